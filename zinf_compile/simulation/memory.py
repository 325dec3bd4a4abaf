"""The memory of each tier over a simulated step: by role, and what it is made of where it is fullest."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from zinf_compile.plans import OPEN_PART, SWAPPED_PART, Plan
from zinf_compile.simulation.timeline import Timeline
from zinf_compile.terms import Tier

# Parts of a tier's peak that are told by what they are made of; other parts are told as they are.
_COUNTED_PARTS = {"residents", "arena", "activations", "homes", SWAPPED_PART}


class MemoryRole(StrEnum):
    """What bytes are taken for."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"
    STAGING = "staging"
    RESERVE = "reserve"  # planned for, and nothing of the others: workspace, reserve, arena bytes that are idle


_ROLE_OF_PART = {"staging": MemoryRole.STAGING, OPEN_PART: MemoryRole.ACTIVATION}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """The bytes taken on a tier from a moment on, by role, in the roles' order and with zeros."""

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
    """What is on a tier when most is, the largest first."""

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
    """Return what is on a tier when most is: at the tick where activations peak, at the end of forward elsewhere."""
    plan = timeline.plan
    tick = plan.activations.peak_tick if tier is Tier.DEVICE else plan.num_forward_ticks
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
    """Return the bytes that are taken all the time, and held by one thing after another."""
    if tier is Tier.DEVICE:
        return Held(name="idle arena", role=MemoryRole.RESERVE, nbytes=plan.arena_nbytes)
    swapped = dict(plan.tier(tier).parts).get(SWAPPED_PART, 0)
    return Held(name="room for swapped activations", role=MemoryRole.RESERVE, nbytes=swapped)


def _stays(plan: Plan, tier: Tier) -> Iterator[_Stay]:
    """Yield all that is ever on a tier. What stays to the end of the step stays beyond the last tick."""
    always = plan.num_ticks + 1
    for placement in plan.placements:
        copies = (
            (MemoryRole.PARAMETER, placement.compute, placement.compute_nbytes),
            (MemoryRole.PARAMETER, placement.master, placement.master_nbytes),
            (MemoryRole.GRADIENT, placement.gradient, placement.gradient_nbytes),
            (MemoryRole.OPTIMIZER_STATE, placement.optimizer_state, placement.optimizer_state_nbytes),
        )
        for role, home, nbytes in copies:
            if home is tier and nbytes:
                yield _Stay(Held(name=placement.parameter, role=role, nbytes=nbytes), 0, always)
    for part, nbytes in plan.tier(tier).parts:
        if part not in _COUNTED_PARTS:
            role = _ROLE_OF_PART.get(part, MemoryRole.RESERVE)
            yield _Stay(Held(name=part, role=role, nbytes=nbytes), 0, always)
    for swap in plan.swaps:
        held = Held(name=swap.value, role=MemoryRole.ACTIVATION, nbytes=swap.nbytes)
        if tier is Tier.DEVICE:
            yield _Stay(held, swap.issue, swap.release, is_inside=True)
        elif swap.destination is tier:
            yield _Stay(held, swap.out + 1, swap.need_by, is_inside=True)
    if tier is Tier.DEVICE:
        yield from _device_stays(plan)


def _device_stays(plan: Plan) -> Iterator[_Stay]:
    """Yield gathered parameters and values of compute."""
    for transfer in plan.transfers:
        held = Held(name=transfer.name, role=MemoryRole.PARAMETER, nbytes=transfer.nbytes)
        yield _Stay(held, transfer.issue, transfer.release, is_inside=True)
    for value in plan.bound:
        held = Held(name=value.name, role=MemoryRole.ACTIVATION, nbytes=value.nbytes)
        yield _Stay(held, value.live.start, value.live.end, is_inside=True)
    for span in plan.spans:
        name = f"outside of the arena, in {span.module}"
        yield _Stay(Held(name=name, role=MemoryRole.ACTIVATION, nbytes=span.peak_nbytes), span.start, span.end)
