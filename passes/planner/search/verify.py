"""Prove a plan before anything runs: capacity, no two live values on one byte, every read after its transfer."""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.glossary import LiveRange, Phase, StepTiming, Tier, format_bytes
from zinf_compile.ir.plan import Placement, Plan, TierPart
from zinf_compile.ir.transfers import Moved, Transfer, order_transfers


def verify_plan(plan: Plan) -> None:
    """Raise VerifyError if the plan is not valid; the message names the transfer, parameter or tier."""
    _verify_capacity(plan)
    _verify_spans(plan)
    read = {use.parameter: use.dtype for use in plan.uses}
    homes = {placement.parameter: placement for placement in plan.placements}
    for gather in plan.gathers:
        _verify_gather(plan, gather, read, homes)
    _verify_launches(plan)
    _verify_swaps(plan)
    if plan.transfers != order_transfers(plan.transfers):
        raise VerifyError("the transfers are not in the order in which they are issued")
    _verify_no_overlap(plan)
    _verify_reads(plan, homes)
    _verify_sinks(plan, homes)
    _verify_updates_ahead(plan, homes)


def _verify_capacity(plan: Plan) -> None:
    for tier in plan.tiers:
        total = sum(nbytes for _, nbytes in tier.parts)
        if total != tier.predicted_peak:
            raise VerifyError(
                f"{tier.tier}: the parts add up to {total} bytes, the predicted peak is {tier.predicted_peak}"
            )
        if tier.capacity is not None and tier.predicted_peak > tier.capacity:
            raise VerifyError(
                f"{tier.tier}: predicted peak {format_bytes(tier.predicted_peak)} is over its capacity "
                f"{format_bytes(tier.capacity)}"
            )
    parts = dict(plan.tier(Tier.DEVICE).parts)
    resident = sum(placement.nbytes_on(Tier.DEVICE) for placement in plan.placements)
    for part, nbytes in (
        (TierPart.ARENA, plan.arena_nbytes),
        (TierPart.ACTIVATIONS, plan.activations.peak_nbytes),
        (TierPart.RESIDENTS, resident),
    ):
        if parts.get(part) != nbytes:
            raise VerifyError(f"device: part '{part}' says {parts.get(part)} bytes, the plan needs {nbytes}")
    for destination in (Tier.HOST, Tier.NVME):
        swapped = plan.swapped_nbytes(destination)
        counted = plan.tier(destination).nbytes_of(TierPart.SWAPPED)
        if counted != swapped:
            raise VerifyError(
                f"{destination}: part '{TierPart.SWAPPED}' says {counted} bytes, the plan's swaps keep {swapped} there"
            )


def _verify_spans(plan: Plan) -> None:
    tick = 0
    for span in plan.spans:
        if span.start != tick or span.end <= span.start:
            raise VerifyError(
                f"span of {span.module} covers [{span.start}, {span.end}), expected it to begin at {tick}"
            )
        tick = span.end
    if tick != plan.num_ticks:
        raise VerifyError(f"spans end at tick {tick}, the graph has {plan.num_ticks} ticks")


