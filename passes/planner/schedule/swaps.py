"""Schedules the offloading and reloading of activations between forward and backward.

Offloading starts when a value is computed, since nothing writes to it any more. Its device bytes are free after its
last use in forward or the end of the transfer, whichever is later. Reloading starts at the latest point that still
hides it, if backward is long enough.

Where a link is slower than compute, that leaves nearly all values on the device. One at a time they take the fewest bytes:
each has left before the next is computed, and its reload starts when the one before is read. Then compute waits.
"""

import bisect
import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.facts import GraphFacts, ValueFact
from zinf_compile.ir.glossary import LiveRange, Phase, Tier
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.transfers import Moved, Transfer
from zinf_compile.passes.planner.cost.costs import ops_seconds
from zinf_compile.passes.planner.memory.arena import align


def plan_swaps(
    graph: GraphFacts,
    destinations: Mapping[str, Tier],
    hardware: Hardware,
    seconds_of_ops: Sequence[float] | None = None,
    *,
    in_place: bool = False,
    one_at_a_time: bool = False,
) -> tuple[Transfer, ...]:
    """Return the offloads of the values named in ``destinations``, each to that tier, and their reloads.

    ``in_place``: what rests in host memory is read there, and its reload moves nothing. ``seconds_of_ops`` saves estimating
    them again. Offsets are 0 until ``bind_values`` assigns some. VerifyError for a name that is no value that may leave
    (``idle``).
    """
    leaving = {value.name: value for value in graph.values if value.idle is not None and value.name in destinations}
    if unknown := destinations.keys() - leaving.keys():
        raise VerifyError(f"{graph.name}: '{min(unknown)}' is no value that can leave the device")
    values = [(value, destinations[value.name]) for value in leaving.values()]
    reached = _seconds_at(graph, seconds_of_ops or list(ops_seconds(graph.ops, hardware)))
    gone = _plan_out(graph, values, hardware, reached)
    moved_back = [item for item in values if not (in_place and item[1] is Tier.HOST)]
    issues = _plan_back(graph, moved_back, hardware, reached)
    if one_at_a_time:
        gone = _leave_before_the_next(values, gone)
        issues = _return_after_the_last(moved_back, issues)
    swaps: list[Transfer] = []
    for value, destination in sorted(values, key=lambda item: (item[0].live.start, item[0].name)):
        name, nbytes, left_at = value.name, align(value.nbytes), gone[value.name]
        swaps += (
            Transfer(
                what=Moved.ACTIVATION,
                name=name,
                parameters=(),
                source=Tier.DEVICE,
                destination=destination,
                nbytes=nbytes,
                issue=value.live.start + 1,
                need_by=left_at,
                release=left_at,
            ),
            Transfer(
                what=Moved.ACTIVATION,
                name=name,
                parameters=(),
                source=destination,
                destination=Tier.DEVICE if name in issues else destination,
                nbytes=nbytes,
                issue=issues.get(name, _idle(value).end),
                need_by=_idle(value).end,
                release=value.live.end,
                offsets=(0,) if name in issues else (),
            ),
        )
    return tuple(swaps)


def least_seconds(
    graph: GraphFacts, swaps: Sequence[Transfer], hardware: Hardware, seconds_of_ops: Sequence[float]
) -> float:
    """Return a lower bound of the seconds of forward and backward: compute, which waits for these transfers alone."""
    reached, waited = _seconds_at(graph, seconds_of_ops), 0.0
    free_at: dict[str, float] = defaultdict(float)
    rests_at: dict[str, float] = {}
    pending: list[tuple[int, float]] = []  # when compute waits for the end of a transfer
    for swap in sorted(swaps, key=lambda swap: (swap.issue, swap.need_by)):
        while pending and pending[0][0] < swap.issue:
            tick, end = heapq.heappop(pending)
            waited = max(waited, end - reached[tick])
        if swap.source is swap.destination:
            continue
        route = hardware.route(swap.source, swap.destination)
        start = max(
            reached[swap.issue] + waited, rests_at.get(swap.name, 0.0), *(free_at[lane] for lane in route.lanes)
        )
        end = start + route.latency_seconds + swap.nbytes / route.bytes_per_second
        free_at.update(dict.fromkeys(route.lanes, end))
        if swap.is_offload:
            rests_at[swap.name] = end
        heapq.heappush(pending, (swap.need_by, end))
    return reached[-1] + max([waited, *(end - reached[tick] for tick, end in pending)])


