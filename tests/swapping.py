"""Plans with activations that leave the device, made from the planner's by hand. For tests of what carries them out."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from zinf_compile import program
from zinf_compile.facts import GraphFacts, ValueFact
from zinf_compile.passes.planning import planner as planning
from zinf_compile.passes.planning.activations import bind_values, plan_activations
from zinf_compile.passes.planning.costs import plan_spans
from zinf_compile.passes.planning.planner import Request
from zinf_compile.passes.planning.swaps import plan_swaps, without_swapped
from zinf_compile.plans import SWAPPED_PART, Plan, TierPlan
from zinf_compile.terms import Tier

Destination = Callable[[int, ValueFact], Tier | None]  # of the values that may leave, by their number; None: it stays


def swap_activations(plan: Plan, graph: GraphFacts, destinations: Mapping[str, Tier]) -> Plan:
    """Return a plan in which activations leave for the tiers that ``destinations`` says, and all else is as before."""
    swaps = plan_swaps(graph, destinations, plan.hardware)
    left = without_swapped(graph, swaps)
    transfers = max((transfer.offset + transfer.nbytes for transfer in plan.transfers), default=0)
    bound = bind_values(left, base=transfers, swaps=swaps)
    activations = plan_activations(left)
    swapped = replace(
        plan,
        bound=bound.values,
        swaps=bound.swaps,
        spans=plan_spans(left, plan.hardware),
        activations=activations,
        arena_nbytes=transfers + bound.nbytes,
    )
    return replace(swapped, tiers=tuple(_count(swapped, tier) for tier in plan.tiers))


def _count(plan: Plan, tier: TierPlan) -> TierPlan:
    if tier.tier is Tier.DEVICE:
        parts = {**dict(tier.parts), "arena": plan.arena_nbytes, "activations": plan.activations.peak_nbytes}
    else:
        parts = {**dict(tier.parts), SWAPPED_PART: plan.swapped_nbytes(tier.tier)}
    return replace(tier, predicted_peak=sum(parts.values()), parts=tuple(parts.items()))


@contextmanager
def swapping(choose: Destination, *, at_least: int = 64 * 2**10) -> Iterator[list[Plan]]:
    """Inside, every training graph is planned with swaps of the values of ``at_least`` bytes; gives the plans made so."""
    made: list[Plan] = []
    planner, levels = program.make_plan, planning.leaving_levels

    def make_plan(request: Request) -> Plan:
        plan = planner(request)
        graph = next(graph for graph in request.candidates if graph.policy is plan.activations.policy)
        may_leave = [value for value in graph.values if value.idle is not None and value.nbytes >= at_least]
        chosen = {value.name: choose(number, value) for number, value in enumerate(may_leave)}
        destinations = {name: tier for name, tier in chosen.items() if tier is not None}
        if not destinations:
            return plan
        made.append(swap_activations(plan, graph, destinations))
        return made[-1]

    program.make_plan = make_plan
    planning.leaving_levels = lambda *_: iter(())  # those that the planner chooses stay
    try:
        yield made
    finally:
        program.make_plan, planning.leaving_levels = planner, levels
