"""Text in columns: tables, folded runs of repeating rows, shortened names."""

import textwrap
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_MAX_UNFOLDED_ROWS = 40  # as many rows as one screen shows
_MAX_ROWS = 60  # rows that do not repeat
_MAX_PERIOD = 8  # rows per layer that a repeating run may have
_NO_BREAK = "\N{NO-BREAK SPACE}"  # where a table must not wrap; printed as a space

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Folded(Generic[Item]):
    """Items that are printed as one line."""

    items: tuple[Item, ...]


def fold_rows(items: Sequence[Item], signature: Callable[[Item], Hashable]) -> list[Item | Folded[Item]]:
    """Return all items if they fit on a screen; otherwise with the middle of each repeating run folded."""
    if len(items) <= _MAX_UNFOLDED_ROWS:
        return list(items)
    signatures = [signature(item) for item in items]
    rows: list[Item | Folded[Item]] = []
    index = 0
    while index < len(items):
        period, covered = _find_run(signatures, index)
        shown = -(-3 // period) * period  # whole periods, at least three items
        if covered > 2 * shown + period:
            last = index + covered - period
            rows += [
                *items[index : index + shown],
                Folded(tuple(items[index + shown : last])),
                *items[last : last + period],
            ]
            index += covered
        else:
            rows.append(items[index])
            index += 1
    if len(rows) <= _MAX_ROWS:
        return rows
    half = _MAX_ROWS // 2
    middle = [item for row in rows[half:-half] for item in (row.items if isinstance(row, Folded) else (row,))]
    return [*rows[:half], Folded(tuple(middle)), *rows[-half:]]


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


def make_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str] | str],
    *,
    align: str,
    width: int,
    flexible: int,
    indent: str = "",
) -> list[str]:
    """Return the lines of a table; a row that is a str is printed as it is.

    The flexible column is shortened to fit the width: the last column is wrapped, any other loses its middle.
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
        cells = [*(shorten(cell, columns) for cell, columns in zip(row[:-1], widths[:-1], strict=True)), last[0]]
        line = "  ".join(f"{cell:{side}{columns}}" for cell, side, columns in zip(cells, align, widths, strict=True))
        printed.append([line.rstrip(), *(f"{'':{sum(widths[:-1]) + 2 * len(widths) - 2}}{rest}" for rest in last[1:])])
    lines = iter(printed)
    blocks = [next(lines), *([clip(row, width)] if isinstance(row, str) else next(lines) for row in rows)]
    return [line.replace(_NO_BREAK, " ") for block in blocks for line in block]


def join_unbroken(items: Iterable[str]) -> str:
    """Return items for a cell that may be wrapped, but not within an item."""
    return ", ".join(item.replace(" ", _NO_BREAK) for item in items)


def shorten(text: str, width: int) -> str:
    """Return text of at most ``width`` columns, with dots for its middle."""
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def clip(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."
