"""Offload gradients in the background; the token that stands for them in autograd becomes an empty tensor.

Emitted::

    layers_1_up_weight_grad = zinf.sink_grad(mm_7, store, param)     in place of store_grad
    ...
    down_weight_grad = zinf.sink_grad(mm_8, store, param, ends)      of experts: slices of those without rows are zero
    ...
    wait_sinks = zinf.wait_sinks(store)                              at the end: backward returns once all are stored
"""

import torch
from torch import fx

from zinf_compile.ir.ops import SINK_GRAD, STORE_GRAD, WAIT_SINKS
from zinf_compile.passes.contract import LowerInputs, Pass, node_facts
from zinf_compile.passes.fx_edit import insert_call
from zinf_compile.passes.properties import GRADIENTS_SUNK, VALUES_KNOWN


def _run(graph_module: fx.GraphModule, inputs: LowerInputs) -> None:
    graph = graph_module.graph
    stores = graph.find_nodes(op="call_function", target=STORE_GRAD)
    if not stores:
        return
    output = graph.output_node()
    ends = {sink.name: sink.ends for sink in inputs.plan.sinks if sink.ends is not None}
    at = {node_facts(node).tick: node for node in graph.nodes} if ends else {}
    token = insert_call(graph, stores[0], torch.ops.aten.empty.memory_format, ([0],), name="token")
    for store in stores:
        grad, param, *_ = store.args
        parameter = node_facts(store).parameter
        args: tuple[object, ...] = (grad, inputs.store_id, param)
        if parameter in ends:
            args = (*args, at[ends[parameter]])
        insert_call(graph, store, SINK_GRAD, args, name=f"{parameter}_grad_sink")
        store.replace_all_uses_with(token)
        graph.erase_node(store)
    insert_call(graph, output, WAIT_SINKS, (inputs.store_id,), name="wait_sinks")


SINK_GRADIENTS: Pass[LowerInputs] = Pass(
    name="sink_gradients",
    run=_run,
    requires=frozenset({VALUES_KNOWN}),
    establishes=frozenset({GRADIENTS_SUNK}),
)
