"""The memory of each tier over a simulated step: by role, and what holds it at the peak."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from zinf_compile.ir.copies import Role
from zinf_compile.ir.glossary import Phase, Tier
from zinf_compile.ir.plan import Plan, TierPart
from zinf_compile.ir.timeline import Timeline
from zinf_compile.ir.transfers import Moved

# Parts of a tier's peak that are broken down into what they hold; other parts are one item each.
_COUNTED_PARTS = {TierPart.RESIDENTS, TierPart.ARENA, TierPart.ACTIVATIONS, TierPart.HOMES, TierPart.SWAPPED}


class MemoryRole(StrEnum):
    """What bytes are used for."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"
    STAGING = "staging"
    RESERVE = "reserve"  # planned for, and none of the above: workspace, reserve, idle arena bytes


MEMORY_ROLES = {
    Role.COMPUTE: MemoryRole.PARAMETER,
    Role.MASTER: MemoryRole.PARAMETER,
    Role.GRADIENT: MemoryRole.GRADIENT,
    Role.STATE: MemoryRole.OPTIMIZER_STATE,
}
MOVED_ROLES = {
    Moved.PARAMETERS: MemoryRole.PARAMETER,
    Moved.GRADIENT: MemoryRole.GRADIENT,
    Moved.ACTIVATION: MemoryRole.ACTIVATION,
}
_ROLE_OF_PART = {TierPart.STAGING: MemoryRole.STAGING, TierPart.OPEN: MemoryRole.ACTIVATION}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """The bytes taken on a tier from a moment on, for each role in order."""

    tier: Tier
    seconds: float
    nbytes: tuple[tuple[MemoryRole, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Something that takes bytes of a tier."""

    name: str
    role: MemoryRole
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSet:
    """What a tier holds at its peak, the largest first."""

    tier: Tier
    seconds: float
    tick: int
    held: tuple[Held, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all of it: the predicted peak."""
        return sum(item.nbytes for item in self.held)


class _Stay(NamedTuple):
    """Something that takes bytes of a tier from one tick to another."""

    held: Held
    start: int
    end: int
    is_inside: bool = (
        False  # of bytes that are taken all the time: the arena, or what is planned for swapped activations
    )


def memory_by_role(timeline: Timeline, tier: Tier) -> tuple[RoleMemory, ...]:
    """Return the bytes taken on a tier by role, from 0 on and whenever they change.

    At each moment they sum to what ``timeline.memory`` says.
    """
    plan = timeline.plan
    changes: dict[int, dict[MemoryRole, int]] = defaultdict(lambda: dict.fromkeys(MemoryRole, 0))
    changes[0][MemoryRole.RESERVE] = _region(plan, tier).nbytes
    for stay in _stays(plan, tier):
        for tick, nbytes in ((stay.start, stay.held.nbytes), (stay.end, -stay.held.nbytes)):
            changes[tick][stay.held.role] += nbytes
            if stay.is_inside:
                changes[tick][MemoryRole.RESERVE] -= nbytes
    taken = dict.fromkeys(MemoryRole, 0)
    points = []
    for tick in sorted(tick for tick in changes if tick <= plan.num_ticks):
        for role, nbytes in changes[tick].items():
            taken[role] += nbytes
        points.append(RoleMemory(tier=tier, seconds=timeline.seconds_at(tick), nbytes=tuple(taken.items())))
    return tuple(points)


def live_set(timeline: Timeline, tier: Tier) -> LiveSet:
    """Return what a tier holds at its peak: on the device where activations peak, elsewhere at the end of forward."""
    plan = timeline.plan
    tick = plan.activations.peak_tick if tier is Tier.DEVICE else plan.schedule.ticks(Phase.BACKWARD).start
    stays = [stay for stay in _stays(plan, tier) if stay.start <= tick < stay.end]
    region = _region(plan, tier)
    idle = region.nbytes - sum(stay.held.nbytes for stay in stays if stay.is_inside)
    held = [*(stay.held for stay in stays), replace(region, nbytes=idle)]
    return LiveSet(
        tier=tier,
        seconds=timeline.seconds_at(tick),
        tick=tick,
        held=tuple(sorted((item for item in held if item.nbytes), key=lambda item: (-item.nbytes, item.name))),
    )


def _region(plan: Plan, tier: Tier) -> Held:
    """Return the bytes that are reserved throughout the step, by purpose."""
    if tier is Tier.DEVICE:
        return Held(name="idle arena", role=MemoryRole.RESERVE, nbytes=plan.arena_nbytes)
    swapped = plan.tier(tier).nbytes_of(TierPart.SWAPPED)
    return Held(name="room for swapped activations", role=MemoryRole.RESERVE, nbytes=swapped)


def _stays(plan: Plan, tier: Tier) -> Iterator[_Stay]:
    """Yield everything that is ever on a tier. What is still there at the end of the step ends after the last tick."""
    always = plan.num_ticks + 1
    for placement in plan.placements:
        for kept in placement.by_role:
            nbytes = placement.nbytes_of(kept)
            if placement.home_of(kept) is tier and nbytes and not placement.by_role[kept][0].is_in_place:
                yield _Stay(Held(name=placement.parameter, role=MEMORY_ROLES[kept], nbytes=nbytes), 0, always)
    for part, nbytes in plan.tier(tier).parts:
        if part not in _COUNTED_PARTS:
            role = _ROLE_OF_PART.get(part, MemoryRole.RESERVE)
            yield _Stay(Held(name=part, role=role, nbytes=nbytes), 0, always)
    for swap in plan.swaps:
        if swap.rests_on is tier:
            held = Held(name=swap.value, role=MemoryRole.ACTIVATION, nbytes=swap.nbytes)
            end = swap.reload.release if swap.reload.stays else swap.reload.need_by
            yield _Stay(held, swap.offload.issue, end, is_inside=True)
    if tier is Tier.DEVICE:
        yield from _device_stays(plan)


def _device_stays(plan: Plan) -> Iterator[_Stay]:
    """Yield what transfers bring to the arena, and values of compute."""
    for transfer in plan.transfers:
        if transfer.offsets:
            held = Held(name=transfer.name, role=MOVED_ROLES[transfer.what], nbytes=transfer.nbytes)
            yield _Stay(held, transfer.issue, transfer.release, is_inside=True)
    for value in plan.bound:
        held = Held(name=value.name, role=MemoryRole.ACTIVATION, nbytes=value.nbytes)
        yield _Stay(held, value.live.start, value.live.end, is_inside=True)
    for span in plan.spans:
        name = f"outside of the arena, in {span.module}"
        yield _Stay(Held(name=name, role=MemoryRole.ACTIVATION, nbytes=span.peak_nbytes), span.start, span.end)
