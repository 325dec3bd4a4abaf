"""Checks that a file holds a plausible plan: numbers that some machine could have, known names, ordered ticks.

A damaged or malicious file could describe a plan so large that simulating or drawing it would not end, or would run out
of memory. Whether a plan keeps its promises is another question, which ``verify_plan`` answers.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import NamedTuple

from zinf_compile.ir.copies import COMPUTE, Role
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import route_name
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.schedule import Schedule
from zinf_compile.ir.transfers import Moved, Transfer, order_transfers

_MOST_TICKS = 2_000_000  # a graph of a million ops takes hours to capture
_MOST_NBYTES = 2**60
_MOST_SECONDS = 1e12
_LEAST_RATE, _MOST_RATE = 1.0, 1e21  # per second
_MOST_NODES = 10**7
_COUNTS = ("num_nodes", "devices_per_node", "num_ranks", "num_replicas", "num_tensor_ranks", "num_stages", "num_blocks")
_SMALL = dict.fromkeys((*_COUNTS, "num_micro_batches", "num_open"), _MOST_NODES)
_SHARES = ("takes_of_compute", "updates_take_of_compute", "links_take_of_compute", "device_share", "share")


def find_nonsense(plan: Plan) -> str | None:
    """Return what no plan can have, as the rest of a sentence behind the name of its file; None for a plan."""
    checks = (_check_numbers, _check_copies, _check_ticks, _check_tiers, _check_names, _check_moves, _check_hardware)
    return next((problem for check in checks for problem in check(plan)), None)


def _check_numbers(record: object, path: str = "") -> Iterator[str]:
    """Yield the numbers that are out of all bounds, of a record and what it holds."""
    if is_dataclass(record):
        for field in fields(record):
            name = f"{path}.{field.name}" if path else field.name
            yield from _check_numbers(getattr(record, field.name), name)
    elif isinstance(record, tuple):
        for index, item in enumerate(record):
            yield from _check_numbers(item, f"{path}[{index}]")
    elif isinstance(record, int | float) and not isinstance(record, bool):
        low, high = _bounds_of(path.rpartition(".")[2], isinstance(record, int))
        if not low <= record <= high:
            yield f"is damaged at {path}: {record:.4g} is not between {low:.4g} and {high:.4g}"


def _bounds_of(name: str, is_whole: bool) -> tuple[float, float]:
    if name in _SMALL:
        return 1, _SMALL[name]
    if name in _SHARES:
        return 0, 1
    if name.endswith("per_second"):
        # 0: there are no such links, or nothing is decoded
        return (0 if "link" in name or name == "decoded_bytes_per_second" else _LEAST_RATE), _MOST_RATE
    if name == "columns":
        return 1, _MOST_NBYTES
    return 0, _MOST_NBYTES if is_whole else _MOST_SECONDS


def _check_copies(plan: Plan) -> Iterator[str]:
    for index, place in enumerate(plan.placements):
        where = f"placements[{index}].copies"
        keys = Counter(copy.key for copy in place.copies)
        if keys[COMPUTE] != 1 or max(keys.values()) > 1:
            yield f"is damaged at {where}: {place.parameter!r} has to have one compute copy, and no copy twice"
        if len({copy.slice.parameter for copy in place.copies}) > 1:
            yield f"is damaged at {where}: they are of several parameters"
        for copy in place.copies:
            part = copy.slice
            if part.dim >= len(part.shape) or part.stop > part.shape[part.dim]:
                yield f"is damaged at {where}: {part.parameter!r} of shape {part.shape} has no such slice"
            encodings = [copy.encoding, *([copy.state.encoding] if copy.state is not None else [])]
            for encoding in encodings:
                if not encoding.is_known:
                    yield f"is damaged at {where}: {encoding.dtype!r} is no dtype"
                if encoding.code is not None and (copy.role is not Role.STATE or encoding.dtype != "float32"):
                    yield f"is damaged at {where}: only optimizer state in float32 is stored as {encoding.code}"
            if (copy.state is None) != (copy.role is not Role.STATE):
                yield f"is damaged at {where}: a {copy.role} copy has to say which state it is, and no other copy"
        for role, copies in place.by_role.items():
            if len({copy.tier for copy in copies}) > 1:
                yield f"is damaged at {where}: the {role.label} of {place.parameter!r} is on several tiers"


def _check_ticks(plan: Plan) -> Iterator[str]:
    runs = plan.schedule.runs
    if not runs or plan.schedule != Schedule.of_one_graph(runs[0].end, runs[-1].end):
        yield "is damaged at schedule: it is not that of one forward, and of one backward after it"
        return
    if plan.num_ticks > _MOST_TICKS:
        yield f"is damaged at schedule: {plan.num_ticks:,} ticks are more than the {_MOST_TICKS:,} that a graph can have"
    if any(run.end < run.start for run in runs):
        yield "is damaged at schedule: a run ends before it starts"
    tick = 0
    for index, span in enumerate(plan.spans):
        if span.start != tick or span.end <= span.start:
            yield f"is damaged at spans[{index}]: [{span.start}, {span.end}) does not follow tick {tick}"
        tick = span.end
    if tick != plan.num_ticks or tick == 0:
        yield f"is damaged at spans: they end at tick {tick}, and there are {plan.num_ticks}"


def _check_tiers(plan: Plan) -> Iterator[str]:
    found = Counter(tier.tier for tier in plan.tiers)
    for tier in Tier:
        if found[tier] != 1:
            yield f"is damaged at tiers: it speaks {found[tier]} times of {tier}, not once"


def _check_names(plan: Plan) -> Iterator[str]:
    known = Counter(placement.parameter for placement in plan.placements)
    read = Counter(use.parameter for use in plan.uses)
    for counted, what in ((known, "placements"), (read, "uses")):
        for name, count in counted.items():
            if count > 1:
                yield f"is damaged at {what}: it names {name!r} {count} times"
    named = (
        *(("uses", use.parameter) for use in plan.uses),
        *(("transfers", name) for transfer in plan.transfers for name in transfer.parameters),
    )
    gathered = plan.by_tick.gathered
    for what, name in named:
        if name not in known or (what == "transfers" and name in gathered and name not in read):
            yield f"is damaged at {what}: {name!r} is no parameter of the plan, or nothing reads it"
    for index, use in enumerate(plan.uses):
        if not use.ticks or list(use.ticks) != sorted(use.ticks) or use.ticks[-1] >= plan.num_ticks:
            yield f"is damaged at uses[{index}].ticks: they are not ticks of the plan in their order"
    leaving = Counter(transfer.name for transfer in plan.transfers if transfer.is_offload)
    returning = Counter(transfer.name for transfer in plan.transfers if transfer.is_reload)
    for name in leaving | returning:
        if leaving[name] != 1 or returning[name] != 1:
            yield (
                f"is damaged at transfers: {name!r} leaves {leaving[name]} times and comes back {returning[name]} times"
            )


class _Stay(NamedTuple):
    """Ticks that have to be in this order, and where the arena bytes end that are taken meanwhile."""

    ticks: tuple[int, ...]
    end: int = 0


def _check_moves(plan: Plan) -> Iterator[str]:
    for index, move in enumerate(plan.transfers):
        if (problem := _judge_way(move)) is not None:
            yield f"is damaged at transfers[{index}]: {problem}"
    if plan.transfers != order_transfers(plan.transfers):
        yield "is damaged at transfers: they are not in the order in which they are issued"
    stays = [
        *(
            (
                f"transfers[{index}]",
                _Stay((move.issue, move.need_by, move.release), move.offset + move.nbytes if move.offsets else 0),
            )
            for index, move in enumerate(plan.transfers)
        ),
        *(("transfers", _Stay((swap.offload.need_by, swap.reload.issue))) for swap in plan.swaps),
        *(
            (f"bound[{index}]", _Stay((value.live.start, value.live.end), value.offset + value.nbytes))
            for index, value in enumerate(plan.bound)
        ),
    ]
    for where, stay in stays:
        if list(stay.ticks) != sorted(stay.ticks) or stay.ticks[-1] > plan.num_ticks:
            yield f"is damaged at {where}: ticks {', '.join(map(str, stay.ticks))} are not ones of the plan in their order"
        if stay.end > plan.arena_nbytes:
            yield f"is damaged at {where}: it ends beyond the {plan.arena_nbytes} bytes of the arena"


def _judge_way(move: Transfer) -> str | None:
    """Return what is wrong with what a transfer moves, from where or to where; None if it could be."""
    num_offsets = 0
    if move.what is Moved.PARAMETERS:
        if move.source is Tier.DEVICE or move.destination is not Tier.DEVICE or not move.parameters:
            return "it moves no parameters to the device"
        num_offsets = len(move.parameters)
    elif move.what is Moved.GRADIENT:
        if move.source is not Tier.DEVICE or move.parameters != (move.name,) or move.issue == 0:
            return "it moves no gradient that the device has"
    else:
        is_read_there = move.source is Tier.HOST and move.stays
        crosses = (move.source is Tier.DEVICE) != (move.destination is Tier.DEVICE)
        if move.parameters or not (crosses or is_read_there) or move.issue == 0:
            return "it moves no activation from the device or to it, and none is read in host memory"
        num_offsets = int(move.is_reload and not move.stays)
    if len(move.offsets) != num_offsets:
        return f"it has {len(move.offsets)} offsets in the arena, not {num_offsets}"
    return None


def _check_hardware(plan: Plan) -> Iterator[str]:
    hardware = plan.hardware
    if not hardware.flops:
        yield "is damaged at hardware.flops: it is empty"
    routes = Counter(route.name for route in hardware.routes)
    used = {Tier.DEVICE, Tier.HOST} | ({Tier.NVME} if _uses_disk(plan) else set())
    for source in used:
        for destination in used - {source}:
            if routes[route_name(source, destination)] != 1:
                yield f"is damaged at hardware.routes: there is not one {route_name(source, destination)}"
    for index, route in enumerate(hardware.routes):
        if not route.lanes:
            yield f"is damaged at hardware.routes[{index}].lanes: it is empty"
    yield from _check_links(plan)


def _uses_disk(plan: Plan) -> bool:
    homes = {copy.tier for place in plan.placements for copy in place.copies}
    homes |= {tier for transfer in plan.transfers for tier in (transfer.source, transfer.destination)}
    return Tier.NVME in homes or plan.step.nbytes_read > 0 or plan.step.nbytes_written > 0


def _check_links(plan: Plan) -> Iterator[str]:
    hardware, where = plan.hardware, "num_ranks" if plan.num_replicas == 1 else "num_replicas"
    try:
        filled = hardware.with_mesh(
            plan.num_ranks, plan.num_replicas, num_tensor_ranks=plan.num_tensor_ranks, num_stages=plan.num_stages
        )
    except ConfigError as error:
        yield f"is damaged at {where}: {error}"
        return
    if filled.num_nodes > hardware.num_nodes:
        yield (
            f"is damaged at {where}: {plan.world_size} ranks do not fit {hardware.num_nodes} nodes of "
            f"{hardware.devices_per_node} devices each"
        )
