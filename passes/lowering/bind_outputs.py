"""Let ops write their results to the arena offsets that the plan has bound, instead of allocating.

Emitted::

    mm_memory = zinf.arena_view(store, offset, shape, stride, dtype, device)
    mm = aten.mm.out(x, t, out=mm_memory)

Memory that compute reuses all the time stays warm and in one place; the system's allocator would scatter it over several
times as much, or give it back and fault it in again.
"""

from torch import fx

from zinf_compile.ops import ARENA_VIEW
from zinf_compile.passes.contract import LowerInputs, Pass, node_facts
from zinf_compile.passes.fx_edit import insert_call
from zinf_compile.passes.out_forms import out_form
from zinf_compile.passes.properties import TRANSFERS_STARTED, VALUES_KNOWN


def _run(graph_module: fx.GraphModule, inputs: LowerInputs) -> None:
    graph = graph_module.graph
    offsets = {bound.live.start: bound.offset for bound in inputs.plan.bound}
    for node in list(graph.nodes):
        tick = node_facts(node).tick
        if tick is None or tick not in offsets:
            continue
        value = node.meta["val"]
        place = (inputs.store_id, offsets[tick], list(value.shape), list(value.stride()), value.dtype, value.device)
        memory = insert_call(graph, node, ARENA_VIEW, place, name=f"{node.name}_memory")
        form = out_form(node, memory)
        node.target, node.args, node.kwargs = form.target, form.args, form.kwargs


BIND_OUTPUTS: Pass[LowerInputs] = Pass(
    name="bind_outputs",
    run=_run,
    requires=frozenset({VALUES_KNOWN, TRANSFERS_STARTED}),
)
