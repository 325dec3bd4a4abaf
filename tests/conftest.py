"""What all tests share: one compute thread per process, op-by-op compute, and a reset of Dynamo after each test."""

import gc
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from _pytest import runner

from tests.support.run_cache import open_cache, remove_cache
from zinf_compile.runtime.process.call_stack import with_room_for_calls

# Set before torch is imported, and inherited by child processes: spinning OpenMP threads slow down other workers.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("ZINF_QUIET", "1")  # hide the progress messages of first calls
# The first run of a captured graph collects what capturing has left, anyway.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

RANKS = "tests/distributed/"

# Fixtures that tests of several folders share, the profile of hypothesis for `make test-long`, and which variants it runs.
pytest_plugins = (
    *(("tests.support.examples",) if find_spec("hypothesis") is not None else ()),  # a machine with a GPU may lack it
    "tests.support.delays",
    "tests.support.hand_made_plans",
    "tests.support.planner_inputs",
    "tests.support.stored_models",
    "tests.support.variants",
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder of what processes of this run share. Workers of xdist find the one of the process that starts them."""
    if not hasattr(config, "workerinput"):
        open_cache()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove it."""
    if not hasattr(config, "workerinput"):
        remove_cache()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With ``--dist loadscope``, run all tests that need ranks in one process, which starts them once."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return RANKS if nodeid.startswith(RANKS) else str(super()._split_scope(nodeid))

    return ByModule(config, log)


@pytest.hookimpl(trylast=True)  # behind `-m`, and behind what folders mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out variants of long tests whose values occur in other variants too, and other parts, if asked to."""
    from tests.support import variants  # a plugin: pytest imports it first, to rewrite its asserts

    left_out = {item for item in items if not variants.is_in_part(item.nodeid)}
    if not variants.are_all_wanted():
        left_out |= set(variants.find_surplus_long(items))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
@with_room_for_calls
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    """Run each test, with its fixtures, in a chunk of Python's stack of its own: pytest is thirty frames deep itself."""
    return runner.pytest_runtest_protocol(item, nextitem)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> None:
    """Restore Ctrl-C for tests of interrupts: shells start background processes with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _few_collections() -> None:
    """Collect garbage less often: captures allocate millions of objects, and collections take a fifth of their time."""
    gc.set_threshold(400_000, 5, 5)


@pytest.fixture(scope="session", autouse=True)
def _op_by_op() -> Iterator[None]:
    """Default to op-by-op compute: bitwise equal to plain PyTorch, and nothing is compiled."""
    from zinf_compile.ir import config  # imports torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "DEFAULT_COMPUTE", "aten")
        patch.setattr(config, "DEFAULT_RESERVE", 0)  # memory of the test process does not count against budgets
        yield


@pytest.fixture(scope="session", autouse=True)
def _fixed_rates(_op_by_op: None) -> Iterator[None]:
    """Plan for an ordinary machine with the routes of this one: plans depend on rates, and these on load and machine."""
    if "zinf_compile.driver.session" not in sys.modules:  # planner tests do not import it
        yield
        return
    from tests.support.fixed_rates import fixed_rates

    with fixed_rates():
        yield


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each model measure its machine, as it does outside of tests."""
    from zinf_compile.driver import session  # imports torch
    from zinf_compile.runtime.calibration.calibrate import measure_hardware

    monkeypatch.setattr(session, "measure_hardware", measure_hardware)


@pytest.fixture(autouse=True)
def _no_kept_profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let each test find only the rates that it has kept itself: plans depend on them, and any plan of a disk keeps some.

    Not by the fixture ``monkeypatch``: it would then be undone after all others, and put back what these have patched.
    """
    if "zinf_compile.runtime.calibration.measured" not in sys.modules:  # planner tests do not import it
        yield
        return
    from zinf_compile.runtime.calibration import measured
    from zinf_compile.runtime.native.compiled import cache_folder

    own = tmp_path_factory.getbasetemp() / f"profiles-{uuid.uuid4().hex}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "cache_folder", lambda: cache_folder() if "XDG_CACHE_HOME" in os.environ else own)
        yield


class _Frozen:
    num_kept = 0  # graphs that tests share, in the frozen part of the heap


@pytest.fixture(autouse=True)
def _sharing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Trace, split and plan each graph once, even if several tests capture it."""
    if "zinf_compile.driver.session" not in sys.modules:
        yield
        return
    from tests.support.sharing import num_kept, shares, sharing

    if num_kept() > _Frozen.num_kept:  # by the test before, of which nothing else is left now
        _freeze_heap()
        _Frozen.num_kept = num_kept()
    with sharing(shares(request.node.nodeid)):
        yield


@pytest.fixture(scope="module", autouse=True)
def _settled_heap() -> None:
    """Freeze what the modules before have left."""
    _freeze_heap()


def _freeze_heap() -> None:
    """Freeze existing objects, a million of them torch's: scanning them takes 0.2 s, and each capture collects once."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_dynamo(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reset Dynamo: after 8 compiles of a code object it runs eagerly, and all nn.Sequential share one forward.

    Skipped after tests marked ``keeps_captures``: the fixture that builds their shared model resets Dynamo.
    """
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None and not request.node.get_closest_marker(
        "keeps_captures"
    ):
        dynamo.reset()
