"""A shadow of the user's optimizer: the same class and options, holding one tensor that stands for part of a parameter."""

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.errors import UnsupportedError

# Their update of an element depends on that element alone, so a tensor may be cut anywhere.
_ELEMENT_WISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.ASGD,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    }
)
_REFUSED: Mapping[type[Optimizer], str] = {
    torch.optim.LBFGS: "it needs all parameters at once and keeps a history of them",
    torch.optim.SparseAdam: "it needs sparse gradients, which a store does not hold",
}


def is_element_wise(optimizer: Optimizer) -> bool:
    """Return whether a tensor may be cut into chunks for this optimizer; classes we do not know get whole tensors."""
    return type(optimizer) in _ELEMENT_WISE


def check_supported(optimizer: Optimizer) -> None:
    """Raise UnsupportedError for an optimizer that cannot be streamed."""
    for refused, reason in _REFUSED.items():
        if isinstance(optimizer, refused):
            raise UnsupportedError(
                f"{type(optimizer).__name__} cannot step parameters that live in a store: {reason}; "
                "use AdamW, or another optimizer that updates one parameter at a time"
            )


def shadow_step(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor, state: dict[str, Any]
) -> dict[str, Any]:
    """Update ``parameter`` in place as ``optimizer`` would, with the options of ``group``; return its new state.

    ``state`` is what the optimizer keeps for the parameter, its tensors updated in place; empty before the first step.
    """
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)  # a learning-rate scheduler wraps the method of the instance
    stand_in = parameter.requires_grad_()
    stand_in.grad = gradient
    shadow.param_groups = [{**group, "params": [stand_in]}]
    shadow.state = defaultdict(dict, {stand_in: state} if state else {})
    step: Any = type(optimizer).step
    # torch wraps the method with hooks, ours among them; the plain method is underneath.
    plain_step = step.__wrapped__ if getattr(step, "hooked", False) else step
    plain_step(shadow)
    new_state: dict[str, Any] = shadow.state[stand_in]
    return new_state


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor of optimizer state that has one element per parameter element."""

    key: str
    dtype: torch.dtype


def probe_state(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> tuple[StateTensor, ...]:
    """Return the per-element state tensors an element-wise optimizer keeps, by updating three zeros."""
    zeros = torch.zeros(3, dtype=dtype)
    state = shadow_step(optimizer, group, zeros, torch.zeros_like(zeros), {})
    return tuple(
        StateTensor(key=key, dtype=value.dtype)
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == zeros.shape
    )


def copy_scalars(state: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
    """Return copies of the entries of a parameter's state that are not tensors of its shape: step counts and the like."""
    return {
        key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in state.items()
        if not (isinstance(value, Tensor) and value.shape == shape and value.dim() > 0)
    }
