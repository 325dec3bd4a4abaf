"""A simulated step in a few numbers: how busy each lane is, what bounds the step, what it writes to the disk."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from zinf_compile.ir.glossary import Tier, format_seconds
from zinf_compile.ir.hardware import DEVICE_LINKS, NODE_LINKS
from zinf_compile.ir.timeline import Event, Timeline

_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How long a route or other user of a lane is busy in a step, and the bytes it moves."""

    name: str
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyLane:
    """How long a lane is busy in a step, and how that divides among the routes that share it."""

    name: str
    seconds: float
    uses: tuple[Use, ...]  # the longest first; the lane itself if no route uses it


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """Bytes written to nvme, per step and per day of such steps. Checkpoints are not in it."""

    nbytes_per_step: int
    nbytes_per_day: float


NO_WEAR = Wear(nbytes_per_step=0, nbytes_per_day=0.0)


def busy_lanes(timeline: Timeline) -> tuple[BusyLane, ...]:
    """Return every lane that was used, the busiest first. Routes that share a lane (a disk's, say) add up on it."""
    hardware = timeline.plan.hardware
    lanes_of = {route.name: route.lanes for route in hardware.routes}
    lanes_of[DEVICE_LINKS] = hardware.device_link_lanes or (DEVICE_LINKS,)
    seconds: dict[str, float] = defaultdict(float)
    nbytes: dict[str, int] = defaultdict(int)
    for node in timeline.nodes:
        seconds[node.lane] += node.seconds
        nbytes[node.lane] += node.nbytes
    held: dict[str, list[Use]] = defaultdict(list)
    for name in seconds:
        for lane in lanes_of.get(name, (name,)):
            held[lane].append(Use(name=name, seconds=seconds[name], nbytes=nbytes[name]))
    lanes = (
        BusyLane(
            name=lane,
            seconds=sum(use.seconds for use in uses),
            uses=tuple(sorted(uses, key=lambda use: (-use.seconds, use.name))),
        )
        for lane, uses in held.items()
    )
    return tuple(sorted(lanes, key=lambda lane: (-lane.seconds, lane.name)))


def tell_bound(timeline: Timeline) -> str:
    """Return what bounds the step: ``"nvme, busy 3.90 s of 4.10 s (95%)"``."""
    lanes = busy_lanes(timeline)
    if not lanes:
        return "nothing: the step does nothing"
    lane, step = lanes[0], timeline.step_seconds
    return f"{lane.name}, busy {format_seconds(lane.seconds)} of {format_seconds(step)} ({lane.seconds / step:.0%})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """How long the links between ranks are busy in a step, and how much of that compute waits meanwhile."""

    seconds: float
    exposed_seconds: float  # not hidden behind compute


def measure_links(timeline: Timeline) -> LinkUse:
    """Return the use of the links between ranks. What compute waits for meanwhile may also be a disk."""
    busy = [node for node in timeline.nodes if node.lane in (DEVICE_LINKS, NODE_LINKS)]
    return LinkUse(seconds=sum(node.seconds for node in busy), exposed_seconds=_exposed_seconds(timeline, busy))


def count_disk_stalls(timeline: Timeline) -> float:
    """Return the seconds in which compute waits and the disk is busy."""
    busy = [node for node in timeline.nodes if Tier.NVME in node.lane.split()]
    return _exposed_seconds(timeline, busy)


def _exposed_seconds(timeline: Timeline, busy: Iterable[Event]) -> float:
    """Return the seconds in which compute waits and at least one of some events goes on."""
    ordered = sorted(busy, key=lambda node: node.start_seconds)
    exposed, first = 0.0, 0
    for stall in sorted(timeline.stalls, key=lambda stall: stall.start_seconds):
        counted_to = stall.start_seconds
        while first < len(ordered) and ordered[first].end_seconds <= stall.start_seconds:
            first += 1
        for node in ordered[first:]:
            if node.start_seconds >= stall.end_seconds:
                break
            end = min(stall.end_seconds, node.end_seconds)
            exposed += max(0.0, end - max(counted_to, node.start_seconds))
            counted_to = max(counted_to, end)
    return exposed


def measure_wear(timeline: Timeline) -> Wear:
    """Return what the step writes to nvme: gradients, swapped activations, updates."""
    to_nvme = f"-> {Tier.NVME}"
    nbytes = sum(node.nbytes for node in timeline.nodes if node.lane.endswith(to_nvme))
    step = timeline.step_seconds
    return Wear(nbytes_per_step=nbytes, nbytes_per_day=nbytes * _SECONDS_PER_DAY / step if step else 0.0)
