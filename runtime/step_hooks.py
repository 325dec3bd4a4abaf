"""Hooks on every optimizer's step: parameters that live in a store are streamed, and hidden from the step itself."""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zinf_compile.runtime.backward_step import BackwardStep
from zinf_compile.runtime.optimizer import StreamedStep
from zinf_compile.runtime.shadow import STEP_HOOKS, check_supported
from zinf_compile.runtime.slots import record_of
from zinf_compile.runtime.step_jobs import JobCollector
from zinf_compile.runtime.store import Store


def _without_stored(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer as its own step is to see it: without the parameters that live in a store, and our hooks.

    The optimizer itself stays as it is, also when its step raises.
    """
    stand_in: Optimizer = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__, **{name: OrderedDict() for name in STEP_HOOKS})
    stand_in.param_groups = [
        {**group, "params": [parameter for parameter in group["params"] if record_of(parameter) is None]}
        for group in optimizer.param_groups
    ]
    return stand_in


def _take_over(optimizer: Optimizer, stand_in: Optimizer) -> None:
    """Give an optimizer what its own step has written into its attributes and groups."""
    kept = {"param_groups", *STEP_HOOKS}
    optimizer.__dict__.update({name: value for name, value in stand_in.__dict__.items() if name not in kept})
    # Dynamo, where it traces the step, says capturable in a group without parameters: they might all be on a GPU.
    kept_options = {"params", "capturable"}
    for group, seen in zip(optimizer.param_groups, stand_in.param_groups, strict=False):
        group.update({key: value for key, value in seen.items() if key not in kept_options})


def _stores_of(optimizer: Optimizer) -> list[Store]:
    stores: dict[int, Store] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (record := record_of(parameter)) is not None:
                stores[record.store.store_id] = record.store
    return list(stores.values())


def _untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that runs as it is where ``step`` is called in a compiled function: it has files and threads."""
    untraced: Callable[..., Any] = torch.compiler.disable(hook)
    return untraced


class _StepInterception:
    """What happens around one ``step()`` of an optimizer: our updates instead of its own, for parameters in a store."""

    def __init__(self, optimizer: Optimizer, stores: list[Store]) -> None:
        self._stores = stores
        self._steps: list[StreamedStep] = []
        self._stand_in: Optimizer | None = None
        # Innermost of all hooks: what the user's own do before a step happens before ours, and what they do after, after.
        self._handles = [
            optimizer.register_step_pre_hook(_untraced(self.before)),
            optimizer.register_step_post_hook(_untraced(self.after)),
        ]
        optimizer._optimizer_step_post_hooks.move_to_end(self._handles[1].id, last=False)  # type: ignore[attr-defined]  # an OrderedDict

    def remove(self) -> None:
        """Leave the optimizer as it was. Not to be called by its hooks: their dictionary must not change under them."""
        for handle in self._handles:
            handle.remove()

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Write down what is to be updated, and let a stand-in without stored parameters take the optimizer's own step."""
        (_, *rest), kwargs = _call_closure_first(args, kwargs)
        with torch.no_grad():
            for store in self._stores:
                store.check_usable()
                if isinstance(store.early_step, BackwardStep):
                    store.early_step.close(optimizer)
                jobs = JobCollector(store, optimizer)
                self._steps.append(StreamedStep(store, jobs.collect(), element_wise=jobs.is_element_wise))
        self._stand_in = _without_stored(optimizer)
        return (self._stand_in, *rest), kwargs

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Start the updates, now that the optimizer's own step has not raised."""
        if self._stand_in is not None:
            _take_over(optimizer, self._stand_in)
            self._stand_in = None
        steps, self._steps = self._steps, []
        with torch.no_grad():
            for step in steps:
                step.start()


@functools.cache
def install_step_hooks() -> None:
    """Let every optimizer of the process stream the parameters that live in a store. Called once."""
    interceptions: weakref.WeakKeyDictionary[Optimizer, _StepInterception] = weakref.WeakKeyDictionary()

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (last := interceptions.pop(optimizer, None)) is not None:
            last.remove()
        stores = _stores_of(optimizer)
        if stores:
            check_supported(optimizer)
            interceptions[optimizer] = _StepInterception(optimizer, stores)

    register_optimizer_step_pre_hook(_untraced(before))


def _call_closure_first(args: Any, kwargs: Any) -> Any:
    """Evaluate ``step(closure)``'s closure, since it makes the gradients; return arguments that give its loss."""
    optimizer, *rest = args
    closure: Callable[[], Any] | None = rest[0] if rest else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return (optimizer, lambda: loss), {key: value for key, value in kwargs.items() if key != "closure"}
