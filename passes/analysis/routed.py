"""Finds weights of which a graph reads only the experts that have rows, and gradients that are zero for all others.

A grouped product multiplies consecutive rows with one matrix each. Its kernels never read that of an expert without rows::

    up = gather(anchor, 3, [8, 64, 32], ..)
    product = aten._grouped_mm(rows, transpose(up), ends)          rows [ends[e - 1], ends[e]) with expert e

Between the gather and the product there may be views that keep the first dimension, and a product may be inside of a segment
whose inputs the ends are.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from zinf_compile.ir.facts import RoutedFact, Routing
from zinf_compile.ir.ops import RUN_SEGMENT
from zinf_compile.ir.sizes import Size
from zinf_compile.passes.analysis.shapes import GraphShapes
from zinf_compile.passes.analysis.storages import StorageRoot, raw_size
from zinf_compile.passes.contract import SEGMENT, node_facts
from zinf_compile.passes.fx_edit import view_source

_PRODUCT = "aten::_grouped_mm"
_FALLBACK, _FALLBACK_BACKWARD = "transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward"
_DIMS = 3  # of the weights of experts
_OF_WEIGHT = 1  # the index of the weight's gradient among the results of the latter
_CASTS = (
    torch.ops.aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.aten.clone.default,
)


class Grouped(NamedTuple):
    """A product of rows with the weights of their experts: its rows, all weights, and the ends of each expert's rows."""

    rows: fx.Node
    weight: fx.Node
    ends: fx.Node


def grouped_product(node: fx.Node) -> Grouped | None:
    """Return the operands of a node that multiplies rows with a weight for each expert; None of any other node."""
    if _name(node) not in (_PRODUCT, _FALLBACK, _FALLBACK_BACKWARD):
        return None
    operands = _operands(node)
    if operands is None or operands.rows.meta["val"].dim() != 2 or operands.weight.meta["val"].dim() != _DIMS:
        return None
    return operands


