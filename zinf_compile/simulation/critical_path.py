"""What delayed what: the chain of nodes that a simulated step is as long as."""

from collections import defaultdict
from dataclasses import dataclass

from zinf_compile.simulation.timeline import Event, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneShare:
    """What one lane has of a critical path, and what is longest there."""

    lane: str
    seconds: float
    longest: tuple[Event, ...]


def critical_path(timeline: Timeline) -> tuple[Event, ...]:
    """Return nodes of which each ends when the next one starts, from 0 to the end of the step; () for an empty step.

    Shortening anything else makes the step no shorter. Of several that end at once, the one that was met first is taken.
    """
    nodes = timeline.nodes
    if not nodes:
        return ()
    index = max(range(len(nodes)), key=lambda node: (nodes[node].end_seconds, -node))
    path = [nodes[index]]
    while nodes[index].start_seconds > 0:
        index = max(nodes[index].after, key=lambda node: (nodes[node].end_seconds, -node))
        path.append(nodes[index])
    return tuple(reversed(path))


def share_path(path: tuple[Event, ...], *, num_longest: int = 2) -> tuple[LaneShare, ...]:
    """Return a path by lane, the lane with most of it first, with the longest things that were done there."""
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
