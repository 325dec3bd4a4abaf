"""Take views that only backward reads as soon as what they show is computed.

Backward often reads a saved value through a view, and the partitioner leaves this view at the end of the forward graph.
A value cannot be offloaded before the last view of it is taken. Emitted::

    probabilities = aten._softmax(...)
    transpose = aten.transpose(probabilities, 1, 2)
    bmm = aten.bmm(probabilities, ...)
    ...
    return (..., transpose)
"""

import torch
from torch import fx

from zinf_compile.passes.contract import FormInputs, Pass
from zinf_compile.passes.fx_edit import view_source


def _run(graph_module: fx.GraphModule, _: FormInputs) -> None:
    graph = graph_module.graph
    hoisted: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if _is_plain_view(node) and all(user.op == "output" or user in hoisted for user in node.users):
            hoisted.add(node)
    behind = {node: node for node in graph.nodes}  # the last of the views that were put behind a node
    inputs = graph.find_nodes(op="placeholder")
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if node in hoisted]:
        last = max(node.all_input_nodes, key=position.__getitem__)
        if last.op == "placeholder":
            last = inputs[-1]
        behind[last].append(node)
        behind[last] = node
        position[node] = position[last]


def _is_plain_view(node: fx.Node) -> bool:
    """Return whether a node is a view, and writes nothing."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    return view_source(node) is not None


HOIST_VIEWS: Pass[FormInputs] = Pass(name="hoist_views", run=_run)
