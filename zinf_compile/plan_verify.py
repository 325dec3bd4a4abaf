"""Prove a plan before anything runs: capacity, no two live values on one byte, every read after its transfer."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from zinf_compile.errors import VerifyError
from zinf_compile.plans import SWAPPED_PART, ActivationSwap, GatherTransfer, Placement, Plan
from zinf_compile.terms import LiveRange, StepTiming, Tier, format_bytes


def verify_plan(plan: Plan) -> None:
    """Raise VerifyError if the plan breaks a promise; the message names the transfer, parameter or tier."""
    _verify_capacity(plan)
    _verify_spans(plan)
    read = {use.parameter: use.dtype for use in plan.uses}
    homes = {placement.parameter: placement for placement in plan.placements}
    for transfer in plan.transfers:
        _verify_transfer(plan, transfer, read, homes)
    _verify_swaps(plan)
    _verify_no_overlap(plan)
    _verify_reads(plan, homes)
    _verify_sinks(plan, homes)


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
        ("arena", plan.arena_nbytes),
        ("activations", plan.activations.peak_nbytes),
        ("residents", resident),
    ):
        if parts.get(part) != nbytes:
            raise VerifyError(f"device: part '{part}' says {parts.get(part)} bytes, the plan needs {nbytes}")
    for destination in (Tier.HOST, Tier.NVME):
        swapped = plan.swapped_nbytes(destination)
        counted = dict(plan.tier(destination).parts).get(SWAPPED_PART, 0)
        if counted != swapped:
            raise VerifyError(
                f"{destination}: part '{SWAPPED_PART}' says {counted} bytes, the plan's swaps rest {swapped} there"
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


def _verify_transfer(
    plan: Plan, transfer: GatherTransfer, read: Mapping[str, str], homes: Mapping[str, Placement]
) -> None:
    where = f"transfer '{transfer.name}' ({transfer.phase}, needed at tick {transfer.need_by})"
    if not 0 <= transfer.issue <= transfer.need_by < transfer.release <= plan.num_ticks:
        raise VerifyError(f"{where}: issue {transfer.issue}, need-by and release {transfer.release} are out of order")
    if plan.phase_of(transfer.issue) is not transfer.phase or plan.phase_of(transfer.release - 1) is not transfer.phase:
        raise VerifyError(f"{where}: it reaches beyond its phase, from tick {transfer.issue} to {transfer.release}")
    if not 0 <= transfer.offset <= transfer.offset + transfer.nbytes <= plan.arena_nbytes:
        raise VerifyError(
            f"{where}: bytes [{transfer.offset}, +{transfer.nbytes}) leave the arena of {plan.arena_nbytes}"
        )
    cursor = transfer.offset
    for name, offset in zip(transfer.parameters, transfer.offsets, strict=True):
        if name not in read:
            raise VerifyError(f"{where}: '{name}' moves, and nothing reads it")
        placement = homes[name]
        # What it keeps is this rank's shard; what lands are the shards of all ranks.
        home, nbytes = placement.home_read(read[name]), plan.num_ranks * placement.nbytes_read(read[name])
        if home is not transfer.source:
            raise VerifyError(f"{where}: '{name}' lives on {home}, not on {transfer.source}")
        if offset < cursor or offset + nbytes > transfer.offset + transfer.nbytes:
            raise VerifyError(f"{where}: '{name}' at offset {offset} does not fit its transfer")
        cursor = offset + nbytes


def _verify_swaps(plan: Plan) -> None:
    seen: set[str] = set()
    for swap in plan.swaps:
        _verify_swap(plan, swap)
        if swap.value in seen:
            raise VerifyError(f"swap of '{swap.value}': it leaves more than once")
        seen.add(swap.value)


def _verify_swap(plan: Plan, swap: ActivationSwap) -> None:
    where = f"swap of '{swap.value}'"
    if swap.destination is Tier.DEVICE:
        raise VerifyError(f"{where}: it goes to the device, which it is to leave")
    if not 0 <= swap.out < swap.gone < plan.num_forward_ticks:
        raise VerifyError(
            f"{where}: it leaves after tick {swap.out} and is gone by {swap.gone}, in a forward of "
            f"{plan.num_forward_ticks} ticks"
        )
    if not plan.num_forward_ticks <= swap.issue <= swap.need_by < swap.release <= plan.num_ticks:
        raise VerifyError(
            f"{where}: issue {swap.issue}, need-by {swap.need_by} and release {swap.release} are out of order, or not in "
            f"backward, which is [{plan.num_forward_ticks}, {plan.num_ticks})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArenaUse:
    """Arena bytes that hold something from tick ``start`` to ``end``."""

    name: str
    offset: int
    nbytes: int
    live: LiveRange


def _arena_uses(plan: Plan) -> list[_ArenaUse]:
    moved = [
        _ArenaUse(name=f"transfer '{item.name}'", offset=item.offset, nbytes=item.nbytes, live=item.live)
        for item in plan.transfers
    ]
    computed = [
        _ArenaUse(name=f"value '{item.name}'", offset=item.offset, nbytes=item.nbytes, live=item.live)
        for item in plan.bound
    ]
    swapped = [
        _ArenaUse(name=f"swapped value '{item.value}'", offset=item.offset, nbytes=item.nbytes, live=item.live)
        for item in plan.swaps
    ]
    return sorted([*moved, *computed, *swapped], key=lambda use: use.live.start)


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
    held: dict[str, list[GatherTransfer]] = defaultdict(list)
    for transfer in plan.transfers:
        for name in transfer.parameters:
            held[name].append(transfer)
    for use in plan.uses:
        if homes[use.parameter].home_read(use.dtype) is Tier.DEVICE:
            continue
        for tick in use.ticks:
            covering = [item for item in held[use.parameter] if item.need_by <= tick < item.release]
            if len(covering) != 1:
                raise VerifyError(
                    f"'{use.parameter}' is read at tick {tick}, where {len(covering)} transfers hold it instead of one"
                )


def _verify_sinks(plan: Plan, homes: Mapping[str, Placement]) -> None:
    for sink in plan.sinks:
        if not plan.num_forward_ticks <= sink.tick < plan.num_ticks:
            raise VerifyError(f"gradient of '{sink.parameter}' leaves at tick {sink.tick}, which is not in backward")
        home = homes[sink.parameter].gradient
        if plan.step.timing is StepTiming.IN_BACKWARD and home is Tier.NVME:
            home = Tier.HOST  # its update takes it there
        if home is not sink.destination:
            raise VerifyError(f"gradient of '{sink.parameter}' goes to {sink.destination}, which is not its home")
