"""A shadow of the user's optimizer: the same class and options, holding one tensor that stands for part of a parameter."""

import copy
import functools
import logging
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.runtime.optim.block_wise import find_draws, is_block_wise
from zinf_compile.runtime.optim.bookkeeping import NOT_BOOKKEEPING, Bookkeeping, Ledger, shared_state
from zinf_compile.runtime.optim.element_wise import find_obstacle, find_odd_state, is_same_value
from zinf_compile.runtime.optim.isolation import Isolation
from zinf_compile.runtime.optim.overrides import with_overrides_by_place
from zinf_compile.runtime.optim.periodic import periodics_of, tried_out
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.process.compiling import Uncompiled
from zinf_compile.runtime.process.waiting import wait_for_turn

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

_obstacles: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()  # what the log has said already
_DRAWS = "it draws random numbers"
_log = logging.getLogger(__name__)


Place = tuple[int, int]  # of a parameter in an optimizer: its group, and its position there
SCALER_ATTRIBUTES = ("grad_scale", "found_inf")  # with which torch.amp.GradScaler lets a fused optimizer unscale
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # attributes of an optimizer


@dataclass(slots=True, kw_only=True)
class Traits:
    """What was found out about an optimizer when its step was tried."""

    draws: bool = False  # its step draws random numbers, from generators that all updates share
    changes_gradients: bool = False  # in place, or by replacing them
    in_place: bool = True  # its step accepts a parameter among others without gradients; else only alone
    takes_empty_groups: bool = True  # its step accepts groups of which no parameter has a gradient


_traits: weakref.WeakKeyDictionary[Optimizer, Traits] = weakref.WeakKeyDictionary()


def traits_of(optimizer: Optimizer) -> Traits:
    """Return what is known about an optimizer; changing it changes what is known."""
    return _traits.setdefault(optimizer, Traits())


def is_known(optimizer: Optimizer) -> bool:
    """Return whether updates of this class of torch, or torchao, are known to need but their parameter and options."""
    return type(optimizer) in _ELEMENT_WISE | _WHOLE_TENSORS or is_block_wise(optimizer)


def is_element_wise(
    optimizer: Optimizer, frozen: Optimizer | None = None, *, has_gradient: Callable[[Tensor], bool] | None = None
) -> bool:
    """Return whether tensors may be cut into chunks for the next step of this optimizer.

    Classes of torch are known. Others are asked with the options and step counts they have now, so the answer is for
    one step; the log says why tensors are not cut. ``has_gradient`` returns whether it will update a parameter.
    """
    if is_block_wise(optimizer):
        traits_of(optimizer).draws = find_draws(optimizer, _master_dtypes(optimizer))
        if traits_of(optimizer).draws:
            _say_whole(optimizer, _DRAWS)
        return not traits_of(optimizer).draws
    if is_known(optimizer):
        return type(optimizer) in _ELEMENT_WISE
    frozen = frozen or freeze(optimizer)
    for index in range(len(optimizer.param_groups)):
        obstacle = _find_obstacle(optimizer, frozen, index, has_gradient or _has_gradient)
        if obstacle is not None:
            _say_whole(optimizer, obstacle)
            return False
    return True


def _say_whole(optimizer: Optimizer, obstacle: str) -> None:
    if _obstacles.get(optimizer) != obstacle:
        _log.info("%s gets whole tensors: %s", type(optimizer).__name__, obstacle)
        _obstacles[optimizer] = obstacle


