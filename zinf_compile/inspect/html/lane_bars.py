"""Events of the lanes as bars, merged so that there are few enough to draw."""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zinf_compile.ir.timeline import COMPUTE_LANE, UPDATE_LANE, UPDATED_RESIDENTS, Event, Timeline
from zinf_compile.passes.planner.simulator.memory import MOVED_ROLES, MemoryRole

MAX_BARS = 400  # bars per lane that are drawn individually
GAPS = 1000  # if there are more, neighbours closer than this fraction of the step are merged

_BLOCK = re.compile(r"(.*?\.\d+)(?:[.\s]|$)")  # "gradient layers.3" of "gradient layers.3.up.weight"
_PHASE = re.compile(r" \(\w+\)$")


class Kind(NamedTuple):
    """The kind of a bar: bytes of a role that move or are updated, compute (no role), or a stall."""

    role: MemoryRole | None
    is_stall: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One or more neighbouring events of a lane."""

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
    """The bars of all lanes, and the number of events they represent."""

    lanes: tuple[str, ...]  # from the top: compute, updates, then routes by name
    bars: tuple[Bar, ...]
    num_events: int


def collect_bars(timeline: Timeline) -> LaneBars:
    """Return the bars of each lane, at most about ``GAPS`` each; stalls are separate bars on the compute lane."""
    roles = {transfer.label: MOVED_ROLES[transfer.what] for transfer in timeline.plan.transfers}
    by_lane: dict[str, list[Bar]] = defaultdict(list)
    stalls = [_make_bar(stall, Kind(None, is_stall=True)) for stall in timeline.stalls]
    for event in timeline.events:
        if event.end_seconds > event.start_seconds:
            by_lane[event.lane].append(_make_bar(event, _kind_of(event, roles)))
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
    """Return bars unchanged if there are at most ``MAX_BARS``; otherwise merge neighbours that are at most ``gap`` apart.

    Bars of one block are merged first, then bars of one kind if there are still too many, and finally any bars; the
    result has the kind with the largest share.
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


def _kind_of(event: Event, roles: Mapping[str, MemoryRole]) -> Kind:
    """Return the kind of an event, from its name; ``roles`` are those of transfers, by their labels."""
    if event.name.startswith(("optimizer", "update of ")):
        return Kind(MemoryRole.OPTIMIZER_STATE)
    if event.lane == COMPUTE_LANE:
        return Kind(None)
    if event.name == UPDATED_RESIDENTS:
        return Kind(MemoryRole.PARAMETER)
    return Kind(roles[event.name])
