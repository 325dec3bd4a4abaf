"""Where compute's own values live: most in the arena, at offsets bound ahead of time; the rest where torch puts them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zinf_compile.facts import GraphFacts, ValueFact, working_set
from zinf_compile.passes.planning.arena import Piece, plan_sequential
from zinf_compile.plans import ActivationPlan, ActivationSwap, BoundValue

# Smaller values are left to torch: together they are little, and binding costs a few microseconds each.
MIN_BOUND_NBYTES = 64 * 2**10
# One part in so many, for what else a loss makes and what the system's allocator rounds up; at other ticks the workspace has
# room for it.
_SMALL_THINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundValues:
    """Values with their arena offsets, and the arena bytes they need together."""

    values: tuple[BoundValue, ...]
    swaps: tuple[ActivationSwap, ...]
    nbytes: int

    def moved(self, nbytes: int) -> "BoundValues":
        """Return the same with all offsets so many bytes further on."""
        values = tuple(
            BoundValue(name=value.name, offset=nbytes + value.offset, nbytes=value.nbytes, live=value.live)
            for value in self.values
        )
        swaps = tuple(replace(swap, offset=nbytes + swap.offset) for swap in self.swaps)
        return BoundValues(values=values, swaps=swaps, nbytes=self.nbytes)


def unbound_values(graph: GraphFacts) -> list[ValueFact]:
    """Return the values torch allocates: saved and returned ones, and results of ops that cannot write elsewhere."""
    return [value for value in graph.values if not _is_bound(value)]


def bind_values(graph: GraphFacts, *, base: int, swaps: Sequence[ActivationSwap] = ()) -> BoundValues:
    """Return arena offsets, from ``base`` on, for every value that can be bound and every swapped one that comes back."""
    values = sorted(filter(_is_bound, graph.values), key=lambda value: (value.live.start, value.name))
    pieces = [
        *(Piece(nbytes=value.nbytes, live=value.live) for value in values),
        *(Piece(nbytes=swap.nbytes, live=swap.live) for swap in swaps),
    ]
    order = sorted(range(len(pieces)), key=lambda index: pieces[index].live.start)
    layout = plan_sequential([pieces[index] for index in order])
    offsets = {index: base + offset for index, offset in zip(order, layout.offsets, strict=True)}
    return BoundValues(
        values=tuple(
            BoundValue(name=value.name, offset=offsets[index], nbytes=value.nbytes, live=value.live)
            for index, value in enumerate(values)
        ),
        swaps=tuple(replace(swap, offset=offsets[index]) for index, swap in enumerate(swaps, start=len(values))),
        nbytes=layout.nbytes,
    )


def plan_activations(graph: GraphFacts) -> ActivationPlan:
    """Return the bytes saved for backward and the peak of what lies outside of the arena, with its tick."""
    live = working_set(unbound_values(graph), graph.num_ticks)
    peak_tick = max(range(len(live)), key=live.__getitem__, default=0)
    return ActivationPlan(
        policy=graph.policy,
        saved_nbytes=sum(value.nbytes for value in graph.values if value.saved),
        peak_nbytes=live[peak_tick] if live else 0,
        peak_tick=peak_tick,
    )


def count_outside(graph: GraphFacts, counted_nbytes: int) -> int:
    """Return the bytes by which a loss outside of the graph takes more than is counted for compute inside of it.

    It runs between forward and backward: beside what is saved and returned, with no kernel of the graph at work.
    """
    if graph.outside_nbytes == 0:
        return 0
    between = working_set(unbound_values(graph), graph.num_ticks)[graph.num_forward_ticks - 1]
    outside = graph.outside_nbytes + graph.outside_nbytes // _SMALL_THINGS
    return max(0, between + outside - counted_nbytes)


def _is_bound(value: ValueFact) -> bool:
    return value.bindable and value.nbytes >= MIN_BOUND_NBYTES
