"""What one op costs: floating-point operations by torch's own formulas, and bytes read and written."""

from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from zinf_compile.passes.analysis.storages import size_hint, tensor_nbytes
from zinf_compile.passes.fx_edit import view_source


def count_flops(node: fx.Node) -> int:
    """Return the floating-point operations of a node by torch's flop registry; 0 for ops it has no formula for."""
    formula = flop_registry.get(getattr(node.target, "_overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda arg: _at_hint(arg.meta["val"]))
    output = node.meta["val"]
    output = type(output)(map(_at_hint, output)) if isinstance(output, list | tuple) else _at_hint(output)
    return int(formula(*args, **kwargs, out_val=output))


def count_bytes_accessed(node: fx.Node) -> int:
    """Return the bytes of a node's tensor inputs and outputs; 0 for views and for what does no work."""
    if (
        node.op != "call_function"
        or view_source(node) is not None
        or not isinstance(node.target, torch._ops.OpOverload)
    ):
        return 0
    tensors = [value for arg in node.all_input_nodes for value in _tensors(arg.meta.get("val"))]
    return sum(map(tensor_nbytes, [*tensors, *_tensors(node.meta.get("val"))]))


def _tensors(value: object) -> list[torch.Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def _at_hint(value: Any) -> Any:
    """Return a meta tensor of the hinted shape for a fake tensor, anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return size_hint(value) if isinstance(value, torch.SymInt) else value
    return torch.empty([size_hint(size) for size in value.shape], dtype=value.dtype, device="meta")
