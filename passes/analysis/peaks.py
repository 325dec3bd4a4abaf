"""Estimates the bytes that a segment needs besides its inputs and results: what it would need op by op.

A compiled segment fuses ops and frees inputs early, so it usually needs less, and a little more where it computes a
result early. What it allocates is known once it is compiled: see ``execute/compiled_memory.py``.
"""

from collections import Counter
from math import ceil
from typing import Any

import sympy
import torch
from torch import fx

from zinf_compile.ir.ops import attention_scratch
from zinf_compile.ir.sizes import Size
from zinf_compile.passes.analysis.costs import count_workspace
from zinf_compile.passes.analysis.storages import StorageRoot, find_roots, tensor_nbytes

_REORDERING = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


def peak_inside(graph: fx.Graph) -> Size:
    """Return the most intermediate bytes that are live at once, in graph order.

    Results count from where they are computed. The bytes may contain torch's symbols.
    """
    roots = find_roots(graph)
    given = set(graph.find_nodes(op="placeholder"))
    results = {roots[node] for node in graph.output_node().all_input_nodes}
    last_use: dict[StorageRoot, fx.Node] = {}
    for node in graph.nodes:
        for used in (*node.all_input_nodes, *([node] if node in roots else [])):
            last_use[roots[used]] = node
    dying: dict[fx.Node, list[StorageRoot]] = {}
    for dead, node in last_use.items():
        dying.setdefault(node, []).append(dead)
    live, born = Counter[Any](), set[StorageRoot]()
    peaks: list[Counter[Any]] = []
    for node in graph.nodes:
        root = roots.get(node)
        if root is not None and root not in born and root.node not in given:
            born.add(root)
            live.update(_terms(root.nbytes))
        found = live.copy()
        found.update(_terms(scratch_of(node)))
        peaks = _keep_largest(peaks, found)
        for dead in dying.get(node, ()):
            if dead in born and dead not in results:
                live.subtract(_terms(dead.nbytes))
    for peak in peaks:
        for root in results:
            peak.subtract(_terms(root.nbytes))
    return _largest(peaks)


def scratch_of(node: fx.Node) -> Size:
    """Return the bytes that the kernel of a node allocates and frees again; 0 where that is not known to be much."""
    if node.target in _REORDERING:
        return count_workspace(node)
    scratch: Size = attention_scratch(node, tensor_nbytes)
    return scratch


def _terms(nbytes: Size) -> dict[Any, int]:
    """Return a number of bytes as a sum: the factor of each product of symbols."""
    if isinstance(nbytes, int):
        return {1: nbytes}
    expression: Any = nbytes
    return {product: ceil(factor) for product, factor in expression.as_coefficients_dict().items()}


def _keep_largest(sums: list[Counter[Any]], found: Counter[Any]) -> list[Counter[Any]]:
    """Return the sums and ``found``, without any sum that another one equals or exceeds for all values of symbols."""
    if any(_is_within(found, each) for each in sums):
        return sums
    return [*(each for each in sums if not _is_within(each, found)), found]


def _is_within(less: Counter[Any], more: Counter[Any]) -> bool:
    return all(more[product] >= less[product] for product in less.keys() | more.keys())


def _largest(sums: list[Counter[Any]]) -> Size:
    totals: list[Any] = [sum(product * factor for product, factor in each.items()) for each in sums]
    size: Size = totals[0] if len(totals) == 1 else sympy.Max(*totals)
    return size
