"""Replace plain parameter placeholders by gathers, for a model that was never passed to ``optimize``.

Emitted, at the top of the torch-level graph::

    anchor = placeholder[zinf_anchor]
    weight = zinf.gather(anchor, param, shape, dtype, device)     instead of placeholder[l_self_weight]

The placeholders stay, unused, so that the graph is called as before.
"""

from torch import fx

from zinf_compile.ir.ops import GATHER
from zinf_compile.passes.contract import Pass, PrepareInputs
from zinf_compile.passes.fx_edit import node_name
from zinf_compile.passes.properties import PARAMETERS_GATHERED


def _run(graph_module: fx.GraphModule, inputs: PrepareInputs) -> None:
    if not inputs.handles:
        return
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_before(placeholders[0]):
        anchor = graph.placeholder("zinf_anchor")
        frozen_anchor = graph.placeholder("zinf_frozen_anchor")
    for node in (anchor, frozen_anchor):
        node._dynamo_source = None  # AOTAutograd reads it of every input of a Dynamo graph
    last = placeholders[-1]
    for placeholder in placeholders:
        handle = inputs.handles.get(placeholder.name)
        if handle is None:
            continue
        placeholder.meta["is_parameter"] = True
        root = anchor if handle.trainable else frozen_anchor
        with graph.inserting_after(last):
            gathered = graph.create_node(
                "call_function",
                GATHER,
                (root, handle.param, list(handle.shape), handle.dtype, handle.device),
                name=node_name(handle.name),
            )
        gathered.meta = {name: fact for name, fact in placeholder.meta.items() if name != "is_parameter"}
        gathered.meta["val"] = gathered.meta.get("example_value")
        placeholder.replace_all_uses_with(gathered)


INSERT_GATHERS: Pass[PrepareInputs] = Pass(
    name="insert_gathers", run=_run, establishes=frozenset({PARAMETERS_GATHERED})
)
