"""Transfers in progress. Each takes one or more legs: over a route, and over the links between ranks.

Lanes are used in the order in which legs become ready. A later leg takes its lane only when the leg before has ended, so
that meanwhile the lane is free for others.
"""

import heapq
from collections.abc import Sequence

from zinf_compile.hardware.world import Leg
from zinf_compile.passes.planner.simulator.lanes import Lanes


class Journeys:
    """Transfers in progress, numbered in the order in which they were started."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._names: list[str] = []
        self._ends: list[int] = []  # by journey: the node of its last leg that has been placed
        self._to_go: list[Sequence[Leg]] = []
        self._ready: list[tuple[float, int]] = []  # a heap: when the next leg may start, and the number of its journey

    def start(self, name: str, legs: Sequence[Leg], after: tuple[int, ...]) -> int:
        """Start a transfer of one or more legs after some nodes; return its number."""
        journey = len(self._names)
        self._names.append(name)
        self._ends.append(self._lanes.travel(legs[0], name, after))
        self._to_go.append(legs[1:])
        if len(legs) > 1:
            self._await_next(journey)
        return journey

    def advance(self, now: float) -> None:
        """Place the legs that can start by now."""
        while self._ready and self._ready[0][0] <= now:
            self._place_next()

    def finish(self, journey: int) -> int:
        """Place every leg that can start before the last one of a journey, and that one; return its node."""
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
