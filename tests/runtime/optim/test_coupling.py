"""Optimizers that couple parameters inside ``step`` are refused before anything changes."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zinf_compile.ir.errors import UnsupportedError


class Clipping(torch.optim.SGD):
    """Clips by the norm over all parameters inside ``step``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step(closure)


class ClippingGroups(torch.optim.SGD):
    """Clips by the norm over each group inside ``step``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        super().step(closure)


class ClippingAcross(torch.optim.SGD):
    """Clips by the largest norm of the groups' first parameters: couples groups, but not the parameters of one group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        largest = max(float(group["params"][0].grad.norm()) for group in self.param_groups)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(max(1.0, largest))
        super().step(closure)


class Estimating(Optimizer):
    """Adapts one learning rate in the group, for all its parameters, to the gradients it has seen."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"rate": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for parameter in with_gradient:
                parameter.sub_(parameter.grad, alpha=group["rate"])
            for parameter in with_gradient:
                group["rate"] = max(group["rate"], 1e-3 * float(parameter.grad.abs().sum()))


class CountingUpdates(Optimizer):
    """Counts, in the group, the steps in which there was a gradient."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"count": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            group["count"] += bool(with_gradient)
            for parameter in with_gradient:
                parameter.sub_(parameter.grad, alpha=1e-3 / group["count"])


class CountingSteps(CountingUpdates):
    """Counts every step, in the group."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1e-3 / group["count"])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(150, 150), nn.Linear(150, 150))


def train(model: nn.Module, optimizer: Optimizer, num_steps: int = 3) -> None:
    for step in range(num_steps):
        x: Tensor = torch.full((2, 150), 0.1 * (1 + step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda params: Clipping(params, lr=0.1), "Clipping .*: its update of one parameter depends on the others"),
        (lambda params: ClippingGroups(params, lr=0.1), "ClippingGroups .*: its update of one parameter depends on"),
        (lambda params: ClippingAcross(params, lr=0.1), "ClippingAcross .*: its step raises where only one has"),
        (Estimating, "Estimating .*: what it keeps in its parameter group as 'rate' depends on the gradients"),
        (lambda params: torch.optim.Adam(params, differentiable=True), r"Adam\(differentiable=True\) is not supported"),
    ],
)
def test_it_is_refused_before_anything_changes(
    make: Callable[[Iterable[Any]], Optimizer], message: str, optimize: Callable[..., nn.Module]
) -> None:
    model = optimize(make_model(), tiny=True)
    before = copy.deepcopy(dict(model.state_dict()))
    optimizer = make(model.parameters())
    with pytest.raises(UnsupportedError, match=message):
        train(model, optimizer)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.zero_grad()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)


def test_counting_every_step_in_the_group_is_fine(optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True)
    optimizers = [CountingSteps(each.parameters()) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer)
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in model.state_dict().items())
    assert optimizers[1].param_groups[0]["count"] == 3
