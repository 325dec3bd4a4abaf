"""Plans as text, for a person and for golden tests: the dump of a plan."""

import itertools
import textwrap
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from zinf_compile.hardware.world import World
from zinf_compile.inspect.arena_chart import bound_region, dump_arena, offset_unit, transfer_range
from zinf_compile.inspect.pipeline_summary import dump_pipeline
from zinf_compile.inspect.step_summary import dump_live_set, dump_summary
from zinf_compile.inspect.text.plan_names import NamePattern, cut_name, join_name, name_pattern, summarize_names
from zinf_compile.inspect.text.text_layout import Folded, clip, fold_rows, join_unbroken, make_table
from zinf_compile.ir.copies import Role
from zinf_compile.ir.glossary import Phase, StepTiming, Tier, format_bytes, format_seconds, printable
from zinf_compile.ir.hardware import route_name
from zinf_compile.ir.pipeline import PipelineSchedule
from zinf_compile.ir.plan import Placement, Plan, RecomputedValue, TierPart
from zinf_compile.ir.slices import shard_size
from zinf_compile.ir.transfers import Transfer
from zinf_compile.passes.planner.simulator.simulate import Event, Timeline, simulate


def dump_plan(plan: Plan, *, width: int = 100) -> str:
    """Return a plan as text of at most ``width`` columns, with the seconds that simulating it predicts."""
    timeline = simulate(plan)
    sections = (
        _dump_header(plan, width),
        dump_pipeline(plan.pipeline, width) if plan.pipeline is not None else [],
        _dump_tiers(plan, width),
        _dump_placements(plan, width),
        _dump_transfers(plan, width),
        _dump_swaps(plan, width),
        dump_arena(plan, width),
        _dump_values(plan),
        _dump_predicted(timeline, width),
        _dump_routes(timeline, width),
        dump_summary(timeline),
        dump_live_set(timeline, width),
    )
    return "\n\n".join("\n".join(clip(printable(line), width) for line in section) for section in sections if section)


def _dump_header(plan: Plan, width: int) -> list[str]:
    kind = "training" if plan.schedule.is_training else "inference"
    forward, backward = (len(plan.schedule.ticks(phase)) for phase in (Phase.FORWARD, Phase.BACKWARD))
    ticks = f"{plan.num_ticks} ticks: {forward} forward, {backward} backward"
    dtype = plan.compute_dtype or "each parameter's own dtype"
    return [
        f"plan v{plan.version}  {plan.name}  {kind}",
        f"  compute in {dtype}; {ticks}; rates of {plan.hardware.name}",
        *_dump_world(plan),
        *(
            line
            for note in plan.notes
            for line in textwrap.wrap(note, width, initial_indent="  ", subsequent_indent="    ")
        ),
    ]


def _dump_world(plan: Plan) -> list[str]:
    """Return lines on the ranks that the plan is for; none for one rank."""
    world, nodes = World.of_plan(plan), f"{plan.hardware.num_nodes} node{'s' if plan.hardware.num_nodes > 1 else ''}"
    if plan.pipeline is not None and plan.pipeline.schedule is PipelineSchedule.ROUNDS:
        return [
            f"  of one of {plan.world_size:,} ranks on {nodes}, which has stages of the model, and computes them",
            "  for the batches of all ranks",
        ]
    if plan.num_tensor_ranks * plan.num_stages > 1:
        lines = [
            f"  of one of {plan.world_size:,} ranks on {nodes}: {plan.num_stages:,} stages x {plan.mesh_size:,} "
            f"data-parallel x {plan.num_tensor_ranks:,} tensor-parallel"
        ]
        if plan.num_ranks > 1:
            lines += [
                f"  it keeps its shard, among {plan.num_ranks:,} ranks, of what is not resident, and gathers the full",
                f"  value over the {world.links.name}",
            ]
        if plan.num_replicas > 1:
            order = "in the order of ranks" if plan.is_reduced_in_order else "in any order"
            lines.append(
                f"  gradients are added up between {plan.num_replicas:,} replicas over the {world.replica_links.name}, "
                f"{order}"
            )
        return lines
    if plan.mesh_size == 1:
        return []
    if plan.num_replicas == 1:
        return [
            f"  of one of {plan.num_ranks:,} ranks on {nodes}, which keeps its shard of what is not resident, and gathers",
            f"  the full value over the {world.links.name}",
        ]
    ranks, keeps = "1 rank", "everything"
    if plan.num_ranks > 1:
        ranks = f"{plan.num_ranks:,} ranks"
        keeps = f"its shard of what is not resident, and gathers the full value over the {world.links.name}"
    order = "in the order of ranks" if plan.is_reduced_in_order else "in any order"
    return [
        f"  of one of {plan.mesh_size:,} ranks on {nodes}, in {plan.num_replicas:,} replicas of {ranks} each",
        f"  it keeps {keeps}",
        f"  gradients are added up between replicas over the {world.replica_links.name}, {order}",
    ]


