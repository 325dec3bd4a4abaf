"""Store each gradient as soon as it may be, in the backward graph that the partitioner made: it takes memory until then.

A parameter may be updated as soon as its gradient is stored (``step_in_backward``); whatever is still to be computed from
its old value has to come before. Emitted::

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
    for store in reversed(graph.find_nodes(op="call_function", target=STORE_GRAD)):
        grad, param, *_ = store.args
        assert isinstance(grad, fx.Node)
        before = max(grad, last_reads.get(param, grad), key=position.__getitem__)
        if before.op != "placeholder":
            before.append(store)


PLACE_STORES: Pass[JointInputs] = Pass(name="place_stores", run=_run, establishes=frozenset({STORED_LAST}))
