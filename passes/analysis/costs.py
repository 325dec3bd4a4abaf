"""What one op costs: floating-point operations by torch's own formulas, and bytes read and written.

Both are in torch's symbols where shapes have some: the formulas are plain arithmetic on sizes, whatever those are.

Ops that torch's partitioner wraps, so that they draw the same random numbers twice, are looked into::

    attention_1 = run_and_save_rng_state(attention, query, key, value, ..)       gives the state, and what attention gives
    attention_2 = run_with_rng_state(state, attention, query, key, value, ..)
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zinf_compile.passes.analysis.storages import raw_size, tensor_nbytes
from zinf_compile.passes.fx_edit import view_source
from zinf_compile.sizes import Size


class Call(NamedTuple):
    """What a node calls in the end, with what, and what that gives."""

    target: fx.node.Target
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: object


def unwrap_call(node: fx.Node) -> Call:
    """Return the call of a node, or the one that it wraps."""
    value = node.meta.get("val")
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return Call(node.target, node.args, node.kwargs, value)
    wrapped = next((at for at, arg in enumerate(node.args) if isinstance(arg, torch._ops.OpOverload)), None)
    if wrapped is None:
        return Call(node.target, node.args, node.kwargs, value)
    target = node.args[wrapped]
    assert isinstance(target, torch._ops.OpOverload)
    if node.target is torch._prims.rng_prims.run_and_save_rng_state:
        assert isinstance(value, tuple)
        _, value = value
    return Call(target, node.args[wrapped + 1 :], node.kwargs, value)


def count_flops(node: fx.Node) -> Size:
    """Return the floating-point operations of a node by torch's flop registry; 0 for ops it has no formula for.

    Torch counts causal attention as if nothing were masked; its kernels leave out the half that is.
    """
    call = unwrap_call(node)
    packet = getattr(call.target, "_overloadpacket", None)
    formula = _FORMULAS.get(packet) or flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((call.args, dict(call.kwargs)), lambda arg: arg.meta["val"])
    num_flops: int | torch.SymInt = formula(*args, **kwargs, out_val=call.value)
    size: Any = raw_size(num_flops)
    if _is_causal(call):
        size = size // 2 if isinstance(size, int) else size / 2  # all its terms are even
    counted: Size = size
    return counted


def _is_causal(call: Call) -> bool:
    assert isinstance(call.target, torch._ops.OpOverload)
    names = [argument.name for argument in call.target._schema.arguments]
    if "is_causal" not in names:
        return False
    index = names.index("is_causal")
    return bool(call.args[index] if index < len(call.args) else call.kwargs.get("is_causal", False))


def count_bytes_accessed(node: fx.Node) -> Size:
    """Return the bytes of a node's tensor inputs and outputs; 0 for views and for what does no work."""
    if (
        node.op != "call_function"
        or view_source(node) is not None
        or not isinstance(unwrap_call(node).target, torch._ops.OpOverload)
    ):
        return 0
    return _add_nbytes([*(arg.meta.get("val") for arg in node.all_input_nodes), node.meta.get("val")])


def count_workspace(node: fx.Node) -> Size:
    """Return the bytes that a kernel takes which copies each of its tensors into another layout, and scratch beside.

    The scratch is counted as large as the outputs: with oneDNN's convolutions, on 2 threads, it was less.
    """
    return _add_nbytes([*(arg.meta.get("val") for arg in node.all_input_nodes), *2 * (node.meta.get("val"),)])


def _add_nbytes(values: Iterable[object]) -> Size:
    nbytes: Any = 0
    for value in values:
        for tensor in _tensors(value):
            nbytes += tensor_nbytes(tensor)
    counted: Size = nbytes
    return counted


def _tensors(value: object) -> list[torch.Tensor]:
    return [item for item in tree_leaves(value) if isinstance(item, torch.Tensor)]


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Return the FLOPs of two products for every query head: with the keys, and of the weights with the values."""
    batch, heads, num_queries, width = query.shape
    return 2 * batch * heads * num_queries * key.shape[2] * (width + value.shape[3])


def _attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Return the FLOPs of five products: the scores again, and the gradients of weights, values, queries and keys."""
    batch, heads, num_queries, width = query.shape
    return 2 * batch * heads * num_queries * key.shape[2] * (3 * width + 2 * value.shape[3])


def _logits_flops(hidden: Tensor, weight: Tensor, *_: object, **__: object) -> int:
    """Return the FLOPs of the product that makes the logits."""
    return 2 * hidden.shape[0] * weight.numel()


def _logits_with_gradients_flops(hidden: Tensor, weight: Tensor, *others: object, **__: object) -> int:
    """Return those, and of one product for each of the gradients of hidden states and weight, if it is wanted."""
    wanted = others[-1]
    assert isinstance(wanted, list | tuple)
    return _logits_flops(hidden, weight) * (1 + sum(wanted[:2]))


def _logits_backward_flops(*arguments: Any, **__: object) -> int:
    """Return the same for backward, which has five tensors of sums before the layer."""
    return _logits_with_gradients_flops(*arguments[5:])


def _grouped_product_flops(left: Tensor, right: Tensor, *_: object, **__: object) -> int:
    """Return the FLOPs of products of groups, which one side may hold as stretches of one dimension, experts' rows say.

    The stretches sum to that dimension. Only where both sides have a dimension for the groups, each is a product of all.
    """
    num_groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * num_groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


# Torch's registry has the attention kernels of CUDA, and not that of the CPU; and no products of groups.
_FORMULAS: dict[object, Callable[..., int]] = {
    torch.ops.aten._grouped_mm: _grouped_product_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.zinf.logit_sums: _logits_flops,
    torch.ops.zinf.logit_sums_backward: _logits_backward_flops,
    torch.ops.zinf.weigh_logit_sums: _logits_with_gradients_flops,
}