def _operands(node: fx.Node) -> Grouped | None:
    """Return the first three arguments of a grouped product of any form, if one says where the groups end."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments[:3]]
    given = [node.args[at] if at < len(node.args) else node.kwargs.get(name) for at, name in enumerate(names)]
    if not all(isinstance(each, fx.Node) for each in given):
        return None
    rows, weight, ends = given
    assert isinstance(rows, fx.Node)
    assert isinstance(weight, fx.Node)
    assert isinstance(ends, fx.Node)
    return Grouped(rows, weight, ends)


def _name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


class _Found(NamedTuple):
    """The value that says where groups end, and how many rows there are."""

    ends: fx.Node
    num_rows: int | torch.SymInt


def find_routed(
    graph: fx.Graph, roots: Mapping[fx.Node, StorageRoot], shapes: GraphShapes
) -> Iterator[RoutedFact[Size]]:
    """Yield the parameters of which a forward or a backward reads nothing but the experts that have rows."""
    found: dict[str, list[_Found | None]] = {}
    num_experts: dict[str, int] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            root = roots[used]
            name = node_facts(root.node).parameter
            if not root.is_gathered or name is None or roots.get(node) == root:
                continue
            weight = root.node.meta["val"]
            if weight.dim() == _DIMS:
                num_experts[name] = weight.shape[0]
            found.setdefault(name, []).append(_reads_by_expert(node, used, weight))
    for name, reads in found.items():
        if (common := _common(reads)) is not None:
            yield RoutedFact(parameter=name, routing=_routing(common, num_experts[name], shapes))


def find_gradient_routing(store: fx.Node, shapes: GraphShapes) -> Routing[Size] | None:
    """Return by what the gradient that a node stores is zero for experts without rows; None if that is not known."""
    (gradient, *_) = store.all_input_nodes
    value = gradient.meta["val"]
    found = _made_by_expert(gradient, value) if value.dim() == _DIMS else None
    return None if found is None else _routing(found, value.shape[0], shapes)


def _routing(found: _Found, num_experts: int, shapes: GraphShapes) -> Routing[Size]:
    tick = node_facts(found.ends).tick
    assert tick is not None
    return Routing(ends=tick, num_experts=num_experts, num_rows=shapes.size(raw_size(found.num_rows)))


def _reads_by_expert(node: fx.Node, used: fx.Node, weight: Tensor) -> _Found | None:
    """Return by what a node picks the experts that it reads of a weight, by its view ``used``; None if it reads all."""
    if not _keeps_experts(used.meta["val"], weight):
        return None
    if node.target is RUN_SEGMENT:
        return _segment_reads_by_expert(node, used, weight)
    grouped = grouped_product(node)
    if grouped is None or grouped.weight is not used or list(_arguments(node)).count(used) != 1:
        return None
    return _found(grouped, weight.shape[0])


def _segment_reads_by_expert(call: fx.Node, used: fx.Node, weight: Tensor) -> _Found | None:
    inner, outer = _inputs_of(call)
    left = [inner[used]]
    found: list[_Found | None] = []
    while left:
        value = left.pop()
        for user in value.users:
            if view_source(user) is value:
                left.append(user)
                continue
            read = _reads_by_expert(user, value, weight)
            found.append(None if read is None or read.ends not in outer else read._replace(ends=outer[read.ends]))
    return _common(found)


def _common(reads: Sequence[_Found | None]) -> _Found | None:
    """Return by what all reads pick experts; None if some differ, or read all of them."""
    first = reads[0] if reads else None
    return first if first is not None and all(each is not None and each.ends is first.ends for each in reads) else None


def _made_by_expert(node: fx.Node, gradient: Tensor) -> _Found | None:
    """Return by what a value is made, an expert at a time, zero for each without rows; None if it may be anything."""
    if not _keeps_experts(node.meta["val"], gradient):
        return None
    source = view_source(node)
    if source is not None:
        return _made_by_expert(source, gradient)
    if node.target in _CASTS:
        return _made_by_expert(node.all_input_nodes[0], gradient)
    if node.target is operator.getitem:
        call, index = node.args
        assert isinstance(call, fx.Node)
        if _name(call) == _FALLBACK_BACKWARD and index == _OF_WEIGHT:
            grouped = grouped_product(call)
            return None if grouped is None else _found(grouped, gradient.shape[0])
        if call.target is not RUN_SEGMENT:
            return None
        (results,) = call.meta[SEGMENT].graph.output_node().args
        made = _made_by_expert(results[index], gradient)
        _, outer = _inputs_of(call)
        return None if made is None or made.ends not in outer else made._replace(ends=outer[made.ends])
    operands = _operands(node) if _name(node) == _PRODUCT else None
    if operands is None or not operands.rows.meta["val"].dim() == operands.weight.meta["val"].dim() == 2:
        return None
    rows = operands.rows.meta["val"].shape[1]
    return _Found(operands.ends, rows) if _ends_experts(operands.ends, gradient.shape[0]) else None


def _found(grouped: Grouped, num_experts: int) -> _Found | None:
    rows = grouped.rows.meta["val"].shape[0]
    return _Found(grouped.ends, rows) if _ends_experts(grouped.ends, num_experts) else None


def _ends_experts(ends: fx.Node, num_experts: int) -> bool:
    """Return whether a value is one of integers, one for each expert."""
    value = ends.meta["val"]
    return value.dtype in (torch.int32, torch.int64) and tuple(value.shape) == (num_experts,)


def _keeps_experts(view: object, weight: Tensor) -> bool:
    """Return whether slices along the first dimension of a dense tensor are the bytes of those of another, in any order."""
    if not isinstance(view, Tensor) or not view.dim() == weight.dim() == _DIMS or view.shape[0] != weight.shape[0]:
        return False
    each = weight.numel() // max(1, weight.shape[0])
    reach = 1 + sum((size - 1) * step for size, step in zip(view.shape[1:], view.stride()[1:], strict=True))
    return bool(
        view.storage_offset() == 0 and view.stride(0) == each and view.numel() == weight.numel() and reach <= each
    )


def _inputs_of(call: fx.Node) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]]:
    """Return the inputs of a segment inside by those outside, and those outside by those inside."""
    tensors, sizes, *_ = call.args
    assert isinstance(tensors, Sequence)
    assert isinstance(sizes, Sequence)
    placeholders = call.meta[SEGMENT].graph.find_nodes(op="placeholder")[len(sizes) :]
    pairs = [(each, inside) for each, inside in zip(tensors, placeholders, strict=True) if isinstance(each, fx.Node)]
    return dict(pairs), {inside: each for each, inside in pairs}


def _arguments(node: fx.Node) -> Iterator[object]:
    yield from node.args
    yield from node.kwargs.values()
