"""HTML tables and cells. Their content is escaped: any name is shown as it is written."""

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zinf_compile.ir.glossary import printable


class Markup(str):
    """HTML made by this package, which is not escaped again."""

    __slots__ = ()


class Cell(NamedTuple):
    """The text of a table cell, and its sort key."""

    text: str  # escaped, unless it is Markup
    key: float | None = None  # None: by the text


def escape(text: str) -> Markup:
    """Return text as HTML; Markup as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(printable(text)))


def join_lines(parts: Iterable[str]) -> Markup:
    """Return HTML of several pieces, each on a line."""
    return Markup("\n".join(map(escape, parts)))


def swatch(color: str, name: str) -> Markup:
    """Return a square of a colour with its name."""
    return Markup(f'<span class="swatch" style="background:{color}"></span>{escape(name)}')


def make_table(header: Sequence[str], rows: Iterable[Sequence[Cell]], *, name: str = "") -> Markup:
    """Return a table. One with a name can be sorted by its header. A narrow screen shows each row as a card."""
    labels = [
        f'<th scope="col"><button type="button">{escape(label)}</button></th>'
        if name
        else f'<th scope="col">{escape(label)}</th>'
        for label in header
    ]
    lines = [f'<table id="{name}">' if name else "<table>", "<thead><tr>", *labels, "</tr></thead>", "<tbody>"]
    lines += (f"<tr>{''.join(map(_make_cell, header, row))}</tr>" for row in rows)
    return Markup("\n".join([*lines, "</tbody>", "</table>"]))


def _make_cell(label: str, cell: Cell) -> str:
    key = "" if cell.key is None else f' data-key="{cell.key:.9g}"'
    empty = "" if cell.text else ' class="empty"'
    return f'<td data-label="{escape(label)}"{key}{empty}>{escape(cell.text)}</td>'
