"""Plans as text: the whole plan for a person and for golden tests, and what differs between two plans in words."""

import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Generic, NamedTuple, TypeVar

from zinf_compile.hardware import Rate, route_name
from zinf_compile.plan import GatherTransfer, GradientSink, Placement, Plan
from zinf_compile.simulate import COMPUTE_LANE, Event, Timeline, simulate
from zinf_compile.terms import Tier, format_bytes

_NUMBERED = re.compile(r"(?:.*_)?\d+")  # a component of a name that counts: "3" of layers.3, or "layer_3"
_MAX_UNFOLDED_ROWS = 40  # as many transfers as one screen shows
_MAX_ROWS = 60  # of transfers that are no run of alike ones
_MAX_SLOT_NAME = 28  # columns beside the arena chart
_MAX_PERIOD = 8  # transfers per layer that a repeating run may have
_NO_BREAK = "\N{NO-BREAK SPACE}"  # where a table must not wrap; printed as a space
_ROLES = ("compute", "master", "gradient", "optimizer_state")

Item = TypeVar("Item")


def dump_plan(plan: Plan, *, width: int = 100) -> str:
    """Return a plan as text of at most ``width`` columns, with the seconds that simulating it predicts."""
    timeline = simulate(plan)
    sections = (
        _dump_header(plan),
        _dump_tiers(plan, width),
        _dump_placements(plan, width),
        _dump_transfers(plan, width),
        _dump_arena(plan, width),
        _dump_backward(plan, width),
        _dump_predicted(timeline, width),
        _dump_lanes(plan, timeline, width),
    )
    return "\n\n".join("\n".join(_clip(line, width) for line in section) for section in sections if section)


def dump_plan_difference(a: Plan, b: Plan) -> str:
    """Return what differs from ``a`` to ``b``, one line each; ``"the plans are equal"`` when nothing does."""
    if a == b:
        return "the plans are equal"
    scalars = ("version", "name", "compute_dtype", "num_forward_ticks", "num_ticks", "arena_nbytes", "prefetch_nbytes")
    tiers = {tier.tier: tier for tier in b.tiers}
    lines = [
        *_changes("", a, b, scalars),
        *_changes("hardware ", a.hardware, b.hardware),
        *(line for tier in a.tiers if tier.tier in tiers for line in _changes(f"{tier.tier} ", tier, tiers[tier.tier])),
        *_changed_placements(a, b),
        *_changes("activations ", a.activations, b.activations),
        *_changes("step ", a.step, b.step),
        *_changed_movements("transfers", a.transfers, b.transfers),
        *_changed_movements("gradients that leave the device", a.sinks, b.sinks),
    ]
    for name, before, after in (
        ("uses", set(a.uses), set(b.uses)),
        ("spans", set(a.spans), set(b.spans)),
        ("tiers", {tier.tier for tier in a.tiers}, set(tiers)),
    ):
        if before != after:
            lines.append(f"{name}: {len(before)} -> {len(after)} records, not the same ones")
    lines += _changed_seconds(simulate(a), simulate(b))
    return "\n".join(lines or ["the plans list the same records in another order"])


def format_seconds(seconds: float) -> str:
    """Return a duration as a person reads it: ``0.0123`` gives ``'12.3 ms'``."""
    if seconds == 0:
        return "0 s"
    factor, unit = next(
        ((factor, unit) for factor, unit in ((1.0, "s"), (1e-3, "ms")) if abs(seconds) >= factor), (1e-6, "us")
    )
    size = seconds / factor
    return f"{size:.{2 if abs(size) < 10 else 1 if abs(size) < 100 else 0}f} {unit}"


# Sections of the dump


def _dump_header(plan: Plan) -> list[str]:
    num_backward = plan.num_ticks - plan.num_forward_ticks
    kind = "training" if num_backward else "inference"
    ticks = f"{plan.num_ticks} ticks: {plan.num_forward_ticks} forward, {num_backward} backward"
    dtype = plan.compute_dtype or "each parameter's own dtype"
    return [
        f"plan v{plan.version}  {plan.name}  {kind}",
        f"  compute in {dtype}; {ticks}; rates of {plan.hardware.name}",
    ]


