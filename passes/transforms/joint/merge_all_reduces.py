"""Let tensor-parallel ranks add up once what several layers give of one gradient, as their collective does.

Emitted::

    y = aten.mm(x, w)                          instead of    entered = zinf.enter_columns(x, 8); y = aten.mm(entered, w)

    sum = aten.add(grad_q, grad_k)             instead of    q = zinf.all_reduce(grad_q, 8)
    grad = zinf.all_reduce(sum, 8)                           k = zinf.all_reduce(grad_k, 8)
                                                             grad = aten.add(q, k)

The layers read the same values, so that ``enter_columns`` takes no memory, and its gradients may be summed before or after
the ranks exchange them. A graph of a model without such layers stays as it is.
"""

from typing import Any

import torch
from torch import fx

from zinf_compile.ir.ops import ALL_REDUCE, ENTER_COLUMNS
from zinf_compile.passes.contract import Pass
from zinf_compile.passes.fx_edit import insert_call


def _run(graph_module: fx.GraphModule, inputs: object) -> None:
    graph = graph_module.graph
    for node in graph.find_nodes(op="call_function", target=ENTER_COLUMNS):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        reduced = node.all_input_nodes
        if len(reduced) == len(node.args) == 2 and not node.kwargs and all(map(_is_read_once, reduced)):
            _, num_tensor_ranks = reduced[0].args
            parts = tuple(each.args[0] for each in reduced)
            total = insert_call(graph, node, torch.ops.aten.add.Tensor, parts, name="partial_sum")
            together = insert_call(graph, node, ALL_REDUCE, (total, num_tensor_ranks), name="reduced_sum")
            for new in (total, together):
                new.meta.update({key: value for key, value in node.meta.items() if key != "val"})
            node.replace_all_uses_with(together)
            graph.erase_node(node)
            for each in reduced:
                graph.erase_node(each)


def _is_read_once(node: fx.Node) -> bool:
    return node.target is ALL_REDUCE and len(node.users) == 1


MERGE_ALL_REDUCES: Pass[Any] = Pass(name="merge_all_reduces", run=_run)