def _verify_gather(plan: Plan, transfer: Transfer, read: Mapping[str, str], homes: Mapping[str, Placement]) -> None:
    phase_of = plan.schedule.phase_of
    phase = phase_of(transfer.need_by)
    where = f"transfer '{transfer.name}' ({phase}, needed at tick {transfer.need_by})"
    if not 0 <= transfer.issue <= transfer.need_by < transfer.release <= plan.num_ticks:
        raise VerifyError(f"{where}: issue {transfer.issue}, need-by and release {transfer.release} are out of order")
    if not transfer.issue <= transfer.launched_at <= transfer.need_by:
        raise VerifyError(f"{where}: launch {transfer.launch} is not between issue {transfer.issue} and need-by")
    if transfer.ends is not None and (
        plan.num_ranks > 1 or transfer.ends >= transfer.issue or phase_of(transfer.ends) is not phase
    ):
        raise VerifyError(
            f"{where}: it is issued at tick {transfer.issue}, and the experts that it gathers are known at "
            f"{transfer.ends}, of one rank"
        )
    if phase_of(transfer.issue) is not phase or phase_of(transfer.release - 1) is not phase:
        raise VerifyError(f"{where}: it reaches beyond its phase, from tick {transfer.issue} to {transfer.release}")
    if not 0 <= transfer.offset <= transfer.offset + transfer.arena_nbytes <= plan.arena_nbytes:
        raise VerifyError(
            f"{where}: bytes [{transfer.offset}, +{transfer.arena_nbytes}) leave the arena of {plan.arena_nbytes}"
        )
    cursor = transfer.offset
    for name, offset in zip(transfer.parameters, transfer.offsets, strict=True):
        if name not in read:
            raise VerifyError(f"{where}: '{name}' is gathered, but nothing reads it")
        placement = homes[name]
        # The home holds this rank's shard; the gather returns the shards of all ranks.
        home, nbytes = placement.home_read(read[name]), plan.num_ranks * placement.nbytes_read(read[name])
        if home is not transfer.source:
            raise VerifyError(f"{where}: '{name}' lives on {home}, not on {transfer.source}")
        if offset < cursor or offset + nbytes > transfer.offset + transfer.nbytes:
            raise VerifyError(f"{where}: '{name}' at offset {offset} does not fit its transfer")
        cursor = offset + nbytes
    shards = sum(homes[name].nbytes_read(read[name]) for name in transfer.parameters) if plan.num_ranks > 1 else 0
    if transfer.scratch_nbytes < shards:
        raise VerifyError(f"{where}: its scratch of {transfer.scratch_nbytes} bytes cannot hold {shards} of shards")


def _verify_launches(plan: Plan) -> None:
    """Ranks start collectives in the order of ticks, and of need-by at one tick: one order on all of them."""
    launched = sorted(plan.gathers, key=lambda gather: (gather.launched_at, gather.need_by))
    for before, after in itertools.pairwise(launched):
        if after.need_by < before.need_by:
            raise VerifyError(
                f"transfer '{after.name}' is launched at tick {after.launched_at}, after '{before.name}', which is needed "
                "after it"
            )


def _verify_swaps(plan: Plan) -> None:
    moved = [transfer for transfer in plan.transfers if transfer.what is Moved.ACTIVATION]
    for transfer in moved:
        _verify_activation(plan, transfer)
    leaving = Counter(transfer.name for transfer in moved if transfer.is_offload)
    returning = Counter(transfer.name for transfer in moved if transfer.is_reload)
    for value in leaving | returning:
        if leaving[value] > 1:
            raise VerifyError(f"swap of '{value}': it is offloaded more than once")
        if leaving[value] != returning[value]:
            raise VerifyError(
                f"swap of '{value}': it is offloaded {leaving[value]} times and reloaded {returning[value]} times"
            )
    for swap in plan.swaps:
        offload, reload = swap
        if (reload.source, reload.nbytes) != (offload.destination, offload.nbytes):
            raise VerifyError(
                f"swap of '{swap.value}': {offload.nbytes} bytes are offloaded to {offload.destination}, and "
                f"{reload.nbytes} are reloaded from {reload.source}"
            )


