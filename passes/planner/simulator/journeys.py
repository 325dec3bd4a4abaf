"""Transfers in progress. Each takes one or more legs: over a route, and over the links between ranks.

Lanes are used in the order in which legs become ready. A later leg takes its lane only when the leg before has ended, so
that meanwhile the lane is free for others. The gather of several ranks may be held behind its first leg, until compute
launches the second one: then they exchange their shards.
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
        self._after: list[tuple[int, ...]] = []  # by journey: the nodes that its first leg comes after
        self._placed: list[list[int]] = []  # by journey: the nodes of its legs so far
        self._legs: list[Sequence[Leg]] = []  # by journey
        self._ready: list[tuple[float, int]] = []  # a heap: when the next leg may start, and the number of its journey

    def start(self, name: str, legs: Sequence[Leg], after: tuple[int, ...], *, is_held: bool = False) -> int:
        """Start a transfer of one or more legs after some nodes; return its number.

        One that ``is_held`` takes its second leg only when that is launched.
        """
        journey = len(self._names)
        self._names.append(name)
        self._after.append(after)
        self._placed.append([])
        self._legs.append(legs)
        self._place(journey, (), is_held=is_held)
        return journey

    def last_of(self, journey: int) -> int:
        """Return the node of the last leg of a journey that has been placed."""
        return self._placed[journey][-1]

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
        return self.reach(journey, len(self._legs[journey]) - 1)

    def reach(self, journey: int, leg: int) -> int:
        """Place every leg that can start before one of a journey, which is not held, and that one; return its node."""
        while len(self._placed[journey]) <= leg:
            self._place_next()
        return self._placed[journey][leg]

    def _place_next(self) -> None:
        _, journey = heapq.heappop(self._ready)
        self._place(journey, ())

    def _place(self, journey: int, after: tuple[int, ...], *, is_held: bool = False) -> None:
        """Place the next leg of a journey after its last one and after some nodes; hold it before the one that follows."""
        legs, placed = self._legs[journey], self._placed[journey]
        before = placed[-1:] or self._after[journey]
        node = self._lanes.travel(legs[len(placed)], self._names[journey], (*before, *after))
        placed.append(node)
        if len(placed) < len(legs) and not is_held:
            heapq.heappush(self._ready, (self._lanes.end_of((node,)), journey))
