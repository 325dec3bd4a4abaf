"""The input shapes that a program's plan is valid for. A call with larger ones is planned before it runs."""

from collections.abc import Mapping
from typing import Any

from torch import fx

from zinf_compile.ir.facts import GraphFacts, at_sizes, is_within, join_sizes, symbols_of
from zinf_compile.ir.sizes import Size
from zinf_compile.passes.analysis.shapes import GraphShapes


class PlannedShapes:
    """All shapes whose values are no larger than at the shapes seen so far, starting with those at capture."""

    def __init__(self, forward: fx.Graph, captured: GraphFacts[Size]) -> None:
        self._shapes = GraphShapes(forward)
        self._seen: set[tuple[int, ...]] = set()
        self._counted = symbols_of(captured)
        self.captured = captured
        self.facts: GraphFacts = at_sizes(captured)  # what the plan was made for

    def read(self, inputs: list[Any]) -> dict[str, int]:
        """Return the value of every symbol that a size depends on, read from the inputs of a forward call."""
        return {name: size for name, size in self._shapes.read(inputs).items() if name in self._counted}

    def is_seen(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the plan is known to be valid for a call with these sizes."""
        return tuple(sizes.values()) in self._seen

    def grown(self, sizes: Mapping[str, int]) -> GraphFacts | None:
        """Return the facts to replan for before a call with these sizes may run; None if the plan is valid for it."""
        if self.is_seen(sizes):
            return None
        facts = at_sizes(self.captured, sizes)
        if not is_within(facts, self.facts):
            return join_sizes(self.facts, facts)
        self._seen.add(tuple(sizes.values()))
        return None


def dump_sizes(sizes: Mapping[str, int]) -> str:
    """Format sizes: ``batch=8, sequence=512``."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
