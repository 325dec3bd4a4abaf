"""Memory of activations: most are bound to arena offsets ahead of time, the rest is allocated by torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zinf_compile.ir.facts import GraphFacts, ValueFact, working_set
from zinf_compile.ir.glossary import Phase
from zinf_compile.ir.plan import ActivationPlan, BoundValue
from zinf_compile.ir.transfers import Transfer
from zinf_compile.passes.planner.memory.arena import Piece, plan_sequential

# Smaller values are left to torch: their total is small, and binding costs a few microseconds each.
MIN_BOUND_NBYTES = 64 * 2**10
# Add 1/64 for small tensors of a loss, and for what the allocator rounds up. At other ticks the workspace has room for
# these.
_SMALL_THINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundValues:
    """Values and reloads with their arena offsets, the offloads of the latter, and the arena bytes of all."""

    values: tuple[BoundValue, ...]
    swaps: tuple[Transfer, ...]  # offloads and reloads
    nbytes: int

    def moved(self, nbytes: int) -> "BoundValues":
        """Return the same with all offsets shifted by ``nbytes``."""
        values = tuple(
            BoundValue(name=value.name, offset=nbytes + value.offset, nbytes=value.nbytes, live=value.live)
            for value in self.values
        )
        swaps = tuple(replace(swap, offsets=(nbytes + swap.offset,)) if swap.offsets else swap for swap in self.swaps)
        return BoundValues(values=values, swaps=swaps, nbytes=self.nbytes)


def unbound_values(graph: GraphFacts) -> list[ValueFact]:
    """Return the values torch allocates: saved and returned ones, and results of ops that cannot write elsewhere."""
    return [value for value in graph.values if not _is_bound(value)]


def bind_values(graph: GraphFacts, *, base: int, swaps: Sequence[Transfer] = ()) -> BoundValues:
    """Return arena offsets, from ``base`` on, for every value that can be bound and every reload among ``swaps``."""
    values = sorted(filter(_is_bound, graph.values), key=lambda value: (value.live.start, value.name))
    reloads = [swap for swap in swaps if swap.is_reload and not swap.stays]
    pieces = [
        *(Piece(nbytes=value.nbytes, live=value.live) for value in values),
        *(Piece(nbytes=swap.nbytes, live=swap.live) for swap in reloads),
    ]
    order = sorted(range(len(pieces)), key=lambda index: pieces[index].live.start)
    layout = plan_sequential([pieces[index] for index in order])
    offsets = {index: base + offset for index, offset in zip(order, layout.offsets, strict=True)}
    placed = {
        swap.name: replace(swap, offsets=(offsets[index],)) for index, swap in enumerate(reloads, start=len(values))
    }
    return BoundValues(
        values=tuple(
            BoundValue(name=value.name, offset=offsets[index], nbytes=value.nbytes, live=value.live)
            for index, value in enumerate(values)
        ),
        swaps=tuple(placed[swap.name] if swap.is_reload and not swap.stays else swap for swap in swaps),
        nbytes=layout.nbytes,
    )


def plan_activations(graph: GraphFacts) -> ActivationPlan:
    """Return the bytes saved for backward, and the peak of activations outside the arena with its tick."""
    live = working_set(unbound_values(graph), graph.num_ticks)
    peak_tick = max(range(len(live)), key=live.__getitem__, default=0)
    return ActivationPlan(
        policy=graph.policy,
        saved_nbytes=sum(value.nbytes for value in graph.values if value.saved),
        peak_nbytes=live[peak_tick] if live else 0,
        peak_tick=peak_tick,
    )


def count_outside(graph: GraphFacts, counted_nbytes: int) -> int:
    """Return the bytes that a loss outside the graph needs beyond what is counted for compute inside it.

    It runs between forward and backward: beside saved and returned values, and while no kernel of the graph runs.
    """
    if graph.outside_nbytes == 0:
        return 0
    returns = graph.schedule.ticks(Phase.FORWARD)[-1]
    between = working_set(unbound_values(graph), graph.num_ticks)[returns]
    outside = graph.outside_nbytes + graph.outside_nbytes // _SMALL_THINGS
    return max(0, between + outside - counted_nbytes)


def _is_bound(value: ValueFact) -> bool:
    return value.bindable and value.nbytes >= MIN_BOUND_NBYTES
