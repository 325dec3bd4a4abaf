"""A stall is seconds that compute waits for a transfer. Waits of the update thread are not stalls."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.runtime.storage.nvme.posix import PosixEngine
from zinf_compile.runtime.store.store import Store

WIDTH = 160  # its weights are on nvme, its biases in memory
READS, WRITES, STEP = "optimizer state on its way in", "optimizer state on its way home", "optimizer step"

StoreOf = Callable[[nn.Module], Store]


@pytest.fixture(autouse=True)
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is cleared, disk reads and writes take 50 ms, so that compute has to wait for them."""
    opened = threading.Event()
    opened.set()

    def behind_gate(call: Callable[..., None]) -> Callable[..., None]:
        def wait(self: PosixEngine, offset: int, buffer: memoryview) -> None:
            opened.wait(0.05)
            call(self, offset, buffer)

        return wait

    for name in ("read", "write"):
        monkeypatch.setattr(PosixEngine, name, behind_gate(getattr(PosixEngine, name)))
    return opened


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def forward(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(1, WIDTH)).sum()
    return loss


def step_slowly(model: nn.Module, gate: threading.Event) -> None:
    """Take a step with gradients at home, while the disk is slow."""
    optimizer = torch.optim.AdamW(model.parameters())
    forward(model).backward()
    gate.clear()
    optimizer.step()


def stalls(store: Store) -> set[str]:
    return {stall.name for stall in store.meter.stalls}


def test_what_the_update_thread_waits_for_is_no_stall(
    optimize: Callable[..., nn.Module], store_of: StoreOf, gate: threading.Event
) -> None:
    model = optimize(make_model(), tiny=True)
    step_slowly(model, gate)
    store = store_of(model)
    updates = [record.update.future for record in store.records.values() if record.update.future is not None]
    assert updates, "nothing ran in the background"
    for update in updates:
        assert update.exception() is None  # not a wait by the package, so that it is not metered
    assert not stalls(store) & {READS, WRITES}


def test_the_synchronous_step_waits_for_its_reads_and_writes(
    optimize: Callable[..., nn.Module], store_of: StoreOf, gate: threading.Event
) -> None:
    model = optimize(make_model(), tiny=True, overlap_step=False)
    step_slowly(model, gate)
    assert stalls(store_of(model)) >= {READS, WRITES}


def test_synchronize_waits_for_the_step(
    optimize: Callable[..., nn.Module], store_of: StoreOf, gate: threading.Event
) -> None:
    model = optimize(make_model(), tiny=True)
    step_slowly(model, gate)
    assert STEP not in stalls(store_of(model))
    zinf_compile.synchronize(model)
    assert STEP in stalls(store_of(model))


def test_a_forward_waits_for_the_update_of_what_it_reads(
    optimize: Callable[..., nn.Module], store_of: StoreOf, gate: threading.Event
) -> None:
    model = optimize(make_model(), tiny=True)
    step_slowly(model, gate)
    forward(model)
    assert any(name.startswith("update of ") for name in stalls(store_of(model)))
