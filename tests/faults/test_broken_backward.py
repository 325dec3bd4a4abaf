"""A backward that raises halfway: what it left behind is refused, or has no effect on what comes next."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zinf_compile
from zinf_compile.ir.errors import StoreError, UnsupportedError
from zinf_compile.runtime.execute import gradients, saved_tensors
from zinf_compile.runtime.params.records import StoredParameter

WIDTH = 96
STOPPED = (
    r"^an earlier error stopped this model: a backward that updates parameters \(step_in_backward\) did not "
    r"finish; already updated: .*'layers\.3\.weight'.*; half updated: none; the others hold their old values; load a "
    r"checkpoint"
)


class Fragile(torch.autograd.Function):
    """The identity; its backward raises while ``is_broken`` is set."""

    is_broken = False

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fragile.is_broken:
            raise ValueError("backward is broken")
        return grad


class Net(nn.Module):
    """Four layers, with a ``Fragile`` op between the second and the third."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.checkpointed = checkpointed

    def second_half(self, x: Tensor) -> Tensor:
        return self.layers[3](self.layers[2](x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x).tanh()).tanh()
        x = Fragile.apply(x)
        if self.checkpointed:
            return checkpoint(self.second_half, x, use_reentrant=True)
        return self.second_half(x)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module, Tensor], None]:
    """Return a function that runs a forward, and a backward that raises halfway."""

    def run(model: nn.Module, x: Tensor) -> None:
        loss = model(x).square().mean()
        monkeypatch.setattr(Fragile, "is_broken", True)
        with pytest.raises(ValueError, match="backward is broken"):
            loss.backward()
        monkeypatch.setattr(Fragile, "is_broken", False)

    return run


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("form", ["eager", "captured", "checkpoint"])
def test_half_an_update_is_refused_until_a_checkpoint_is_loaded(
    form: str, tmp_path: Path, broken: Callable[[nn.Module, Tensor], None]
) -> None:
    torch.manual_seed(0)
    model = Net(checkpointed=form == "checkpoint")
    x = torch.randn(4, WIDTH)
    zinf_compile.optimize(
        model,
        device_memory="2MiB",
        host_memory="1MiB",
        nvme=tmp_path,
        step_in_backward=True,
        capture=form == "captured",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        train(model, optimizer, x)
    zinf_compile.save(tmp_path / "saved", model, optimizer)
    train(model, optimizer, x)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    broken(model, x)
    actions: dict[str, Callable[[], object]] = {
        "step": optimizer.step,
        "save": lambda: zinf_compile.save(tmp_path / "other", model, optimizer),
        "forward": lambda: model(x),
        "zero_grad": optimizer.zero_grad,
    }
    for name, action in actions.items():
        with pytest.raises(StoreError, match=STOPPED):  # noqa: PT012  # pytest.fail names the action
            action()
            pytest.fail(f"{name} went on")
    zinf_compile.load(tmp_path / "saved", model, optimizer)
    train(model, optimizer, x)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter, value)
    zinf_compile.close(model)


def test_a_backward_that_updated_nothing_may_be_repeated(
    tmp_path: Path, broken: Callable[[nn.Module, Tensor], None]
) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, WIDTH)
    zinf_compile.optimize(model, nvme=tmp_path, step_in_backward=True, capture=False)
    optimizer = torch.optim.AdamW(model.parameters())
    broken(model, x)  # before the first step the optimizer is unknown
    optimizer.zero_grad()
    train(model, optimizer, x)
    train(model, optimizer, x)
    with pytest.raises(UnsupportedError, match="a second gradient of"):  # a refused mistake does not stop the model
        (model(x).square().mean().backward(), model(x).square().mean().backward())
    optimizer.step()
    zinf_compile.close(model)


def test_a_gradient_on_its_way_to_autograd_is_forgotten(
    tmp_path: Path, broken: Callable[[nn.Module, Tensor], None]
) -> None:
    """A hook on a parameter makes its gradient go through autograd, where it waits for the end of the captured backward."""
    torch.manual_seed(0)
    x = torch.randn(4, WIDTH)
    found = []
    for breaks in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = zinf_compile.optimize(_OneGraph(), device_memory="2MiB", host_memory="1MiB", nvme=tmp_path)
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad * 2)
        if breaks:
            broken(model, x)
        model.zero_grad()
        model(x).square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        zinf_compile.close(model)
    assert len(found[0]) == len(found[1]) == 4
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@torch.library.custom_op("zinf_tests::fragile", mutates_args=())
def fragile(value: Tensor) -> Tensor:
    return value.clone()


@torch.library.custom_op("zinf_tests::fragile_backward", mutates_args=())
def fragile_backward(grad: Tensor) -> Tensor:
    if Fragile.is_broken:
        raise ValueError("backward is broken")
    return grad.clone()


fragile.register_fake(torch.empty_like)
fragile_backward.register_fake(torch.empty_like)
fragile.register_autograd(lambda ctx, grad: fragile_backward(grad))


class _OneGraph(nn.Module):
    """Two layers in one captured graph, with an op between them whose backward may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](fragile(self.layers[0](x).tanh()))


def test_a_gradient_that_lacks_tiles_is_not_stepped_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH))
    zinf_compile.optimize(model, device_memory="2MiB", host_memory="1MiB", nvme=tmp_path, tiles={"0.weight": 4})
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(4, WIDTH)
    calls = itertools.count()
    store_tile = gradients._store_tile

    def break_off(*args: Any) -> None:
        if next(calls) == 2:
            raise ValueError("backward is broken")
        store_tile(*args)

    monkeypatch.setattr(gradients, "_store_tile", break_off)
    with pytest.raises(ValueError, match="backward is broken"):
        model(x).square().mean().backward()
    with pytest.raises(
        StoreError, match=r"^the gradient of '0\.weight' has 192 of its 384 rows, since backward was broken"
    ):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, x)
    zinf_compile.close(model)


def test_memory_given_out_again_is_not_taken_for_a_weight_whose_finalizer_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storages, weight = saved_tensors.GatheredStorages(), torch.ones(3)
    record = cast(StoredParameter, object())
    monkeypatch.setattr(saved_tensors.weakref, "finalize", lambda *args: None)
    storages.note(weight, record)
    view = torch.empty(0).set_(weight.untyped_storage())  # not a view, which would keep the tensor alive
    assert storages.find(view) is record
    del weight
    assert storages.find(view) is None