def _master_dtypes(optimizer: Optimizer) -> set[torch.dtype]:
    """Return the dtypes of the master copies that it updates."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    records = (record_of(parameter) for parameter in parameters)
    return {record.copies.master.tensor.dtype for record in records if record is not None}


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None


def _find_obstacle(
    optimizer: Optimizer, frozen: Optimizer, index: int, has_gradient: Callable[[Tensor], bool]
) -> str | None:
    if traits_of(optimizer).draws:
        return _DRAWS
    if periodics_of(optimizer):
        return "it has work that is due every few steps"
    asked: list[tuple[torch.dtype, dict[str, torch.dtype], dict[str, Any]]] = []  # of shadows that were tried
    group = frozen.param_groups[index]
    for position, parameter in enumerate(optimizer.param_groups[index]["params"]):
        record = record_of(parameter)
        if record is None or not has_gradient(parameter):
            continue
        dtype = record.copies.master.tensor.dtype
        state = optimizer.state.get(parameter, {})
        if (obstacle := find_odd_state(state, parameter.shape)) is not None:  # before anything of it is copied
            return obstacle
        scalars = copy_scalars(state, parameter.shape)
        per_element = {key: value.dtype for key, value in state.items() if key not in scalars}
        kind = (dtype, per_element, scalars)
        if not tells_parameters_apart(group) and any(is_same_value(kind, other) for other in asked):
            continue
        asked.append(kind)

        def update(
            tensor: Tensor, gradient: Tensor, state: dict[str, Any], place: Place = (index, position)
        ) -> dict[str, Any]:
            return Shadow(frozen, group, place, tensor, gradient, state, is_trial=True).run()

        obstacle = find_obstacle(update, dtype=dtype, per_element=per_element, scalars=scalars)
        if obstacle is not None:
            return obstacle
    return None


def tells_parameters_apart(group: Mapping[str, Any]) -> bool:
    """Return whether a group has an entry for each of its parameters, such as their names."""
    entries = (value for key, value in group.items() if key != "params")
    return any(isinstance(value, list | tuple) and len(value) == len(group["params"]) for value in entries)


def freeze(optimizer: Optimizer, *, in_place: bool | None = None) -> Optimizer:
    """Return a snapshot of an optimizer, from which shadows are made: later changes do not show in it.

    Its groups hold an empty tensor in the place of every parameter, so that a shadow's parameter is at the position of
    the user's. If its step does not accept that, or without ``in_place``, they are empty, and a shadow has nothing but
    its parameter. Attributes that hold parameters are left out.
    """
    if is_known(optimizer):
        frozen: Optimizer = object.__new__(type(optimizer))
        frozen.__dict__.update(optimizer.__dict__)
        frozen.param_groups = [
            {key: [] if key == "params" else copy_value(value) for key, value in group.items()}
            for group in optimizer.param_groups
        ]
    else:
        frozen = copy_optimizer(optimizer, Isolation(), left_out=attributes_with_parameters(optimizer))
        if not (traits_of(optimizer).in_place if in_place is None else in_place):
            for group in frozen.param_groups:
                group["params"].clear()
        frozen = with_overrides_by_place(optimizer, frozen)
    for group in frozen.param_groups:
        for key, value in group.items():
            if isinstance(value, Tensor) and not value.is_cpu:
                # Hazard: as a learning rate. The stream of updates does not wait for what the stream of compute copies here.
                group[key] = value.detach().to("cpu", copy=True)
    for name in SCALER_ATTRIBUTES:
        if isinstance(value := getattr(optimizer, name, None), Tensor):
            # Hazard: ``GradScaler.update()`` changes them in place. Hazard: a fused step copies them to its device without
            # waiting, and a kernel of the CPU would read them at once.
            setattr(frozen, name, value.detach().to("cpu", copy=True))
    return frozen


def is_scaled(optimizer: Optimizer) -> bool:
    """Return whether a GradScaler lets a fused optimizer unscale gradients itself, in place."""
    return any(getattr(optimizer, name, None) is not None for name in SCALER_ATTRIBUTES)


def put_into(optimizer: Optimizer, place: Place, parameter: Tensor) -> int:
    """Put a parameter into a copy of a frozen optimizer, in its place, or alone if groups are empty; return its group."""
    index, position = place
    if not optimizer.param_groups[index]["params"]:
        optimizer.param_groups = [optimizer.param_groups[index]]
        index = 0
    optimizer.param_groups[index]["params"][position : position + 1] = [parameter]
    return index


def copy_optimizer(
    optimizer: Optimizer, isolation: Isolation, *, left_out: Collection[str] = (), cls: type[Optimizer] | None = None
) -> Optimizer:
    """Return a copy of an optimizer with an empty tensor in the place of every parameter, and with no state of any."""
    copied: Optimizer = object.__new__(cls or type(optimizer))
    groups: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
    state: defaultdict[Any, Any] = defaultdict(dict)
    for value, copy_of_it in ((optimizer, copied), (optimizer.param_groups, groups), (optimizer.state, state)):
        isolation.know(value, copy_of_it)
    for group, copied_group in zip(optimizer.param_groups, groups, strict=True):
        copied_group["params"] = [placeholder(parameter) for parameter in group["params"]]
        isolation.know(group, copied_group)
        isolation.know(group["params"], copied_group["params"])
    for group, copied_group in zip(optimizer.param_groups, groups, strict=True):
        copied_group.update((key, isolation.copy(value)) for key, value in group.items() if key != "params")
    attributes = {
        name: isolation.copy(value)
        for name, value in optimizer.__dict__.items()
        if name not in NOT_BOOKKEEPING and name not in left_out
    }
    copied.__dict__.update(attributes, **{name: OrderedDict() for name in STEP_HOOKS})
    copied.param_groups = groups
    state.update((isolation.copy(key), isolation.copy(value)) for key, value in shared_state(optimizer).items())
    copied.state = state
    return copied


def placeholder(parameter: Tensor) -> Tensor:
    """Return a stand-in for a parameter that a shadow does not update: it has no elements and no gradient."""
    return _placeholder(parameter.dtype, parameter.dim() > 0, parameter.shape[1:])


@functools.lru_cache
def _placeholder(dtype: torch.dtype, has_rows: bool, shape: torch.Size) -> Tensor:
    return torch.empty(
        (0, *shape) if has_rows else (), dtype=dtype, requires_grad=dtype.is_floating_point or dtype.is_complex
    )


def attributes_with_parameters(optimizer: Optimizer) -> dict[str, str]:
    """Return the names of an optimizer's attributes that hold its parameters, and what each holds, in words.

    An update of a shadow's tensor would not reach them. Another optimizer counts, and a module that has these parameters.
    """
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = {id(optimizer.param_groups), id(optimizer.state)}
    own |= {id(each) for group in optimizer.param_groups for each in (group, group["params"])}

    def find(value: Any, seen: set[int]) -> str | None:
        if id(value) in ids:
            return "parameters"
        if isinstance(value, int):
            return "ids of parameters" if value in ids else None
        if id(value) in own or id(value) in seen:
            return None
        seen.add(id(value))
        if isinstance(value, Optimizer) and value is not optimizer:
            return "another optimizer"
        if isinstance(value, torch.nn.Module):
            return "a module" if any(id(each) in ids for each in value.parameters()) else None
        if isinstance(value, dict):
            value = [*value.keys(), *value.values()]
        if isinstance(value, list | tuple | set | frozenset | deque):
            return next((found for each in value if (found := find(each, seen)) is not None), None)
        return None

    found = {name: find(value, set()) for name, value in optimizer.__dict__.items() if name not in NOT_BOOKKEEPING}
    return {name: what for name, what in found.items() if what is not None}


def shadow_step(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    place: Place | None = None,
    ledger: Ledger | None = None,
) -> dict[str, Any]:
    """Update ``parameter`` in place as ``optimizer`` would, with the options of ``group``; return its new state.

    ``state`` is what the optimizer keeps for the parameter, its tensors updated in place; empty before the first step.
    ``ledger`` records what else the step has written.
    """
    shadow = Shadow(optimizer, group, place, parameter, gradient, state)
    new_state = shadow.run()
    if ledger is not None and place is not None:
        ledger.note(place[0], shadow.books())
    return new_state


class Shadow:
    """An optimizer that updates one tensor in the place of a parameter, and cannot change anything else of the user's."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        place: Place | None,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        *,
        is_trial: bool = False,
    ) -> None:
        """``optimizer`` is frozen, and ``group`` is one of its; without ``place``, any optimizer with any group.

        A trial draws from copies of the optimizer's own random generators.
        """
        self._optimizer, self._parameter, self._gradient = optimizer, parameter, gradient
        self._isolation = Isolation({} if is_trial else None)
        self._group, self._own_group = (0, 0) if place is None else (place[0], place[0])
        if place is None or is_known(optimizer):
            self._shadow: Optimizer = object.__new__(type(optimizer))
            self._shadow.__dict__.update(optimizer.__dict__, **{name: OrderedDict() for name in STEP_HOOKS})
            self._shadow.__dict__.pop("step", None)  # a learning-rate scheduler wraps the method of the instance
            self._shadow.param_groups = [{**group, "params": [parameter]}]
            self._shadow.state = defaultdict(dict)
        else:
            self._shadow = copy_optimizer(optimizer, self._isolation)
            self._own_group = put_into(self._shadow, place, parameter)
        if state := state or _made_by_init(optimizer, group, parameter):
            self._shadow.state[parameter] = state

    def run(self) -> dict[str, Any]:
        """Update the parameter in place; return its new state."""
        self._parameter.requires_grad_()
        step_plainly(self._shadow, [self._parameter], [self._gradient])
        left = self._parameter.grad
        if left is not None and left is not self._gradient:  # ``p.grad = ...``
            self._gradient.copy_(left)
        self._isolation.check_shared()
        new_state: dict[str, Any] = self._shadow.state[self._parameter]
        return new_state

    def books(self) -> Bookkeeping:
        """Return what the update has written beside the parameter and its state."""
        return Bookkeeping.of(self._optimizer, self._shadow, self._isolation, self._group, self._own_group)


