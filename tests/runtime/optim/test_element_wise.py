"""An update is cut into chunks only if all of its ops are element-wise and the bits agree."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.runtime.optim.element_wise import find_obstacle, find_odd_state
from zinf_compile.runtime.optim.shadow import _ELEMENT_WISE, copy_scalars, freeze, shadow_step

Rule = Callable[[Tensor, Tensor, dict[str, Any]], None]


class ByRule(Optimizer):
    """An optimizer of an unknown class; ``rule(parameter, gradient, state)`` is its update."""

    def __init__(self, params: Iterable[Any], rule: Rule) -> None:
        super().__init__(params, {})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.rule(parameter, parameter.grad, self.state[parameter])


def ask(optimizer: Optimizer, num_steps: int = 0) -> str | None:
    """Return the obstacle to cutting the update after ``num_steps`` steps, or None."""
    group = optimizer.param_groups[0]
    parameter, state = torch.zeros(2, 3), {}
    for _ in range(num_steps):
        state = shadow_step(optimizer, group, parameter.detach(), torch.ones(2, 3), state)
    scalars = copy_scalars(state, parameter.shape)
    return find_odd_state(state, parameter.shape) or find_obstacle(
        functools.partial(shadow_step, optimizer, group),
        dtype=torch.float32,
        per_element={key: value.dtype for key, value in state.items() if key not in scalars},
        scalars=scalars,
    )


def ask_rule(rule: Rule, num_steps: int = 0) -> str | None:
    return ask(ByRule([torch.zeros(1)], rule), num_steps)


FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


@pytest.mark.parametrize("cls", sorted(_ELEMENT_WISE - {torch.optim.Rprop}, key=lambda cls: cls.__name__))
def test_what_is_known_to_be_element_wise_is_found_to_be(cls: Callable[..., Optimizer]) -> None:
    for options in ({}, {"foreach": True}, {"foreach": False}, *([{"fused": True}] if cls in FUSED else [])):
        optimizer = cls([torch.zeros(1)], **options)
        for num_steps in (0, 1, 6):  # RAdam changes its rule at the sixth step
            assert ask(optimizer, num_steps) is None


def lion(parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    if not state:
        state["mean"] = torch.zeros_like(parameter)
    parameter.data.mul_(0.99)
    direction = state["mean"].clone().mul_(0.9).add(gradient, alpha=0.1).sign_()
    parameter.add_(direction, alpha=-1e-3)
    state["mean"].lerp_(gradient, 0.01)


def sgd_by_assignment(parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    parameter.data = parameter.data - 0.1 * gradient


def choose_by_element(parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    parameter.copy_(torch.where(gradient > 0, parameter - 0.1, parameter.masked_fill(gradient < -0.2, 1.0)))


def count_in_python(parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    state["count"] = state.get("count", 0) + 1
    parameter.sub_(gradient, alpha=1 / state["count"])


@pytest.mark.parametrize("rule", [lion, sgd_by_assignment, choose_by_element, count_in_python])
def test_element_wise_rules(rule: Rule) -> None:
    assert ask_rule(rule) is None
    assert ask_rule(rule, 1) is None


def every_third_time(parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    state["count"] = state.get("count", 0) + 1
    parameter.sub_(gradient / gradient.norm() if state["count"] == 3 else gradient)


def test_the_answer_is_for_the_step_at_hand() -> None:
    assert [ask_rule(every_third_time, step) is None for step in range(4)] == [True, True, False, True]


SCALE = torch.full((4, 32), 0.5)


@pytest.mark.parametrize(
    ("rule", "obstacle"),
    [
        (lambda p, g, s: p.sub_(g / g.norm()), "it calls aten.linalg_vector_norm.default"),
        (lambda p, g, s: p.sub_(torch._foreach_norm([g])[0]), "it calls aten._foreach_norm"),
        (lambda p, g, s: p.sub_(torch._foreach_max([g])[0]), "it calls aten._foreach_max"),
        (lambda p, g, s: p.sub_(g @ g.t() @ g), "it calls aten."),
        (lambda p, g, s: p.sub_(g.cumsum(0)), "it calls aten.cumsum"),
        (lambda p, g, s: p.sub_(g, alpha=float(g.flatten()[0])), "it calls aten."),
        (lambda p, g, s: p.sub_(g.sort(-1).values), "it calls aten.sort"),
        (lambda p, g, s: p.view(-1)[::2].zero_(), "it calls aten.view"),
        (lambda p, g, s: p.t().add_(g.t()), "it calls aten.t"),
        (lambda p, g, s: p.sub_(g, alpha=1 / p.numel()), "it looks at the numel of a tensor"),
        (lambda p, g, s: p.sub_(g, alpha=math.sqrt(p.shape[0])), "it looks at the shape of a tensor"),
        (lambda p, g, s: p.sub_(g) if p.ndim > 1 else None, "it looks at the ndim of a tensor"),
        (lambda p, g, s: p.sub_(g) if len(p) > 1 else None, "it looks at the __len__ of a tensor"),
        (lambda p, g, s: p.numpy().__isub__(g.numpy()), "it looks at the numpy of a tensor"),
        (lambda p, g, s: p.sub_(torch.rand_like(g)), "it draws random numbers (aten.rand_like"),
        (lambda p, g, s: p.sub_(torch.rand(())), "it draws random numbers (aten.rand"),
        (lambda p, g, s: p.sub_(g * SCALE), "it calls aten.mul.Tensor with a tensor that is not its parameter's"),
        (lambda p, g, s: p.grad.missing(), "its update of a small tensor raised AttributeError"),
        (lambda p, g, s: s.update(rows=g.new_zeros(4)), "it calls aten.new_zeros"),
    ],
)
def test_what_is_not_element_wise(rule: Rule, obstacle: str) -> None:
    found = ask_rule(rule)
    assert found is not None
    assert found.startswith(obstacle), found


def test_state_that_is_neither_per_element_nor_one_number() -> None:
    found = ask_rule(lambda p, g, s: s.setdefault("history", torch.zeros(7)), 1)
    assert found == "its state 'history' has neither one element nor the parameter's shape"


def test_bits_are_compared_too() -> None:
    calls = iter(range(100))
    assert ask_rule(lambda p, g, s: p.sub_(g, alpha=next(calls))) == "it gives other bits for parts of a tensor"


def test_asking_draws_none_of_the_users_random_numbers() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert ask_rule(lambda p, g, s: p.sub_(torch.rand_like(g))) is not None
    assert torch.equal(torch.rand(3), expected)


class _Elsewhere(Tensor):
    """A number on a device, which notes that it was copied to host memory."""

    copies: ClassVar[list[object]] = []
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        self.copies.append((args, kwargs))
        return torch.Tensor.to(self.as_subclass(Tensor), *args, **kwargs)


def test_a_learning_rate_on_a_device_is_copied_to_host_memory() -> None:
    """Updates run on another stream, which does not wait for a copy on the device."""
    adamw = torch.optim.AdamW([torch.zeros(4, requires_grad=True)], lr=0.5)
    adamw.param_groups[0]["lr"] = torch.tensor(0.5).as_subclass(_Elsewhere)
    frozen = freeze(adamw)
    assert _Elsewhere.copies == [(("cpu",), {"copy": True})]
    assert type(frozen.param_groups[0]["lr"]) is Tensor
    assert float(frozen.param_groups[0]["lr"]) == 0.5
