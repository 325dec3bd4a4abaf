"""Updates ahead of ``step()``: which begin in backward, where that is faster, and the room for their shadows.

An update writes more than half of the bytes of a step. Beside the next forward, a third of compute, a disk or the link to a
GPU is often too slow for it, and rests during backward. An update that begins in backward is written to *shadows*, beside
the old copies, until ``step()`` takes them or drops them: until then every reader sees the old values. Shadows are extents
on nvme, or, where updates run on a GPU, in host memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zinf_compile.ir.config import Config
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import StepTiming, Tier, format_bytes
from zinf_compile.ir.plan import Placement, Plan, TierPart

# Of the elements that may be updated ahead on a GPU, those whose gradients come first. Others are updated beside forward,
# on the host's processors if they may be.
_SHARES_ON_DEVICE = (1.0, 0.875, 0.75, 0.5)


def updates_to_compare(plan: Plan, config: Config) -> tuple[Plan, ...]:
    """Return the plan as it is, and with those updates ahead of ``step()`` for whose shadows there is room.

    On a CPU of these, one has all, one only those of which nothing is read back into memory. On a GPU they are all, and
    shares of them. With ``speculate=True`` returns only the plan with all; CapacityError then if there is no room for the
    shadows.
    """
    if not _may_begin_early(plan, config):
        return (plan,)
    may = [item for item in _in_order_of_gradients(plan) if item.may_update_ahead(plan.shadow_tier)]
    if not config.speculate and _has_room_for_states(plan, may):
        return (plan,)
    choices = [may] if config.speculate else list(_choices(may, plan))
    with_some = tuple(_with(plan, ahead) for each in choices if (ahead := _within(each, plan, config)))
    return with_some if config.speculate and with_some else (plan, *with_some)


def _may_begin_early(plan: Plan, config: Config) -> bool:
    return (
        plan.schedule.is_training
        and config.speculate is not False
        and config.stage != 1  # gradients are complete at step()
        and (config.unified or plan.step.device_share > 0)
        and plan.mesh_size == 1
        and plan.step.timing is StepTiming.OVERLAPPED
        and plan.may_update_beside_compute
    )


def _in_order_of_gradients(plan: Plan) -> Sequence[Placement]:
    """Return the placements with a gradient, those first whose gradient is complete first: they gain the most."""
    homes = {placement.parameter: placement for placement in plan.placements}
    complete: dict[str, int] = {}  # with the last of its tiles
    for sink in plan.sinks:
        complete[sink.name] = max(sink.issue, complete.get(sink.name, sink.issue))
    return [homes[name] for name in sorted(complete, key=complete.__getitem__)]


def _has_room_for_states(plan: Plan, placements: Sequence[Placement]) -> bool:
    """Return whether the optimizer state of some placements fits a GPU, where updates move much less."""
    device = plan.tier(Tier.DEVICE)
    free = (device.capacity or 0) - device.predicted_peak
    return plan.shadow_tier is Tier.HOST and sum(item.optimizer_state_nbytes for item in placements) <= free


def _choices(may: Sequence[Placement], plan: Plan) -> Iterator[Sequence[Placement]]:
    if plan.shadow_tier is Tier.NVME:
        yield may
        on_nvme = [item for item in may if not item.reloaded_nbytes(Tier.NVME)]
        if len(on_nvme) < len(may):
            yield on_nvme
        return
    nbytes = sum(item.gradient_nbytes for item in may)
    for share in _SHARES_ON_DEVICE:
        left = share * nbytes
        yield [item for item in may if (left := left - item.gradient_nbytes) >= 0]


def _within(may: Sequence[Placement], plan: Plan, config: Config) -> Sequence[Placement]:
    """Return those whose shadows fit beside what else is on their tier."""
    tier = plan.tier(plan.shadow_tier)
    if tier.capacity is None:
        return may
    room = tier.capacity - tier.predicted_peak
    needed = sum(item.shadow_nbytes for item in may)
    if config.speculate and needed > room:
        option = f"{tier.tier}_memory"
        raise CapacityError(
            f"speculate=True writes updates beside the old copies until step(), which takes {format_bytes(needed)} of "
            f"{'disk' if tier.tier is Tier.NVME else 'host memory'}, and {option} leaves {format_bytes(room)}; raise it to "
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
    shadows, nbytes = plan.shadow_tier, sum(item.shadow_nbytes for item in ahead)
    tiers = tuple(
        replace(
            tier,
            predicted_peak=tier.predicted_peak + nbytes,
            parts=(*tier.parts, (TierPart.SHADOWS, nbytes)),
        )
        if tier.tier is shadows
        else tier
        for tier in plan.tiers
    )
    on_disk = sum(item.reloaded_nbytes(shadows) for item in ahead) if shadows is Tier.NVME else 0
    step = replace(
        plan.step,
        # The host's processors have the rest, unless results are to be the device's.
        device_share=1.0 if plan.step.device_share == 1.0 else 0.0,
        ahead=tuple(sorted(item.parameter for item in ahead)),
        nbytes_read=plan.step.nbytes_read + on_disk,
        nbytes_written=plan.step.nbytes_written + on_disk,
    )
    return replace(plan, step=step, tiers=tiers)
