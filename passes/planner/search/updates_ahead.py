"""Updates ahead of ``step()``: which begin in backward, where that is faster, and the disk space of their shadows.

An update writes more than half of the bytes of a step. Beside the next forward, a third of compute, a disk is often too
slow for it, and rests during backward. An update that begins in backward is written to *shadows*, extents beside the old
copies, until ``step()`` takes them or drops them: until then every reader sees the old values.
"""

from collections.abc import Sequence
from dataclasses import replace

from zinf_compile.ir.config import Config
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import StepTiming, Tier, format_bytes
from zinf_compile.ir.plan import Placement, Plan, TierPart


def updates_to_compare(plan: Plan, config: Config) -> tuple[Plan, ...]:
    """Return the plan as it is, and with those updates ahead of ``step()`` for which the disk has room.

    Of these, one has all, one only those of which nothing is read back into memory. With ``speculate=True`` returns only
    the plan with all; CapacityError then if the disk has no room for the shadows.
    """
    if not _may_begin_early(plan, config):
        return (plan,)
    may = [item for item in _in_order_of_gradients(plan) if item.may_update_ahead]
    on_nvme = [item for item in may if not item.reloaded_nbytes]
    choices = [may] if config.speculate or len(on_nvme) == len(may) else [may, on_nvme]
    with_some = tuple(_with(plan, ahead) for each in choices if (ahead := _within(each, plan, config)))
    return with_some if config.speculate and with_some else (plan, *with_some)


def _may_begin_early(plan: Plan, config: Config) -> bool:
    return (
        plan.schedule.is_training
        and config.speculate is not False
        and config.stage != 1  # gradients are complete at step()
        and config.unified
        and plan.mesh_size == 1
        and plan.step.timing is StepTiming.OVERLAPPED
        and plan.may_update_beside_compute
    )


def _in_order_of_gradients(plan: Plan) -> Sequence[Placement]:
    """Return the placements with a gradient, those first whose gradient is complete first: they gain the most."""
    homes = {placement.parameter: placement for placement in plan.placements}
    return [homes[sink.name] for sink in sorted(plan.sinks, key=lambda sink: sink.issue)]


def _within(may: Sequence[Placement], plan: Plan, config: Config) -> Sequence[Placement]:
    """Return those whose shadows fit beside what else is on nvme."""
    tier = plan.tier(Tier.NVME)
    if tier.capacity is None:
        return may
    room = tier.capacity - tier.predicted_peak
    needed = sum(item.shadow_nbytes for item in may)
    if config.speculate and needed > room:
        raise CapacityError(
            f"speculate=True writes updates beside the old copies until step(), which takes {format_bytes(needed)} of "
            f"disk, and nvme_memory leaves {format_bytes(room)}; raise it to "
            f"{-(-(tier.predicted_peak + needed) // 2**20)}MiB, or say speculate='auto', which needs no more than there is"
        )
    fitting = []
    for placement in may:
        if placement.shadow_nbytes <= room:
            fitting.append(placement)
            room -= placement.shadow_nbytes
    return fitting


def _with(plan: Plan, ahead: Sequence[Placement]) -> Plan:
    """Return the plan with the updates of some placements ahead of ``step()``."""
    nbytes = sum(item.shadow_nbytes for item in ahead)
    tiers = tuple(
        replace(
            tier,
            predicted_peak=tier.predicted_peak + nbytes,
            parts=(*tier.parts, (TierPart.SHADOWS, nbytes)),
        )
        if tier.tier is Tier.NVME
        else tier
        for tier in plan.tiers
    )
    reloaded = sum(item.reloaded_nbytes for item in ahead)
    step = replace(
        plan.step,
        ahead=tuple(sorted(item.parameter for item in ahead)),
        nbytes_read=plan.step.nbytes_read + reloaded,
        nbytes_written=plan.step.nbytes_written + reloaded,
    )
    return replace(plan, step=step, tiers=tiers)
