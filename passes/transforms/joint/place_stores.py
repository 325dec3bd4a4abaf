"""Store each gradient as early as possible in the backward graph, because it takes memory until then.

With ``step_in_backward`` a parameter is updated as soon as its gradient is complete, so everything computed from its
old value has to come before its last gradient is stored. Emitted::

    part = aten.mm(...)
    token = zinf.store_grad(part, tile)
    grad = aten.mm(...)
    ...                                  ops that read zinf.gather(.., tile)
    token = zinf.store_grad(grad, tile, 1)
"""

from collections.abc import Callable, Mapping

from torch import fx

from zinf_compile.ir.ops import GATHER, STORE_GRAD
from zinf_compile.passes.analysis.storages import find_roots
from zinf_compile.passes.contract import FormInputs, Pass
from zinf_compile.passes.properties import STORED_LAST


def _run(graph_module: fx.GraphModule, inputs: FormInputs) -> None:
    graph = graph_module.graph
    position = {node: index for index, node in enumerate(graph.nodes)}
    last_reads: dict[object, fx.Node] = {}
    for node, root in find_roots(graph).items():
        if root.node.target is GATHER:
            param = root.node.args[1]
            for reader in (node, *(user for user in node.users if user.op != "output")):
                if param not in last_reads or position[reader] > position[last_reads[param]]:
                    last_reads[param] = reader
    complete: set[object] = set()  # parameters whose later gradients have all been seen
    for store in sorted(
        graph.find_nodes(op="call_function", target=STORE_GRAD), key=_gradient_at(position), reverse=True
    ):
        grad, param, *_ = store.args
        assert isinstance(grad, fx.Node)
        is_last = param not in complete
        complete.add(param)
        before = max(grad, last_reads.get(param, grad), key=position.__getitem__) if is_last else grad
        if before.op != "placeholder":
            before.append(store)


def _gradient_at(position: Mapping[fx.Node, int]) -> Callable[[fx.Node], int]:
    """Return a sort key: the position at which the gradient of a store is computed."""
    return lambda store: position[store.all_input_nodes[0]]


PLACE_STORES: Pass[FormInputs] = Pass(name="place_stores", run=_run, establishes=frozenset({STORED_LAST}))
