"""While a whole tensor is updated, the last one goes home and the next one is read, as far as staging holds both."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.support.optimizer_twins import SignDescent, assert_same_training
from zinf_compile.ir.errors import StoreError
from zinf_compile.runtime.optim import optimizer as optimizer_module
from zinf_compile.runtime.optim.step_jobs import Job
from zinf_compile.runtime.store.store import Store

WIDTH, NUM_LAYERS = 128, 6
STAGED = 2 * 4 * WIDTH**2  # gradient and mean of a weight, whose master copy is resident
SECONDS = 10.0


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))


def run_backward(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, WIDTH)).square().mean().backward()


@pytest.fixture
def trained(optimize: Callable[..., nn.Module], store_of: Callable[[nn.Module], Store]) -> tuple[nn.Module, Optimizer]:
    """Return a model and its optimizer, which gets whole tensors, after two steps, and gradients of the third."""
    model = optimize(make_model(), tiny=True)
    optimizer = SignDescent(model.parameters())
    for _ in range(2):
        run_backward(model, optimizer)
        optimizer.step()
    run_backward(model, optimizer)
    store = store_of(model)
    assert store.staging.capacity == 2 * STAGED
    return model, optimizer


class Reads:
    """Notes of which parameters some state is being read, or has been."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = {name: threading.Event() for name in store.records}
        self.refused: str | None = None  # the parameter of which a read is refused
        self._of = {id(record.copies.states["mean"]): name for name, record in store.records.items()}
        self._read = store.io_pool.read
        monkeypatch.setattr(store.io_pool, "read", self._watch)

    def _watch(self, slot: Any, *arguments: Any, **options: Any) -> Any:
        if (name := self._of.get(id(slot))) is not None:
            self.begun[name].set()
            if name == self.refused:
                raise StoreError(f"no read of {name}")
        return self._read(slot, *arguments, **options)


@pytest.mark.parametrize("held", [2, 1.5])
def test_the_next_tensor_is_read_while_this_one_is_updated(
    held: float,
    trained: tuple[nn.Module, Optimizer],
    store_of: Callable[[nn.Module], Store],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If staging holds one and a half, a part of the next is read."""
    model, optimizer = trained
    store = store_of(model)
    store.staging.capacity = round(held * STAGED)
    store.staging.forget_peak()
    plain = make_model()
    plain_optimizer = SignDescent(plain.parameters())
    for _ in range(3):
        run_backward(plain, plain_optimizer)
        plain_optimizer.step()
    reads, in_time = Reads(store, monkeypatch), []
    after = dict(
        itertools.pairwise(name for name, record in store.records.items() if not record.gradient.slot.in_memory)
    )
    update = optimizer_module.update_slice

    def waiting(job: Job, *arguments: Any, **options: Any) -> dict[str, Any]:
        if (name := after.get(job.record.name)) is not None:
            in_time.append(reads.begun[name].wait(SECONDS))
        return update(job, *arguments, **options)

    monkeypatch.setattr(optimizer_module, "update_slice", waiting)
    optimizer.step()
    assert in_time == [True] * 3
    assert_same_training(plain, plain_optimizer, model, optimizer)


def test_a_read_that_was_refused_on_another_thread_stops_the_step(
    trained: tuple[nn.Module, Optimizer], store_of: Callable[[nn.Module], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained
    store = store_of(model)
    reads = Reads(store, monkeypatch)
    reads.refused = "4.weight"
    update = optimizer_module.update_slice

    def waiting(job: Job, *arguments: Any, **options: Any) -> dict[str, Any]:
        if job.record.name == "3.weight":
            assert reads.begun["4.weight"].wait(SECONDS)
        return update(job, *arguments, **options)

    monkeypatch.setattr(optimizer_module, "update_slice", waiting)
    with pytest.raises(StoreError, match=r"no read of 4\.weight"):
        optimizer.step()
    assert not any(record.update.is_torn for record in store.records.values())
