"""Finds parameters that a graph reads only through casts to one narrower dtype, as ``torch.autocast`` inserts them."""

import operator
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx

from zinf_compile.ir.ops import GATHER
from zinf_compile.passes.fx_edit import view_source

_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True, slots=True, kw_only=True)
class CastReads:
    """The casts that read a gathered value, and the views between gather and casts, each after its source."""

    views: tuple[fx.Node, ...]
    casts: tuple[fx.Node, ...]


def find_narrow_reads(graph: fx.Graph) -> dict[int, torch.dtype]:
    """Return, by parameter id, the dtype to which all reads of it are cast, if there is one and it is narrower."""
    own: dict[int, torch.dtype] = {}
    read: dict[int, set[torch.dtype]] = defaultdict(set)
    for gather in graph.find_nodes(op="call_function", target=GATHER):
        param = gather.args[1]
        own[param] = gather.args[3]
        reads = find_cast_reads(gather)
        read[param] |= {own[param]} if reads is None else {cast.meta["val"].dtype for cast in reads.casts}
    sole = {param: next(iter(dtypes)) for param, dtypes in read.items() if len(dtypes) == 1}
    return {param: dtype for param, dtype in sole.items() if _is_narrower(dtype, own[param])}


def find_cast_reads(gather: fx.Node) -> CastReads | None:
    """Return the casts that are the only readers of a gather, directly or through views; None if anything else reads it.

    A cast counts if it keeps the layout and its result is not returned: the caller could write to it.
    """
    views: list[fx.Node] = []
    casts: list[fx.Node] = []
    pending = [gather]
    while pending:
        node = pending.pop()
        for user in node.users:
            if _is_view(user, node):
                views.append(user)
                pending.append(user)
            elif user.target is _CAST and _keeps_layout(user, node) and not _is_returned(user):
                casts.append(user)
            else:
                return None
    return CastReads(views=tuple(views), casts=tuple(casts))


def _is_view(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a node is a view of another (or one of several views) that does not depend on the dtype."""
    if node.target is operator.getitem:
        return True
    return view_source(node) is source and node.target is not torch.ops.aten.view.dtype


def _keeps_layout(cast: fx.Node, source: fx.Node) -> bool:
    before, after = source.meta["val"], cast.meta["val"]
    return before.device == after.device and before.stride() == after.stride() and not cast.kwargs.get("pin_memory")


def _is_returned(node: fx.Node) -> bool:
    """Return whether a node, or a view of it, is an output of the graph."""
    return any(user.op == "output" or (_is_view(user, node) and _is_returned(user)) for user in node.users)


def _is_narrower(dtype: torch.dtype, than: torch.dtype) -> bool:
    return dtype.is_floating_point and than.is_floating_point and dtype.itemsize < than.itemsize
