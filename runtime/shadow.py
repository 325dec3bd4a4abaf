"""A shadow of the user's optimizer: the same class and options, holding one tensor that stands for part of a parameter."""

import copy
import functools
import logging
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.errors import UnsupportedError
from zinf_compile.runtime.coupling import find_coupling
from zinf_compile.runtime.element_wise import find_obstacle, is_same_value
from zinf_compile.runtime.slots import record_of

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
# Of torch too: each needs a whole matrix, and no other parameter.
_WHOLE_TENSORS = frozenset({torch.optim.Adafactor, torch.optim.Muon})
_REFUSED: Mapping[type[Optimizer], str] = {
    torch.optim.LBFGS: "it needs all parameters at once and keeps a history of them",
    torch.optim.SparseAdam: "it needs sparse gradients, which a store does not hold",
}

_uncoupled: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers that need not be asked again
_obstacles: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()  # what the log has said already
_log = logging.getLogger(__name__)


STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # attributes of an optimizer


def is_element_wise(optimizer: Optimizer) -> bool:
    """Return whether tensors may be cut into chunks for the next step of this optimizer.

    Classes of torch are known. Others are asked with the options and step counts they have now, so the answer is for one
    step; what keeps a tensor whole is in the log.
    """
    if type(optimizer) in _ELEMENT_WISE:
        return True
    if type(optimizer) in _WHOLE_TENSORS:
        return False
    for group in optimizer.param_groups:
        obstacle = _find_obstacle(optimizer, group)
        if obstacle is not None:
            if _obstacles.get(optimizer) != obstacle:
                _log.info("%s gets whole tensors: %s", type(optimizer).__name__, obstacle)
                _obstacles[optimizer] = obstacle
            return False
    return True


def _find_obstacle(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    asked: list[tuple[torch.dtype, dict[str, torch.dtype], dict[str, Any]]] = []
    for parameter in group["params"]:
        record = record_of(parameter)
        if record is None or parameter.grad is None:
            continue
        master = record.master.tensor
        state = optimizer.state.get(parameter, {})
        scalars = copy_scalars(state, master.shape)
        per_element = {key: value.dtype for key, value in state.items() if key not in scalars}
        if any(each[:2] == (master.dtype, per_element) and _is_same_state(each[2], scalars) for each in asked):
            continue
        asked.append((master.dtype, per_element, scalars))
        update = functools.partial(shadow_step, optimizer, group)
        obstacle = find_obstacle(update, dtype=master.dtype, per_element=per_element, scalars=scalars)
        if obstacle is not None:
            return obstacle
    return None


def _is_same_state(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(is_same_value(left[key], right[key]) for key in left)


def check_supported(optimizer: Optimizer) -> None:
    """Raise UnsupportedError for an optimizer that cannot be streamed."""
    name = type(optimizer).__name__
    for refused, reason in _REFUSED.items():
        if isinstance(optimizer, refused):
            raise UnsupportedError(
                f"{name} cannot step parameters that live in a store: {reason}; "
                "use AdamW, or another optimizer that updates one parameter at a time"
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError(
            f"{name}(differentiable=True) cannot step parameters that live in a store: their updates are not in the "
            "autograd graph; say differentiable=False"
        )
    if type(optimizer) in _ELEMENT_WISE | _WHOLE_TENSORS or optimizer in _uncoupled:
        return
    for group in optimizer.param_groups:
        coupling = find_coupling(functools.partial(_update_together, optimizer, group))
        if coupling is not None:
            raise UnsupportedError(
                f"{name} cannot step parameters that live in a store: {coupling}, and each is updated by itself; "
                "do what needs all gradients before step(), as torch.nn.utils.clip_grad_norm_ does"
            )
    _uncoupled.add(optimizer)


def shadow_step(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor, state: dict[str, Any]
) -> dict[str, Any]:
    """Update ``parameter`` in place as ``optimizer`` would, with the options of ``group``; return its new state.

    ``state`` is what the optimizer keeps for the parameter, its tensors updated in place; empty before the first step.
    """
    shadow = _run_shadow(optimizer, group, [parameter], [gradient], [state])
    new_state: dict[str, Any] = shadow.state[parameter]
    return new_state


def _update_together(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    states: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Update parameters in place, and their states; return the options of the group afterwards.

    The third one, if there is one, is in another group with the same options.
    """
    shadow = _run_shadow(optimizer, group, parameters, gradients, states)
    for parameter, state in zip(parameters, states, strict=True):
        state.update(shadow.state.get(parameter, {}))
    return {key: value for key, value in shadow.param_groups[0].items() if key != "params"}


def _run_shadow(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    states: Sequence[dict[str, Any]],
) -> Optimizer:
    """Let a shadow update ``parameters`` in place; return it."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__, **{name: OrderedDict() for name in STEP_HOOKS})
    shadow.__dict__.pop("step", None)  # a learning-rate scheduler wraps the method of the instance
    homes = [parameter.detach() for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_().grad = gradient
    shadow.param_groups = [{**group, "params": list(part)} for part in (parameters[:2], parameters[2:]) if part]
    states = [
        state or _made_by_init(optimizer, group, parameter) for parameter, state in zip(parameters, states, strict=True)
    ]
    shadow.state = defaultdict(
        dict, {parameter: state for parameter, state in zip(parameters, states, strict=True) if state}
    )
    step: Any = type(optimizer).step
    # torch wraps the method with hooks, ours among them; the plain method is underneath.
    plain_step = step.__wrapped__ if getattr(step, "hooked", False) else step
    plain_step(shadow)
    with torch._C.DisableTorchFunction():  # this look at memory is ours, whoever watches the update
        moved = [(p, home) for p, home in zip(parameters, homes, strict=True) if p.data_ptr() != home.data_ptr()]
    for parameter, home in moved:  # ``p.data = ...`` gave it other memory
        home.copy_(parameter.detach())
    return shadow


def _made_by_init(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the state that an optimizer's ``__init__`` makes: before torch 2.13, Adagrad's does, all others' none."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    options = {name: group[name] for name in optimizer.defaults}
    return dict(torch.optim.Adagrad([parameter], **options).state.get(parameter, {}))


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
    with torch._C.DisableTorchFunctionSubclass():  # a look at the shape of a home tensor is not a look at its value
        scalars = {
            key: value
            for key, value in state.items()
            if not (isinstance(value, Tensor) and value.shape == shape and value.dim() > 0)
        }
    return {key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in scalars.items()}
