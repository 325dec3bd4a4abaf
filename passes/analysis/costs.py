"""What one op costs: floating-point operations by torch's own formulas, and bytes read and written.

Both are in torch's symbols where shapes have some: the formulas are plain arithmetic on sizes, whatever those are.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from zinf_compile.passes.analysis.storages import raw_size, tensor_nbytes
from zinf_compile.passes.fx_edit import view_source
from zinf_compile.sizes import Size


def count_flops(node: fx.Node) -> Size:
    """Return the floating-point operations of a node by torch's flop registry; 0 for ops it has no formula for.

    Torch counts causal attention as if nothing were masked; its kernels leave out the half that is.
    """
    packet = getattr(node.target, "_overloadpacket", None)
    formula = _FORMULAS.get(packet) or flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda arg: arg.meta["val"])
    num_flops: int | torch.SymInt = formula(*args, **kwargs, out_val=node.meta["val"])
    size: Any = raw_size(num_flops)
    if _is_causal(node):
        size = size // 2 if isinstance(size, int) else size / 2  # all its terms are even
    counted: Size = size
    return counted


def _is_causal(node: fx.Node) -> bool:
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    if "is_causal" not in names:
        return False
    index = names.index("is_causal")
    return bool(node.args[index] if index < len(node.args) else node.kwargs.get("is_causal", False))


def count_bytes_accessed(node: fx.Node) -> Size:
    """Return the bytes of a node's tensor inputs and outputs; 0 for views and for what does no work."""
    if (
        node.op != "call_function"
        or view_source(node) is not None
        or not isinstance(node.target, torch._ops.OpOverload)
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
    values = value if isinstance(value, list | tuple) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Return the FLOPs of two products for every query head: with the keys, and of the weights with the values."""
    batch, heads, num_queries, width = query.shape
    return 2 * batch * heads * num_queries * key.shape[2] * (width + value.shape[3])


def _attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Return the FLOPs of five products: the scores again, and the gradients of weights, values, queries and keys."""
    batch, heads, num_queries, width = query.shape
    return 2 * batch * heads * num_queries * key.shape[2] * (3 * width + 2 * value.shape[3])


# Torch's registry has the attention kernels of CUDA, and not that of the CPU.
_FORMULAS: dict[object, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
