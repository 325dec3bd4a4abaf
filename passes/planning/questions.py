"""Questions to a plan that are answered by planning again: what if, the largest that fits, the smallest that works."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from zinf_compile.errors import CapacityError
from zinf_compile.facts import GraphFacts, at_sizes, join_sizes
from zinf_compile.passes.planning.planner import Request, make_plan

_MOST = 2**31  # of a dimension; what fits at this size fits at any


def largest_that_fits(fits: Callable[[int], bool], *, start: int = 1) -> int:
    """Return the largest whole number for which ``fits`` is true, up to 2^31; 0 if it is for none."""
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
        if low >= _MOST:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def describe_largest(request: Request, sizes: Mapping[str, int]) -> str:
    """Return, for inputs that ``request``'s plan has no room for, the largest of each grown dimension that would fit.

    The plan must go on to hold for what its one candidate holds for; the other dimensions are those of the inputs.
    """
    (planned,), (captured,) = request.candidates, request.captured
    sentences = []
    for symbol in planned.symbols:
        if sizes[symbol.name] <= symbol.value:
            continue

        def fits(size: int, name: str = symbol.name) -> bool:
            return does_fit(request, join_sizes(planned, at_sizes(captured, {**sizes, name: size})))

        others = ", ".join(f"{name}={size}" for name, size in sizes.items() if name != symbol.name)
        largest = largest_that_fits(fits)
        found = f"is {largest}" if largest else "is none"
        sentences.append(f"the largest {symbol.name} that fits{f' with {others}' if others else ''} {found}")
    return "; ".join(sentences)


def does_fit(request: Request, graph: GraphFacts) -> bool:
    """Return whether a plan for one graph fits the budgets of a request."""
    try:
        make_plan(replace(request, candidates=(graph,)))
    except CapacityError:
        return False
    return True
