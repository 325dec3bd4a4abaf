"""Work of an optimizer that is due every few steps, such as inverse roots: ``every`` runs it beside the steps.

    step 10    state["new_bases.pending.matrix"] = a copy of state["matrix"]; state["new_bases.adopt_at"] = 11
               threads compute new_bases() of the copies
    step 11    state["basis"] gets the result, and the two entries are gone

So the state of a parameter says everything: results that a thread has are only ahead of what could be computed from it,
with the same bits, after a checkpoint or in another process. Who keeps the copies is a ``Keeper``: memory, or a store.
"""

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from zinf_compile.ir.errors import ConfigError
from zinf_compile.runtime.optim.bookkeeping import NOT_BOOKKEEPING
from zinf_compile.runtime.optim.temporaries import TemporaryCount
from zinf_compile.runtime.process.background import background_calls
from zinf_compile.runtime.process.failure import describe_error
from zinf_compile.runtime.process.interrupts import check_interrupt
from zinf_compile.runtime.process.waiting import wait_future

Result = TypeVar("Result")
State = dict[str, Any]
Method = Callable[[Any, dict[str, Tensor]], dict[str, Tensor]]


class Spec(NamedTuple):
    """What a result has to be."""

    shape: torch.Size
    dtype: torch.dtype


def every(k: int | str, *, staleness: int | str = 0) -> Callable[[Method], "Periodic"]:
    """Let a method of an optimizer run in every ``k``-th step only, and in the background if its results may be late.

    The method gets a dict of tensors of one parameter's state and returns a dict of new ones. Its arguments are not to be
    changed, and are all that it may read, beside attributes of the optimizer that never change: it sees no groups and no
    state. ``step`` calls it for each parameter, in every step::

        @zinf_compile.every(10, staleness=1)
        def new_basis(self, state):
            return {"basis": torch.linalg.qr(state["matrix"] @ state["basis"])[0]}

        self.new_basis(self.state[parameter], reads=["matrix", "basis"], writes=["basis"])

    It runs where ``state["step"]`` is a multiple of ``k``, with the entries ``reads``, and its results are copied into the
    entries ``writes``: in the same call if ``staleness`` is 0, else in the call ``staleness`` steps later, no matter how
    long it takes. Until then threads compute, with one thread of torch each, as many as there are processors that torch does
    not use, and at least one. The state has copies of what was read meanwhile, under the keys ``"new_basis.pending.*"``, and
    the number of the step under ``"new_basis.adopt_at"``; so checkpoints are exact at all times. Training is the same bit by
    bit with and without ``optimize``, which updates parameters of such an optimizer whole, and computes ahead where half of
    its staging memory (a quarter of ``host_memory``, at most 96 MiB) holds what one parameter takes.

    ``k`` and ``staleness`` are numbers of steps, or names of such options in ``optimizer.defaults``.

    Raises ConfigError if ``k`` is less than 1, if ``staleness`` is negative or not less than ``k``, if this is no method of
    an optimizer, if the state lacks ``step`` or a key, or if the method changes an argument or returns other keys, shapes
    or dtypes than those of ``writes``. RuntimeError at the step that takes the result if the method raised in the
    background. The state is then as before the call.
    """
    if not isinstance(k, str) and not isinstance(staleness, str):
        _check_numbers(k, staleness, "every()")

    def decorate(method: Method) -> Periodic:
        if not inspect.isfunction(method) or len(inspect.signature(method).parameters) != 2:
            raise ConfigError(
                f"every() was given {method!r}; decorate a method of an optimizer with it, def name(self, state), which "
                "returns a dict of tensors"
            )
        return Periodic(method, k, staleness)

    return decorate