def _dump_tiers(plan: Plan, width: int) -> list[str]:
    rows = []
    for tier in plan.tiers:
        made_of = join_unbroken(f"{part} {format_bytes(nbytes)}" for part, nbytes in tier.parts if nbytes)
        capacity = "the disk" if tier.capacity is None else format_bytes(tier.capacity)
        share = f"{tier.predicted_peak / tier.capacity:.0%}" if tier.capacity else "-"
        rows.append((str(tier.tier), capacity, format_bytes(tier.predicted_peak), share, made_of))
    return make_table(("tiers", "capacity", "peak", "used", "made of"), rows, align="<>>><", width=width, flexible=4)


def tell_rows(placements: Iterable[Placement]) -> Iterator[str]:
    """Yield what storing frozen weights as rows of int8 saves, outside of the device."""
    rows = [
        copy
        for place in placements
        for copy in place.copies
        if copy.encoding.rows is not None and copy.tier is not Tier.DEVICE
    ]
    if rows:
        exact = sum(copy.gathered_nbytes for copy in rows)
        yield f"int8: {format_bytes(sum(copy.nbytes for copy in rows))}, exactly {format_bytes(exact)}"


def tell_codes(placements: Iterable[Placement]) -> Iterator[str]:
    """Yield how optimizer state is stored in fewer bits, what it takes, and what it would take exactly."""
    coded = [copy for place in placements for copy in place.copies if copy.encoding.code is not None]
    for code in sorted({copy.encoding.code for copy in coded if copy.encoding.code is not None}, key=str):
        those = [copy for copy in coded if copy.encoding.code == code]
        exact = sum(replace(copy, encoding=replace(copy.encoding, code=None)).nbytes for copy in those)
        yield f"{code}: {format_bytes(sum(copy.nbytes for copy in those))}, exactly {format_bytes(exact)}"


def _dump_placements(plan: Plan, width: int) -> list[str]:
    rows: list[tuple[str, ...] | str] = []
    for group in _group_placements(plan.placements):
        homes = (str(home) if home else "-" for home in group.homes)
        rows.append((group.label, str(len(group.placements)), format_bytes(group.nbytes), *homes))
        if len(group.suffixes) > 1:
            rows.append(f"    {', '.join(group.suffixes)}")
    header = ("placement", "count", "bytes", "compute", "master", "gradient", "optimizer")
    lines = make_table(header, rows, align="<>><<<<", width=width, flexible=0)
    read = {use.parameter: use.dtype for use in plan.uses}
    narrowed = {placement.parameter: placement for placement in plan.placements if placement.is_narrowed}
    for dtype in sorted({read[name] for name in narrowed.keys() & read.keys()}):
        names = [name for name in narrowed if read.get(name) == dtype]
        copies = {"compute" if narrowed[name].compute_dtype == dtype else "master" for name in names}
        lines.append(f"  moved in {dtype}, by their {' and '.join(sorted(copies))} copies: {summarize_names(names)}")
    lines += (f"  optimizer state as {told}" for told in tell_codes(plan.placements))
    if in_place := {each.tile_of or each.parameter for each in plan.placements if each.in_place_nbytes}:
        lines.append(
            f"  {format_bytes(plan.in_place_nbytes)} of {len(in_place)} frozen parameters stay in the files of their weights"
        )
    lines += (f"  frozen weights as {told}" for told in tell_rows(plan.placements))
    unread = [placement.parameter for placement in plan.placements if placement.parameter not in read]
    if unread:
        lines.append(f"  {len(unread)} not read by this graph: {', '.join(unread)}")
    return lines