def _verify_activation(plan: Plan, transfer: Transfer) -> None:
    where = f"swap of '{transfer.name}'"
    forward, backward = plan.schedule.ticks(Phase.FORWARD), plan.schedule.ticks(Phase.BACKWARD)
    if transfer.is_offload:
        if transfer.destination is Tier.DEVICE:
            raise VerifyError(f"{where}: it is offloaded to the device itself")
        if not forward.start <= transfer.made_at < transfer.need_by < forward.stop:
            raise VerifyError(
                f"{where}: it is offloaded after tick {transfer.made_at} and waited for at {transfer.need_by}, in a "
                f"forward of {len(forward)} ticks"
            )
    elif not backward.start <= transfer.issue <= transfer.need_by < transfer.release <= backward.stop:
        raise VerifyError(
            f"{where}: issue {transfer.issue}, need-by {transfer.need_by} and release {transfer.release} are out of order, "
            f"or not in backward, which is [{backward.start}, {backward.stop})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArenaUse:
    """Arena bytes that hold something from tick ``start`` to ``end``."""

    name: str
    offset: int
    nbytes: int
    live: LiveRange


_KINDS = {Moved.PARAMETERS: "transfer", Moved.GRADIENT: "gradient", Moved.ACTIVATION: "swapped value"}


def _arena_uses(plan: Plan) -> list[_ArenaUse]:
    moved = [
        _ArenaUse(
            name=f"{_KINDS[item.what]} '{item.name}'", offset=item.offset, nbytes=item.arena_nbytes, live=item.live
        )
        for item in plan.transfers
        if item.offsets
    ]
    computed = [
        _ArenaUse(name=f"value '{item.name}'", offset=item.offset, nbytes=item.nbytes, live=item.live)
        for item in plan.bound
    ]
    return sorted([*computed, *moved], key=lambda use: use.live.start)


def _verify_no_overlap(plan: Plan) -> None:
    """Sweep over ticks, keeping what is live: any two of them must be disjoint in bytes."""
    live: list[_ArenaUse] = []
    for use in _arena_uses(plan):
        if not 0 <= use.offset <= use.offset + use.nbytes <= plan.arena_nbytes:
            raise VerifyError(f"{use.name}: bytes [{use.offset}, +{use.nbytes}) leave the arena of {plan.arena_nbytes}")
        live = [other for other in live if other.live.end > use.live.start]
        for other in live:
            if other.offset < use.offset + use.nbytes and use.offset < other.offset + other.nbytes:
                raise VerifyError(
                    f"{other.name} and {use.name} are both live at tick {use.live.start} and share arena bytes "
                    f"[{max(other.offset, use.offset)}, {min(other.offset + other.nbytes, use.offset + use.nbytes)})"
                )
        live.append(use)


def _verify_reads(plan: Plan, homes: Mapping[str, Placement]) -> None:
    for use in plan.uses:
        if homes[use.parameter].home_read(use.dtype) is Tier.DEVICE:
            continue
        for tick in use.ticks:
            covering = plan.by_tick.holding(use.parameter, tick)
            if len(covering) != 1:
                raise VerifyError(
                    f"'{use.parameter}' is read at tick {tick}, where {len(covering)} transfers hold it instead of one"
                )


def _verify_sinks(plan: Plan, homes: Mapping[str, Placement]) -> None:
    backward = plan.schedule.ticks(Phase.BACKWARD)
    for sink in plan.sinks:
        if sink.made_at not in backward:
            raise VerifyError(
                f"gradient of '{sink.name}' is offloaded at tick {sink.made_at}, which is not in backward"
            )
        home = homes[sink.name].gradient
        if plan.step.timing is StepTiming.IN_BACKWARD and home is Tier.NVME:
            home = Tier.HOST  # the update writes it there
        if home is not sink.destination:
            raise VerifyError(f"gradient of '{sink.name}' goes to {sink.destination}, which is not its home")


def _verify_updates_ahead(plan: Plan, homes: Mapping[str, Placement]) -> None:
    ahead = plan.step.ahead
    if list(ahead) != sorted(set(ahead)):
        raise VerifyError("the updates ahead of step() are not in order, or one is there twice")
    if ahead and plan.step.timing is not StepTiming.OVERLAPPED:
        raise VerifyError(f"updates are made ahead of step(), and those of this plan are {plan.step.timing}")
    sunk = {sink.name for sink in plan.sinks}
    for name in ahead:
        if name not in homes or name not in sunk or not homes[name].may_update_ahead(plan.shadow_tier):
            raise VerifyError(
                f"'{name}' is updated ahead of step(), and has no gradient here, or a copy that is written and not on "
                f"{plan.shadow_tier}"
            )
    needed = sum(homes[name].shadow_nbytes for name in ahead)
    for tier in plan.tiers:
        counted, expected = tier.nbytes_of(TierPart.SHADOWS), needed if tier.tier is plan.shadow_tier else 0
        if counted != expected:
            raise VerifyError(
                f"{tier.tier}: part '{TierPart.SHADOWS}' says {counted} bytes, the updates ahead need {expected}"
            )
