"""Fixtures: optimized models that are closed afterwards, and a clock that the test controls."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn

import zinf_compile
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.store.store import Store


@pytest.fixture
def store_of() -> Callable[[nn.Module], Store]:
    """Return the store of an optimized model."""

    def find(model: nn.Module) -> Store:
        record = next(record for parameter in model.parameters() if (record := record_of(parameter)) is not None)
        return record.store

    return find


@pytest.fixture
def optimize(tmp_path: Path, store_of: Callable[[nn.Module], Store]) -> Iterator[Callable[..., nn.Module]]:
    """Return ``zinf_compile.optimize`` that runs eagerly; afterwards every store is checked and closed.

    With ``tiny=True`` all but the small parameters live on nvme, and staging is as small as allowed.
    """
    models: list[nn.Module] = []

    def call(model: nn.Module, *, tiny: bool = False, **options: object) -> nn.Module:
        budgets: dict[str, object] = {"device_memory": "32MiB", "host_memory": "64MiB"}
        if tiny:
            budgets = {"device_memory": "8MiB", "host_memory": "512KiB", "nvme": tmp_path}
        zinf_compile.optimize(model, **{"capture": False, **budgets, **options})
        models.append(model)
        return model

    yield call
    for model in models:
        store_of(model).check_integrity()
        zinf_compile.close(model)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("zinf-transfer")]
    assert not names, f"transfer threads outlive their store: {names}"


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that the meter reads. Real sleeps take longer on a busy machine."""
    clock = Clock()
    monkeypatch.setattr("zinf_compile.runtime.observe.meter.time.perf_counter", clock)
    return clock
