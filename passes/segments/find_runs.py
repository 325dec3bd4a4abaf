"""Find what of a graph may be compiled together: ops of one block that follow each other, with its gathers and stores.

What draws random numbers, writes, counts from the start of a storage, or is none of torch's own ops stays as it is, and ends
a run. What computes sizes stays as it is too, and ends none.
"""

import operator
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from zinf_compile.ops import GATHER, STORE_GRAD
from zinf_compile.passes.analysis.repeatable import is_random
from zinf_compile.passes.contract import TILE
from zinf_compile.passes.fx_edit import view_source
from zinf_compile.passes.segments.shown_sizes import is_size

_NAMESPACES = ("aten", "prims")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm")
# Their offsets count from the start of a storage; what is compiled knows its inputs from their first element.
_OF_STORAGES = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
)
_LEAST_OPS = 2  # beside views: to compile one op alone wins nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Nodes of one block that follow each other: what computes, what is gathered for it, what is stored of it."""

    block: str
    compute: list[fx.Node] = field(default_factory=list)
    gathers: list[fx.Node] = field(default_factory=list)
    stores: list[fx.Node] = field(default_factory=list)

    def add(self, node: fx.Node) -> None:
        """Append the node that follows."""
        is_gather, is_store = node.target is GATHER, node.target is STORE_GRAD
        (self.gathers if is_gather else self.stores if is_store else self.compute).append(node)

    @property
    def is_worth_compiling(self) -> bool:
        """Return whether there is something to fuse: several ops, of which one at least is no product."""
        ops = [node.target for node in self.compute if is_op(node) and view_source(node) is None]
        names = [target._schema.name.partition("::")[2] for target in ops if isinstance(target, torch._ops.OpOverload)]
        return len(names) >= _LEAST_OPS and any(name not in _PRODUCTS for name in names)


def find_runs(graph: fx.Graph, blocks: Mapping[fx.Node, str], apart: Container[int] = ()) -> Iterator[Run]:
    """Give the runs of a graph that are worth compiling, in order; ``blocks`` says which block each node belongs to.

    A run ends before it gathers a parameter that is ``apart``, unless it has computed nothing yet; and where another tile of
    a chain begins, so that all tiles are one structure, one after another.
    """
    run: Run | None = None
    tile: int | None = None
    for node in [*(node for node in graph.nodes if not _is_size_of_inputs(node)), None]:
        joins = node is not None and (node.target in (GATHER, STORE_GRAD) or _computes(node, run))
        is_apart = node is not None and node.target is GATHER and node.args[1] in apart
        begun = _tile_of(node)
        is_apart |= begun is not None and begun != tile
        tile = tile if begun is None else begun
        ends = not (joins and node is not None and run is not None and blocks[node] == run.block)
        if run is not None and (ends or (is_apart and run.compute)):
            if run.is_worth_compiling:
                yield run
            run = None
        if joins and node is not None:
            run = run or Run(block=blocks[node])
            run.add(node)


def _tile_of(node: fx.Node | None) -> int | None:
    """Return the tile that a node computes a piece of a chain for; None for others."""
    number: int | None = None if node is None else (node.meta.get("custom") or {}).get(TILE)
    return number


def _is_size_of_inputs(node: fx.Node) -> bool:
    """Return whether a node computes a size of nothing but sizes and what the graph is given."""
    of_inputs = all(is_size(used) or used.op == "placeholder" for used in node.all_input_nodes)
    return node.op == "call_function" and is_size(node) and of_inputs


def is_op(node: fx.Node) -> bool:
    """Return whether a node calls an op, and does not only take one of its results."""
    return isinstance(node.target, torch._ops.OpOverload)


def _computes(node: fx.Node, run: Run | None) -> bool:
    """Return whether a node may join what a run computes; of several results, where what gives them has joined."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return run is not None and node.args[0] in run.compute
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in _NAMESPACES
        and target not in _OF_STORAGES
        and not target._schema.is_mutable
        and not is_random(node)
    )
