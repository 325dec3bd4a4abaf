"""The step inside backward gives the bits of an ordinary step, and refuses what it cannot support before any harm."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.params.records import record_of

pytestmark = pytest.mark.needs_more_on_streams(host_memory=1.25)

WIDTH = 160


class Tied(nn.Module):
    """A weight that is used at the beginning and at the end, and read in backward after its last use in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + torch.tanh(self.inner(self.norm(x)))
        x = torch.tanh(self.inner(x))
        return torch.nn.functional.cross_entropy(x @ self.embedding.weight.t(), tokens)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


BATCHES = [torch.arange(start, start + 50) for start in (0, 30, 60, 90)]


@pytest.fixture
def optimize(tmp_path: Path) -> Iterator[Callable[..., nn.Module]]:
    models: list[nn.Module] = []

    def call(model: nn.Module, **options: Any) -> nn.Module:
        budgets: dict[str, Any] = {"device_memory": "8MiB", "host_memory": "512KiB", "nvme": tmp_path, "capture": False}
        models.append(zinf_compile.optimize(model, **{**budgets, "step_in_backward": True, **options}))
        record = record_of(next(model.parameters()))
        assert record is not None
        record.store.chunk_elements = 4096  # so that staging has room for copies of gradients; planning sets it again
        return model

    yield call
    for model in models:
        record = record_of(next(model.parameters()))
        assert record is not None
        record.store.check_integrity()
        zinf_compile.close(model)
    torch._dynamo.reset()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "AdamW tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "groups": lambda model: torch.optim.NAdam(
        [{"params": [p], "lr": 0.01 * (index + 1)} for index, p in enumerate(model.parameters())]
    ),
}


def train(model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]) -> list[list[Tensor]]:
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen = []
    for batch in BATCHES:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        states = [value.clone() for p in model.parameters() for value in optimizer.state[p].values()]
        seen.append([loss.detach().clone(), *(p.detach().clone() for p in model.parameters()), *states])
    return seen


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("capture", [False, True])
def test_it_gives_the_same_bits(capture: bool, name: str, optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    expected = train(plain, OPTIMIZERS[name])
    model = optimize(make_model(), capture=capture, device_memory="1700KiB" if capture else "8MiB")
    got = train(model, OPTIMIZERS[name])
    for step, (left, right) in enumerate(zip(expected, got, strict=True)):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(one, other), (step, index)


@pytest.mark.of_a_cpu(reason="from other devices gradients go to nvme by way of the host, which is another route")
def test_gradients_do_not_move(optimize: Callable[..., nn.Module]) -> None:
    model = optimize(make_model())
    optimizer = torch.optim.AdamW(model.parameters())
    record = record_of(model.get_parameter("inner.weight"))
    assert record is not None
    written = []
    for batch in BATCHES[:3]:
        before = dict(record.store.meter.moved)
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        zinf_compile.synchronize(model)
        moved = dict(record.store.meter.moved)
        written.append({route: moved[route] - before.get(route, 0) for route in moved})
    slots = [
        slot for r in record.store.records.values() if (slot := r.gradient.slot) is not None and not slot.in_memory
    ]
    gradients = sum(slot.byte_range(slot.slice)[1] for slot in slots)
    assert gradients > 0
    assert written[1]["device -> nvme"] == 0
    assert written[0]["device -> nvme"] == gradients


REFUSED: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "norm": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "value": lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "a look": lambda model, optimizer: [p.grad.sum() for p in model.parameters() if p.grad is not None],
    "accumulation": lambda model, optimizer: model(BATCHES[1]).backward(),
}


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("what", [*REFUSED, "scaler"])
def test_what_it_refuses_before_anything_is_updated(
    what: str, capture: bool, optimize: Callable[..., nn.Module]
) -> None:
    model = optimize(make_model(), capture=capture)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=what == "scaler")
    scaler.scale(model(BATCHES[0])).backward()
    calls = {**REFUSED, "scaler": lambda model, optimizer: scaler.unscale_(optimizer)}
    with pytest.raises(UnsupportedError, match="step_in_backward"):
        calls[what](model, optimizer)
    for one, other in zip(make_model().parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_refuses_later(what: str, optimize: Callable[..., nn.Module]) -> None:
    model = optimize(make_model())
    optimizer = torch.optim.AdamW(model.parameters())
    model(BATCHES[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(BATCHES[0]).backward()
    with pytest.raises(UnsupportedError, match="step_in_backward"):
        REFUSED[what](model, optimizer)
    optimizer.step()


def test_options_that_change_between_backward_and_step(optimize: Callable[..., nn.Module]) -> None:
    model = optimize(make_model())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(BATCHES[0]).backward()
        optimizer.param_groups[0]["lr"] *= 0.5
        if _ == 0:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(UnsupportedError, match="lr of AdamW changed between backward"):
        optimizer.step()


def test_an_optimizer_that_needs_whole_tensors(optimize: Callable[..., nn.Module]) -> None:
    model = optimize(make_model())
    optimizer = torch.optim.Adafactor(model.parameters())
    model(BATCHES[0]).backward()
    with pytest.raises(UnsupportedError, match="Adafactor"):
        optimizer.step()


def test_updates_that_are_done_hold_no_staging_memory(optimize: Callable[..., nn.Module]) -> None:
    """A finished update keeps no reference to staging memory, which the pool counts as free."""
    model = optimize(make_model())
    optimizer = torch.optim.AdamW(model.parameters())
    record = record_of(model.get_parameter("inner.weight"))
    assert record is not None
    store = record.store
    model(BATCHES[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(BATCHES[1]).backward()
    store.check_integrity()  # waits for the updates, and keeps their futures
    assert record.update.future is not None
    assert store.staging.held_nbytes > 0
    num_held = [sys.getrefcount(idle.memory) for idle in store.staging._idle]
    assert num_held == [num_held[0]] * len(num_held)
    with store.staging.lease(4096) as lease:
        fresh = sys.getrefcount(store.staging._leased[lease])
    assert num_held[0] <= fresh
    optimizer.step()


def test_a_checkpoint_loaded_between_backward_and_step(tmp_path: Path, optimize: Callable[..., nn.Module]) -> None:
    """Loading drops the open step and the values that it computed."""
    model = optimize(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(BATCHES[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    zinf_compile.save(tmp_path / "checkpoint", model, optimizer)
    results = []
    for is_interrupted in (False, True):
        if is_interrupted:
            model(BATCHES[2]).backward()
        zinf_compile.load(tmp_path / "checkpoint", model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.02
        model(BATCHES[1]).backward()
        optimizer.step()
        results.append([parameter.clone() for parameter in model.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
