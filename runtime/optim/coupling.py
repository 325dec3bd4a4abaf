"""Finds out whether an optimizer can update each parameter separately, that is, whether it couples parameters.

A shadow sees one parameter with a gradient, in its place among others without gradients. A norm over all gradients
inside ``step`` would then be wrong, and so would a count of updates. Three steps are tried on small tensors: by one
copy of the optimizer for all of them, and by one copy each. Both must give the same bits, and leave the same groups,
attributes and random states.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.optim.bookkeeping import Bookkeeping
from zinf_compile.runtime.optim.element_wise import SURPRISES, is_same_value
from zinf_compile.runtime.optim.isolation import Isolation
from zinf_compile.runtime.optim.shadow import (
    Place,
    attributes_with_parameters,
    copy_optimizer,
    copy_value,
    freeze,
    put_into,
    step_plainly,
    traits_of,
)
from zinf_compile.runtime.optim.temporaries import small_shape
from zinf_compile.runtime.process.random_state import keeping_random_state, random_state, set_random_state

_GRADIENT_SCALES = (1e-3, 1.0, 1e3)  # below and above where gradients are clipped
_MOST_GROUPS = 3  # in each of which two parameters are also updated alone
_FEW = 500


def find_coupling(optimizer: Optimizer) -> str | None:
    """Return what couples the updates of an optimizer's parameters; None if nothing.

    UnsupportedError if it reads parameters other than those in its groups; an error of its own step is raised as it is.
    What else is learned goes into ``traits_of(optimizer)``.
    """
    error: Exception | None = None
    for shape_of, with_state, closure in _TRIALS:
        toys = _make_toys(optimizer, shape_of, with_state=with_state)
        try:
            with keeping_random_state(), torch.enable_grad():
                coupling = _try_both(optimizer, toys, closure)
        except UnsupportedError:
            raise
        except SURPRISES as surprise:
            error = error or surprise
        else:
            return coupling if closure is None else "its step needs a closure, which is called once and before it"
    assert error is not None
    error.add_note(
        f"A step of {type(optimizer).__name__} was tried on small tensors, since it is to update parameters that live in a "
        "store, and raised this; nothing was updated."
    )
    raise error


def _square(parameter: Tensor) -> torch.Size:
    return torch.Size([4, 4])


def _small(parameter: Tensor) -> torch.Size:
    return small_shape(parameter.shape)


_TRIALS: Sequence[tuple[Callable[[Tensor], torch.Size], bool, Callable[[], Tensor] | None]] = (
    (_square, False, None),
    (_small, False, None),
    (_small, True, None),
    (_small, False, lambda: torch.zeros(())),
)  # shapes, whether with states of parameters, and a closure


@dataclass(frozen=True, slots=True, kw_only=True)
class _Toy:
    """A small tensor in the place of a parameter."""

    place: Place
    is_asked: bool  # whether it is also updated alone
    value: Tensor
    state: dict[str, Any]


def _make_toys(optimizer: Optimizer, shape_of: Callable[[Tensor], torch.Size], *, with_state: bool) -> list[_Toy]:
    """Return toys for all parameters; or, where these are many, for those that are asked.

    Two of some groups are, which differ in dtype or dimensions if there are such.
    """
    generator = torch.Generator().manual_seed(0)
    are_few = sum(len(group["params"]) for group in optimizer.param_groups) <= _FEW
    toys = []
    for index, group in enumerate(optimizer.param_groups):
        kinds = [(parameter.dtype, parameter.dim()) for parameter in group["params"]]
        others = [position for position, kind in enumerate(kinds) if kind != kinds[0]]
        asked = {0, *(others[:1] or [1])} if index < _MOST_GROUPS else set()
        for position, parameter in enumerate(group["params"]):
            if are_few or position in asked:
                value = torch.randn(shape_of(parameter), generator=generator).to(parameter.dtype)
                state = _small_state(optimizer, parameter, value) if with_state else {}
                toys.append(_Toy(place=(index, position), is_asked=position in asked, value=value, state=state))
    return toys


def _small_state(optimizer: Optimizer, parameter: Tensor, value: Tensor) -> dict[str, Any]:
    """Return a parameter's state for its toy: tensors of the parameter's shape at the toy's."""
    small: dict[str, Any] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for key, entry in optimizer.state.get(parameter, {}).items():
            is_alike = isinstance(entry, Tensor) and entry.shape == parameter.shape
            small[key] = torch.rand(value.shape).to(entry.dtype) if is_alike else copy_value(entry)
    return small


