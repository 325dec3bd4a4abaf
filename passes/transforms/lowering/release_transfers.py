"""Release the bytes of every transfer after its last reader, at the plan's release tick.

Emitted::

    mm = aten.mm(x, t)                     the last reader
    release = zinf.release(layers_1, store)
"""

import bisect

from torch import fx

from zinf_compile.ir.ops import RELEASE
from zinf_compile.passes.contract import LowerInputs, Pass, node_facts
from zinf_compile.passes.fx_edit import insert_call
from zinf_compile.passes.properties import TRANSFERS_RELEASED, TRANSFERS_STARTED


def _run(graph_module: fx.GraphModule, inputs: LowerInputs) -> None:
    graph = graph_module.graph
    numbered = [(tick, node) for node in graph.nodes if (tick := node_facts(node).tick) is not None]
    ticks = [tick for tick, _ in numbered]
    nodes = [node for _, node in numbered]
    for ticket in list(graph.nodes):
        transfer = node_facts(ticket).transfer
        if transfer is None:
            continue
        # Right after the last node before the release tick: a transfer issued at that tick may use the same bytes.
        last = bisect.bisect_left(ticks, transfer.release) - 1
        reader = nodes[last] if last >= 0 and ticks[last] >= transfer.issue else ticket
        before = reader if reader.op == "output" else reader.next
        insert_call(graph, before, RELEASE, (ticket, inputs.store_id), name=f"{transfer.name}_release")


RELEASE_TRANSFERS: Pass[LowerInputs] = Pass(
    name="release_transfers",
    run=_run,
    requires=frozenset({TRANSFERS_STARTED}),
    establishes=frozenset({TRANSFERS_RELEASED}),
)
