"""Store a gradient only after the last op that reads its parameter, in the backward graph that the partitioner made.

A parameter may be updated as soon as its gradient is stored (``step_in_backward``); whatever is still to be computed from
its old value has to come before. Autograd orders it so for a parameter that is used once. Emitted::

    grad = aten.mm(...)
    ...                                  ops that read zinf.gather(.., param)
    token = zinf.store_grad(grad, param)
"""

from torch import fx

from zinf_compile.ops import GATHER, STORE_GRAD
from zinf_compile.passes.analysis.storages import find_roots
from zinf_compile.passes.contract import JointInputs, Pass
from zinf_compile.passes.properties import STORED_LAST


def _run(graph_module: fx.GraphModule, inputs: JointInputs) -> None:
    graph = graph_module.graph
    position = {node: index for index, node in enumerate(graph.nodes)}
    last_reads: dict[object, fx.Node] = {}
    for node, root in find_roots(graph).items():
        if root.node.target is GATHER:
            param = root.node.args[1]
            for reader in (node, *(user for user in node.users if user.op != "output")):
                if param not in last_reads or position[reader] > position[last_reads[param]]:
                    last_reads[param] = reader
    for store in graph.find_nodes(op="call_function", target=STORE_GRAD):
        last_read = last_reads.get(store.args[1])
        if last_read is not None and position[last_read] > position[store]:
            last_read.append(store)


STORE_GRADIENTS_LAST: Pass[JointInputs] = Pass(
    name="store_gradients_last", run=_run, establishes=frozenset({STORED_LAST})
)
