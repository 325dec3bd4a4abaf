"""The input shapes that a program's plan holds for. A call with larger ones is planned for before it runs."""

from collections.abc import Mapping
from typing import Any

from torch import fx

from zinf_compile.facts import GraphFacts, at_sizes, is_within, join_sizes, symbols_of
from zinf_compile.passes.analysis.shapes import GraphShapes
from zinf_compile.sizes import Size


class PlannedShapes:
    """All shapes whose values are no larger than those of the shapes seen so far; at first, of those at capture."""

    def __init__(self, forward: fx.Graph, captured: GraphFacts[Size]) -> None:
        self._shapes = GraphShapes(forward)
        self._seen: set[tuple[int, ...]] = set()
        self._counted = symbols_of(captured)
        self.captured = captured
        self.facts: GraphFacts = at_sizes(captured)  # what the plan is made for

    def read(self, inputs: list[Any]) -> dict[str, int]:
        """Return the value of every symbol that some size follows, in the inputs of a call to the forward."""
        return {name: size for name, size in self._shapes.read(inputs).items() if name in self._counted}

    def is_seen(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the plan is known to hold for a call of these sizes."""
        return tuple(sizes.values()) in self._seen

    def grown(self, sizes: Mapping[str, int]) -> GraphFacts | None:
        """Return the facts to plan again for before a call of these sizes may run; None where the plan holds for it."""
        if self.is_seen(sizes):
            return None
        facts = at_sizes(self.captured, sizes)
        if not is_within(facts, self.facts):
            return join_sizes(self.facts, facts)
        self._seen.add(tuple(sizes.values()))
        return None


def dump_sizes(sizes: Mapping[str, int]) -> str:
    """Return sizes as a person writes them: ``batch=8, sequence=512``."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
