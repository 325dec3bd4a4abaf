"""Rows of stored parameters: where they begin in the file, and which bytes they are."""

import pytest

from zinf_compile.runtime.nvme.engine import ALIGN
from zinf_compile.runtime.tiles import rows_in_whole_sectors


@pytest.mark.parametrize(
    ("shape", "itemsizes", "rows"),
    [
        ((512, 1024), [4], 1),
        ((512, 1024), [2, 4], 2),
        ((512, 32), [4], 32),
        ((512, 33), [4], 1024),  # more than there are: it cannot be cut
        ((64, 3, 3, 3), [8], 512),
    ],
)
def test_tiles_begin_at_whole_sectors(shape: tuple[int, ...], itemsizes: list[int], rows: int) -> None:
    assert rows_in_whole_sectors(shape, itemsizes) == rows
    row = 1
    for size in shape[1:]:
        row *= size
    assert all(rows * row * itemsize % ALIGN == 0 for itemsize in itemsizes)
    assert any(rows // 2 * row * itemsize % ALIGN for itemsize in itemsizes) or rows == 1