def _check_numbers(k: object, staleness: object, what: str) -> None:
    for name, value in (("k", k), ("staleness", staleness)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{what} has {name}={value!r}; give a whole number of steps")
    assert isinstance(k, int)
    assert isinstance(staleness, int)
    if k < 1:
        raise ConfigError(f"{what} has k={k}; give a number of steps of at least 1")
    if not 0 <= staleness < k:
        raise ConfigError(
            f"{what} has staleness={staleness}, and results are to be there before they are computed anew, {k} steps "
            f"later; give a staleness from 0 to {k - 1}, or a larger k"
        )


class Periodic:
    """A method of an optimizer that runs every few steps."""

    def __init__(self, method: Method, k: int | str, staleness: int | str) -> None:
        functools.update_wrapper(self, method)
        self._method, self._k, self._staleness = method, k, staleness
        self.name = method.__name__

    def __set_name__(self, owner: type, name: str) -> None:
        """Be called as in the class: its name is part of the keys of the state."""
        self.name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        """Return the method bound to an optimizer."""
        return self if optimizer is None else partial(self._call, optimizer)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse calls without an optimizer."""
        raise ConfigError(f"{self.name}() was called as a function; every() is for methods of an optimizer's class")

    @property
    def adopt_key(self) -> str:
        """Return the key of the step in which results are adopted."""
        return f"{self.name}.adopt_at"

    @property
    def pending_prefix(self) -> str:
        """Return how keys of copies begin."""
        return f"{self.name}.pending."

    def numbers(self, optimizer: Optimizer) -> tuple[int, int]:
        """Return ``k`` and ``staleness`` for an optimizer."""
        numbers = []
        for name, number in (("k", self._k), ("staleness", self._staleness)):
            if isinstance(number, str) and number not in optimizer.defaults:
                options = ", ".join(sorted(optimizer.defaults)) or "none"
                raise ConfigError(
                    f"{self.name}() of {type(optimizer).__name__} has {name}={number!r}, which is none of the options in "
                    f"its defaults: {options}; name one of these, or give a number of steps"
                )
            numbers.append(optimizer.defaults[number] if isinstance(number, str) else number)
        k, staleness = numbers
        _check_numbers(k, staleness, f"{self.name}() of {type(optimizer).__name__}")
        return k, staleness

    def _call(self, optimizer: Any, state: State, *, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Run the method, let it run, or adopt what it gave, where one of these is due for the parameter of ``state``."""
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"{self.name}() belongs to {type(optimizer).__name__}, and every() is for torch.optim.Optimizer"
            )
        k, staleness = self.numbers(optimizer)
        step = self._step_of(optimizer, state)
        for key in (*reads, *writes):
            if not isinstance(state.get(key), Tensor):
                have = ", ".join(sorted(key for key, value in state.items() if isinstance(value, Tensor))) or "none"
                raise ConfigError(
                    f"{self.name}() is to use '{key}' of a state whose tensors are {have}; make it before"
                )
        if not writes:
            return
        keeper = _local.keeper or IN_MEMORY
        specs = {key: Spec(state[key].shape, state[key].dtype) for key in writes}
        call = Call(self, optimizer, specs)
        is_due, adopt_at = step % k == 0, state.get(self.adopt_key)
        if isinstance(keeper, Trial):
            keeper.try_out(call, {key: state[key] for key in reads})
            return
        if adopt_at is not None and (step >= adopt_at or is_due):
            self._adopt(keeper.results(call, state), specs, state)
        if is_due and staleness == 0:
            self._adopt(call.compute({key: state[key] for key in reads}), specs, state)
        elif is_due:
            for key in reads:
                copied = state[key].detach().clone(memory_format=torch.contiguous_format)
                state[f"{self.pending_prefix}{key}"] = copied
            state[self.adopt_key] = step + staleness
            keeper.begin(call, state)

    def _step_of(self, optimizer: Optimizer, state: State) -> int:
        step = state.get("step")
        if isinstance(step, Tensor) and step.numel() == 1:
            step = step.item()
        if not isinstance(step, int | float) or step != int(step) or step < 0:
            raise ConfigError(
                f"{self.name}() of {type(optimizer).__name__} needs the number of steps of its parameter, and the state has "
                f"{step!r} as 'step'; keep a whole number there"
            )
        return int(step)

    def _adopt(self, results: Mapping[str, Tensor], specs: Mapping[str, Spec], state: State) -> None:
        self.check(results, specs)
        for key in [key for key in state if key == self.adopt_key or key.startswith(self.pending_prefix)]:
            del state[key]
        for key, value in results.items():
            state[key].copy_(value)

    def check(self, results: object, specs: Mapping[str, Spec] | None) -> None:
        """Raise ConfigError unless results are tensors; with ``specs``, as the state has them."""
        if not isinstance(results, dict) or not all(isinstance(value, Tensor) for value in results.values()):
            raise ConfigError(f"{self.name}() returned {type(results).__name__}; it is to return a dict of tensors")
        if specs is None:
            return
        if results.keys() != specs.keys():
            raise ConfigError(
                f"{self.name}() returned {', '.join(map(str, results)) or 'nothing'}; it is to return {', '.join(specs)}, "
                "its `writes`"
            )
        for key, (shape, dtype) in specs.items():
            value = results[key]
            if (value.shape, value.dtype) != (shape, dtype):
                raise ConfigError(
                    f"{self.name}() returned {value.dtype} {tuple(value.shape)} as '{key}', and the state has {dtype} "
                    f"{tuple(shape)}; return a tensor of that shape and dtype"
                )

    def pending_of(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the copies that a state has, by the keys of what they were copied from."""
        prefix = self.pending_prefix
        return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}

    def compute(
        self, optimizer: Optimizer, given: dict[str, Tensor], specs: Mapping[str, Spec] | None
    ) -> dict[str, Tensor]:
        """Return the results of the method, which share no memory with what it was given; checked if ``specs`` are known."""
        versions = {key: value._version for key, value in given.items()}
        results = self._method(bare_of(optimizer), dict(given))
        for key, value in given.items():
            if value._version != versions[key]:
                raise ConfigError(f"{self.name}() changed '{key}', which it was given; return new tensors instead")
        self.check(results, specs)
        storages = {value.untyped_storage().data_ptr() for value in given.values()}
        return {
            key: value.clone() if value.untyped_storage().data_ptr() in storages else value.detach()
            for key, value in results.items()
        }


def bare_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the attributes of another one, but without its groups and its state."""
    bare: Optimizer = object.__new__(type(optimizer))
    bare.__dict__.update((name, value) for name, value in optimizer.__dict__.items() if name not in NOT_BOOKKEEPING)
    return bare


class Call(NamedTuple):
    """One call of a periodic method: its optimizer, and what its results have to be, if that is known."""

    method: Periodic
    optimizer: Optimizer
    specs: Mapping[str, Spec] | None

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the results."""
        method: Periodic = self.method
        return method.compute(self.optimizer, given, self.specs)

    def compute_apart(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the results, on a background thread."""
        with torch.no_grad():
            return self.compute(given)

    def wait(self, future: "Future[Result]") -> "Result":
        """Wait until it has been computed, and return what that gave. RuntimeError with a sentence if it has failed.

        Left by an interrupt; where these are delayed, by a second one.
        """
        name = f"{type(self.optimizer).__name__}.{self.method.name}()"
        error = wait_future(future, f"{name} in the background", gone=_leave_if_impatient)
        if error is not None:
            raise RuntimeError(
                f"{name}, which ran in the background, has failed: {describe_error(error)}; the state that it was to change "
                "is as before"
            ) from error
        return future.result(timeout=0)


def _leave_if_impatient() -> None:
    check_interrupt(only_if_impatient=True)


class Keeper(Protocol):
    """Keeps what work was given between the step in which it is due and the one that adopts its results."""

    def begin(self, call: Call, state: State) -> None:
        """Let threads compute from the copies in the state."""

    def results(self, call: Call, state: State) -> dict[str, Tensor]:
        """Return the results for the copies in the state; blocks."""


class _Local(threading.local):
    """Who keeps copies for the steps that a thread runs; None: memory."""

    keeper: "Keeper | Trial | None" = None


_local = _Local()


@contextmanager
def kept_by(keeper: "Keeper | Trial") -> Iterator[None]:
    """Let a keeper keep what steps on this thread begin."""
    before, _local.keeper = _local.keeper, keeper
    try:
        yield
    finally:
        _local.keeper = before


@contextmanager
def tried_out() -> Iterator[None]:
    """Let steps on this thread begin nothing, unless somebody keeps it."""
    with kept_by(_local.keeper or Trial()):
        yield


class Trial:
    """Runs nothing, or only to find out how much memory it takes: for steps on small tensors, whose result nobody wants."""

    def __init__(self, *, runs: bool = False, copies: bool = False) -> None:
        """``runs`` if methods are to be run, ``copies`` if what they are given is to be copied."""
        self.runs, self.copies = runs, copies
        self.growth = 0.0  # bytes that one of the methods takes at most, for each byte that it is given

    def try_out(self, call: Call, given: dict[str, Tensor]) -> None:
        """Do what is wanted, and forget the result."""
        kept = [value.clone() for value in given.values()] if self.copies else []
        if self.runs:
            with TemporaryCount() as count:
                call.compute(given)
            self.growth = max(self.growth, count.most_nbytes / max(1, sum(value.nbytes for value in given.values())))
        del kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """What threads compute from copies in memory."""

    future: "Future[dict[str, Tensor] | None]"
    versions: Mapping[str, int]  # of the copies
    process: int  # a forked child has no such threads


class _InMemory:
    """Keeps copies of plain PyTorch: threads compute from the very tensors in the state."""

    def __init__(self) -> None:
        self._begun = WeakTensorKeyDictionary()  # by the first of the copies

    def begin(self, call: Call, state: State) -> None:
        """See Keeper. Copies on another device than the CPU are left until the results are wanted."""
        copies = call.method.pending_of(state)
        if any(not copied.is_cpu for copied in copies.values()):
            return
        first = next(iter(copies.values()))
        behind = call._replace(optimizer=bare_of(call.optimizer))  # which keeps no state alive
        references = {key: TensorWeakRef(copied) for key, copied in copies.items()}
        future = background_calls().submit(partial(_compute_if_alive, behind, references))
        self._begun[first] = _Begun(future=future, versions=_versions(copies), process=os.getpid())

    def results(self, call: Call, state: State) -> dict[str, Tensor]:
        """See Keeper."""
        copies = call.method.pending_of(state)
        begun = self._begun.pop(next(iter(copies.values())), None) if copies else None
        if begun is None or begun.versions != _versions(copies) or begun.process != os.getpid():
            if any(not copied.is_cpu for copied in copies.values()):
                return call.compute(copies)
            begun = _Begun(
                future=background_calls().submit(partial(call.compute_apart, copies)), versions={}, process=os.getpid()
            )
        results: dict[str, Tensor] | None = call.wait(begun.future)
        assert results is not None, "the copies are alive"
        return results


IN_MEMORY = _InMemory()


def _versions(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {key: value._version for key, value in tensors.items()}


def _compute_if_alive(call: Call, references: Mapping[str, TensorWeakRef]) -> dict[str, Tensor] | None:
    """Compute from copies; None if the state that had them is gone."""
    copies = {key: reference() for key, reference in references.items()}
    alive = {key: value for key, value in copies.items() if value is not None}
    return call.compute_apart(alive) if len(alive) == len(copies) else None


@dataclass(slots=True, eq=False)
class Streamed:
    """Keeps copies of one parameter's update in a store: notes what is to begin, and has the results that are due."""

    begun: list[Call] = field(default_factory=list)
    ready: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # results, by the name of the method
    adopted: list[Periodic] = field(default_factory=list)

    def begin(self, call: Call, state: State) -> None:
        """See Keeper: it begins when the update has ended, and the copies are at home."""
        self.begun.append(call)

    def results(self, call: Call, state: State) -> dict[str, Tensor]:
        """See Keeper."""
        if call.method.pending_of(state):  # on several ranks, of which each has it in memory
            return IN_MEMORY.results(call, state)
        if call.method.name not in self.ready:
            raise ConfigError(
                f"{call.method.name}() adopts what is due in step {state[call.method.adopt_key]} in step {state['step']}; "
                "let the number of steps in the state rise by one in each step"
            )
        self.adopted.append(call.method)
        return self.ready.pop(call.method.name)


def periodics_of(optimizer: Optimizer) -> dict[str, Periodic]:
    """Return the methods of an optimizer that run every few steps, by name."""
    found: dict[str, Any] = {}
    for base in reversed(type(optimizer).__mro__):
        found.update(vars(base))
    return {name: value for name, value in found.items() if isinstance(value, Periodic)}


def is_pending(optimizer: Optimizer, key: str) -> bool:
    """Return whether an entry of a state is a copy of what a method was given."""
    return any(key.startswith(method.pending_prefix) for method in periodics_of(optimizer).values())


class Due(NamedTuple):
    """What the next step of a parameter has to do."""

    begins: bool  # some work in the background
    runs: bool  # some work in the step itself
    adopts: tuple[Periodic, ...]


def find_due(optimizer: Optimizer, scalars: Mapping[str, Any]) -> Due:
    """Return what is due in a parameter's next step, given the entries of its state that are no tensors of its shape.

    The step counts itself before it calls the methods, or after that.
    """
    begins = runs = False
    adopts = []
    step = scalars.get("step", 0)
    before = int(step.item() if isinstance(step, Tensor) else step)
    for method in periodics_of(optimizer).values():
        k, staleness = method.numbers(optimizer)
        is_due = "step" in scalars and (before % k == 0 or (before + 1) % k == 0)
        begins |= is_due and staleness > 0
        runs |= is_due and staleness == 0
        adopt_at = scalars.get(method.adopt_key)
        if adopt_at is not None and (before + 1 >= adopt_at or is_due):
            adopts.append(method)
    return Due(begins=begins, runs=runs, adopts=tuple(adopts))