class _Twin:
    """A copy of an optimizer with toys of its own."""

    def __init__(
        self, optimizer: Optimizer, frozen: Optimizer, toys: Sequence[_Toy], generators: dict[int, torch.Generator]
    ) -> None:
        self.frozen, self.toys = frozen, toys
        self.isolation = Isolation(generators)
        withheld = attributes_with_parameters(optimizer)
        self.optimizer = copy_optimizer(frozen, self.isolation, cls=_refusing(type(optimizer), withheld))
        self.parameters = [toy.value.clone().requires_grad_() for toy in toys]
        self._own_groups: dict[int, int] = {}  # by those of the user's optimizer
        if not toys and not traits_of(optimizer).takes_empty_groups:
            self.optimizer.param_groups = []
        for toy, parameter in zip(toys, self.parameters, strict=True):
            self._own_groups[toy.place[0]] = put_into(self.optimizer, toy.place, parameter)
            if toy.state:
                self.optimizer.state[parameter] = Isolation().copy(toy.state)

    def step(self, gradients: Mapping[Place, Tensor], closure: Callable[[], Tensor] | None = None) -> bool:
        """Take a step with gradients for some toys; return whether it leaves them as they were."""
        given = [gradients.get(toy.place) for toy in self.toys]
        step_plainly(
            self.optimizer, self.parameters, [None if each is None else each.clone() for each in given], closure
        )
        return all(is_same_value(each, parameter.grad) for each, parameter in zip(given, self.parameters, strict=True))

    def books(self, group: int) -> Bookkeeping:
        """Return what its steps have written beside parameters and their state."""
        return Bookkeeping.of(self.frozen, self.optimizer, self.isolation, group, self._own_groups[group])

    def outcome(self, place: Place) -> tuple[Tensor, dict[str, Any], Tensor | None]:
        """Return a parameter, its state and its gradient."""
        parameter = next(each for each, toy in zip(self.parameters, self.toys, strict=True) if toy.place == place)
        return parameter.detach(), dict(self.optimizer.state.get(parameter, {})), parameter.grad

    def moved(self) -> bool:
        """Return whether a parameter has changed."""
        pairs = zip(self.parameters, self.toys, strict=True)
        return not all(is_same_value(each.detach(), toy.value) for each, toy in pairs)


def _refusing(cls: type[Optimizer], withheld: dict[str, str]) -> type[Optimizer]:
    """Return a class that raises UnsupportedError where an attribute that is withheld is looked at."""
    if not withheld:
        return cls

    def look(self: Any, name: str) -> Any:
        if name in withheld:
            raise UnsupportedError(
                f"{cls.__name__} is not supported by zinf_compile: its step looks at its attribute '{name}', "
                f"which holds {withheld[name]}, and each parameter is updated by itself; let it take them from its groups, "
                "and keep what belongs to one in its state"
            )
        inherited: Any = getattr(cls, "__getattr__", None)
        if inherited is None:
            raise AttributeError(f"'{cls.__name__}' object has no attribute '{name}'", name=name, obj=self)
        return inherited(self, name)

    refusing: type[Optimizer] = types.new_class(
        cls.__name__, (cls,), exec_body=lambda body: body.update(__getattr__=look)
    )
    return refusing


class _RaisesAloneError(Exception):
    """A step raises where only some parameters have a gradient."""


def _try_both(optimizer: Optimizer, toys: Sequence[_Toy], closure: Callable[[], Tensor] | None) -> str | None:
    """Try shadows in which each parameter is in its place; if the step takes no missing gradients, alone."""
    traits = traits_of(optimizer)
    failure = ""
    for traits.in_place, traits.takes_empty_groups in ((True, True), (False, True), (False, False)):
        try:
            return _try(optimizer, toys, closure)
        except _RaisesAloneError as error:
            failure = f"its step raises where only one has a gradient ({error})"
    return failure


def _try(optimizer: Optimizer, toys: Sequence[_Toy], closure: Callable[[], Tensor] | None) -> str | None:
    traits = traits_of(optimizer)
    generators: dict[int, torch.Generator] = {}
    together = _Twin(optimizer, freeze(optimizer, in_place=True), toys, generators)
    of_its_own = {key: each.get_state() for key, each in generators.items()}
    frozen = freeze(optimizer)
    asked = [toy for toy in toys if toy.is_asked]
    alone_generators: dict[int, torch.Generator] = {}  # consecutive updates draw from the same
    alone = [_Twin(optimizer, frozen, [toy], alone_generators) for toy in asked]
    idle = [_Twin(optimizer, frozen, each, {}) for each in ([], toys if traits.in_place else [])]
    generator = torch.Generator().manual_seed(1)
    for scale in _GRADIENT_SCALES:
        gradients = {
            toy.place: (scale * torch.randn(toy.value.shape, generator=generator)).to(toy.value.dtype) for toy in toys
        }
        before = random_state()
        traits.changes_gradients |= not together.step(gradients, closure)
        after = random_state()
        traits.draws |= not is_same_value(before, after)
        traits.draws |= any(not torch.equal(state, generators[key].get_state()) for key, state in of_its_own.items())
        set_random_state(before)
        if any(parameter.grad is None for parameter in together.parameters):
            return "it takes gradients away, which zero_grad() does after it"
        if traits.draws and len(asked) < len(toys):
            return _try(optimizer, asked, closure)  # the random numbers drawn for the others would be missing
        try:
            for twin in idle:
                twin.step({}, closure)
            draws_idly = not is_same_value(before, random_state())
            for twin, toy in zip(alone, asked, strict=True):
                twin.step({toy.place: gradients[toy.place]}, closure)
        except UnsupportedError:
            raise
        except SURPRISES as error:
            raise _RaisesAloneError(f"{type(error).__name__}: {error}") from error
        if draws_idly or not is_same_value(after, random_state()):
            return "it draws random numbers for all of them together"
        for twin, toy in zip(alone, asked, strict=True):
            if (difference := together.books(toy.place[0]).difference(twin.books(toy.place[0]))) is not None:
                return f"{difference} depends on the gradients of all parameters"
            if not is_same_value(together.outcome(toy.place), twin.outcome(toy.place)):
                return "its update of one parameter depends on the others"
            if any(each.moved() for each in idle):
                return "it changes parameters that have no gradient"
    return None
