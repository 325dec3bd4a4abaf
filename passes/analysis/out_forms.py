"""Ops that can write their result into given memory, with exactly the result they would write into fresh memory.

Only ops whose out variant runs the same kernel are listed. Many others have a generated out variant that computes into
fresh memory and then copies, which gains nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_COPIES = frozenset({aten._to_copy.default, aten.clone.default})

# op -> the view of its result that receives its input; the rest is zeros
_PARTS: dict[object, Callable[..., Any]] = {
    aten.select_backward.default: aten.select.int,
    aten.slice_backward.default: aten.slice.Tensor,
}

# op -> its out variant and the name of the output argument
_OUT_VARIANTS: dict[object, tuple[Callable[..., Any], str]] = {
    aten.mm.default: (aten.mm.out, "out"),
    aten.addmm.default: (aten.addmm.out, "out"),
    aten.bmm.default: (aten.bmm.out, "out"),
    aten.baddbmm.default: (aten.baddbmm.out, "out"),
    aten.add.Tensor: (aten.add.out, "out"),
    aten.sub.Tensor: (aten.sub.out, "out"),
    aten.mul.Tensor: (aten.mul.out, "out"),
    aten.div.Tensor: (aten.div.out, "out"),
    aten.pow.Tensor_Scalar: (aten.pow.Tensor_Scalar_out, "out"),
    aten.neg.default: (aten.neg.out, "out"),
    aten.exp.default: (aten.exp.out, "out"),
    aten.tanh.default: (aten.tanh.out, "out"),
    aten.sigmoid.default: (aten.sigmoid.out, "out"),
    aten.rsqrt.default: (aten.rsqrt.out, "out"),
    aten.gelu.default: (aten.gelu.out, "out"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.silu.default: (aten.silu.out, "out"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.cat.default: (aten.cat.out, "out"),
    aten._softmax.default: (aten._softmax.out, "out"),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input"),
    aten._log_softmax.default: (aten._log_softmax.out, "out"),
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, "out"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutForm:
    """A call that writes into given memory and returns it."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def has_out_form(node: fx.Node) -> bool:
    """Return whether a node can write a dense result into given memory."""
    if node.target not in _OUT_VARIANTS and node.target not in _COPIES and node.target not in _PARTS:
        return False
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and is_dense(value)


def out_form(node: fx.Node, memory: fx.Node) -> OutForm:
    """Return the call that computes ``node`` into ``memory``, a tensor of its shape, strides and dtype."""
    if node.target in _COPIES:
        return OutForm(target=aten.copy_.default, args=(memory, node.args[0]), kwargs={})
    if node.target in _PARTS:
        part, _, *where = node.args
        return OutForm(target=write_part, args=(memory, part, _PARTS[node.target], *where), kwargs={})
    target, argument = _OUT_VARIANTS[node.target]
    return OutForm(target=target, args=node.args, kwargs={**node.kwargs, argument: memory})


def write_part(memory: torch.Tensor, part: torch.Tensor, view: Callable[..., Any], *where: int) -> torch.Tensor:
    """Fill memory with zeros, except for the view that ``part`` is copied to; return it."""
    view(memory.zero_(), *where).copy_(part)
    return memory


def is_dense(value: torch.Tensor) -> bool:
    """Return whether the strides cover a block of memory without gaps or overlap, for all values of its symbols."""
    sizes, strides = [_expression(size) for size in value.shape], [_expression(stride) for stride in value.stride()]
    hints = [_hint(stride) for stride in value.stride()]
    expected = 1
    for _, stride, size in sorted(zip(hints, strides, sizes, strict=True), key=lambda dimension: dimension[0]):
        if size == 0:
            return False
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _expression(size: int | torch.SymInt) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _hint(size: int | torch.SymInt) -> int:
    """Return a size as it was at capture. It orders the dimensions; the caller then proves the order symbolically."""
    return size if isinstance(size, int) else int(size.node.hint)
