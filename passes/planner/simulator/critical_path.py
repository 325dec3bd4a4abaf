"""The critical path of a simulated step: the chain of nodes that determines its length."""

from collections import defaultdict
from dataclasses import dataclass

import networkx as nx

from zinf_compile.ir.timeline import Event, Timeline
from zinf_compile.passes.planner.simulator.step_graph import build_step_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneShare:
    """The share of one lane in a critical path, and the longest nodes of it."""

    lane: str
    seconds: float
    longest: tuple[Event, ...]


def critical_path(timeline: Timeline) -> tuple[Event, ...]:
    """Return nodes from 0 to the end of the step, each ending when the next one starts; () for an empty step.

    Shortening any other node does not shorten the step.
    """
    nodes = timeline.nodes
    if not nodes:
        return ()
    graph = build_step_graph(timeline)
    end_seconds = max(node.end_seconds for node in nodes)
    graph.add_edges_from(
        (index, len(nodes), {"seconds": node.seconds})
        for index, node in enumerate(nodes)
        if node.end_seconds == end_seconds
    )
    # Keep only the edges of what a node waited for last. Rounding could otherwise prefer a path that is shorter by a bit.
    graph.remove_edges_from(
        [
            (before, index)
            for before, index in graph.edges
            if index < len(nodes) and nodes[before].end_seconds < nodes[index].start_seconds
        ]
    )
    chain = graph.subgraph(nx.ancestors(graph, len(nodes)) | {len(nodes)})
    path = nx.dag_longest_path(chain, weight="seconds", topo_order=sorted(chain))
    return tuple(nodes[index] for index in path if index < len(nodes))


def share_path(path: tuple[Event, ...], *, num_longest: int = 2) -> tuple[LaneShare, ...]:
    """Return a path by lane, the lane with the most seconds first, with the longest nodes of each."""
    by_lane: dict[str, dict[str, Event]] = defaultdict(dict)
    for event in path:
        held = by_lane[event.lane].get(event.name)
        joined = event if held is None else held._replace(end_seconds=held.end_seconds + event.seconds)
        by_lane[event.lane][event.name] = joined
    shares = [
        LaneShare(
            lane=lane,
            seconds=sum(event.seconds for event in events.values()),
            longest=tuple(sorted(events.values(), key=lambda event: (-event.seconds, event.name))[:num_longest]),
        )
        for lane, events in by_lane.items()
    ]
    return tuple(sorted(shares, key=lambda share: (-share.seconds, share.lane)))
