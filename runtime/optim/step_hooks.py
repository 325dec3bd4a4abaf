"""Hooks on every optimizer's step: parameters that live in a store are streamed, and hidden from the step itself."""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.optim.backward_step import BackwardStep
from zinf_compile.runtime.optim.bookkeeping import Ledger, rebound
from zinf_compile.runtime.optim.optimizer import StreamedStep
from zinf_compile.runtime.optim.shadow import STEP_HOOKS, is_known, placeholder, traits_of
from zinf_compile.runtime.optim.step_jobs import JobCollector
from zinf_compile.runtime.optim.supported import check_supported
from zinf_compile.runtime.optim.updates_ahead import Begun, UpdatesAhead
from zinf_compile.runtime.params.home_gradient import reduce_unreduced
from zinf_compile.runtime.params.records import StoredParameter, record_of, replacement_of
from zinf_compile.runtime.params.remote import Elsewhere, RemoteParameter
from zinf_compile.runtime.process.call_stack import with_room_for_calls
from zinf_compile.runtime.process.interrupts import interruptible, without_interrupts
from zinf_compile.runtime.store.store import Store, store_of


def _without_stored(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer as its own step is to see it: without the parameters that live in a store, and our hooks.

    The optimizer itself stays as it is, also when its step raises.
    """
    stand_in: Optimizer = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__, **{name: OrderedDict() for name in STEP_HOOKS})
    stand_in.param_groups = [
        {**group, "params": _without(optimizer, group["params"])} for group in optimizer.param_groups
    ]
    return stand_in


def _without(optimizer: Optimizer, parameters: list[Tensor]) -> list[Tensor]:
    """Return parameters without the stored ones; for unknown classes, which may count them, stand-ins take their place."""
    if is_known(optimizer) or not traits_of(optimizer).in_place:
        return [parameter for parameter in parameters if not _is_ours(parameter)]
    return [placeholder(parameter) if _is_ours(parameter) else parameter for parameter in parameters]


def _is_ours(parameter: Tensor) -> bool:
    """Return whether a parameter lives in a store, of this rank or another one."""
    return record_of(parameter) is not None or isinstance(parameter, RemoteParameter)


def _take_over(optimizer: Optimizer, stand_in: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Write what an optimizer's own step wrote into the stand-in's attributes and groups back into the optimizer."""
    kept = {"param_groups", *STEP_HOOKS}
    own = {name: rebound(value, optimizer) for name, value in stand_in.__dict__.items() if name not in kept}
    optimizer.__dict__.update(own)
    # Dynamo, where it traces the step, says capturable in a group without parameters: they might all be on a GPU.
    kept_options = {"params", "capturable"}
    for group, seen in zip(optimizer.param_groups, groups, strict=False):
        group.update({key: value for key, value in seen.items() if key not in kept_options})


def _stores_of(optimizer: Optimizer) -> list[Store]:
    stores: dict[int, Store] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (record := record_of(parameter)) is not None:
                stores[record.store.store_id] = store_of(record)
    return list(stores.values())


def _untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that runs as it is where ``step`` is called in a compiled function: it has files and threads.

    Interrupts wait until it has ended: until then some of what a step does may be done.
    """
    untraced: Callable[..., Any] = torch.compiler.disable(without_interrupts(hook))
    return untraced


class _StepInterception:
    """What happens around one ``step()`` of an optimizer: our updates instead of its own, for parameters in a store."""

    def __init__(self, optimizer: Optimizer, stores: list[Store]) -> None:
        self._stores = stores
        self._steps: list[StreamedStep] = []
        self._ahead: list[
            tuple[Store, JobCollector, list[Begun], StreamedStep]
        ] = []  # updates that began before the step
        self._stand_in: Optimizer | None = None
        self._groups: list[dict[str, Any]] = []  # of the stand-in, also those that its step does not see
        self._loss: _Loss | None = None
        self._before: Optimizer | None = None  # the optimizer, frozen
        self._ledgers: list[Ledger] = []
        self._known_states: list[Any] = []  # keys of its state
        # Innermost of all hooks: the user's pre-hooks run before ours, and the user's post-hooks after ours.
        self._handles = [
            optimizer.register_step_pre_hook(_untraced(self.before)),
            optimizer.register_step_post_hook(_untraced(self.after)),
        ]
        optimizer._optimizer_step_post_hooks.move_to_end(self._handles[1].id, last=False)  # type: ignore[attr-defined]  # an OrderedDict

    def remove(self) -> None:
        """Remove the hooks. Not to be called by hooks of the optimizer: their dictionary must not change while they run."""
        for handle in self._handles:
            handle.remove()

    @with_room_for_calls
    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Collect the jobs, and let a stand-in without stored parameters take the optimizer's own step."""
        if not is_known(optimizer):
            _check_arguments(optimizer, args, kwargs)
        self._loss = _call_closure(args, kwargs)
        self._known_states = list(optimizer.state)
        with torch.no_grad():
            for store in self._stores:
                store.check_usable()
                _note_options(store, optimizer)
                store.ranks.meet(f"an optimizer step, number {store.meter.num_steps}")
                reduce_unreduced(store)
                early = store.early_step.close(optimizer) if isinstance(store.early_step, BackwardStep) else None
                jobs = JobCollector(store, optimizer)
                self._before, self._ledgers = jobs.frozen, [*self._ledgers, jobs.ledger]
                if early is not None:
                    self._known_states = early.known_states
                    self._ledgers.append(early.ledger)
                begun: list[Begun] = []
                if isinstance(store.updates_ahead, UpdatesAhead):
                    begun = store.updates_ahead.claim(optimizer, jobs)
                self._steps.append(_collect(store, jobs, but={each.job.record for each in begun}))
                self._ahead.append((store, jobs, begun, self._steps[-1]))
        self._stand_in = _without_stored(optimizer)
        self._groups = self._stand_in.param_groups
        if not is_known(optimizer) and not traits_of(optimizer).takes_empty_groups:
            self._stand_in.param_groups = [group for group in self._groups if group["params"]]
        if self._loss is None:
            return (self._stand_in, *args[1:]), kwargs
        return (self._stand_in, self._loss), {}

    @with_room_for_calls
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Start the updates, now that the optimizer's own step has not raised."""
        if self._loss is not None and self._loss.num_calls != 1 and self._stand_in is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__} is not supported by zinf_compile with a closure: it calls it "
                f"{self._loss.num_calls} times, and it has to be called once, before anything is updated; nothing was"
            )
        steps, self._steps = self._steps, []
        ahead, self._ahead = self._ahead, []
        with torch.no_grad():
            for store, jobs, begun, step in ahead:
                if begun and isinstance(store.updates_ahead, UpdatesAhead):
                    step.add(store.updates_ahead.commit(begun, jobs))
            for step in steps:
                step.start()
            if self._stand_in is not None:
                _take_over(optimizer, self._stand_in, self._groups)
                self._stand_in = None
            self._settle(optimizer)
            _show_remote_states(optimizer)
            _order_new_states(optimizer, self._known_states)
        self._before, self._ledgers, self._known_states = None, [], []
        if torch._C._current_graph_task_id() == -1:  # hooks of a parameter run in backward on its own rank only
            _count_step(optimizer)

    def _settle(self, optimizer: Optimizer) -> None:
        """Give groups and attributes what one update wrote there: a step advances them once."""
        if self._before is not None and not is_known(optimizer):
            for ledger in self._ledgers:
                ledger.settle(optimizer, self._before)


