"""The device arena over time as a text chart: a row for each range used by transfers, and one for all bound outputs.

arena  512 B, ranges in bytes; a column is a tick, - moving, # in use, | backward begins
                     ......|.....
  device [  0, 200)  -##....--##.  layers.0
  device [256, 456)  .--##.-##...  layers.1
  device [456, 512)  .#####.###..  5 bound values
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zinf_compile.inspect.text.plan_names import name_pattern, summarize_names
from zinf_compile.inspect.text.text_layout import Folded, fold_rows, shorten
from zinf_compile.ir.glossary import LiveRange, Phase, format_bytes
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.transfers import Transfer

_MAX_ROW_NAME = 28  # columns beside the chart


class ByteRange(NamedTuple):
    """Arena bytes [start, end)."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""
        return self.end - self.start


def bound_region(plan: Plan) -> ByteRange | None:
    """Return the arena bytes after those of transfers: bound values and reloaded activations; None if there are none."""
    offsets = [*(value.offset for value in plan.bound), *(reload.offset for reload in _reloads(plan))]
    return ByteRange(min(offsets), plan.arena_nbytes) if offsets else None


def _reloads(plan: Plan) -> list[Transfer]:
    """Return what brings activations back to the arena: not those that are read in host memory."""
    return [swap.reload for swap in plan.swaps if not swap.reload.stays]


def transfer_range(transfer: Transfer) -> ByteRange:
    """Return the arena bytes that a transfer fills."""
    return ByteRange(transfer.offset, transfer.offset + transfer.nbytes)


class OffsetUnit(NamedTuple):
    """The unit that offsets are printed in."""

    nbytes: int
    name: str


def offset_unit(plan: Plan) -> OffsetUnit:
    """Return the largest unit in which all ranges of the chart begin and end at whole numbers."""
    region = bound_region(plan)
    ranges = [*map(transfer_range, plan.gathers), *([region] if region else [])]
    for unit in (OffsetUnit(2**20, "MiB"), OffsetUnit(2**10, "KiB")):
        if all(number % unit.nbytes == 0 for each in ranges for number in each):
            return unit
    return OffsetUnit(1, "bytes")


class _Row(NamedTuple):
    where: ByteRange
    name: str
    ticks: str  # one character per tick


def dump_arena(plan: Plan, width: int) -> list[str]:
    """Return the chart's lines, of about ``width`` columns; none for a plan without an arena."""
    rows = _make_rows(plan)
    if not rows:
        return []
    unit = offset_unit(plan)
    digits = len(str(plan.arena_nbytes // unit.nbytes))
    label_width = len("  device [, )  ") + 2 * digits
    name_width = min(max(len(row.name) for row in rows), _MAX_ROW_NAME) + 2
    num_columns = max(8, min(plan.num_ticks, width - label_width - name_width))
    per_column = -(-plan.num_ticks // num_columns)
    num_columns = -(-plan.num_ticks // per_column)
    ruler = ["."] * num_columns
    if plan.schedule.is_training:
        ruler[plan.schedule.ticks(Phase.BACKWARD).start // per_column] = "|"
    scale = "a column is a tick" if per_column == 1 else f"a column is {per_column} ticks"
    legend = f"ranges in {unit.name}; {scale}, - moving, # in use, | backward begins"
    lines = [
        f"arena  {format_bytes(plan.arena_nbytes)}, {legend}",
        f"{'':{label_width}}{''.join(ruler)}",
    ]
    for row in fold_rows(rows, lambda _: None):
        if isinstance(row, Folded):
            lines.append(f"  ... {len(row.items)} more ranges")
            continue
        start, end = (f"{number // unit.nbytes:>{digits}}" for number in row.where)
        chart = "".join(_draw_columns(row.ticks, per_column))
        name = shorten(row.name, max(8, width - label_width - num_columns - 2))
        lines.append(f"  device [{start}, {end})  {chart}  {name}")
    return lines


def _make_rows(plan: Plan) -> list[_Row]:
    slots: dict[ByteRange, list[Transfer]] = defaultdict(list)
    for transfer in plan.gathers:
        slots[transfer_range(transfer)].append(transfer)
    rows = [_Row(slot, _name_slot(held), _draw_transfers(held, plan.num_ticks)) for slot, held in sorted(slots.items())]
    region = bound_region(plan)
    if region is not None:
        name = f"{len(plan.bound)} bound value{'' if len(plan.bound) == 1 else 's'}"
        reloads = _reloads(plan)
        if reloads:
            name += f", {len(reloads)} swapped"
        live = [*(value.live for value in plan.bound), *(reload.live for reload in reloads)]
        rows.append(_Row(region, name, _draw_live(live, plan.num_ticks)))
    return rows


def _name_slot(transfers: Sequence[Transfer]) -> str:
    """Return the names of the users of an arena range, as patterns if there are many."""
    names = summarize_names(transfer.name for transfer in transfers)
    if len(names) <= _MAX_ROW_NAME:
        return names
    patterns = dict.fromkeys(name_pattern(transfer.name) for transfer in transfers)
    stars = ", ".join(f"{pattern.prefix}*{pattern.suffix and '.'}{pattern.suffix}" for pattern in patterns)
    return f"{len(transfers)} of {stars}"


def _draw_transfers(transfers: Iterable[Transfer], num_ticks: int) -> str:
    ticks = ["."] * num_ticks
    for transfer in transfers:
        ticks[transfer.issue : transfer.need_by] = "-" * (transfer.need_by - transfer.issue)
        ticks[transfer.need_by : transfer.release] = "#" * (transfer.release - transfer.need_by)
    return "".join(ticks)


def _draw_live(ranges: Iterable[LiveRange], num_ticks: int) -> str:
    ticks = ["."] * num_ticks
    for live in ranges:
        ticks[live.start : live.end] = "#" * (live.end - live.start)
    return "".join(ticks)


def _draw_columns(ticks: str, per_column: int) -> Iterable[str]:
    """Yield the most frequent state of each column, but never "free" if any of its ticks is used."""
    for start in range(0, len(ticks), per_column):
        column = ticks[start : start + per_column]
        yield "." if set(column) == {"."} else max("#-", key=column.count)
