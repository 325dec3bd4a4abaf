"""What a model's first steps have shown of the machine, and the machine's rates made to agree with it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from zinf_compile.hardware import Hardware, Rate, Route

_LEAST_NBYTES = 16 * 2**20  # over a lane: of less, the time is that of other things


class RouteBytes(NamedTuple):
    """Bytes that have moved over a route."""

    route: str
    nbytes: int


class BusyTime(NamedTuple):
    """The time in which bytes moved over exactly these routes, however many at once."""

    routes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Some steps of one captured graph, run by one plan."""

    num_steps: int  # since the graph's first run, these included
    compute_seconds: float  # of one forward and one backward, without stalls
    step_seconds: float  # of one step, from its optimizer step to the next
    moved: tuple[RouteBytes, ...]
    busy: tuple[BusyTime, ...]


def with_observed(hardware: Hardware, observed: Observed, *, compute_factor: float) -> Hardware:
    """Return the hardware whose routes take as long as was observed, and whose ops take ``compute_factor`` times as long.

    Routes that take turns on a lane are slowed down or sped up alike, by what the lane was busy with them all. Lanes over
    which next to nothing has moved keep their rates, and so does what the optimizer computes.
    """
    return replace(
        hardware,
        flops=_slowed(hardware.flops, compute_factor),
        peak_flops=(),  # of the maker; what was observed need not agree with it
        attention_flops=_slowed(hardware.attention_flops, compute_factor),
        op_rates=tuple(
            replace(rate, bytes_per_second=rate.bytes_per_second / compute_factor) for rate in hardware.op_rates
        ),
        op_overhead_seconds=hardware.op_overhead_seconds * compute_factor,
        memory_bytes_per_second=hardware.memory_bytes_per_second / compute_factor,
        routes=tuple(
            replace(route, bytes_per_second=route.bytes_per_second / _lane_factor(route, hardware.routes, observed))
            for route in hardware.routes
        ),
        sources=(*hardware.sources, "the first steps of a model"),
    )


def _slowed(rates: tuple[Rate, ...], factor: float) -> tuple[Rate, ...]:
    return tuple(replace(rate, per_second=rate.per_second / factor) for rate in rates)


def _lane_factor(route: Route, routes: Iterable[Route], observed: Observed) -> float:
    """Return how many times as long as its rates say the slowest of a route's lanes was busy; 1 if it was hardly used."""
    moved = dict(observed.moved)
    factors = []
    for lane in route.lanes:
        sharing = {other.name: other for other in routes if lane in other.lanes and moved.get(other.name)}
        if sum(moved[name] for name in sharing) < _LEAST_NBYTES:
            continue
        expected = sum(moved[name] / other.bytes_per_second for name, other in sharing.items())
        busy = sum(time.seconds for time in observed.busy if not sharing.keys().isdisjoint(time.routes))
        if busy > 0:
            factors.append(busy / expected)
    return max(factors, default=1.0)