def _collect(store: Store, jobs: JobCollector, *, but: Container[StoredParameter]) -> StreamedStep:
    """Return the step of the jobs, ``but`` for some parameters.

    If ranks have to take it together and one cannot, all of them raise.
    """

    def collect() -> StreamedStep:
        return StreamedStep(store, jobs.collect(but=but), element_wise=jobs.is_element_wise)

    return collect() if jobs.is_element_wise else store.ranks.do_alike("preparing an optimizer step", collect)


def _order_new_states(optimizer: Optimizer, known: list[Any]) -> None:
    """Put states that came with this step behind the others, in the order of the parameters, as an ordinary step does."""
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_known_state = {id(key) for key in known}
    states = optimizer.state
    for parameter in order:
        if parameter in states and id(parameter) not in is_known_state:
            states[parameter] = states.pop(parameter)


def _show_remote_states(optimizer: Optimizer) -> None:
    """Give parameters that other ranks have an empty state, without which torch.distributed.checkpoint refuses to load.

    ``load_state_dict`` of all states puts those of others there, on meta.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, RemoteParameter) and parameter.requires_grad:
                optimizer.state[parameter] = {}


def _note_options(store: Store, optimizer: Optimizer) -> None:
    """Note the options of a step of parameters that ranks have together: the next meeting compares them."""
    if store.ranks.is_alone:
        return
    records = [record_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    names = [record.name for record in records if record is not None and record.store.store_id == store.store_id]
    store.ranks.note_options(_in_words(optimizer, names), _options_of(optimizer))


def _count_step(optimizer: Optimizer) -> None:
    """Count a step of parameters of ranks that work in rounds: each updates its own, without meeting the others."""
    names: dict[Elsewhere, dict[str, int]] = {}  # and the ranks
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, RemoteParameter):
                names.setdefault(parameter.elsewhere, {})[parameter.path] = parameter.rank
            elif (record := record_of(parameter)) is not None and (elsewhere := record.store.elsewhere) is not None:
                names.setdefault(elsewhere, {})[record.name] = elsewhere.ranks.rank
    for elsewhere, ranks in names.items():
        if len(set(ranks.values())) == 1:  # another rank may have one of its own parameters, which is stepped as often
            elsewhere.ranks.count_step(f"{type(optimizer).__name__} of parameters of one rank")
        else:
            elsewhere.ranks.count_step(_in_words(optimizer, [*ranks]))
            elsewhere.ranks.note_options(_in_words(optimizer, [*ranks]), _options_of(optimizer))


def _in_words(optimizer: Optimizer, names: Sequence[str]) -> str:
    return f"{type(optimizer).__name__} of {len(names)} parameters from '{names[0]}' on"


def _options_of(optimizer: Optimizer) -> dict[str, object]:
    """Return the options of all groups that decide about updates, by name, as plain values: numbers, flags and text.

    Tensors on a device are left out: reading one would wait for it.
    """
    options = {}
    for number, group in enumerate(optimizer.param_groups):
        where = f" of group {number}" if len(optimizer.param_groups) > 1 else ""
        for name in optimizer.defaults:
            value = group.get(name)
            if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
                value = value.item()
            if _is_plain(value):
                options[f"{name}{where}"] = value
    return options


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


@functools.cache
def install_step_hooks() -> None:
    """Let every optimizer of the process stream the parameters that live in a store. Called once."""
    # Weak on both sides: an interception refers to stores, and updates ahead of a step there refer to the optimizer. Its
    # hooks keep the interception alive.
    interceptions: weakref.WeakKeyDictionary[Optimizer, weakref.ref[_StepInterception]] = weakref.WeakKeyDictionary()

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _check_not_replaced(optimizer)
        last = interceptions.pop(optimizer, None)
        if last is not None and (interception := last()) is not None:
            interception.remove()
        stores = _stores_of(optimizer)
        if stores or any(_is_ours(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            check_supported(optimizer)
            interceptions[optimizer] = weakref.ref(_StepInterception(optimizer, stores))

    register_optimizer_step_pre_hook(_untraced(before))


def _check_not_replaced(optimizer: Optimizer) -> None:
    """Raise UnsupportedError for an optimizer with plain parameters in whose place ranks have put others."""
    for group in optimizer.param_groups:
        if any(replacement_of(parameter) is not None for parameter in group["params"]):
            raise UnsupportedError(
                f"{type(optimizer).__name__} was made before zinf_compile.optimize(model), which put others in the place of "
                "parameters: DTensors, of which every rank has a shard, or, with schedule='rounds', those that stand for "
                "parameters of other ranks; make the optimizer after it, of model.parameters()"
            )


class _Loss:
    """Replaces a closure that was called: returns its loss, and counts the calls."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.num_calls = 0

    def __call__(self) -> Any:
        """Return the loss."""
        self.num_calls += 1
        return self._value


def _call_closure(args: Any, kwargs: Any) -> _Loss | None:
    """Call the closure of ``step(closure)``, which computes the gradients; return its replacement, None without one."""
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad(), interruptible():
        return _Loss(closure())


def _check_arguments(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise UnsupportedError for arguments that shadows would not get."""
    names = [f"argument {index}" for index, value in enumerate(args[2:], start=2) if value is not None]
    names += [f"'{name}'" for name, value in kwargs.items() if name != "closure" and value is not None]
    if names:
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step() cannot take {', '.join(names)} where parameters live in a store: each is "
            "updated by a step of its own, which takes nothing but a closure; put it into a parameter group"
        )
