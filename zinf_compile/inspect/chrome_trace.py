"""Predicted and measured timelines as a Chrome trace: open the file in ui.perfetto.dev.

One lane for compute, with its stalls in the category ``stall``, one for each route, and a counter for each tier::

    compute         [layers.0 (forward)][stall: layers.1][layers.1 (forward)] ...
    nvme -> device  [layers.0][layers.1              ][layers.2] ...
    device bytes    ______----======----______

Several measured transfers may have used a route at the same time. All but the first are then shown on extra lanes.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import TypeAlias

from zinf_compile.inspect.text.whole_file import write_whole
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.simulator.simulate import COMPUTE_LANE, Event, MemoryPoint, Timeline, simulate

TraceEvent: TypeAlias = dict[str, object]

_FIRST_PID = 1
_CATEGORY_STALL = "stall"


def chrome_trace(plan: Plan) -> dict[str, object]:
    """Return the JSON object of the Chrome trace event format: times in microseconds, rounded to nanoseconds."""
    timeline = simulate(plan)
    return {
        "traceEvents": _predicted_events(timeline, _FIRST_PID),
        "displayTimeUnit": "ms",
        "otherData": {
            "plan": plan.name,
            "hardware": plan.hardware.name,
            "predicted_seconds": {str(phase): seconds for phase, seconds in timeline.phase_seconds},
            "stall_seconds": timeline.stall_seconds,
        },
    }


def measured_trace(
    name: str, events: Sequence[Event], stalls: Sequence[Event], plans: Iterable[Plan] = ()
) -> dict[str, object]:
    """Return the same for measured events and stalls, as one more process after those predicted by ``plans``."""
    numbers = count(_FIRST_PID)
    predicted = [event for plan in plans for event in _predicted_events(simulate(plan), next(numbers))]
    apart = [*_lanes_apart(events)]
    measured = _describe_process(f"{name} (measured)", apart, stalls, next(numbers))
    return {
        "traceEvents": [*predicted, *measured],
        "displayTimeUnit": "ms",
        "otherData": {"model": name, "stall_seconds": sum(stall.seconds for stall in stalls)},
    }


def _predicted_events(timeline: Timeline, pid: int) -> list[TraceEvent]:
    return [
        *_describe_process(f"plan {timeline.plan.name} (predicted)", timeline.events, timeline.stalls, pid),
        *_describe_memory(timeline.memory, pid, end_seconds=timeline.step_seconds),
    ]


def _lanes_apart(events: Iterable[Event]) -> Iterable[Event]:
    """Yield the events with extra lanes where they overlap, merging pieces of a transfer; input is sorted by start."""
    moved: dict[tuple[str, str], Event] = {}
    joined: list[Event] = []
    for event in events:
        last = moved.get((event.lane, event.name))
        if last is not None and event.nbytes and event.start_seconds <= last.end_seconds:
            end = max(last.end_seconds, event.end_seconds)
            moved[event.lane, event.name] = last._replace(end_seconds=end, nbytes=last.nbytes + event.nbytes)
            continue
        if last is not None:
            joined.append(last)
        moved[event.lane, event.name] = event
    free: dict[str, list[float]] = {}  # when each lane of a route becomes free
    for event in sorted([*joined, *moved.values()], key=lambda event: event.start_seconds):
        ends = free.setdefault(event.lane, [])
        number = next((index for index, end in enumerate(ends) if end <= event.start_seconds), len(ends))
        ends[number : number + 1] = [event.end_seconds]
        yield event if number == 0 else event._replace(lane=f"{event.lane} ({number + 1})")


def _describe_process(name: str, events: Sequence[Event], stalls: Sequence[Event], pid: int) -> Iterable[TraceEvent]:
    lanes = _number_lanes(events)
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for lane, tid in lanes.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for event in events:
        yield _describe_event(event, pid, lanes[event.lane], _category(event))
    for stall in stalls:
        yield _describe_event(stall, pid, lanes[stall.lane], _CATEGORY_STALL)


def save_chrome_trace(plan: Plan, path: str | Path) -> None:
    """Write the trace as JSON; the file appears whole or not at all. ConfigError if the path cannot be written."""
    save_trace(chrome_trace(plan), path)


def save_trace(trace: dict[str, object], path: str | Path) -> None:
    """Write a trace as JSON; the file appears whole or not at all. ConfigError if the path cannot be written."""
    write_whole(path, json.dumps(trace, allow_nan=False).encode(), what="trace")


def _number_lanes(events: Iterable[Event]) -> dict[str, int]:
    """Return a thread id for each lane: compute on top, then the routes by name."""
    routes = sorted({event.lane for event in events} - {COMPUTE_LANE})
    return {lane: tid for tid, lane in enumerate([COMPUTE_LANE, *routes])}


def _describe_event(event: Event, pid: int, tid: int, category: str) -> TraceEvent:
    start, end = _nanoseconds(event.start_seconds), _nanoseconds(event.end_seconds)
    return {
        "ph": "X",
        "name": event.name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": {"nbytes": event.nbytes} if event.nbytes else {},
    }


def _describe_memory(points: Iterable[MemoryPoint], pid: int, *, end_seconds: float) -> Iterable[TraceEvent]:
    """Return counter events; the last one of each tier is repeated at the end, so that its line extends to the end."""
    last: dict[str, MemoryPoint] = {}
    for point in points:
        last[point.tier] = point
        yield _describe_point(point, pid, point.seconds)
    for point in last.values():
        if point.seconds < end_seconds:
            yield _describe_point(point, pid, end_seconds)


def _describe_point(point: MemoryPoint, pid: int, seconds: float) -> TraceEvent:
    return {
        "ph": "C",
        "name": f"{point.tier} bytes",
        "pid": pid,
        "ts": _nanoseconds(seconds) / 1000,
        "args": {"nbytes": point.nbytes},
    }


def _category(event: Event) -> str:
    return "transfer" if event.nbytes else "compute"


def _nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds, so that adjacent events stay adjacent and never overlap after rounding."""
    return round(seconds * 1e9)
