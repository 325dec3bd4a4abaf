"""Compute as the simulator runs it: a span for each run of ops of one module, with its seconds and its memory."""

from collections.abc import Sequence
from itertools import groupby

from zinf_compile.ir.facts import GraphFacts, working_set
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.plan import ComputeSpan
from zinf_compile.passes.planner.cost.costs import ops_seconds
from zinf_compile.passes.planner.memory.activations import unbound_values


def plan_spans(
    graph: GraphFacts, hardware: Hardware, seconds_of_ops: Sequence[float] | None = None
) -> tuple[ComputeSpan, ...]:
    """Return runs of consecutive ops of one module and phase, covering every tick.

    ``seconds_of_ops`` are the seconds of each op, if the caller has them already.
    """
    live = working_set(unbound_values(graph), graph.num_ticks)
    timed = zip(graph.ops, seconds_of_ops or ops_seconds(graph.ops, hardware), strict=True)
    spans = []
    for (module, phase), run in groupby(
        timed, key=lambda item: (item[0].module, graph.schedule.phase_of(item[0].tick))
    ):
        ops, seconds = zip(*run, strict=True)
        start, end = ops[0].tick, ops[-1].tick + 1
        spans.append(
            ComputeSpan(
                module=module,
                phase=phase,
                start=start,
                end=end,
                seconds=sum(seconds),
                peak_nbytes=max(live[start:end]),
            )
        )
    return tuple(spans)
