"""What occupies the lanes as bars: few enough to draw, those of one block that touch told as one."""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zinf_compile.simulation.memory import MemoryRole
from zinf_compile.simulation.timeline import COMPUTE_LANE, UPDATE_LANE, Event, Timeline

MAX_BARS = 400  # of a lane that are drawn one by one
GAPS = 1000  # neighbours closer than this part of the step are one bar where there are more

_BLOCK = re.compile(r"(.*?\.\d+)(?:[.\s]|$)")  # "gradient layers.3" of "gradient layers.3.up.weight"
_PHASE = re.compile(r" \(\w+\)$")


class Kind(NamedTuple):
    """What a bar is of: a role's bytes that move or are updated, compute (no role), or a stall."""

    role: MemoryRole | None
    is_stall: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Some neighbouring events of a lane."""

    lane: str
    kind: Kind
    first: str
    last: str
    start_seconds: float
    end_seconds: float
    busy_seconds: float
    nbytes: int
    num_events: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBars:
    """The bars of all lanes, and of how many events they are."""

    lanes: tuple[str, ...]  # from the top: compute, updates, then routes by name
    bars: tuple[Bar, ...]
    num_events: int


def collect_bars(timeline: Timeline) -> LaneBars:
    """Return what occupies each lane, at most about ``GAPS`` bars each; stalls are bars of their own on compute's."""
    swapped = {f"{swap.value} {way}" for swap in timeline.plan.swaps for way in ("out", "back")}
    by_lane: dict[str, list[Bar]] = defaultdict(list)
    stalls = [_make_bar(stall, Kind(None, is_stall=True)) for stall in timeline.stalls]
    for event in timeline.events:
        if event.end_seconds > event.start_seconds:
            by_lane[event.lane].append(_make_bar(event, _kind_of(event, swapped)))
    first = [lane for lane in (COMPUTE_LANE, UPDATE_LANE) if lane in by_lane]
    lanes = (*first, *sorted(by_lane.keys() - set(first)))
    gap = timeline.step_seconds / GAPS
    bars = [bar for lane in lanes for bar in merge_bars(by_lane[lane], gap)]
    return LaneBars(
        lanes=lanes,
        bars=(*bars, *merge_bars(stalls, gap)),
        num_events=sum(map(len, by_lane.values())) + len(stalls),
    )


def merge_bars(bars: Sequence[Bar], gap: float) -> list[Bar]:
    """Return at most ``MAX_BARS`` bars as they are; else neighbours that are no more than ``gap`` apart as one.

    Those of one block first; if that leaves too many, those of one kind; at last any, of the kind that has most of it.
    """
    merged = list(bars)
    keys: tuple[Callable[[Bar], Hashable], ...] = (_block_of, lambda bar: bar.kind, lambda _: None)
    for key in keys:
        if len(merged) <= MAX_BARS:
            break
        merged = _join(merged, key, gap)
    return merged


def _join(bars: Iterable[Bar], key: Callable[[Bar], Hashable], gap: float) -> list[Bar]:
    joined: list[Bar] = []
    for bar in bars:
        before = joined[-1] if joined else None
        if before is None or bar.start_seconds - before.end_seconds > gap or key(bar) != key(before):
            joined.append(bar)
            continue
        joined[-1] = replace(
            before,
            kind=max(before, bar, key=lambda each: each.busy_seconds).kind,
            last=bar.last,
            end_seconds=bar.end_seconds,
            busy_seconds=before.busy_seconds + bar.busy_seconds,
            nbytes=before.nbytes + bar.nbytes,
            num_events=before.num_events + bar.num_events,
        )
    return joined


def _make_bar(event: Event, kind: Kind) -> Bar:
    return Bar(
        lane=event.lane,
        kind=kind,
        first=event.name,
        last=event.name,
        start_seconds=event.start_seconds,
        end_seconds=event.end_seconds,
        busy_seconds=event.seconds,
        nbytes=event.nbytes,
        num_events=1,
    )


def _block_of(bar: Bar) -> Hashable:
    """Return a bar's kind, block and phase."""
    block, phase = _BLOCK.match(bar.last), _PHASE.search(bar.last)
    return bar.kind, block[1] if block else bar.last, phase[0] if phase else ""


def _kind_of(event: Event, swapped: set[str]) -> Kind:
    """Return what an event is of, by the name that the simulator gives it."""
    if event.name.startswith(("optimizer", "update of ")):
        return Kind(MemoryRole.OPTIMIZER_STATE)
    if event.lane == COMPUTE_LANE:
        return Kind(None)
    if event.name in swapped:
        return Kind(MemoryRole.ACTIVATION)
    return Kind(MemoryRole.GRADIENT if event.name.startswith("gradient ") else MemoryRole.PARAMETER)
