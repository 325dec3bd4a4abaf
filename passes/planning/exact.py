"""The best plan of a small graph, and proof that no plan is faster: how close does the search come to it?

The choices are those of ``exact_model.py``, which allows a little more than a plan may do. So there are two numbers: no plan
of the graph is faster than ``bound_seconds``, and the plan that is made from the choices may be slower than that.
What is recomputed is given with the graph: a request has a bound for each candidate.
"""

from dataclasses import dataclass, replace

from zinf_compile.errors import ConfigError
from zinf_compile.facts import GraphFacts
from zinf_compile.passes.planning.build import Choice, LookAhead, PlanBuilder, Request
from zinf_compile.passes.planning.exact_model import ExactModel
from zinf_compile.passes.planning.leaving import count_resting
from zinf_compile.passes.planning.prefetch import bind_transfers
from zinf_compile.passes.planning.swaps import plan_swaps
from zinf_compile.plans import Plan
from zinf_compile.terms import StepTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPlan:
    """What no plan of a graph is faster than, and the plan that follows from the choices that led there."""

    bound_seconds: float
    is_optimal: bool  # False: time ran out, and a higher bound may hold as well
    # None where transfers do not fit their arena in one piece each, or time ran out before anything was found.
    plan: Plan | None


def plan_exactly(request: Request, graph: GraphFacts, *, seconds: float = 60.0) -> ExactPlan | None:
    """Return the bound of a graph, after so many seconds of search at the most; None where nothing fits the budgets.

    Raises ConfigError for several ranks, and for a step that is not synchronous.
    """
    timing = request.config.step_timing
    if request.num_ranks > 1 or timing is not StepTiming.SYNCHRONOUS:
        raise ConfigError(
            f"{request.name}: an exact plan is of one rank with a synchronous step, not of {request.num_ranks} with "
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
        plan = PlanBuilder(left, graph, swaps).build_moved(model.placements(solution), moved, choice)
    return ExactPlan(bound_seconds=solution.bound * model.unit_seconds, is_optimal=solution.is_optimal, plan=plan)
