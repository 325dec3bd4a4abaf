"""Hooks on every optimizer's step: parameters that live in a store are streamed, and hidden from the step itself."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zinf_compile.runtime.backward_step import BackwardStep
from zinf_compile.runtime.optimizer import StreamedStep
from zinf_compile.runtime.shadow import check_supported
from zinf_compile.runtime.slots import record_of
from zinf_compile.runtime.step_jobs import JobCollector
from zinf_compile.runtime.store import Store


class _HiddenParameters:
    """The stored parameters of an optimizer, taken from its groups for the time of its own step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._hidden: list[tuple[dict[str, Any], list[Tensor]]] = []
        for group in optimizer.param_groups:
            self._hidden.append((group, group["params"]))
            group["params"] = [parameter for parameter in group["params"] if record_of(parameter) is None]

    def show(self) -> None:
        """Put them back."""
        for group, parameters in self._hidden:
            group["params"] = parameters


def _stores_of(optimizer: Optimizer) -> list[Store]:
    stores: dict[int, Store] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (record := record_of(parameter)) is not None:
                stores[record.store.store_id] = record.store
    return list(stores.values())


class _StepInterception:
    """What happens around one ``step()`` of an optimizer: our updates instead of its own, for parameters in a store."""

    def __init__(self, optimizer: Optimizer, stores: list[Store]) -> None:
        self._stores = stores
        self._steps: list[StreamedStep] = []
        self._hidden: _HiddenParameters | None = None
        # Innermost of all hooks: what the user's own do before a step happens before ours, and what they do after, after.
        self._handles = [
            optimizer.register_step_pre_hook(self.before),
            optimizer.register_step_post_hook(self.after),
        ]
        optimizer._optimizer_step_post_hooks.move_to_end(self._handles[1].id, last=False)  # type: ignore[attr-defined]  # an OrderedDict

    def remove(self) -> None:
        """Leave the optimizer as it was. Not to be called by its hooks: their dictionary must not change under them."""
        for handle in self._handles:
            handle.remove()
        self._show_parameters()

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Write down what is to be updated, and hide the parameters from the optimizer's own step."""
        result = _call_closure_first(args, kwargs)
        with torch.no_grad():
            for store in self._stores:
                store.check_usable()
                if isinstance(store.early_step, BackwardStep):
                    store.early_step.close(optimizer)
                jobs = JobCollector(store, optimizer)
                self._steps.append(StreamedStep(store, jobs.collect(), element_wise=jobs.is_element_wise))
        self._hidden = _HiddenParameters(optimizer)
        return result

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Show the parameters again and start the updates."""
        self._show_parameters()
        steps, self._steps = self._steps, []
        with torch.no_grad():
            for step in steps:
                step.start()

    def _show_parameters(self) -> None:
        if self._hidden is not None:
            self._hidden.show()
            self._hidden = None


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

    register_optimizer_step_pre_hook(before)


def _call_closure_first(args: Any, kwargs: Any) -> Any:
    """Evaluate ``step(closure)``'s closure now, since it makes the gradients; return arguments that give its loss."""
    optimizer, *rest = args
    closure: Callable[[], Any] | None = rest[0] if rest else kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return (optimizer, lambda: loss), {key: value for key, value in kwargs.items() if key != "closure"}
