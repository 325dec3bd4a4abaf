"""Journeys: what goes leg by leg, over a route and the links, takes each lane in the order in which it gets there.

A leg is placed when it is ready and not before, so that whatever waits for the leg before it leaves lanes to others.
"""

import heapq
from collections.abc import Sequence

from zinf_compile.simulation.lanes import Lanes
from zinf_compile.world import Leg


class Journeys:
    """What is on its way. Each journey is known by its number."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._names: list[str] = []
        self._ends: list[int] = []  # by journey: the node that ends what it has been through
        self._to_go: list[Sequence[Leg]] = []
        self._ready: list[tuple[float, int]] = []  # a heap: when a journey may go on, and its number

    def start(self, name: str, legs: Sequence[Leg], after: tuple[int, ...]) -> int:
        """Begin a journey of one or more legs, after some nodes; return its number."""
        journey = len(self._names)
        self._names.append(name)
        self._ends.append(self._lanes.travel(legs[0], name, after))
        self._to_go.append(legs[1:])
        if len(legs) > 1:
            self._await_next(journey)
        return journey

    def advance(self, now: float) -> None:
        """Place the legs that are ready by now."""
        while self._ready and self._ready[0][0] <= now:
            self._place_next()

    def finish(self, journey: int) -> int:
        """Place what is ready before a journey's last leg, and that; return the node that ends it."""
        while self._to_go[journey]:
            self._place_next()
        return self._ends[journey]

    def _place_next(self) -> None:
        _, journey = heapq.heappop(self._ready)
        leg, *rest = self._to_go[journey]
        self._ends[journey] = self._lanes.travel(leg, self._names[journey], (self._ends[journey],))
        self._to_go[journey] = rest
        if rest:
            self._await_next(journey)

    def _await_next(self, journey: int) -> None:
        heapq.heappush(self._ready, (self._lanes.end_of((self._ends[journey],)), journey))
