"""Lanes: each does one thing at a time, in the order of requests. Each thing done is a node of the simulated step."""

from collections.abc import Iterable
from typing import NamedTuple

from zinf_compile.hardware.world import Leg
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware, route_name
from zinf_compile.ir.timeline import COMPUTE_LANE, UPDATE_LANE, Event


class _Taking(NamedTuple):
    """The time in which a transfer or an update on the same processors slows compute down by a share."""

    start: float
    end: float
    share: float


class Lanes:
    """What has occupied each lane so far, as nodes. A node is identified by its index."""

    def __init__(self, hardware: Hardware) -> None:
        self.nodes: list[Event] = []
        routes = {route.name: route for route in hardware.routes}
        pairs = [(source, destination) for source in Tier for destination in Tier]
        self._routes = {pair: routes[name] for pair in pairs if (name := route_name(*pair)) in routes}
        self._last: dict[str, int] = {}  # the last node of each lane
        self._ends: list[float] = []  # of each node; kept apart, since it is read more often than anything else
        self._beside: list[_Taking] = []  # what still slows compute down
        self._updates_take = hardware.updates_take_of_compute

    def end_of(self, nodes: Iterable[int]) -> float:
        """Return when the last of some nodes ends; 0 for none."""
        last, ends = 0.0, self._ends
        for node in nodes:
            end = ends[node]
            if end > last:
                last = end
        return last

    def compute(self, name: str, start: float, end: float, after: tuple[int, ...]) -> tuple[int, ...]:
        """Append a node of compute, unless it takes no time; return the nodes after which compute continues."""
        if end <= start:
            return after
        self.nodes.append(Event(COMPUTE_LANE, name, start, end, 0, after))
        self._ends.append(end)
        return (len(self.nodes) - 1,)

    def update(self, name: str, seconds: float, after: tuple[int, ...]) -> int:
        """Append a node of the update thread."""
        node = self._append(UPDATE_LANE, (UPDATE_LANE,), name, seconds, 0, after)
        self._slow_down(node, self._updates_take)
        return node

    def move(self, source: Tier, destination: Tier, name: str, nbytes: int, after: tuple[int, ...]) -> int:
        """Append a transfer that starts after some nodes, once its route is free; KeyError for an unknown route."""
        route = self._routes[source, destination]
        node = self._append(route.name, route.lanes, name, route.seconds_for(nbytes), nbytes, after)
        self._slow_down(node, route.takes_of_compute)
        return node

    def travel(self, leg: Leg, name: str, after: tuple[int, ...]) -> int:
        """Append a leg that starts after some nodes, once all its lanes are free."""
        node = self._append(leg.route.name, leg.route.lanes, name, leg.seconds, leg.nbytes, after)
        self._slow_down(node, leg.route.takes_of_compute)
        return node

    def _slow_down(self, node: int, share: float) -> None:
        """Let a node slow down what computes beside it. While compute waits, it loses nothing."""
        if share:
            beside = self.nodes[node]
            self._beside.append(_Taking(beside.start_seconds, beside.end_seconds, share))

    def end_beside(self, start: float, end: float) -> float:
        """Return when compute from ``start`` ends that would end at ``end`` with nothing beside it."""
        if not self._beside or end <= start:
            return end
        self._beside = [taking for taking in self._beside if taking.end > start]  # compute's clock never goes back
        bounds = sorted({bound for taking in self._beside for bound in taking[:2] if bound > start})
        now, seconds = start, end - start
        for bound in bounds:
            taken = sum(taking.share for taking in self._beside if taking.start <= now < taking.end)
            pace = max(0.0, 1.0 - taken)
            if pace * (bound - now) >= seconds:
                return now + seconds / pace
            now, seconds = bound, seconds - pace * (bound - now)
        return now + seconds

    def start_of(self, source: Tier, destination: Tier, after: tuple[int, ...]) -> float:
        """Return when a transfer between two tiers would start."""
        return self.end_of(self._with_last(self._routes[source, destination].lanes, after))

    def _append(
        self, name: str, lanes: tuple[str, ...], what: str, seconds: float, nbytes: int, after: tuple[int, ...]
    ) -> int:
        nodes, last = self.nodes, self._last
        index = len(nodes)
        after = self._with_last(lanes, after)
        start = self.end_of(after)
        nodes.append(Event(name, what, start, start + seconds, nbytes, after))
        self._ends.append(start + seconds)
        for lane in lanes:
            last[lane] = index
        return index

    def _with_last(self, lanes: tuple[str, ...], after: tuple[int, ...]) -> tuple[int, ...]:
        """Return nodes, and the last nodes of some lanes."""
        last = self._last
        for lane in lanes:
            if lane in last:
                after = (*after, last[lane])
        return after