def _dump_transfers(plan: Plan, width: int) -> list[str]:
    if not plan.gathers:
        return ["transfers  none: every parameter this graph reads is resident"]
    unit = offset_unit(plan)
    digits = len(str(plan.arena_nbytes // unit.nbytes))
    total = format_bytes(sum(transfer.moved_nbytes for transfer in plan.gathers))
    rows: list[tuple[str, ...] | str] = []
    for row in fold_rows(
        _fold_tiles(plan),
        lambda tiles: (
            name_pattern(tiles[0].name),
            plan.schedule.phase_of(tiles[0].issue),
            tiles[0].source,
            sum(tile.nbytes for tile in tiles),
        ),
    ):
        if isinstance(row, Folded):
            folded = [transfer for tiles in row.items for transfer in tiles]
            nbytes = format_bytes(sum(item.nbytes for item in folded))
            names = summarize_names(item.name for item in folded)
            rows.append(f"      ... {len(folded)} more alike, {nbytes}: {names}")
            continue
        first, last, nbytes_moved = row[0], row[-1], sum(item.nbytes for item in row)
        offsets = (f"{number // unit.nbytes:>{digits}}" for number in transfer_range(first))
        count = f", {len(row)} tiles" if len(row) > 1 else ""
        if first.ends is not None:
            count += f", {first.share:.0%} of the experts"
        rows.append(
            (
                f"{first.issue:>5} -> {first.need_by:>7} -> {last.release:>7}",
                route_name(first.source, Tier.DEVICE),
                summarize_names(item.name for item in row) + count,
                *((format_bytes(shard_size(nbytes_moved, plan.num_ranks)),) if plan.num_ranks > 1 else ()),
                format_bytes(nbytes_moved),
                f"[{', '.join(offsets)})",
            )
        )
    sizes = ("bytes",) if plan.num_ranks == 1 else ("shard", "full")
    header = ("issue -> need by -> release", "route", "name", *sizes, f"arena, {unit.name}")
    ahead = format_bytes(plan.prefetch_nbytes)
    return [
        f"transfers  {len(plan.gathers)} of {total} in all, at most {ahead} ahead of compute",
        *make_table(header, rows, align=f"<<<{'>' * len(sizes)}<", width=width, flexible=2, indent="  "),
    ]


def _fold_tiles(plan: Plan) -> list[tuple[Transfer, ...]]:
    """Return groups of transfers: consecutive tiles of one parameter in a phase together, all others alone."""
    tile_of = {placement.parameter: placement.tile_of or placement.parameter for placement in plan.placements}

    def read(transfer: Transfer) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tile_of[name] for name in transfer.parameters))

    phase_of = plan.schedule.phase_of
    runs = itertools.groupby(plan.gathers, key=lambda each: (read(each), phase_of(each.issue), each.source))
    folded: list[tuple[Transfer, ...]] = []
    for (wholes, _, _), run in runs:
        is_tiled = len(wholes) == 1 and wholes[0] not in tile_of
        folded += [tuple(run)] if is_tiled else [(transfer,) for transfer in run]
    return folded


def _dump_swaps(plan: Plan, width: int) -> list[str]:
    """Return lines on activations that are offloaded in forward and reloaded in backward; none if there are none."""
    if not plan.swaps:
        return []
    rows: list[tuple[str, ...] | str] = []
    for row in fold_rows(plan.swaps, lambda item: (item.rests_on, item.nbytes)):
        if isinstance(row, Folded):
            nbytes = format_bytes(sum(item.nbytes for item in row.items))
            rows.append(f"      ... {len(row.items)} more, {nbytes}")
            continue
        issue = "there" if row.reload.stays else row.reload.issue  # read in host memory
        rows.append(
            (
                f"{row.offload.made_at:>5} -> {row.offload.need_by:>4}",
                f"{issue:>5} -> {row.reload.need_by:>7} -> {row.reload.release:>7}",
                str(row.rests_on),
                row.value,
                format_bytes(row.nbytes),
            )
        )
    header = ("  out -> gone", "issue -> need by -> release", "rests on", "name", "bytes")
    resting = ((tier, plan.swapped_nbytes(tier)) for tier in (Tier.HOST, Tier.NVME))
    kinds = [f"{format_bytes(swapped)} on {tier}" for tier, swapped in resting if swapped]
    return [
        f"swaps  {len(plan.swaps)}, away from the device between forward and backward: {', '.join(kinds)}",
        *make_table(header, rows, align="<<<<>", width=width, flexible=3),
    ]


