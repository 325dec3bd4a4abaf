"""The bytes that a segment takes beside what goes in and comes out, if it ran op by op.

Compiled it fuses ops and frees inputs early, and was not seen to take more. Nothing proves that it cannot.
"""

import torch
from torch import fx

from zinf_compile.passes.analysis.costs import count_workspace
from zinf_compile.passes.analysis.storages import StorageRoot, find_roots

REORDERING = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


def peak_inside(graph: fx.Graph) -> int:
    """Return the most bytes that are live at once between inputs and results, by the order of the graph.

    Results count from where they are made. Sizes are numbers.
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
    live, most, born = 0, 0, set[StorageRoot]()
    for node in graph.nodes:
        root = roots.get(node)
        if root is not None and root not in born and root.node not in given:
            born.add(root)
            live += _nbytes(root)
        workspace = count_workspace(node) if node.target in REORDERING else 0
        assert isinstance(workspace, int)
        most = max(most, live + workspace)
        live -= sum(_nbytes(dead) for dead in dying.get(node, ()) if dead in born and dead not in results)
    return max(0, most - sum(map(_nbytes, results)))


def _nbytes(root: StorageRoot) -> int:
    nbytes = root.nbytes
    assert isinstance(nbytes, int)
    return nbytes
