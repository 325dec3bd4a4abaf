"""Models release their resources when closed or garbage-collected: threads, file descriptors, store file, graphs."""

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.driver import session
from zinf_compile.ir.errors import StoreError
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.process.ram import anonymous_rss, return_freed_memory
from zinf_compile.runtime.store.store import Store

FEATURES = 32
MORE_THAN_DYNAMO_TAKES = 9  # models: Dynamo's limit is 8 per code object


class Layers(nn.Module):
    """Two layers with their own forward, which no other test captures."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.gelu(self.first(x))).square().mean()


class Held(NamedTuple):
    """Resources of a process other than memory."""

    threads: int
    descriptors: int
    mappings: int  # of the store's file


def held(folder: Path) -> Held:
    gc.collect()
    return Held(
        threads=len(os.listdir("/proc/self/task")),
        descriptors=len(os.listdir("/proc/self/fd")),
        mappings=Path("/proc/self/maps").read_text().count(str(folder)),
    )


def train(model: nn.Module, call: Any = None, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        (model if call is None else call)(torch.ones(4, FEATURES)).backward()
        optimizer.step()
        optimizer.zero_grad()


def store_of(model: nn.Module) -> Store:
    record = record_of(next(model.parameters()))
    assert record is not None
    return record.store


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    """Budgets with which most of the model is on nvme."""
    return {"device_memory": "1MiB", "host_memory": "64KiB", "nvme": tmp_path}


@pytest.mark.parametrize(
    ("way", "is_closed"),
    [("eager", False), ("aten", False), ("aten", True), ("inductor", False), ("backend", False), ("backend", True)],
)
def test_many_models_hold_no_more_than_the_first(
    way: str, is_closed: bool, options: dict[str, object], tmp_path: Path
) -> None:
    def run_one() -> "weakref.ref[Store]":
        model: Any = Layers()
        call = None
        if way == "backend":
            call = torch.compile(model, backend="zinf", options={**options, "compute": "aten"})  # type: ignore[arg-type]
        else:
            zinf_compile.optimize(model, **options, **({"capture": False} if way == "eager" else {"compute": way}))
        train(model, call)
        zinf_compile.synchronize(model)
        if is_closed:
            zinf_compile.close(model)
        return weakref.ref(store_of(model))

    stores = [run_one()]
    first = held(tmp_path)
    stores += [run_one() for _ in range(3)]
    assert held(tmp_path) == first
    assert first.mappings == 0
    assert [store() for store in stores] == [None] * 4


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("is_closed", [False, True])
def test_thirty_models_hold_no_more_than_five(is_closed: bool, options: dict[str, object], tmp_path: Path) -> None:
    """Each has a captured graph; memory of the process grows by less than a sixth of a MiB per model."""

    def run(num_models: int) -> tuple[Held, int]:
        for _ in range(num_models):
            model = zinf_compile.optimize(Layers(), **options)
            train(model)
            zinf_compile.synchronize(model)
            if is_closed:
                zinf_compile.close(model)
            del model
        found = held(tmp_path)
        return_freed_memory()
        return found, anonymous_rss()

    few, rss_of_few = run(5)
    many, rss_of_many = run(25)
    assert many == few
    assert rss_of_many < rss_of_few + 4 * 2**20


def test_every_model_of_a_class_is_captured(options: dict[str, object]) -> None:
    for forward in (Layers, lambda: nn.Sequential(Layers())):
        for _ in range(MORE_THAN_DYNAMO_TAKES):
            model = zinf_compile.optimize(forward(), **options)
            model(torch.ones(4, FEATURES))
            assert zinf_compile.report(model).num_eager_gathers == 0


def test_models_of_a_class_compute_with_their_own_parameters(options: dict[str, object]) -> None:
    models = [Layers(), Layers()]
    x = torch.ones(4, FEATURES)
    expected = [model(x) for model in models]
    compiled = [torch.compile(model, backend="zinf", options={**options, "compute": "aten"}) for model in models]  # type: ignore[dict-item]
    assert [call(x) for call in compiled] == expected


def test_home_tensors_outlive_their_model(options: dict[str, object]) -> None:
    model = zinf_compile.optimize(Layers(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(4, FEATURES)).backward()
    optimizer.step()
    zinf_compile.synchronize(model)
    weight = model.first.weight
    assert weight.grad is not None
    shown = [weight.grad, optimizer.state[weight]["exp_avg"], weight.detach()]
    values = [tensor.clone() for tensor in shown]
    store = weakref.ref(store_of(model))
    del model, optimizer, weight
    gc.collect()
    assert store() is None
    assert all(torch.equal(tensor, value) for tensor, value in zip(shown, values, strict=True))


def test_a_dropped_model_does_not_wait_for_its_step(options: dict[str, object]) -> None:
    model = zinf_compile.optimize(Layers(), **options)
    train(model)
    store, may_end = store_of(model), threading.Event()
    store.updates.submit(lambda: may_end.wait(60) and None)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("zinf-update")]
    dropped = weakref.ref(store)
    del model, store
    gc.collect()
    assert dropped() is None
    assert threads[-1].is_alive()
    may_end.set()
    threads[-1].join(60)
    assert not threads[-1].is_alive()


def test_a_closed_model_drops_its_graphs_and_says_so(options: dict[str, object]) -> None:
    model = zinf_compile.optimize(Layers(), **options)
    loss = model(torch.ones(4, FEATURES))
    loss.backward()
    store_of(model).arena.reserve(4096)  # these small layers need no arena
    programs = session.session_of_store(store_of(model)).programs
    zinf_compile.close(model)
    del loss
    gc.collect()
    assert [program._captured for program in programs] == [None]
    assert store_of(model).arena.nbytes == store_of(model).staging.held_nbytes == 0
    assert zinf_compile.report(model).plans
    with pytest.raises(StoreError, match="is closed"):
        model(torch.ones(4, FEATURES))
    zinf_compile.close(model)
