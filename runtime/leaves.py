"""Parameters as the autograd leaves of captured graphs, so that autograd knows who is asked for a gradient, and hooks work.

A captured graph has one input for all of its parameters, the anchor. Before a run it is replaced by a tensor that autograd
made of the parameters. In the backward of the loss::

    captured backward          every gradient leaves it by way of ``zinf::store_grad``
    ParameterLeaves            hands over to autograd what it must see itself, and None for what went straight home
    AccumulateGrad, each       of PyTorch: hooks, ``p.grad``
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from zinf_compile.errors import UnsupportedError
from zinf_compile.runtime.slots import StoredParameter


class Delivery(Enum):
    """Where a gradient goes that a captured backward computed."""

    HOME = "home"  # at once, without waiting for the end of backward
    AUTOGRAD = "autograd"  # who must see it: a hook, the caller of autograd.grad, or the sum with other contributions
    NOWHERE = "nowhere"  # nobody asked for it


class ParameterLeaves(torch.autograd.Function):
    """The anchor of one run of a captured graph, as a function of the parameters that the graph trains."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, records: Sequence[StoredParameter], *parameters: Tensor) -> Tensor:
        """Return the anchor of this run."""
        ctx.records = records
        for record in records:
            record.uses.add(ctx)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        """Return what the captured backward left for autograd, by parameter. UnsupportedError for ``create_graph=True``."""
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "a captured backward cannot be differentiated again, as create_graph=True asks; say capture=False in "
                "optimize()"
            )
        return None, None, *(take_handed(record) for record in ctx.records)


def hang_on_parameters(anchor: Tensor, records: Sequence[StoredParameter]) -> Tensor:
    """Return an anchor whose gradient reaches the parameters of ``records``; the anchor itself where none is trained."""
    if not torch.is_grad_enabled():
        return anchor
    apply: Callable[..., Tensor] = ParameterLeaves.apply
    return apply(anchor.detach(), records, *(record.parameter for record in records))


def take_handed(record: StoredParameter) -> Tensor | None:
    """Return the gradient that a captured backward handed over, and forget it."""
    handed, record.handed = record.handed, None
    if handed is not None:
        record.store.await_gradient(record)  # to which autograd will add
    return handed


def choose_delivery(record: StoredParameter) -> Delivery:
    """Return where a gradient goes that arrives now; called inside the backward that computes it."""
    parameter = record.parameter
    if not parameter.requires_grad:  # frozen since the graph was captured
        return Delivery.NOWHERE
    backward = torch._C._current_graph_task_id()
    if backward == -1 or not record.uses:  # nothing in the autograd graph stands for the parameter itself
        return Delivery.HOME
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        accumulate_grad = get_gradient_edge(parameter).node
        num_own_hooks = 1
        is_hooked = parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks) > num_own_hooks
        has_gradient = parameter.grad is not None
    try:
        if not torch._C._will_engine_execute_node(accumulate_grad):
            return Delivery.NOWHERE
    except RuntimeError:  # it refuses to answer for leaves that are the inputs of autograd.grad()
        return Delivery.AUTOGRAD
    # Autograd adds the sum of all contributions to what was there. Added one by one, they would round differently.
    is_added = has_gradient and record.home_backward != backward
    if is_hooked or (is_added and sum(map(torch._C._will_engine_execute_node, record.uses)) > 1):
        return Delivery.AUTOGRAD
    record.home_backward = backward
    return Delivery.HOME
