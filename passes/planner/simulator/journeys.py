"""Transfers in progress. Each takes one or more legs: over a route, and over the links between ranks.

Lanes are used in the order in which legs become ready. A later leg takes its lane only when the leg before has ended, so
that meanwhile the lane is free for others. A gather of several ranks is held behind its first leg: they start to exchange
their shards when compute launches that.
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

    def start(self, name: str, legs: Sequence[Leg], after: tuple[int, ...], *, is_held: bool = False) -> int:
        """Start a transfer of one or more legs after some nodes; return its number.

        One that is held takes its second leg only when that is launched.
        """
        journey = len(self._names)
        self._names.append(name)
        self._ends.append(self._lanes.travel(legs[0], name, after))
        self._to_go.append(legs[1:])
        if len(legs) > 1 and not is_held:
            self._await_next(journey)
        return journey

    def last_of(self, journey: int) -> int:
        """Return the node of the last leg of a journey that has been placed."""
        return self._ends[journey]

    def launch(self, journey: int, now: float, after: tuple[int, ...]) -> None:
        """Place the next leg of a journey that is held, after some nodes: compute is there now, and what came has ended."""
        self.advance(now)  # what was ready before has its lanes first
        self._place(journey, after)

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
        self._place(journey, ())

    def _place(self, journey: int, after: tuple[int, ...]) -> None:
        """Place the next leg of a journey after its last one and after some nodes."""
        leg, *rest = self._to_go[journey]
        self._ends[journey] = self._lanes.travel(leg, self._names[journey], (self._ends[journey], *after))
        self._to_go[journey] = rest
        if rest:
            self._await_next(journey)

    def _await_next(self, journey: int) -> None:
        heapq.heappush(self._ready, (self._lanes.end_of((self._ends[journey],)), journey))
