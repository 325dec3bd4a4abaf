"""Hooks on every optimizer's step: parameters that live in a store are streamed, and hidden from the step itself."""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zinf_compile.runtime.optimizer import StreamedStep
from zinf_compile.runtime.shadow import check_supported
from zinf_compile.runtime.slots import record_of
from zinf_compile.runtime.store import Store
from zinf_compile.terms import Phase


class _HiddenGradients:
    """The gradients taken from parameters for the time of a step."""

    def __init__(self) -> None:
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def hide(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if record_of(parameter) is not None and parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def show(self) -> None:
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden.clear()


def _stores_of(optimizer: Optimizer) -> list[Store]:
    stores: dict[int, Store] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (record := record_of(parameter)) is not None:
                stores[record.store.store_id] = record.store
    return list(stores.values())


@functools.cache
def install_step_hooks() -> None:
    """Let every optimizer of the process stream the parameters that live in a store. Called once."""
    hidden: dict[int, _HiddenGradients] = {}

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        stores = _stores_of(optimizer)
        if not stores:
            return None
        check_supported(optimizer)
        result = _call_closure_first(args, kwargs)
        with torch.no_grad():
            for store in stores:
                store.check_usable()
                with store.meter.phase(Phase.STEP):
                    StreamedStep(store, optimizer).run()
        hidden[id(optimizer)] = _HiddenGradients()
        hidden[id(optimizer)].hide(optimizer)
        return result

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with suppress(KeyError):
            hidden.pop(id(optimizer)).show()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _call_closure_first(args: Any, kwargs: Any) -> Any:
    """Evaluate ``step(closure)``'s closure now, since it makes the gradients; return arguments that give its loss."""
    optimizer, *rest = args
    closure: Callable[[], Any] | None = rest[0] if rest else kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return (optimizer, lambda: loss), {key: value for key, value in kwargs.items() if key != "closure"}
