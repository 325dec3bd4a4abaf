"""What needs a GPU. Without one it is skipped; with ZINF_STREAMS it runs on the tests' own GPU, a device on the CPU."""

import os
from collections.abc import Iterator

import pytest

from tests.support.gpus import FakeGpu, Gpu, RealGpu

# Before CUDA is asked for anything: products give the same bits whenever they run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here, and skip it without a GPU."""
    import torch

    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not (torch.cuda.is_available() or "ZINF_STREAMS" in os.environ):
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """Return the GPU that models are optimized for."""
    if "ZINF_STREAMS" not in os.environ:
        yield RealGpu()
        return
    with FakeGpu.made() as made:
        yield made


@pytest.fixture(params=["aten"] if "ZINF_STREAMS" in os.environ else ["aten", "inductor"])
def compute(request: pytest.FixtureRequest) -> str:
    """Return what runs the ops of graphs. For the tests' own GPU Inductor generates no code."""
    return str(request.param)
