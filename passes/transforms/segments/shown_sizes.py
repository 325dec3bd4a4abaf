"""Sizes that may change from call to call, as nodes of a graph: one for each symbol in its shapes, read from its inputs."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from zinf_compile.passes.analysis.shapes import find_sources
from zinf_compile.passes.fx_edit import insert_call


def is_size(node: fx.Node) -> bool:
    """Return whether a node is a size that may change from call to call."""
    return isinstance(node.meta.get("val"), torch.SymInt)


class ShownSizes:
    """The nodes of a graph that are symbols of its shapes: inputs, or sizes of input tensors, added on demand."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._sources = {source.symbol: source for source in find_sources(graph)}
        self._nodes: dict[Any, fx.Node] = {}

    def of(self, nodes: Iterable[fx.Node]) -> list[fx.Node] | None:
        """Return a node for each symbol in the shapes of some nodes; None if one of them is in no input."""
        leaves = [leaf for node in nodes for leaf in tree_leaves(node.meta["val"])]
        sizes = [size for leaf in leaves for size in _sizes(leaf) if isinstance(size, torch.SymInt)]
        symbols = sorted({symbol for size in sizes for symbol in size.node.expr.free_symbols}, key=str)
        if not self._sources.keys() >= set(symbols):
            return None
        return [self._nodes.get(symbol) or self._make(symbol) for symbol in symbols]

    def _make(self, symbol: Any) -> fx.Node:
        source = self._sources[symbol]
        placeholders = self._graph.find_nodes(op="placeholder")
        node: fx.Node = placeholders[source.position]
        if source.dim is not None:
            name, arguments = f"{node.name}_size", (node, source.dim)
            node = insert_call(self._graph, placeholders[-1].next, torch.ops.aten.sym_size.int, arguments, name=name)
        self._nodes[symbol] = node
        return node


def _sizes(leaf: object) -> Iterable[object]:
    return (*leaf.shape, *leaf.stride()) if isinstance(leaf, torch.Tensor) else (leaf,)
