"""Simple plans with all parameters on one tier. The planner must never be worse than they are.

There is one for each candidate graph of a request: with all activations kept, or with blocks recomputed.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from zinf_compile.ir.config import Config
from zinf_compile.ir.copies import Role
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import ActivationPolicy, Tier
from zinf_compile.ir.plan import Placement, Plan
from zinf_compile.passes.planner.placement.homes import plan_placement
from zinf_compile.passes.planner.search.build import Choice, LookAhead, PlanBuilder, Request

_MIB = 2**20
_LOOK_AHEADS = tuple(nbytes * _MIB for nbytes in (256, 128, 64, 32, 16, 8, 0))
_ANY = 2**62  # bytes: larger than any need


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A simple plan that fits the budgets. A home on the device is for compute copies only; the rest is on the host."""

    home: Tier
    policy: ActivationPolicy
    plan: Plan


def baseline_plans(request: Request) -> Iterator[Baseline]:
    """Yield the baselines that fit: for each policy and tier, with several look-aheads, issued early and late."""
    look_aheads = _LOOK_AHEADS if request.config.prefetch_memory is None else (request.config.prefetch_memory,)
    for graph in request.candidates:
        builder = PlanBuilder(request, graph)
        for home in Tier:
            placements = _place(request, home)
            for prefetch_nbytes in look_aheads:
                look_ahead = LookAhead(prefetch_nbytes=prefetch_nbytes, group_nbytes=prefetch_nbytes // 4)
                for is_eager in (False, True):
                    with suppress(CapacityError):  # too little staging for the step
                        plan = builder.build_at(placements, Choice(look_ahead=look_ahead, is_eager=is_eager))
                        if plan is not None and _does_fit(plan, request.config):
                            yield Baseline(home=home, policy=graph.policy, plan=plan)


def _place(request: Request, home: Tier) -> tuple[Placement, ...]:
    placements = plan_placement(
        request.parameters,
        replace(request.config, host_memory=_ANY),
        resident_nbytes=_ANY if home is Tier.DEVICE else 0,
        num_ranks=request.num_ranks,
    )
    if home is Tier.DEVICE:
        return placements
    return tuple(item.moved(dict.fromkeys(Role, home)) for item in placements)


def _does_fit(plan: Plan, config: Config) -> bool:
    """Return whether the peak of every tier fits. As in placement, homes leave the staging share of the host free.

    Staging is needed even if the plan does not use it: for parameters that are unfrozen later, and for checkpoints.
    """
    homes = sum(placement.nbytes_on(Tier.HOST) for placement in plan.placements)
    if homes > config.host_memory - config.staging_memory:
        return False
    capacity = {tier.tier: tier.capacity for tier in plan.tiers}
    peak = {tier.tier: tier.predicted_peak for tier in plan.tiers}
    limits = {**capacity, Tier.NVME: 0 if config.nvme is None else capacity[Tier.NVME]}
    return all(limit is None or peak[tier] <= limit for tier, limit in limits.items())