def without_swapped(graph: GraphFacts, swaps: tuple[Transfer, ...]) -> GraphFacts:
    """Return the graph without its offloaded values once they have left: they end there, and are not saved."""
    gone = {swap.name: swap.release for swap in swaps if swap.is_offload}
    values = (
        replace(value, live=LiveRange(start=value.live.start, end=gone[value.name]), saved=False, idle=None)
        if value.idle is not None and value.name in gone
        else value
        for value in graph.values
    )
    return replace(graph, values=tuple(values))


def _idle(value: ValueFact) -> LiveRange:
    assert value.idle is not None
    return value.idle


def _plan_out(
    graph: GraphFacts, values: list[tuple[ValueFact, Tier]], hardware: Hardware, seconds: Sequence[float]
) -> dict[str, int]:
    """Return the tick by which each value has left; values on one lane leave one after the other."""
    last = graph.schedule.ticks(Phase.FORWARD)[-1]  # where forward returns
    free_at: dict[str, float] = {}
    gone = {}
    for value, destination in sorted(values, key=lambda item: (item[0].live.start, item[0].name)):
        route = hardware.route(Tier.DEVICE, destination)
        start = max(seconds[value.live.start + 1], *(free_at.get(lane, 0.0) for lane in route.lanes))
        end = start + route.latency_seconds + value.nbytes / route.bytes_per_second
        free_at.update(dict.fromkeys(route.lanes, end))
        gone[value.name] = min(last, bisect.bisect_left(seconds, end, lo=_idle(value).start))
    return gone


def _plan_back(
    graph: GraphFacts, values: list[tuple[ValueFact, Tier]], hardware: Hardware, seconds: Sequence[float]
) -> dict[str, int]:
    """Return the tick at which each reload is issued, from the last need backwards over each lane."""
    first = graph.schedule.ticks(Phase.BACKWARD).start
    taken_from: dict[str, float] = {}
    issues = {}
    for value, destination in sorted(values, key=lambda item: (-_idle(item[0]).end, item[0].name)):
        route = hardware.route(destination, Tier.DEVICE)
        need_by = _idle(value).end
        end = min(seconds[need_by], *(taken_from.get(lane, seconds[-1]) for lane in route.lanes))
        start = end - route.latency_seconds - value.nbytes / route.bytes_per_second
        taken_from.update(dict.fromkeys(route.lanes, start))
        issues[value.name] = max(first, min(need_by, bisect.bisect_right(seconds, start) - 1))
    return issues


def _leave_before_the_next(values: list[tuple[ValueFact, Tier]], gone: Mapping[str, int]) -> dict[str, int]:
    """Return the tick by which each value has left, so that another is on its way only while it is still read."""
    births = sorted({value.live.start for value, _ in values})
    following = dict(pairwise(births))
    return {
        value.name: min(gone[value.name], max(_idle(value).start, following.get(value.live.start, gone[value.name])))
        for value, _ in values
    }


def _return_after_the_last(values: list[tuple[ValueFact, Tier]], issues: Mapping[str, int]) -> dict[str, int]:
    """Return the tick at which each reload is issued, so that what is read before has been reloaded."""
    needs = sorted({_idle(value).end for value, _ in values})
    before = {later: earlier for earlier, later in pairwise(needs)}
    return {value.name: max(issues[value.name], before.get(_idle(value).end, 0)) for value, _ in values}


def _seconds_at(graph: GraphFacts, seconds_of_ops: Sequence[float]) -> list[float]:
    """Return when compute reaches each tick, and the end, if it never stalls."""
    costs = [0.0] * graph.num_ticks
    for op, seconds in zip(graph.ops, seconds_of_ops, strict=True):
        costs[op.tick] += seconds
    return list(accumulate(costs, initial=0.0))
