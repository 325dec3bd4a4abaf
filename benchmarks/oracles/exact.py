"""The best plan of a small graph, with a proof that no plan is faster. Measures how close the search comes to it.

The program of ``exact_model.py`` is a relaxation of what a plan may do. So there are two numbers: ``bound_seconds`` is a
lower bound on every plan of the graph, and the plan made from the solution may be slower than the bound. The graph fixes
what is recomputed: a request has one bound per candidate.
"""

from dataclasses import dataclass, replace

from benchmarks.oracles.exact_model import ExactModel
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.facts import GraphFacts
from zinf_compile.ir.glossary import StepTiming
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.placement.homes import count_placed
from zinf_compile.passes.planner.schedule.leaving import count_resting
from zinf_compile.passes.planner.schedule.prefetch import bind_transfers
from zinf_compile.passes.planner.schedule.swaps import plan_swaps
from zinf_compile.passes.planner.search.build import Choice, Homes, LookAhead, PlanBuilder, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPlan:
    """A lower bound on the step of every plan of a graph, and the plan made from the solution."""

    bound_seconds: float
    is_optimal: bool  # False: time ran out, so the bound may not be tight
    # None if the transfers cannot be placed contiguously in the arena, or if no solution was found in time.
    plan: Plan | None


def plan_exactly(request: Request, graph: GraphFacts, *, seconds: float = 60.0) -> ExactPlan | None:
    """Return the bound of a graph, after at most ``seconds`` of search; None if no plan fits the budgets.

    Raises ConfigError for several ranks, and for a step that is not synchronous.
    """
    timing = request.config.step_timing
    world = request.num_ranks * request.num_replicas
    if world > 1 or timing is not StepTiming.SYNCHRONOUS:
        raise ConfigError(
            f"{request.name}: an exact plan is of one rank with a synchronous step, not of {world} with "
            f"one {timing}; give overlap_step=False and plan for one rank"
        )
    builder = PlanBuilder(request, graph)
    model = ExactModel(request, graph, room=request.config.device_memory - builder.floor_nbytes)
    solution = model.program.minimize(model.objective, seconds=seconds)
    if solution is None:
        return None
    plan = None
    if solution.values is not None:
        swaps = plan_swaps(graph, model.destinations(solution), request.hardware)
        left = replace(request, config=count_resting(swaps).taken_from(request.config))
        residencies = dict(model.residencies(solution))
        moved = bind_transfers(tuple(residencies), tuple(residencies.values()))
        choice = Choice(look_ahead=LookAhead(prefetch_nbytes=moved.arena_nbytes, group_nbytes=0))
        homes = Homes(placed=count_placed(model.placements(solution)), moved=moved)
        plan = PlanBuilder(left, graph, swaps).build_with(homes, choice)
    return ExactPlan(bound_seconds=solution.bound * model.unit_seconds, is_optimal=solution.is_optimal, plan=plan)
