"""Makes parameters the autograd leaves of captured graphs, so that autograd knows which gradients are wanted and hooks work.

A captured graph has one input for all of its parameters, the anchor. Before a run it is replaced by a tensor that
autograd derived from the parameters. In the backward of the loss::

    captured backward          every gradient leaves it through ``zinf::store_grad``
    ParameterLeaves            returns the gradients that autograd must see, and None for those that were offloaded directly
    AccumulateGrad             PyTorch's, per parameter: hooks, ``p.grad``
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.process.interrupts import without_interrupts


class Delivery(Enum):
    """Where a gradient of a captured backward goes."""

    HOME = "home"  # offloaded at once, before the end of backward
    AUTOGRAD = "autograd"  # passed on for a hook, the caller of autograd.grad, or the sum with other contributions
    NOWHERE = "nowhere"  # not requested


class ParameterLeaves(torch.autograd.Function):
    """The anchor of one run of a captured graph, as a function of the parameters that the graph trains."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, records: Sequence[StoredParameter], *parameters: Tensor) -> Tensor:
        """Return the anchor of this run."""
        ctx.records = records
        for record in records:
            record.gradient.add_use(ctx)
            _wait_before_accumulation(record)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        """Return, per parameter, the gradient for autograd or None. UnsupportedError for ``create_graph=True``."""
        _refuse_create_graph()
        return None, None, *(take_handed(record) for record in ctx.records)


@without_interrupts
def hang_on_parameters(anchor: Tensor, records: Sequence[StoredParameter]) -> Tensor:
    """Return an anchor whose gradient reaches the parameters of ``records``; ``anchor`` itself if none is trained."""
    if not torch.is_grad_enabled():
        return anchor
    apply: Callable[..., Tensor] = ParameterLeaves.apply
    return apply(anchor.detach(), records, *(record.parameter for record in records))


_STEPS_TO_CAPTURED = 3  # from an output of a captured graph to its autograd node, through AOTAutograd's views


def refuse_double_backward(outputs: Sequence[Any]) -> None:
    """Make the backward of a captured graph with these outputs refuse to be differentiated again.

    Torch would raise only in the second backward, without a remedy, and gradients of inputs do not pass through any
    other code of ours.
    """
    captured = {_find_captured(output) for output in outputs if isinstance(output, Tensor)}
    for node in captured - {None}:
        assert node is not None
        node.register_prehook(_refuse_create_graph)


def _find_captured(output: Tensor) -> Node | None:
    node = output.grad_fn
    for _ in range(_STEPS_TO_CAPTURED):
        if node is None or node.name() == "CompiledFunctionBackward":
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _refuse_create_graph(*_: object) -> None:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "a captured backward cannot be differentiated again, as create_graph=True asks; say capture=False in optimize()"
        )


@without_interrupts
def take_handed(record: StoredParameter) -> Tensor | None:
    """Return the gradient that the backward which runs now left for autograd, and forget it."""
    handed = record.gradient.take_handed(torch._C._current_graph_task_id())
    if handed is None:
        return None
    return record.views.of_shard(handed)


_IS_HOOKED = "zinf_compile waits before it"


def _wait_before_accumulation(record: StoredParameter) -> None:
    """Have autograd wait for the gradient on its way home before it adds to it what else the parameter was used for.

    A hook of its node, which lives as long as a graph leads to it: hooks of the parameter are those of users.
    """
    if not record.parameter.requires_grad:  # frozen since the graph was captured
        return
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        accumulate_grad = get_gradient_edge(record.parameter).node

    def wait(grads: Sequence[Tensor | None]) -> None:
        if grads[0] is not None:
            record.store.await_gradient(record)

    metadata = cast(dict[str, bool], accumulate_grad.metadata)  # a property, which torch declares as a method
    if _IS_HOOKED not in metadata:
        metadata[_IS_HOOKED] = True
        accumulate_grad.register_prehook(wait)


def _has_other_contributions(record: StoredParameter) -> bool:
    """Return whether autograd may sum the gradient of a captured graph with others in the backward that runs now."""
    gradient = record.gradient
    return gradient.is_used_outside or sum(map(torch._C._will_engine_execute_node, gradient.uses)) > 1


def choose_delivery(record: StoredParameter) -> Delivery:
    """Return where a gradient that is complete now should go; called inside the backward that computes it."""
    parameter = record.parameter
    if not parameter.requires_grad:  # frozen since the graph was captured
        return Delivery.NOWHERE
    backward = torch._C._current_graph_task_id()
    if backward == -1 or not record.gradient.has_uses:  # the parameter itself is not in the autograd graph
        return Delivery.HOME
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        accumulate_grad = get_gradient_edge(parameter).node
        num_own_hooks = 1
        is_hooked = parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks) > num_own_hooks
        has_gradient = parameter.grad is not None
    try:
        if not torch._C._will_engine_execute_node(accumulate_grad):
            return Delivery.NOWHERE
    except RuntimeError:  # torch raises for leaves that are inputs of autograd.grad()
        return Delivery.AUTOGRAD
    # Autograd adds the sum of all contributions to the existing gradient. Added one by one they would round differently.
    is_added = has_gradient and record.gradient.home_backward != backward
    if is_hooked or (is_added and _has_other_contributions(record)):
        return Delivery.AUTOGRAD
    record.gradient.go_home(backward)
    return Delivery.HOME
