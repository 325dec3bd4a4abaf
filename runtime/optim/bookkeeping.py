"""What an optimizer's step writes besides parameters and their state: groups, attributes, shared state.

Each shadow starts from the values before the step. To advance them once per step, the writes of one shadow are taken,
and all shadows must have written the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MethodType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.optim.element_wise import is_same_value
from zinf_compile.runtime.optim.isolation import Isolation

NOT_BOOKKEEPING = frozenset(
    {"param_groups", "state", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
)


class _Gone(Enum):
    """Marks an entry that is missing, on other ranks too: a member of an enum is the same after pickling."""

    GONE = "gone"


_GONE = _Gone.GONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry as a step left it."""

    value: Any
    in_place: bool  # the object that was there has changed, and is there still

    def put(self, into: Any, key: Any) -> None:
        """Write it into a mapping; into the object that is there if the step changed that one in place."""
        old = into.get(key)
        if self.value is _GONE:
            into.pop(key, None)
        elif self.in_place and isinstance(old, Tensor) and old.shape == self.value.shape:
            old.copy_(self.value)
        elif self.in_place and isinstance(old, list):
            old[:] = self.value
        elif self.in_place and isinstance(old, dict | set):
            old.clear()
            old.update(self.value)
        else:
            into[key] = self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookkeeping:
    """The entries that a step has changed."""

    options: Mapping[str, Entry]  # of one group
    attributes: Mapping[str, Entry]
    state: Mapping[Any, Entry]  # of ``optimizer.state``, of no parameter

    @staticmethod
    def of(before: Optimizer, after: Optimizer, isolation: Isolation, group: int, own_group: int) -> "Bookkeeping":
        """Return what a copy of an optimizer, whose group is ``own_group``, has changed since ``isolation`` made it."""
        return Bookkeeping(
            options=_changes(before.param_groups[group], after.param_groups[own_group], isolation, {"params"}),
            attributes=_changes(before.__dict__, after.__dict__, isolation, NOT_BOOKKEEPING),
            state=_changes(shared_state(before), shared_state(after), isolation, ()),
        )

    def difference(self, other: "Bookkeeping") -> str | None:
        """Return the first entry, in words, in which the two differ; None if they agree."""
        kinds = (("parameter group", "options"), ("attributes", "attributes"), ("shared state", "state"))
        for words, kind in kinds:
            mine, others = getattr(self, kind), getattr(other, kind)
            for key in {**mine, **others}:
                if key not in mine or key not in others or not is_same_value(mine[key].value, others[key].value):
                    return f"what it keeps in its {words} as '{key}'"
        return None


def rebound(value: Any, optimizer: Optimizer) -> Any:
    """Return a value as an attribute of ``optimizer``: a bound method of a copy becomes one of the optimizer itself."""
    if isinstance(value, MethodType) and type(value.__self__) is type(optimizer):
        return MethodType(value.__func__, optimizer)
    return value


def shared_state(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the entries of ``optimizer.state`` that are not of a parameter."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def _changes(
    before: Mapping[Any, Any], after: Mapping[Any, Any], isolation: Isolation, left_out: Any
) -> dict[Any, Entry]:
    changes: dict[Any, Entry] = {}
    for key in {**before, **after}:
        if key in left_out:
            continue
        old, new = before.get(key, _GONE), after.get(key, _GONE)
        if not is_same_value(old, new):
            changes[key] = Entry(value=new, in_place=isolation.is_copy(new, old))
    return changes


class Ledger:
    """Collects what the shadows of one step wrote beside their parameter and its state; all have to agree."""

    def __init__(self, name: str) -> None:
        """``name`` is the optimizer's, for messages."""
        self._name = name
        self._noted: dict[int, Bookkeeping] = {}  # by group

    @property
    def noted(self) -> Mapping[int, Bookkeeping]:
        """Return what was recorded, by group."""
        return self._noted

    def note(self, group: int, books: Bookkeeping) -> None:
        """Record what the update of a parameter of a group wrote. UnsupportedError if an earlier one wrote otherwise."""
        others = [(self._noted[group], books)] if group in self._noted else []
        if not others and self._noted:
            first = next(iter(self._noted.values()))
            others = [(_without_options(first), _without_options(books))]
        for other, mine in others:
            if (difference := other.difference(mine)) is not None:
                raise UnsupportedError(
                    f"{self._name} is not supported by zinf_compile: {difference} differs from one parameter "
                    "to the next, and each is updated by itself; keep it in the state of the parameter"
                )
        self._noted.setdefault(group, books)

    def settle(self, optimizer: Optimizer, before: Optimizer) -> None:
        """Write what its shadows wrote into an optimizer, in place of what its own step wrote, which saw no gradient.

        ``before`` is the optimizer as it was before that step.
        """
        for group, books in self._noted.items():
            _settle(optimizer.param_groups[group], before.param_groups[group], books.options, {"params"})
            attributes = {
                name: replace(entry, value=rebound(entry.value, optimizer)) for name, entry in books.attributes.items()
            }
            _settle(optimizer.__dict__, before.__dict__, attributes, NOT_BOOKKEEPING)
            _settle(optimizer.state, shared_state(before), books.state, ())


def _without_options(books: Bookkeeping) -> Bookkeeping:
    return Bookkeeping(options={}, attributes=books.attributes, state=books.state)


def _settle(into: Any, before: Mapping[Any, Any], changes: Mapping[Any, Entry], left_out: Any) -> None:
    for key in {**before, **changes}:
        if key in left_out:
            continue
        entry = changes.get(key) or Entry(value=before[key], in_place=True)
        if not is_same_value(into.get(key, _GONE), entry.value):
            entry.put(into, key)
