"""Measurements of a model's first steps, and hardware rates adjusted to agree with them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from zinf_compile.ir.hardware import Hardware, Rate, Route

_LEAST_NBYTES = 16 * 2**20  # moved over a lane: with fewer bytes, the time is dominated by other things


class RouteBytes(NamedTuple):
    """Bytes moved over a route."""

    route: str
    nbytes: int


class BusyTime(NamedTuple):
    """The time during which exactly these routes were busy."""

    routes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Measurements of some steps of one captured graph under one plan."""

    num_steps: int  # since the graph's first run, including these
    compute_seconds: float  # of one forward and one backward, without stalls
    step_seconds: float  # of one step, from its optimizer step to the next
    moved: tuple[RouteBytes, ...]
    busy: tuple[BusyTime, ...]


def with_observed(hardware: Hardware, observed: Observed, *, compute_factor: float) -> Hardware:
    """Return the hardware whose routes take as long as was observed, and whose ops take ``compute_factor`` times as long.

    Routes that share a lane are scaled alike, by the lane's total busy time. Lanes that were hardly used keep their
    rates, and so does the optimizer's compute.
    """
    return replace(
        hardware,
        flops=_slowed(hardware.flops, compute_factor),
        peak_flops=(),  # the vendor's; observed rates need not agree with them
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
    """Return measured over expected busy time of the slowest lane of a route; 1 if it was hardly used."""
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