_STEP_TIMES = {
    StepTiming.SYNCHRONOUS: "",
    StepTiming.OVERLAPPED: "beside the next forward: ",
    StepTiming.IN_BACKWARD: "inside backward: ",
}


def _dump_recomputed(values: Sequence[RecomputedValue]) -> list[str]:
    """Return one line on large values that backward recomputes; none if there are none."""
    if not values:
        return []
    nbytes, seconds = sum(value.nbytes for value in values), sum(value.seconds for value in values)
    return [f"             {len(values):,} values of {format_bytes(nbytes)} recomputed in {format_seconds(seconds)}"]


def _dump_values(plan: Plan) -> list[str]:
    """Return lines on the results of compute (bound values, activations, gradients) and on the optimizer step."""
    activations, step = plan.activations, plan.step
    lines = []
    region = bound_region(plan)
    if region is not None and plan.bound:
        largest = max(plan.bound, key=lambda value: value.nbytes)
        num_swapped = sum(not swap.reload.stays for swap in plan.swaps)
        swapped = f", and {num_swapped:,} swapped," if num_swapped else ""
        lines += [
            f"bound        {len(plan.bound):,} of compute's values{swapped} in {format_bytes(region.nbytes)} of the arena",
            f"             the largest is {largest.name}: {format_bytes(largest.nbytes)} "
            f"in ticks [{largest.live.start}, {largest.live.end})",
        ]
    at = next((span for span in plan.spans if span.start <= activations.peak_tick < span.end), None)
    where = f" ({at.phase}, {at.module})" if at else ""
    lines += [
        f"activations  policy {activations.policy}: {format_bytes(activations.saved_nbytes)} saved for backward",
        *_dump_recomputed(activations.recomputed),
        f"             outside of the arena at most {format_bytes(activations.peak_nbytes)}, "
        f"at tick {activations.peak_tick}{where}",
    ]
    if not plan.schedule.is_training:
        return lines
    kinds = []
    for tier in Tier:
        held = [sink for sink in plan.sinks if sink.destination is tier]
        if held:
            kinds.append(f"{len(held)} of {format_bytes(sum(sink.nbytes for sink in held))} to {tier}")
    last = f"; the last leaves after tick {plan.sinks[-1].made_at}" if plan.sinks else ""
    lines.append(f"gradients    {', '.join(kinds) or 'none leaves the device'}{last}")
    sunk = {sink.name for sink in plan.sinks}
    dtypes = {item.gradient_dtype for item in plan.placements if item.parameter in sunk and item.gradient_dtype}
    if dtypes:
        lines.append(f"             backwards add up there in {' and '.join(sorted(dtypes))}")
    lines.append(
        f"step         {_STEP_TIMES[step.timing]}{step.num_elements:,} elements in {step.num_chunks:,} chunks of "
        f"{step.chunk_elements:,}"
        if step.num_chunks
        else f"step         {step.num_elements:,} elements, none of them on nvme"
    )
    on_device = plan.device_updates
    if step.num_chunks:
        lines.append(
            f"             reads {format_bytes(step.nbytes_read)}, writes {format_bytes(step.nbytes_written)}, "
            f"staging {format_bytes(step.staging_nbytes)}"
        )
    if split := [placement for placement in plan.placements if placement.splits_master]:
        saved = sum(placement.split_saves_nbytes for placement in split)
        lines.append(
            f"             of {len(split)} master copies only what their compute copies lack: "
            f"{format_bytes(saved)} less move a step"
        )
    if step.ahead:
        shadows = format_bytes(plan.tier(plan.shadow_tier).nbytes_of(TierPart.SHADOWS))
        lines.append(
            f"             {len(step.ahead)} of {len(plan.sinks)} parameters updated ahead of step(), from backward on, "
            f"to {shadows} of shadows"
        )
    if on_device.share:
        in_place = f"; {format_bytes(on_device.nbytes_in_place)} are read and written in host memory"
        lines.append(
            f"             {on_device.share:.0%} of the elements updated on the device, {step.chunk_elements:,} at a time; "
            f"{format_bytes(on_device.nbytes_in)} go there, {format_bytes(on_device.nbytes_out)} come back"
            f"{in_place if on_device.nbytes_in_place else ''}"
        )
    return lines


