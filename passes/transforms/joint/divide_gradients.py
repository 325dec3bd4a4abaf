"""Divide the gradient of each parameter, as data-parallel ranks do with the sum of theirs.

Emitted::

    grad_mean = aten.div(grad_sum, 4)
    token = zinf.store_grad(grad_mean, param)
"""

import torch
from torch import fx

from zinf_compile.ir.ops import STORE_GRAD
from zinf_compile.passes.contract import JointInputs, Pass
from zinf_compile.passes.fx_edit import insert_call


def _run(graph_module: fx.GraphModule, inputs: JointInputs) -> None:
    if inputs.divisor == 1:
        return
    graph = graph_module.graph
    for store in graph.find_nodes(op="call_function", target=STORE_GRAD):
        grad, *_ = store.args
        mean = insert_call(graph, store, torch.ops.aten.div.Tensor, (grad, inputs.divisor), name="grad_mean")
        mean.meta = {**store.meta, "val": mean.meta["val"]}
        store.update_arg(0, mean)


DIVIDE_GRADIENTS: Pass[JointInputs] = Pass(name="divide_gradients", run=_run)