def _dump_tiers(plan: Plan, width: int) -> list[str]:
    rows = []
    for tier in plan.tiers:
        made_of = _list(f"{part} {format_bytes(nbytes)}" for part, nbytes in tier.parts if nbytes)
        capacity = "the disk" if tier.capacity is None else format_bytes(tier.capacity)
        share = f"{tier.predicted_peak / tier.capacity:.0%}" if tier.capacity else "-"
        rows.append((str(tier.tier), capacity, format_bytes(tier.predicted_peak), share, made_of))
    return _make_table(("tiers", "capacity", "peak", "used", "made of"), rows, align="<>>><", width=width, flexible=4)


def _dump_placements(plan: Plan, width: int) -> list[str]:
    rows: list[tuple[str, ...] | str] = []
    for group in _group_placements(plan.placements):
        homes = (str(home) if home else "-" for home in group.homes)
        rows.append((group.label, str(len(group.placements)), format_bytes(group.nbytes), *homes))
        if len(group.suffixes) > 1:
            rows.append(f"    {', '.join(group.suffixes)}")
    header = ("placement", "count", "bytes", "compute", "master", "gradient", "optimizer")
    lines = _make_table(header, rows, align="<>><<<<", width=width, flexible=0)
    read = {use.parameter for use in plan.uses}
    unread = [placement.parameter for placement in plan.placements if placement.parameter not in read]
    if unread:
        lines.append(f"  {len(unread)} not read by this graph: {', '.join(unread)}")
    return lines


def _dump_transfers(plan: Plan, width: int) -> list[str]:
    if not plan.transfers:
        return ["transfers  none: every parameter this graph reads is resident"]
    unit, unit_name = _offset_unit(plan.transfers)
    total = format_bytes(sum(transfer.nbytes for transfer in plan.transfers))
    rows: list[tuple[str, ...] | str] = []
    for row in _fold(plan.transfers, lambda item: (_pattern(item.name), item.phase, item.source, item.nbytes)):
        if isinstance(row, _Folded):
            nbytes = format_bytes(sum(item.nbytes for item in row.items))
            names = _summarize_names(item.name for item in row.items)
            rows.append(f"      ... {len(row.items)} more alike, {nbytes}: {names}")
            continue
        offsets = (f"{number // unit:>{len(str(plan.arena_nbytes // unit))}}" for number in _byte_range(row))
        rows.append(
            (
                f"{row.issue:>5} -> {row.need_by:>7} -> {row.release:>7}",
                route_name(row.source, Tier.DEVICE),
                row.name,
                format_bytes(row.nbytes),
                f"[{', '.join(offsets)})",
            )
        )
    header = ("issue -> need by -> release", "route", "name", "bytes", f"arena, {unit_name}")
    ahead = format_bytes(plan.prefetch_nbytes)
    return [
        f"transfers  {len(plan.transfers)} of {total} in all, at most {ahead} ahead of compute",
        *_make_table(header, rows, align="<<<><", width=width, flexible=2, indent="  "),
    ]


