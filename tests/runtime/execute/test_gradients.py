"""Gradients on their way home: within one backward nobody waits for them, and whoever looks does."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from tests.support.fake_device import on_fake_device
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.execute import gradients as gradients_module
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.transfer.io_pool import IOPool

WIDTH = 224
_LIMIT_SECONDS = 5.0


class TwoGraphs(nn.Module):
    """Dynamo makes a graph of each layer. A hook runs in backward between the two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between: Callable[[Tensor], None] = lambda grad: None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self._watch(hidden)
        loss: Tensor = self.second(torch.tanh(hidden)).square().sum()
        return loss

    @torch._dynamo.disable  # type: ignore[untyped-decorator, unused-ignore]
    def _watch(self, hidden: Tensor) -> None:
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self.between(grad))


def run(model: nn.Module, scale: float = 1.0) -> Tensor:
    loss: Tensor = model(torch.linspace(-scale, scale, 4 * WIDTH).view(4, WIDTH))
    return loss


def backward(model: nn.Module, scale: float = 1.0) -> None:
    run(model, scale).backward()


def with_l2(model: nn.Module, scale: float = 1.0) -> Tensor:
    """Return a loss that reads every parameter outside of the forward, too."""
    return run(model, scale) + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())


@pytest.fixture(params=[True, False], ids=["graphs", "eager"])
def on_nvme(optimize: Callable[..., nn.Module], request: pytest.FixtureRequest) -> nn.Module:
    """Return a model with gradients on nvme."""
    model = optimize(TwoGraphs(), tiny=True, device_memory="800KiB", capture=request.param)
    assert slot_tier(model) is Tier.NVME
    return model


@pytest.fixture(params=["nvme", "nvme, eager", "beside a device"])
def pair(optimize: Callable[..., nn.Module], request: pytest.FixtureRequest) -> Iterator[tuple[TwoGraphs, nn.Module]]:
    """Return a plain model and its optimized copy with gradients on nvme, or in host memory beside a device."""
    if "nvme" in request.param:
        model = optimize(TwoGraphs(), tiny=True, device_memory="800KiB", capture="eager" not in request.param)
        assert slot_tier(model) is Tier.NVME
        yield TwoGraphs(), model
        return
    torch._dynamo.reset()
    with on_fake_device():
        options = {"device_memory": "64MiB", "host_memory": "64MiB", "compute": "aten", "tiles": False}
        model = zinf_compile.optimize(TwoGraphs(), device="cuda", **options)
        assert slot_tier(model) is Tier.HOST
        yield TwoGraphs(), model
        zinf_compile.close(model)


