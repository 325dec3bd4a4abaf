"""Launch the all-gathers of several ranks: at a tick of the plan, in the same order on every rank.

Emitted, where the tick is before the first reader::

    layers_1 = zinf.issue_gather(store, [params], [dtypes], [offsets])      this rank's shards start to arrive
    ...
    layers_1_launch = zinf.launch_gather(layers_1, store)                   waits for them; all ranks exchange theirs
    ...
    layers_1_up_weight = zinf.wait_gather(layers_1, store, offset, ...)

A wait launches what was not launched before. One process has nothing to exchange, and gets no launches.
"""

import bisect

from torch import fx

from zinf_compile.ir.ops import ISSUE_GATHER, LAUNCH_GATHER
from zinf_compile.passes.contract import LowerInputs, Pass, node_facts
from zinf_compile.passes.fx_edit import insert_call
from zinf_compile.passes.properties import LAUNCHES_IN_ORDER, TRANSFERS_STARTED


def _run(graph_module: fx.GraphModule, inputs: LowerInputs) -> None:
    if inputs.plan.num_ranks == 1:
        return
    graph = graph_module.graph
    numbered = [(tick, node) for node in graph.nodes if (tick := node_facts(node).tick) is not None]
    ticks = [tick for tick, _ in numbered]
    nodes = [node for _, node in numbered]
    issued = [(node_facts(node).transfer, node) for node in graph.nodes if node.target is ISSUE_GATHER]
    gathers = [(item, node) for item, node in issued if item is not None]
    for transfer, ticket in sorted(gathers, key=lambda pair: (pair[0].launched_at, pair[0].need_by)):
        if transfer.launched_at < transfer.need_by:
            before = nodes[bisect.bisect_left(ticks, transfer.launched_at)]
            insert_call(graph, before, LAUNCH_GATHER, (ticket, inputs.store_id), name=f"{transfer.name}_launch")


LAUNCH_GATHERS: Pass[LowerInputs] = Pass(
    name="launch_gathers",
    run=_run,
    requires=frozenset({TRANSFERS_STARTED}),
    establishes=frozenset({LAUNCHES_IN_ORDER}),
)
