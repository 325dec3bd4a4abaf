"""Finds what can be compiled together: consecutive ops of one block, with its gathers and stores.

Ops that draw random numbers, have side effects, use offsets from the start of a storage, or are not torch's own are
left alone and end a run. Ops that compute sizes are left alone and do not end a run.
"""

import operator
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from zinf_compile.ir.ops import GATHER, STORE_GRAD
from zinf_compile.passes.analysis.repeatable import is_random
from zinf_compile.passes.analysis.routed import grouped_product
from zinf_compile.passes.contract import TILE
from zinf_compile.passes.fx_edit import view_source
from zinf_compile.passes.transforms.segments.shown_sizes import is_size

_NAMESPACES = ("aten", "prims")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm")
# Their offsets count from the start of a storage; compiled code sees its inputs from their first element.
_OF_STORAGES = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
)
_LEAST_OPS = 2  # besides views and matrix products, whose kernels do not change: a single op has nothing to fuse with


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive nodes of one block: compute, the gathers it needs, and the stores of its gradients."""

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
        """Return whether there is something to fuse: several ops that are not matrix products."""
        ops = [node.target for node in self.compute if is_op(node) and view_source(node) is None]
        names = [target._schema.name.partition("::")[2] for target in ops if isinstance(target, torch._ops.OpOverload)]
        return sum(name not in _PRODUCTS for name in names) >= _LEAST_OPS


def find_runs(graph: fx.Graph, blocks: Mapping[fx.Node, str], apart: Container[int] = ()) -> Iterator[Run]:
    """Yield the runs of a graph that are worth compiling, in order; ``blocks`` maps each node to its block.

    A run ends before the gather of a parameter in ``apart``, unless it has computed nothing yet, and where another tile
    of a chain begins, so that all tiles share one structure. It also ends before a product of experts if it has computed
    which of them have rows: their gather may wait for that.
    """
    run: Run | None = None
    tile: int | None = None
    for node in [*(node for node in graph.nodes if not _is_size_of_inputs(node)), None]:
        joins = node is not None and (node.target in (GATHER, STORE_GRAD) or _computes(node, run))
        starts_run = node is not None and node.target is GATHER and node.args[1] in apart
        begun = _tile_of(node)
        starts_run |= begun is not None and begun != tile
        grouped = None if node is None else grouped_product(node)
        starts_run |= grouped is not None and run is not None and grouped.ends in run.compute
        tile = tile if begun is None else begun
        ends = not (joins and node is not None and run is not None and blocks[node] == run.block)
        if run is not None and (ends or (starts_run and run.compute)):
            if run.is_worth_compiling:
                yield run
            run = None
        if joins and node is not None:
            run = run or Run(block=blocks[node])
            run.add(node)


def _tile_of(node: fx.Node | None) -> int | None:
    """Return the tile of a chain that a node computes a piece of; None if it is not part of a chain."""
    number: int | None = None if node is None else (node.meta.get("custom") or {}).get(TILE)
    return number


def _is_size_of_inputs(node: fx.Node) -> bool:
    """Return whether a node computes a size from nothing but sizes and graph inputs."""
    of_inputs = all(is_size(used) or used.op == "placeholder" for used in node.all_input_nodes)
    return node.op == "call_function" and is_size(node) and of_inputs


def is_op(node: fx.Node) -> bool:
    """Return whether a node calls an op, rather than unpacking one of its results."""
    return isinstance(node.target, torch._ops.OpOverload)


def _computes(node: fx.Node, run: Run | None) -> bool:
    """Return whether a node may join a run; one of several results joins if the op that returns them has joined."""
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
