"""The planned device memory in the format of PyTorch's memory snapshots, for pytorch.org/memory_viz.

One segment represents all device memory of the plan. Its bytes, from the front::

    residents   one block each, all the time
    reserve     workspace and the like, one block each, all the time
    arena       transfers, bound values and reloaded activations, at their planned offsets, from issue to release
    outside     other activations: one block per span of compute, with their peak size

Instead of a stack trace each block has one frame, ``role:tick:name``, with the tick at which its bytes are allocated.
"""

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from zinf_compile.inspect.text.whole_file import write_whole
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Plan, TierPart
from zinf_compile.passes.planner.simulator.memory import MEMORY_ROLES, MemoryRole
from zinf_compile.passes.planner.simulator.simulate import Timeline, simulate

Snapshot: TypeAlias = dict[str, object]

_COUNTED_PARTS = {TierPart.ARENA, TierPart.ACTIVATIONS, TierPart.RESIDENTS}  # which are drawn in detail
_BASE = 2**40  # the address of the first byte; arbitrary, but unlike an offset
_PROTOCOL = 4  # the newest that the website's unpickler reads


class _Block(NamedTuple):
    """Bytes allocated from one tick to another, or all the time."""

    name: str
    role: MemoryRole
    address: int
    nbytes: int
    start: int
    end: int | None


def memory_snapshot(plan: Plan) -> Snapshot:
    """Return what ``torch.cuda.memory._snapshot`` would return if the step ran as planned: plain dicts and lists."""
    timeline = simulate(plan)
    standing, moving = _place_blocks(plan)
    total = plan.tier(Tier.DEVICE).predicted_peak
    taken = sum(block.nbytes for block in standing)
    blocks = [_describe_block(block) for block in standing]
    if total > taken:
        blocks.append({"address": _BASE + taken, "size": total - taken, "requested_size": 0, "state": "inactive"})
    segment = {
        "device": 0,
        "address": _BASE,
        "total_size": total,
        "allocated_size": taken,
        "active_size": taken,
        "requested_size": taken,
        "stream": 0,
        "segment_type": "large",
        "blocks": blocks,
    }
    trace = [
        {"action": "segment_alloc", "addr": _BASE, "size": total, "stream": 0, "time_us": 0, "frames": []},
        *_describe_events([*standing, *moving], timeline),
    ]
    return {"segments": [segment], "device_traces": [trace]}


def save_memory_viz(plan: Plan, path: str | Path) -> None:
    """Write the snapshot as a pickle; the file appears whole or not at all. ConfigError if it cannot be written."""
    write_whole(path, pickle.dumps(memory_snapshot(plan), protocol=_PROTOCOL), what="memory snapshot")


def _place_blocks(plan: Plan) -> tuple[list[_Block], list[_Block]]:
    """Return the permanent blocks, and the temporary ones."""
    standing = []
    address = _BASE
    for name, role, nbytes in _list_standing(plan):
        standing.append(_Block(name, role, address, nbytes, 0, None))
        address += nbytes
    arena, outside = address, address + plan.arena_nbytes
    moving = [
        *(
            _Block(item.name, MemoryRole.PARAMETER, arena + item.offset, item.nbytes, item.issue, item.release)
            for item in plan.gathers
        ),
        *(
            _Block(item.name, MemoryRole.ACTIVATION, arena + item.offset, item.nbytes, item.live.start, item.live.end)
            for item in plan.bound
        ),
        *(
            _Block(item.name, MemoryRole.ACTIVATION, arena + item.offset, item.nbytes, item.issue, item.release)
            for _, item in plan.swaps
            if not item.stays
        ),
        *(
            _Block(f"others in {span.module}", MemoryRole.ACTIVATION, outside, span.peak_nbytes, span.start, span.end)
            for span in plan.spans
            if span.peak_nbytes
        ),
    ]
    return standing, moving


def _list_standing(plan: Plan) -> Iterator[tuple[str, MemoryRole, int]]:
    for placement in plan.placements:
        for role in placement.by_role:
            nbytes = placement.nbytes_of(role)
            if placement.home_of(role) is Tier.DEVICE and nbytes:
                yield placement.parameter, MEMORY_ROLES[role], nbytes
    for part, nbytes in plan.tier(Tier.DEVICE).parts:
        if part not in _COUNTED_PARTS and nbytes:
            yield part, MemoryRole.RESERVE, nbytes


def _describe_events(blocks: Iterable[_Block], timeline: Timeline) -> Iterator[Snapshot]:
    """Yield the allocator events of blocks by tick; at each tick, frees come before allocations."""
    events = []
    for block in blocks:
        events.append((block.start, 1, "alloc", block))
        if block.end is not None:
            events += [(block.end, 0, "free_requested", block), (block.end, 0, "free_completed", block)]
    for tick, _, action, block in sorted(events, key=lambda event: event[:2]):
        yield {
            "action": action,
            "addr": block.address,
            "size": block.nbytes,
            "stream": 0,
            "time_us": round(timeline.seconds_at(tick) * 1e6),
            "frames": _frames(block),
        }


def _describe_block(block: _Block) -> Snapshot:
    return {
        "address": block.address,
        "size": block.nbytes,
        "requested_size": block.nbytes,
        "state": "active_allocated",
        "frames": _frames(block),
    }


def _frames(block: _Block) -> list[Snapshot]:
    return [{"filename": str(block.role), "line": block.start, "name": block.name}]