def step_plainly(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    closure: Callable[[], Any] | None = None,
) -> None:
    """Take a step without hooks. A parameter that the optimizer gave new memory is copied back to where it was."""
    homes = [parameter.detach() for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    step: Any = type(optimizer).step
    # torch wraps the method with hooks, ours among them; the plain method is underneath.
    plain_step = step.__wrapped__ if getattr(step, "hooked", False) else step
    turn = Uncompiled()
    wait_for_turn(turn.try_begin, "a compilation on another thread, beside which an update would round otherwise")
    try:
        with tried_out():
            plain_step(optimizer, *([] if closure is None else [closure]))
    finally:
        turn.end()
    with torch._C.DisableTorchFunction():  # our own look at addresses, which a trial must not record
        moved = [(p, home) for p, home in zip(parameters, homes, strict=True) if p.data_ptr() != home.data_ptr()]
    for parameter, home in moved:  # ``p.data = ...`` gave it other memory
        home.copy_(parameter.detach())


def _made_by_init(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the state that an optimizer's ``__init__`` makes: only Adagrad's makes any, before torch 2.13."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    options = {name: group[name] for name in optimizer.defaults}
    return dict(torch.optim.Adagrad([parameter], **options).state.get(parameter, {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor of optimizer state that has one element per parameter element."""

    key: str
    dtype: torch.dtype


def probe_state(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    place: Place,
    dtype: torch.dtype,
    made: Mapping[str, Any],
    shape: torch.Size,
) -> tuple[StateTensor, ...]:
    """Return the per-element state tensors an element-wise optimizer keeps, by updating three zeros.

    ``made`` is the state of a parameter of this shape. The ``__init__`` of an optimizer may have made some, which its
    updates expect to be there.
    """
    zeros = torch.zeros(3, dtype=dtype)
    begun: dict[str, Any] = {}
    if not is_known(optimizer) and len(shape) > 0:  # a 0-dim tensor may be a moment or a step count
        begun = copy_scalars(made, shape)
        begun |= {key: torch.zeros(3, dtype=value.dtype) for key, value in made.items() if key not in begun}
    state = Shadow(optimizer, group, place, zeros, torch.zeros_like(zeros), begun, is_trial=True).run()
    return tuple(
        StateTensor(key=key, dtype=value.dtype)
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == zeros.shape
    )


def copy_scalars(state: Mapping[str, Any], shape: torch.Size, *, but: Container[str] = ()) -> dict[str, Any]:
    """Return copies of the entries of a parameter's state that are not tensors of its shape: step counts and the like.

    ``but`` are the keys of others to leave out.
    """
    with torch._C.DisableTorchFunctionSubclass():  # a look at the shape of a home tensor is not a look at its value
        scalars = {
            key: value
            for key, value in state.items()
            if key not in but and not (isinstance(value, Tensor) and value.shape == shape and value.dim() > 0)
        }
    return {key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in scalars.items()}


def copy_value(value: Any) -> Any:
    """Return a copy of an entry of an optimizer's state or options that shares nothing with it."""
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
