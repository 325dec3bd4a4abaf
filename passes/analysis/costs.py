"""The cost of one op: floating-point operations by torch's own formulas, and bytes read and written.

Both may contain torch's symbols, since the formulas are plain arithmetic on sizes.

The partitioner wraps ops that must draw the same random numbers twice; costs are those of the op inside::

    attention_1 = run_and_save_rng_state(attention, query, key, value, ..)       returns the state and attention's result
    attention_2 = run_with_rng_state(state, attention, query, key, value, ..)
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zinf_compile.ir.ops import ALL_GATHER_COLUMNS, ALL_REDUCE
from zinf_compile.ir.sizes import Size
from zinf_compile.passes.analysis.storages import raw_size, tensor_nbytes
from zinf_compile.passes.fx_edit import view_source


class Call(NamedTuple):
    """The op that a node calls, unwrapped: its target, arguments and result."""

    target: fx.node.Target
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: object


def unwrap_call(node: fx.Node) -> Call:
    """Return the call of a node, or the call that it wraps."""
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

    Torch counts causal attention as if nothing were masked; kernels skip the masked half, so half is counted here.
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
    """Return the bytes of a node's tensor inputs and outputs; 0 for views and other ops that do no work.

    Of an exchange of tensor-parallel ranks, the bytes that each sends in a ring (Patarasuk and Yuan 2009,
    https://doi.org/10.1016/j.jpdc.2008.09.002).
    """
    if node.target in (ALL_REDUCE, ALL_GATHER_COLUMNS):
        num_tensor_ranks = node.args[1]
        assert isinstance(num_tensor_ranks, int)
        nbytes: Any = tensor_nbytes(node.meta["val"])
        rounds = 2 if node.target is ALL_REDUCE else 1
        sent: Size = nbytes * rounds * (num_tensor_ranks - 1) // num_tensor_ranks
        return sent
    if (
        node.op != "call_function"
        or view_source(node) is not None
        or not isinstance(unwrap_call(node).target, torch._ops.OpOverload)
    ):
        return 0
    return _add_nbytes([*(arg.meta.get("val") for arg in node.all_input_nodes), node.meta.get("val")])


def count_workspace(node: fx.Node) -> Size:
    """Return the temporary bytes of a kernel that copies each of its tensors to another layout, with scratch memory.

    Scratch is counted as large as the outputs; oneDNN's convolutions used less, on 2 threads.
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
    """Return the FLOPs of two products per query head: queries with keys, and attention weights with values."""
    batch, heads, num_queries, width = query.shape
    return 2 * batch * heads * num_queries * key.shape[2] * (width + value.shape[3])


def _attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Return the FLOPs of five products: recomputed scores, and gradients of weights, values, queries and keys."""
    batch, heads, num_queries, width = query.shape
    return 2 * batch * heads * num_queries * key.shape[2] * (3 * width + 2 * value.shape[3])


def _logits_flops(hidden: Tensor, weight: Tensor, *_: object, **__: object) -> int:
    """Return the FLOPs of the product that computes the logits."""
    return 2 * hidden.shape[0] * weight.numel()


def _logits_with_gradients_flops(hidden: Tensor, weight: Tensor, *others: object, **__: object) -> int:
    """Return the FLOPs of the logits, and of one product for each wanted gradient (hidden states, weight)."""
    wanted = others[-1]
    assert isinstance(wanted, list | tuple)
    return _logits_flops(hidden, weight) * (1 + sum(wanted[:2]))


def _logits_backward_flops(*arguments: Any, **__: object) -> int:
    """Return the same for backward, whose arguments begin with five tensors of sums."""
    return _logits_with_gradients_flops(*arguments[5:])


def _grouped_product_flops(left: Tensor, right: Tensor, *_: object, **__: object) -> int:
    """Return the FLOPs of a grouped product. One side may hold the groups as slices of one dimension (rows per expert).

    The slices add up to that dimension. If both sides have a group dimension, every group is a full product.
    """
    num_groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * num_groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


_ATTENTIONS = (
    torch.ops.aten._scaled_dot_product_cudnn_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
)
_ATTENTION_BACKWARDS = (
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
# Torch's registry has neither the CPU's attention nor grouped products, and in 2.11 its formulas of CUDA's attention refuse
# fewer heads of keys than of queries.
_FORMULAS: dict[object, Callable[..., int]] = {
    torch.ops.aten._grouped_mm: _grouped_product_flops,
    **dict.fromkeys(_ATTENTIONS, _attention_flops),
    **dict.fromkeys(_ATTENTION_BACKWARDS, _attention_backward_flops),
    torch.ops.zinf.logit_sums: _logits_flops,
    torch.ops.zinf.logit_sums_backward: _logits_backward_flops,
    torch.ops.zinf.weigh_logit_sums: _logits_with_gradients_flops,
}
