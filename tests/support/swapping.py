"""The planner's plans, modified to offload chosen activations. For tests of their execution."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from zinf_compile.driver import planning
from zinf_compile.ir.facts import GraphFacts, ValueFact
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Plan, TierPart, TierPlan
from zinf_compile.ir.transfers import order_transfers
from zinf_compile.passes.planner.memory.activations import bind_values, plan_activations
from zinf_compile.passes.planner.schedule.spans import plan_spans
from zinf_compile.passes.planner.schedule.swaps import plan_swaps, without_swapped
from zinf_compile.passes.planner.search import planner as search
from zinf_compile.passes.planner.search.planner import Request, Searches

Destination = Callable[[int, ValueFact], Tier | None]  # from the index and the value; None: it stays on the device


def swap_activations(
    plan: Plan, graph: GraphFacts, destinations: Mapping[str, Tier], *, in_place: bool = False
) -> Plan:
    """Return the plan with activations offloaded to the tiers in ``destinations``, and no other change."""
    swaps = plan_swaps(graph, destinations, plan.hardware, in_place=in_place)
    left = without_swapped(graph, swaps)
    transfers = max((transfer.offset + transfer.nbytes for transfer in plan.gathers), default=0)
    bound = bind_values(left, base=transfers, swaps=swaps)
    activations = plan_activations(left)
    swapped = replace(
        plan,
        transfers=order_transfers((*plan.gathers, *bound.swaps, *plan.sinks)),
        bound=bound.values,
        spans=plan_spans(left, plan.hardware),
        activations=activations,
        arena_nbytes=transfers + bound.nbytes,
    )
    return replace(swapped, tiers=tuple(_count(swapped, tier) for tier in plan.tiers))


def _count(plan: Plan, tier: TierPlan) -> TierPlan:
    if tier.tier is Tier.DEVICE:
        parts = {
            **dict(tier.parts),
            TierPart.ARENA: plan.arena_nbytes,
            TierPart.ACTIVATIONS: plan.activations.peak_nbytes,
        }
    else:
        parts = {**dict(tier.parts), TierPart.SWAPPED: plan.swapped_nbytes(tier.tier)}
    return replace(tier, predicted_peak=sum(parts.values()), parts=tuple(parts.items()))


@contextmanager
def swapping(choose: Destination, *, at_least: int = 64 * 2**10) -> Iterator[list[Plan]]:
    """Plan every training graph inside with swaps of values of ``at_least`` bytes; yields the list of these plans."""
    made: list[Plan] = []
    planner, levels = planning.make_plan, search.leaving_levels

    def make_plan(request: Request, searches: Searches) -> Plan:
        plan = planner(request, searches)
        graph = next(graph for graph in request.candidates if graph.policy is plan.activations.policy)
        may_leave = [value for value in graph.values if value.idle is not None and value.nbytes >= at_least]
        chosen = {value.name: choose(number, value) for number, value in enumerate(may_leave)}
        destinations = {name: tier for name, tier in chosen.items() if tier is not None}
        if not destinations:
            return plan
        made.append(swap_activations(plan, graph, destinations, in_place=request.config.integrated))
        return made[-1]

    planning.make_plan = make_plan
    search.leaving_levels = lambda *_, **__: iter(())  # disable the planner's own choice
    try:
        yield made
    finally:
        planning.make_plan, search.leaving_levels = planner, levels