def _dump_arena(plan: Plan, width: int) -> list[str]:
    if not plan.transfers:
        return []
    unit, unit_name = _offset_unit(plan.transfers)
    digits = len(str(plan.arena_nbytes // unit))
    slots: dict[tuple[int, int], list[GatherTransfer]] = defaultdict(list)
    for transfer in plan.transfers:
        slots[_byte_range(transfer)].append(transfer)
    names = {slot: _name_slot(held) for slot, held in slots.items()}
    label_width = len("  device [, )  ") + 2 * digits
    name_width = min(max(len(name) for name in names.values()), _MAX_SLOT_NAME) + 2
    num_columns = max(8, min(plan.num_ticks, width - label_width - name_width))
    per_column = -(-plan.num_ticks // num_columns)
    num_columns = -(-plan.num_ticks // per_column)
    backward = plan.num_forward_ticks // per_column
    ruler = ["."] * num_columns
    if plan.num_forward_ticks < plan.num_ticks:
        ruler[backward] = "|"
    scale = "a column is a tick" if per_column == 1 else f"a column is {per_column} ticks"
    legend = f"ranges in {unit_name}; {scale}, - moving, # in use, | backward begins"
    lines = [
        f"arena  {format_bytes(plan.arena_nbytes)}, {legend}",
        f"{'':{label_width}}{''.join(ruler)}",
    ]
    for row in _fold(sorted(slots), lambda _: None):
        if isinstance(row, _Folded):
            lines.append(f"  ... {len(row.items)} more ranges")
            continue
        start, end = row
        chart = _draw_slot(slots[row], plan.num_ticks, per_column)
        label = f"  device [{start // unit:>{digits}}, {end // unit:>{digits}})  "
        lines.append(f"{label}{chart}  {_shorten(names[row], max(8, width - label_width - num_columns - 2))}")
    return lines


def _dump_backward(plan: Plan, width: int) -> list[str]:
    activations, step = plan.activations, plan.step
    at = next((span for span in plan.spans if span.start <= activations.peak_tick < span.end), None)
    where = f" ({at.phase}, {at.module})" if at else ""
    lines = [
        f"activations  policy {activations.policy}: {format_bytes(activations.saved_nbytes)} saved for backward, "
        f"peak {format_bytes(activations.peak_nbytes)} at tick {activations.peak_tick}{where}"
    ]
    if plan.num_ticks == plan.num_forward_ticks:
        return lines
    kinds = []
    for tier in Tier:
        held = [sink for sink in plan.sinks if sink.destination is tier]
        if held:
            kinds.append(f"{len(held)} of {format_bytes(sum(sink.nbytes for sink in held))} to {tier}")
    last = f"; the last leaves after tick {plan.sinks[-1].tick}" if plan.sinks else ""
    lines.append(f"gradients    {', '.join(kinds) or 'none leaves the device'}{last}")
    lines.append(
        f"step         {step.num_elements:,} elements in {step.num_chunks:,} chunks of {step.chunk_elements:,}"
        if step.num_chunks
        else f"step         {step.num_elements:,} elements, none of them on nvme"
    )
    if step.num_chunks:
        lines.append(
            f"             reads {format_bytes(step.nbytes_read)}, writes {format_bytes(step.nbytes_written)}, "
            f"staging {format_bytes(step.staging_nbytes)}"
        )
    return lines


def _dump_predicted(timeline: Timeline, width: int) -> list[str]:
    rows = []
    for phase, seconds in timeline.phase_seconds:
        stalls = timeline.stalls_in(phase)
        stalled = sum(stall.seconds for stall in stalls)
        longest = sorted(stalls, key=lambda stall: (-stall.seconds, stall.start_seconds))[:3]
        waits = _list(f"{stall.name.removeprefix('stall: ')} {format_seconds(stall.seconds)}" for stall in longest)
        rows.append((str(phase), *map(format_seconds, (seconds, seconds - stalled, stalled)), waits))
    total, stalled = timeline.step_seconds, timeline.stall_seconds
    rows.append(("total", *map(format_seconds, (total, total - stalled, stalled)), ""))
    header = ("predicted", "time", "compute", "stalls", "longest stalls")
    return _make_table(header, rows, align="<>>><", width=width, flexible=4)


def _dump_lanes(plan: Plan, timeline: Timeline, width: int) -> list[str]:
    lanes: dict[str, list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.lane != COMPUTE_LANE:
            lanes[event.lane].append(event)
    rates = {rate.name: rate.per_second for rate in plan.hardware.routes}
    rows = []
    for lane, events in sorted(lanes.items()):
        nbytes = sum(event.nbytes for event in events)
        busy = nbytes / rates[lane]
        share = f"{busy / timeline.step_seconds:.0%}"
        rows.append((lane, str(len(events)), format_bytes(nbytes), format_seconds(busy), share))
    header = ("routes", "moves", "bytes", "busy", "of the step")
    return _make_table(header, rows, align="<>>>>", width=width, flexible=0) if rows else []


# Differences


def _changes(label: str, a: object, b: object, names: Sequence[str] = ()) -> list[str]:
    """Return a line for each field of two records of one class that differs."""
    lines = []
    for name in names or [field.name for field in fields(a)]:  # type: ignore[arg-type]  # records are dataclasses
        before, after = getattr(a, name), getattr(b, name)
        if isinstance(before, tuple):
            first, second = dict(map(_name_amount, before)), dict(map(_name_amount, after))
            for each in dict.fromkeys([*first, *second]):
                lines += _change(f"{label}{name.removesuffix('s')} {each}", name, first.get(each), second.get(each))
        else:
            lines += _change(f"{label}{name.removesuffix('_nbytes').replace('_', ' ')}", name, before, after)
    return lines


def _change(label: str, field: str, before: object, after: object) -> list[str]:
    if before == after:
        return []
    texts = [_format_field(field, value) for value in (before, after)]
    if texts[0] == texts[1]:  # a difference that rounding hides
        texts = [str(before), str(after)]
    return [f"{label}: {texts[0]} -> {texts[1]}"]


def _name_amount(item: Rate | tuple[str, int]) -> tuple[str, float]:
    """Return the name and the number of a rate of the hardware or of a part of a tier."""
    return item if isinstance(item, tuple) else (item.name, item.per_second)


def _format_field(name: str, value: object) -> str:
    if isinstance(value, int) and ("nbytes" in name or name in ("capacity", "predicted_peak", "parts")):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.4g}/s"  # the only ones are rates
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else str(value)


def _changed_placements(a: Plan, b: Plan) -> list[str]:
    before = {placement.parameter: placement for placement in a.placements}
    after = {placement.parameter: placement for placement in b.placements}
    changes: dict[tuple[_Pattern, str], list[str]] = defaultdict(list)
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            changes[_pattern(name), _describe_move(before.get(name), after.get(name))].append(name)
    lines = [f"{_summarize_names(names)}: {change}" for (_, change), names in changes.items()]
    if not lines and a.placements != b.placements:
        lines.append("placements: in another order")
    return lines


def _describe_move(before: Placement | None, after: Placement | None) -> str:
    if before is None or after is None:
        return "only in the second plan" if before is None else "only in the first plan"
    return ", ".join(line.replace(":", "", 1) for line in _changes("", before, after))


def _changed_movements(
    label: str, a: Sequence[GatherTransfer | GradientSink], b: Sequence[GatherTransfer | GradientSink]
) -> list[str]:
    if a == b:
        return []
    totals = [format_bytes(sum(item.nbytes for item in items)) for items in (a, b)]
    line = f"{label}: {len(a)} of {totals[0]} -> {len(b)} of {totals[1]}"
    kept = len(set(a) & set(b))
    return [f"{line}; {kept} are the same" if kept else line]


def _changed_seconds(a: Timeline, b: Timeline) -> list[str]:
    before, after = dict(a.phase_seconds), dict(b.phase_seconds)
    pairs = [(str(phase), before.get(phase), after.get(phase)) for phase in dict.fromkeys([*before, *after])]
    pairs += [("stalls", a.stall_seconds, b.stall_seconds), ("total", a.step_seconds, b.step_seconds)]
    lines = []
    for name, first, second in pairs:
        if first is None or second is None or not math.isclose(first, second, rel_tol=1e-9):
            texts = ["none" if seconds is None else format_seconds(seconds) for seconds in (first, second)]
            change = f" ({second / first - 1:+.1%})" if first and second is not None else ""
            lines.append(f"predicted {name}: {texts[0]} -> {texts[1]}{change}")
    return lines


# Names: parameters and transfers of alike blocks are told as one


class _Pattern(NamedTuple):
    """A name cut at the component that counts: ``layers.3.up.weight`` is ``layers``, no stem, 3, ``up.weight``."""

    prefix: str
    suffix: str


def _cut(name: str) -> tuple[_Pattern, int | None]:
    """Return a name's pattern and its number; the number is None for a name without one."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if _NUMBERED.fullmatch(part):
            stem = part.rstrip("0123456789")
            rest = ["*" if _NUMBERED.fullmatch(each) else each for each in parts[index + 1 :]]
            prefix = "".join(f"{each}." for each in parts[:index]) + stem
            return _Pattern(prefix, ".".join(rest)), int(part[len(stem) :])
    return _Pattern(name, ""), None


def _pattern(name: str) -> _Pattern:
    return _cut(name)[0]


def _join_name(prefix: str, numbers: Iterable[int], suffix: str) -> str:
    """Return ``layers.{0..3,7}.up.weight``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    text = ",".join(texts)
    if len(runs) > 1 or (runs and len(runs[0]) > 1):
        text = f"{{{text}}}"
    return f"{prefix}{text}.{suffix}" if suffix else f"{prefix}{text}"


def _summarize_names(names: Iterable[str]) -> str:
    """Return names with those of alike blocks folded: ``embed.weight, layers.{0..23}``."""
    numbers: dict[_Pattern, list[int]] = defaultdict(list)
    for name in names:
        pattern, number = _cut(name)
        numbers[pattern] += [] if number is None else [number]
    return ", ".join(_join_name(pattern.prefix, found, pattern.suffix) for pattern, found in numbers.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacementGroup:
    """Parameters of alike blocks with the same homes."""

    label: str
    suffixes: tuple[str, ...]
    homes: tuple[Tier | None, ...]  # by role; None where there are no bytes
    placements: tuple[Placement, ...]

    @property
    def nbytes(self) -> int:
        return sum(placement.nbytes_on(tier) for placement in self.placements for tier in Tier)


def _group_placements(placements: Sequence[Placement]) -> list[_PlacementGroup]:
    alike: dict[tuple[_Pattern, tuple[Tier | None, ...]], list[Placement]] = defaultdict(list)
    for placement in placements:
        homes = tuple(getattr(placement, role) if getattr(placement, f"{role}_nbytes") else None for role in _ROLES)
        alike[_pattern(placement.parameter), homes].append(placement)
    # Parameters of one block that have their homes in the same layers share a line.
    merged: dict[Hashable, list[tuple[_Pattern, list[Placement]]]] = defaultdict(list)
    for (pattern, homes), held in alike.items():
        numbers = frozenset(_cut(placement.parameter)[1] for placement in held)
        merged[pattern.prefix, numbers, homes].append((pattern, held))
    groups = []
    for (pattern, homes), held in alike.items():
        numbers = frozenset(_cut(placement.parameter)[1] for placement in held)
        members = merged.pop((pattern.prefix, numbers, homes), None)
        if members is None:
            continue
        suffixes = tuple(each.suffix for each, _ in members)
        counted = [number for number in numbers if number is not None]
        groups.append(
            _PlacementGroup(
                label=_join_name(pattern.prefix, counted, suffixes[0] if len(suffixes) == 1 else ""),
                suffixes=suffixes,
                homes=homes,
                placements=tuple(placement for _, items in members for placement in items),
            )
        )
    return groups


# Layout


@dataclass(frozen=True, slots=True)
class _Folded(Generic[Item]):
    """Items that are told as one line."""

    items: tuple[Item, ...]


def _fold(items: Sequence[Item], signature: Callable[[Item], Hashable]) -> list[Item | _Folded[Item]]:
    """Return all items if they fit a screen, else with the middle of each repeating run folded."""
    if len(items) <= _MAX_UNFOLDED_ROWS:
        return list(items)
    signatures = [signature(item) for item in items]
    rows: list[Item | _Folded[Item]] = []
    index = 0
    while index < len(items):
        period, covered = _find_run(signatures, index)
        shown = -(-3 // period) * period  # whole periods, at least three items
        if covered > 2 * shown + period:
            last = index + covered - period
            rows += [
                *items[index : index + shown],
                _Folded(tuple(items[index + shown : last])),
                *items[last : last + period],
            ]
            index += covered
        else:
            rows.append(items[index])
            index += 1
    if len(rows) <= _MAX_ROWS:
        return rows
    half = _MAX_ROWS // 2
    middle = [item for row in rows[half:-half] for item in (row.items if isinstance(row, _Folded) else (row,))]
    return [*rows[:half], _Folded(tuple(middle)), *rows[-half:]]


def _find_run(signatures: Sequence[Hashable], start: int) -> tuple[int, int]:
    """Return the period of the longest repeating run from ``start`` and how many items it covers."""
    best = (1, 1)
    for period in range(1, _MAX_PERIOD + 1):
        end = start + period
        while end < len(signatures) and signatures[end] == signatures[end - period]:
            end += 1
        covered = (end - start) // period * period
        if covered > best[1]:
            best = (period, covered)
    return best


def _byte_range(transfer: GatherTransfer) -> tuple[int, int]:
    return transfer.offset, transfer.offset + transfer.nbytes


def _offset_unit(transfers: Sequence[GatherTransfer]) -> tuple[int, str]:
    """Return the largest unit in which every offset is a whole number, and its name."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if all(number % unit == 0 for transfer in transfers for number in _byte_range(transfer)):
            return unit, name
    return 1, "bytes"


def _name_slot(transfers: Sequence[GatherTransfer]) -> str:
    """Return who uses one arena range: the names, or their patterns where the names are many."""
    names = _summarize_names(transfer.name for transfer in transfers)
    if len(names) <= _MAX_SLOT_NAME:
        return names
    patterns = dict.fromkeys(_pattern(transfer.name) for transfer in transfers)
    stars = ", ".join(f"{pattern.prefix}*{pattern.suffix and '.'}{pattern.suffix}" for pattern in patterns)
    return f"{len(transfers)} of {stars}"


def _draw_slot(transfers: Sequence[GatherTransfer], num_ticks: int, per_column: int) -> str:
    """Return one arena range over time: what most ticks of a column are, but never free where one is taken."""
    ticks = ["."] * num_ticks
    for transfer in transfers:
        ticks[transfer.issue : transfer.need_by] = "-" * (transfer.need_by - transfer.issue)
        ticks[transfer.need_by : transfer.release] = "#" * (transfer.release - transfer.need_by)
    columns = ("".join(ticks[start : start + per_column]) for start in range(0, num_ticks, per_column))
    return "".join("." if set(column) == {"."} else max("#-", key=column.count) for column in columns)


def _make_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str] | str],
    *,
    align: str,
    width: int,
    flexible: int,
    indent: str = "",
) -> list[str]:
    """Return a table's lines; a row that is a str stands as it is.

    The flexible column gives way to the width: the last one is wrapped, any other loses its middle.
    """
    table = [
        [f"{indent}{header[0]}", *header[1:]],
        *([f"  {row[0]}", *row[1:]] for row in rows if not isinstance(row, str)),
    ]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    others = sum(widths) - widths[flexible] + 2 * (len(widths) - 1)
    widths[flexible] = max(8, min(widths[flexible], width - others))
    printed = []
    for row in table:
        last = textwrap.wrap(row[-1], widths[-1]) or [""]
        cells = [*(_shorten(cell, columns) for cell, columns in zip(row[:-1], widths[:-1], strict=True)), last[0]]
        line = "  ".join(f"{cell:{side}{columns}}" for cell, side, columns in zip(cells, align, widths, strict=True))
        printed.append([line.rstrip(), *(f"{'':{sum(widths[:-1]) + 2 * len(widths) - 2}}{rest}" for rest in last[1:])])
    lines = iter(printed)
    blocks = [next(lines), *([_clip(row, width)] if isinstance(row, str) else next(lines) for row in rows)]
    return [line.replace(_NO_BREAK, " ") for block in blocks for line in block]


def _list(items: Iterable[str]) -> str:
    """Return items for a cell that may be wrapped, but not within an item."""
    return ", ".join(item.replace(" ", _NO_BREAK) for item in items)


def _shorten(text: str, width: int) -> str:
    """Return text of at most ``width`` columns, with dots for its middle."""
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def _clip(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."