def slot_tier(model: nn.Module) -> Tier:
    record = record_of(model.second.weight)
    assert record is not None
    assert record.gradient.slot is not None
    return record.gradient.slot.tier


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes to the disk wait until this is set."""
    opened, write = threading.Event(), IOPool._write
    late = []

    def held_up(pool: IOPool, offset: int, buffer: memoryview) -> None:
        if not opened.wait(_LIMIT_SECONDS):
            late.append(offset)
        write(pool, offset, buffer)

    monkeypatch.setattr(IOPool, "_write", held_up)
    yield opened
    opened.set()
    assert not late, "backward waited for the gradients of one layer before it ran the next"


def test_backward_goes_on_while_gradients_are_written(on_nvme: nn.Module, gate: threading.Event) -> None:
    gate.set()
    backward(on_nvme)
    assert slot_tier(on_nvme) is Tier.NVME
    on_nvme.zero_grad()
    gate.clear()
    on_nvme.between = lambda grad: gate.set()
    backward(on_nvme)
    plain = TwoGraphs()
    backward(plain)
    assert_equal(gradients(on_nvme), gradients(plain))


def test_a_look_within_backward_waits(on_nvme: nn.Module, gate: threading.Event) -> None:
    gate.set()
    backward(on_nvme)
    assert slot_tier(on_nvme) is Tier.NVME
    on_nvme.zero_grad()
    seen: dict[str, Tensor] = {}

    def look(grad: Tensor) -> None:
        timer = threading.Timer(0.05, gate.set)
        timer.start()
        seen.update(gradients(on_nvme))
        timer.join(_LIMIT_SECONDS)

    on_nvme.between = look
    gate.clear()
    backward(on_nvme, 2.0)
    plain = TwoGraphs()
    backward(plain, 2.0)
    assert seen.keys() == {"second.weight", "second.bias"}
    assert_equal(seen, {name: value for name, value in gradients(plain).items() if name in seen})


def test_what_is_read_outside_of_the_forward_waits(on_nvme: nn.Module, gate: threading.Event) -> None:
    """Autograd adds what it has of a parameter to the gradient of the captured graph when that is at home, not before."""
    gate.set()
    backward(on_nvme)
    assert slot_tier(on_nvme) is Tier.NVME
    on_nvme.zero_grad()
    gate.clear()
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    with_l2(on_nvme).backward()
    timer.join(_LIMIT_SECONDS)
    plain = TwoGraphs()
    with_l2(plain).backward()
    assert_equal(gradients(on_nvme), gradients(plain))


def test_what_is_read_outside_of_the_forward_rounds_as_in_torch(pair: tuple[TwoGraphs, nn.Module]) -> None:
    """A gradient that others are added to is added as one sum, though most of it comes from a captured graph."""
    plain, model = pair
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in pair]
    for losses in ([run, with_l2], [with_l2, run, with_l2], [run, run]):
        for each in pair:
            for scale, loss in enumerate(losses, 1):
                loss(each, scale).backward()
        assert_equal(gradients(model), gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("pair", ["nvme", "beside a device"], indirect=True)
def test_what_a_broken_backward_has_left_is_forgotten(
    pair: tuple[TwoGraphs, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that autograd was to sum, when an interrupt came, adds nothing to the next backward."""
    plain, model = pair

    def break_off(*args: Any) -> None:
        original(*args)
        raise KeyboardInterrupt

    original = gradients_module._hand_over
    run(model).backward()
    loss = with_l2(model, 2.0)
    monkeypatch.setattr(gradients_module, "_hand_over", break_off)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    monkeypatch.setattr(gradients_module, "_hand_over", original)
    model.zero_grad()
    for each in pair:
        run(each, 0.5).backward()
        with_l2(each, 0.7).backward()
    assert_equal(gradients(model), gradients(plain))


def test_a_look_is_no_use(pair: tuple[TwoGraphs, nn.Module]) -> None:
    """What was computed of a parameter and is gone, as for a log, adds nothing to its gradient."""
    _, model = pair
    backward(model)
    record = record_of(model.second.weight)
    assert record is not None
    model.second.weight.norm().item()
    assert not record.gradient.is_used_outside
    kept = [(2 * model.second.weight).sum()]
    assert record.gradient.is_used_outside
    kept.clear()
    assert not record.gradient.is_used_outside


def test_changes_within_backward(pair: tuple[TwoGraphs, nn.Module]) -> None:
    plain, model = pair
    for step in range(3):
        for each in pair:

            def change(grad: Tensor, each: nn.Module = each) -> None:
                each.second.weight.grad.mul_(0.7)
                each.second.bias.grad.add_(each.second.weight.grad.sum())

            each.between = change
            backward(each, 1.0 + step)
        assert_equal(gradients(model), gradients(plain))
        if step == 1:
            plain.zero_grad()
            model.zero_grad()


def test_a_backward_that_is_broken_off(pair: tuple[TwoGraphs, nn.Module]) -> None:
    plain, model = pair
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in pair]

    def refuse(grad: Tensor) -> None:
        raise KeyboardInterrupt

    for steps_now in (False, True, False):
        for each, optimizer in zip(pair, optimizers, strict=True):
            backward(each)
            optimizer.step()
            optimizer.zero_grad()
            each.between = refuse
            with pytest.raises(KeyboardInterrupt):
                backward(each)
            each.between = lambda grad: None
            if steps_now:
                optimizer.step()
            optimizer.zero_grad()
            backward(each)
            backward(each, 0.5)
            optimizer.step()
        assert_equal(gradients(model), gradients(plain))
        for optimizer in optimizers:
            optimizer.zero_grad()
    zinf_compile.synchronize(model)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
