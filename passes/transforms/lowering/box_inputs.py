"""Take all inputs from one list and drop each after its last use, so that no caller keeps a saved value alive.

Emitted::

    inputs = placeholder[boxed_inputs]
    primals_1 = take_input(inputs, 0)          generated code drops the name after its last use
"""

from typing import Any

from torch import fx

from zinf_compile.passes.contract import LowerInputs, Pass


def take_input(inputs: list[Any], index: int) -> Any:
    """Return ``inputs[index]`` and set that item to None."""
    taken, inputs[index] = inputs[index], None
    return taken


def _run(graph_module: fx.GraphModule, inputs: LowerInputs) -> None:
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_before(next(iter(graph.nodes))):
        boxed = graph.placeholder("boxed_inputs")
    boxed.meta["val"] = None
    for index, placeholder in enumerate(placeholders):
        with graph.inserting_before(placeholder):
            taken = graph.call_function(take_input, (boxed, index))
        taken.meta = dict(placeholder.meta)
        placeholder.replace_all_uses_with(taken)
        name = placeholder.name
        graph.erase_node(placeholder)
        taken.name = name


BOX_INPUTS: Pass[LowerInputs] = Pass(name="box_inputs", run=_run)
