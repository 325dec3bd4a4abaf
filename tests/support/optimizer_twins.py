"""Helpers for tests of optimizers: a model and its batches, optimizers of every kind, and comparing two trainings."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

NUM_STEPS = 4
# Three weights of 49 601 elements and one that divides evenly: with the tiny budgets, chunks are 4096 to 32768 elements.
WIDTHS = (257, 193, 257, 193, 256)

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]


def make_model(*, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width, next_width in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(width, next_width, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def make_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, WIDTHS[0], generator=generator) for _ in range(NUM_STEPS)]


def train_step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    loss = model(batch).pow(2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def assert_same(name: str, left: object, right: object) -> None:
    """Assert that two values of a state dict are equal, tensors bit for bit."""
    if isinstance(left, Tensor):
        assert isinstance(right, Tensor), name
        assert left.dtype == right.dtype, name
        assert torch.equal(left, right), f"{name}: {(left != right).sum()} of {left.numel()} elements differ"
    elif isinstance(left, dict):
        assert isinstance(right, dict)
        assert left.keys() == right.keys(), name
        for key in left:
            assert_same(f"{name}.{key}", left[key], right[key])
    elif isinstance(left, list):
        assert isinstance(right, list)
        assert len(left) == len(right), name
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(f"{name}.{index}", one, other)
    else:
        assert left == right, name


def assert_same_training(plain: nn.Module, plain_optimizer: Optimizer, model: nn.Module, optimizer: Optimizer) -> None:
    assert_same("model", plain.state_dict(), model.state_dict())
    assert_same("optimizer", plain_optimizer.state_dict(), optimizer.state_dict())


class SignDescent(Optimizer):
    """A third-party optimizer: updates by the sign of a running mean, scaled by the norm of the whole tensor."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"] = 0
                    state["mean"] = torch.zeros_like(parameter)
                state["count"] += 1
                state["mean"].lerp_(parameter.grad, 0.1)
                parameter.add_(state["mean"].sign(), alpha=-group["lr"] * float(state["mean"].norm()))


class MyAdam(torch.optim.Adam):
    """A subclass that is element-wise, which the runtime has to detect."""


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD nesterov": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True),
    "Adam": lambda params: torch.optim.Adam(params),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True, weight_decay=0.1),
    "Adam maximize": lambda params: torch.optim.Adam(params, maximize=True),
    "AdamW": lambda params: torch.optim.AdamW(params),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "Adamax": lambda params: torch.optim.Adamax(params),
    "NAdam": lambda params: torch.optim.NAdam(params),
    "RAdam": lambda params: torch.optim.RAdam(params),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr_decay=0.1),
    "Adagrad fused": lambda params: torch.optim.Adagrad(params, fused=True),
    "Adadelta": lambda params: torch.optim.Adadelta(params),
    "ASGD": lambda params: torch.optim.ASGD(params, t0=2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.9),
    "Rprop": lambda params: torch.optim.Rprop(params),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
    "third party": SignDescent,
    "subclass": MyAdam,
}
NEED_WHOLE_TENSORS = ("Adafactor", "third party")
