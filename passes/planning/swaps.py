"""Activations that leave the device between forward and backward: when each goes, and when it has to come back.

A value starts to leave when it is born, since nothing writes to it any more, and its bytes on the device are free after
its last use in forward, or when its way out is over, whichever is later. Its way back begins at the latest point that
still hides it, as far as backward is long enough for that.
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from zinf_compile.errors import VerifyError
from zinf_compile.facts import GraphFacts, ValueFact
from zinf_compile.hardware import Hardware
from zinf_compile.passes.planning.arena import align
from zinf_compile.passes.planning.costs import ops_seconds
from zinf_compile.plans import ActivationSwap
from zinf_compile.terms import LiveRange, Tier


def plan_swaps(
    graph: GraphFacts,
    destinations: Mapping[str, Tier],
    hardware: Hardware,
    seconds_of_ops: Sequence[float] | None = None,
) -> tuple[ActivationSwap, ...]:
    """Return when each value named in ``destinations`` leaves for that tier and comes back, by the tick after which it does.

    Who knows the seconds of the graph's ops gives them. Offsets are 0 until ``bind_values`` gives them some. VerifyError for
    a name that is no value that may leave (``idle``).
    """
    leaving = {value.name: value for value in graph.values if value.idle is not None and value.name in destinations}
    if unknown := destinations.keys() - leaving.keys():
        raise VerifyError(f"{graph.name}: '{min(unknown)}' is no value that can leave the device")
    values = [(value, destinations[value.name]) for value in leaving.values()]
    reached = _seconds_at(graph, seconds_of_ops or list(ops_seconds(graph.ops, hardware)))
    gone = _plan_out(graph, values, hardware, reached)
    issues = _plan_back(graph, values, hardware, reached)
    swaps = [
        ActivationSwap(
            value=value.name,
            destination=destination,
            nbytes=align(value.nbytes),
            out=value.live.start,
            gone=gone[value.name],
            issue=issues[value.name],
            need_by=_idle(value).end,
            release=value.live.end,
            offset=0,
        )
        for value, destination in values
    ]
    return tuple(sorted(swaps, key=lambda swap: (swap.out, swap.value)))


def without_swapped(graph: GraphFacts, swaps: tuple[ActivationSwap, ...]) -> GraphFacts:
    """Return the facts of what is left outside of the arena: a swapped value ends when it is gone, and is not saved."""
    gone = {swap.value: swap.gone for swap in swaps}
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
    """Return the ticks before which values have left, those that share a lane one after the other."""
    last = graph.num_forward_ticks - 1  # where forward returns
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
    """Return the ticks before which the ways back start: the last need first, each before those it shares a lane with."""
    taken_from: dict[str, float] = {}
    issues = {}
    for value, destination in sorted(values, key=lambda item: (-_idle(item[0]).end, item[0].name)):
        route = hardware.route(destination, Tier.DEVICE)
        need_by = _idle(value).end
        end = min(seconds[need_by], *(taken_from.get(lane, seconds[-1]) for lane in route.lanes))
        start = end - route.latency_seconds - value.nbytes / route.bytes_per_second
        taken_from.update(dict.fromkeys(route.lanes, start))
        issues[value.name] = max(graph.num_forward_ticks, min(need_by, bisect.bisect_right(seconds, start) - 1))
    return issues


def _seconds_at(graph: GraphFacts, seconds_of_ops: Sequence[float]) -> list[float]:
    """Return when compute reaches each tick, and the end, if it waits for nothing."""
    costs = [0.0] * graph.num_ticks
    for op, seconds in zip(graph.ops, seconds_of_ops, strict=True):
        costs[op.tick] += seconds
    return list(accumulate(costs, initial=0.0))
