"""A pytest plugin for the tests that libraries have themselves: their models are optimized where a user would do it.

    PYTHONPATH=tests/libraries/upstream python -m pytest -p optimized --optimize peft CLONE/tests/test_custom_models.py

``--optimize plain`` changes nothing. With ``--passed FILE`` a plain run writes which tests pass, and another run selects
only these. The tests that are expected to fail are in ``expected.py``, each with its reason: any other failure is one, and
so is a test of that list that passes. The summary counts the models that were optimized.
"""

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from expected import EXPECTED
from torch.nn import Module

import zinf_compile
from zinf_compile.driver import session
from zinf_compile.ir.hardware import Hardware
from zinf_compile.runtime.calibration.calibrate import measure_hardware
from zinf_compile.runtime.store.store import Store

BUDGETS = {"device_memory": "16MiB", "host_memory": "1MiB"}
_PROPERTY = "optimized"
_COUNTS: Counter[str] = Counter()
_PASSED: list[str] = []
_MEASURED: dict[frozenset[torch.dtype], Hardware] = {}

Optimize = Callable[[Module], None]


def in_peft(optimize: Optimize) -> AbstractContextManager[object]:
    """Optimize each PeftModel at its first call with gradients: tests copy and change models before that.

    Most of peft's tests look only at whether there are gradients, so that call is compared with one of the plain model.
    """
    from peft import PeftModel

    call = PeftModel.__call__

    def first_optimized(self: Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or _is_optimized(self):
            return call(self, *args, **kwargs)
        with torch.random.fork_rng(), torch.no_grad():
            plain = call(copy.deepcopy(self), *args, **kwargs)
        optimize(self)
        ours = call(self, *args, **kwargs)
        torch.testing.assert_close(ours, plain, equal_nan=True)
        return ours

    return mock.patch.object(PeftModel, "__call__", first_optimized)


def in_accelerate(optimize: Optimize) -> AbstractContextManager[object]:
    """Optimize each model that an Accelerator prepares."""
    from accelerate import Accelerator

    prepare = Accelerator.prepare_model

    def then_optimized(self: Any, model: Module, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(self, model, *args, **kwargs)
        if not _is_optimized(prepared):
            optimize(prepared)
        return prepared

    return mock.patch.object(Accelerator, "prepare_model", then_optimized)


PLACES = {"peft": in_peft, "accelerate": in_accelerate}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    parser.addoption(
        "--optimize", choices=("plain", *PLACES), default="plain", help="the library whose models to optimize"
    )
    parser.addoption("--part", default="1/1", help="run every n-th test only, as 2/4")
    parser.addoption("--without-capture", action="store_true", help="optimize with capture=False")
    parser.addoption("--passed", type=Path, help="file of the ids of tests that pass with plain models")


@pytest.hookimpl(trylast=True)  # behind `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other parts, and what fails with plain models, too; mark the tests that are expected to fail."""
    part, num_parts = map(int, config.getoption("--part").split("/"))
    config.hook.pytest_deselected(items=[item for at, item in enumerate(items) if at % num_parts != part - 1])
    items[:] = items[part - 1 :: num_parts]
    passed: Path | None = config.getoption("--passed")
    if passed is not None and config.getoption("--optimize") != "plain":
        wanted = set(passed.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = [item for item in items if item.nodeid in wanted]
    for item in items:
        for expected in EXPECTED.get(config.getoption("--optimize"), ()):
            if expected.matches(item.nodeid):
                item.add_marker(pytest.mark.xfail(reason=expected.reason, raises=expected.raises, strict=True))


@pytest.fixture(autouse=True)
def _optimized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Optimize the models of a test, and close them after it."""
    place = PLACES.get(request.config.getoption("--optimize"))
    capture = not request.config.getoption("--without-capture")
    models: list[Module] = []

    def optimize(model: Module) -> None:
        folder = tmp_path_factory.mktemp("nvme")
        zinf_compile.optimize(model, nvme=folder, compute="aten", tiles=False, capture=capture, **BUDGETS)
        models.append(model)

    with (
        nullcontext() if place is None else place(optimize),
        mock.patch.object(session, "measure_hardware", _measure_once),
    ):
        yield
    counts: Counter[str] = Counter()
    for model in models:
        report = zinf_compile.report(model)
        counts["optimized"] += 1
        counts["captured"] += bool(report.plans)
        counts["with fallbacks"] += bool(report.fallbacks)
        zinf_compile.close(model)
    request.node.user_properties.append((_PROPERTY, dict(counts)))
    if models:
        torch._dynamo.reset()
        gc.collect()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add what a test has counted, in this process or in a worker of xdist; note that it passed."""
    if report.when == "call" and report.passed:
        _PASSED.append(report.nodeid)
    if report.when == "teardown":
        _COUNTS.update(dict(report.user_properties).get(_PROPERTY, {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write which tests passed with plain models."""
    config = session.config
    passed: Path | None = config.getoption("--passed")
    is_worker = hasattr(config, "workerinput")
    if passed is not None and config.getoption("--optimize") == "plain" and not is_worker:
        passed.write_text("".join(f"{nodeid}\n" for nodeid in _PASSED))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many models were optimized."""
    counted = ", ".join(f"{count} {what}" for what, count in _COUNTS.items())
    terminalreporter.write_line(f"models: {counted or 'none optimized'}")


def _measure_once(store: Store, dtypes: frozenset[torch.dtype]) -> Hardware:
    """Return the rates of this machine, measured once a process: that takes as long as a whole test of a small model."""
    if dtypes not in _MEASURED:
        _MEASURED[dtypes] = measure_hardware(store, dtypes)
    return _MEASURED[dtypes]


def _is_optimized(model: Module) -> bool:
    return "_zinf_session" in vars(model)