def _dump_predicted(timeline: Timeline, width: int) -> list[str]:
    rows = []
    for phase, seconds in timeline.phase_seconds:
        stalls = timeline.stalls_in(phase)
        stalled = sum(stall.seconds for stall in stalls)
        longest = sorted(stalls, key=lambda stall: (-stall.seconds, stall.start_seconds))[:3]
        waits = join_unbroken(
            f"{stall.name.removeprefix('stall: ')} {format_seconds(stall.seconds)}" for stall in longest
        )
        rows.append((str(phase), *map(format_seconds, (seconds, seconds - stalled, stalled)), waits))
    total, stalled = timeline.step_seconds, timeline.stall_seconds
    rows.append(("total", *map(format_seconds, (total, total - stalled, stalled)), ""))
    header = ("predicted", "time", "compute", "stalls", "longest stalls")
    return make_table(header, rows, align="<>>><", width=width, flexible=4)


def _dump_routes(timeline: Timeline, width: int) -> list[str]:
    routes: dict[str, list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.nbytes:
            routes[event.lane].append(event)
    rows = []
    for route, events in sorted(routes.items()):
        busy = sum(event.seconds for event in events)
        share = f"{busy / timeline.step_seconds:.0%}"
        nbytes = sum(event.nbytes for event in events)
        rows.append((route, str(len(events)), format_bytes(nbytes), format_seconds(busy), share))
    header = ("routes", "moves", "bytes", "busy", "of the step")
    return make_table(header, rows, align="<>>>>", width=width, flexible=0) if rows else []


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacementGroup:
    """Parameters of identical blocks with the same homes."""

    label: str
    suffixes: tuple[str, ...]
    homes: tuple[Tier | None, ...]  # by role; None if there is no such copy
    placements: tuple[Placement, ...]

    @property
    def nbytes(self) -> int:
        return sum(placement.nbytes_on(tier) for placement in self.placements for tier in Tier)


def _group_placements(placements: Sequence[Placement]) -> list[_PlacementGroup]:
    alike: dict[tuple[NamePattern, tuple[Tier | None, ...]], list[Placement]] = defaultdict(list)
    for placement in placements:
        homes = tuple(placement.home_of(role) for role in Role)
        alike[name_pattern(placement.parameter), homes].append(placement)
    # Parameters of one block that have the same homes in the same layers share a line.
    merged: dict[Hashable, list[tuple[NamePattern, list[Placement]]]] = defaultdict(list)
    for (pattern, homes), held in alike.items():
        numbers = frozenset(cut_name(placement.parameter)[1] for placement in held)
        merged[pattern.prefix, numbers, homes].append((pattern, held))
    groups = []
    for (pattern, homes), held in alike.items():
        numbers = frozenset(cut_name(placement.parameter)[1] for placement in held)
        members = merged.pop((pattern.prefix, numbers, homes), None)
        if members is None:
            continue
        suffixes = tuple(each.suffix for each, _ in members)
        counted = [number for number in numbers if number is not None]
        groups.append(
            _PlacementGroup(
                label=join_name(pattern.prefix, counted, suffixes[0] if len(suffixes) == 1 else ""),
                suffixes=suffixes,
                homes=homes,
                placements=tuple(placement for _, items in members for placement in items),
            )
        )
    return groups
