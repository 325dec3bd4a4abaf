"""A plan's predicted timeline as a Chrome trace: open the file in ui.perfetto.dev or chrome://tracing.

One lane for compute, with its stalls in the category ``stall``, one for each route, and a counter for each tier::

    compute         [layers.0 (forward)][stall: layers.1][layers.1 (forward)] ...
    nvme -> device  [layers.0][layers.1              ][layers.2] ...
    device bytes    ______----======----______
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from zinf_compile.plans import Plan
from zinf_compile.simulate import COMPUTE_LANE, Event, MemoryPoint, Timeline, simulate
from zinf_compile.views.whole_file import write_whole

TraceEvent: TypeAlias = dict[str, object]

_PID = 1
_CATEGORY_STALL = "stall"


def chrome_trace(plan: Plan) -> dict[str, object]:
    """Return the Chrome trace event format's JSON object: times in microseconds, on whole nanoseconds."""
    timeline = simulate(plan)
    lanes = _number_lanes(timeline)
    events = [
        *_name_lanes(plan, lanes),
        *(_describe_event(event, lanes, _category(event)) for event in timeline.events),
        *(_describe_event(stall, lanes, _CATEGORY_STALL) for stall in timeline.stalls),
        *_describe_memory(timeline.memory, end_seconds=timeline.step_seconds),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "plan": plan.name,
            "hardware": plan.hardware.name,
            "predicted_seconds": {str(phase): seconds for phase, seconds in timeline.phase_seconds},
            "stall_seconds": timeline.stall_seconds,
        },
    }


def save_chrome_trace(plan: Plan, path: str | Path) -> None:
    """Write the trace as JSON; the file appears whole or not at all. ConfigError if the path cannot be written."""
    write_whole(path, json.dumps(chrome_trace(plan), allow_nan=False).encode(), what="trace")


def _number_lanes(timeline: Timeline) -> dict[str, int]:
    """Return a thread id for each lane: compute on top, then the routes by name."""
    routes = sorted({event.lane for event in timeline.events} - {COMPUTE_LANE})
    return {lane: tid for tid, lane in enumerate([COMPUTE_LANE, *routes])}


def _name_lanes(plan: Plan, lanes: dict[str, int]) -> Iterable[TraceEvent]:
    yield {"ph": "M", "name": "process_name", "pid": _PID, "args": {"name": f"plan {plan.name} (predicted)"}}
    for lane, tid in lanes.items():
        yield {"ph": "M", "name": "thread_name", "pid": _PID, "tid": tid, "args": {"name": lane}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": _PID, "tid": tid, "args": {"sort_index": tid}}


def _describe_event(event: Event, lanes: dict[str, int], category: str) -> TraceEvent:
    start, end = _nanoseconds(event.start_seconds), _nanoseconds(event.end_seconds)
    return {
        "ph": "X",
        "name": event.name,
        "cat": category,
        "pid": _PID,
        "tid": lanes[event.lane],
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": {"nbytes": event.nbytes} if event.nbytes else {},
    }


def _describe_memory(points: Iterable[MemoryPoint], *, end_seconds: float) -> Iterable[TraceEvent]:
    """Return counter events; the last one of each tier is repeated at the end, so that its line reaches it."""
    last: dict[str, MemoryPoint] = {}
    for point in points:
        last[point.tier] = point
        yield _describe_point(point, point.seconds)
    for point in last.values():
        if point.seconds < end_seconds:
            yield _describe_point(point, end_seconds)


def _describe_point(point: MemoryPoint, seconds: float) -> TraceEvent:
    return {
        "ph": "C",
        "name": f"{point.tier} bytes",
        "pid": _PID,
        "ts": _nanoseconds(seconds) / 1000,
        "args": {"nbytes": point.nbytes},
    }


def _category(event: Event) -> str:
    return "transfer" if event.nbytes else "compute"


def _nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds: events that touch still touch, and never overlap, after rounding."""
    return round(seconds * 1e9)
