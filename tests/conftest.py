"""What all tests share: one compute thread a process, ops one by one, and a Dynamo that has forgotten the models before."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest

# Before torch is imported, and for child processes too: OpenMP threads that spin take the cores from the other workers.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")


@pytest.fixture(scope="session", autouse=True)
def _few_collections() -> None:
    """Captures make cycles by the thousand, and objects that stay by the million: looks at the young take a fifth of it."""
    gc.set_threshold(50_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def _op_by_op() -> Iterator[None]:
    """Compute with the bits of plain PyTorch, and compile nothing, where a test does not say otherwise."""
    from zinf_compile import config  # imports torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "DEFAULT_COMPUTE", "aten")
        yield


@pytest.fixture(scope="module", autouse=True)
def _settled_heap() -> None:
    """Let the collector pass over what is there already, a million objects of torch's: each look at them takes 0.2 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Dynamo compiles one code object 8 times and runs it eagerly from then on; all nn.Sequential have one forward."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
