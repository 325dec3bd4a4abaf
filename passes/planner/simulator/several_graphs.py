"""A step in which several graphs run: each has its own plan, and every parameter is updated once."""

from collections.abc import Sequence
from dataclasses import replace

from zinf_compile.ir.glossary import Phase
from zinf_compile.ir.plan import Placement, Plan
from zinf_compile.ir.timeline import Timeline


def share_updates(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Return the plans of one step, to be simulated: each with the updates of the parameters that its graph reads first.

    A single plan has the updates of all parameters. Parameters that no graph reads are updated with the first.
    """
    if len(plans) < 2:
        return tuple(plans)
    read = [{use.parameter for use in plan.uses} for plan in plans]
    in_graphs = {_whole(item) for plan, names in zip(plans, read, strict=True) for item in _of(plan, names)}
    taken: set[str] = set()
    shared: list[Plan] = []
    for plan, names in zip(plans, read, strict=True):
        own = [item for item in _of(plan, names) if _whole(item) not in taken]
        if not shared:
            own += [item for item in plan.placements if _whole(item) not in in_graphs]
        taken.update(map(_whole, own))
        shared.append(_with_updates_of(plan, own))
    return tuple(shared)


def phases_of_step(timelines: Sequence[Timeline]) -> dict[Phase, float]:
    """Return the seconds of each phase of a step, from the timelines of plans that share its updates."""
    phases: dict[Phase, float] = {}
    for timeline in timelines:
        for phase, seconds in timeline.phase_seconds:
            phases[phase] = phases.get(phase, 0.0) + seconds
    return phases


def _of(plan: Plan, names: set[str]) -> list[Placement]:
    return [item for item in plan.placements if item.parameter in names]


def _whole(placement: Placement) -> str:
    return placement.tile_of or placement.parameter


def _with_updates_of(plan: Plan, own: Sequence[Placement]) -> Plan:
    """Return a plan whose step updates some of its parameters; elements are divided by the bytes of gradients."""

    def share(total: int, own_nbytes: int, all_nbytes: int) -> int:
        return total * own_nbytes // max(1, all_nbytes)

    step, every = plan.step, plan.placements
    elements = sum(item.gradient_nbytes for item in own), sum(item.gradient_nbytes for item in every)
    read = sum(item.update_nbytes_read for item in own), sum(item.update_nbytes_read for item in every)
    written = sum(item.update_nbytes_written for item in own), sum(item.update_nbytes_written for item in every)
    shared = replace(
        step,
        num_elements=share(step.num_elements, *elements),
        nbytes_read=share(step.nbytes_read, *read),
        nbytes_written=share(step.nbytes_written, *written),
    )
    return replace(plan, placements=tuple(own), step=shared)
