"""The layout of the store file."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.ir.errors import VerifyError
from zinf_compile.runtime.storage.engine import ALIGN
from zinf_compile.runtime.storage.layout import Extent, FileLayout


def test_successive_extents_are_contiguous() -> None:
    layout = FileLayout()
    extents = [layout.allocate(nbytes) for nbytes in (1, ALIGN, ALIGN + 1)]
    assert extents == [
        Extent(offset=0, nbytes=1, reserved_nbytes=ALIGN),
        Extent(offset=ALIGN, nbytes=ALIGN, reserved_nbytes=ALIGN),
        Extent(offset=2 * ALIGN, nbytes=ALIGN + 1, reserved_nbytes=2 * ALIGN),
    ]
    assert layout.end == 4 * ALIGN


def test_best_fit_takes_the_smallest_hole() -> None:
    layout = FileLayout()
    extents = [layout.allocate(pages * ALIGN) for pages in (3, 1, 2, 1)]
    layout.free(extents[0])
    layout.free(extents[2])
    assert layout.allocate(2 * ALIGN).offset == extents[2].offset
    assert layout.allocate(ALIGN).offset == 0, "a hole that is larger is divided"
    assert layout.allocate(2 * ALIGN).offset == ALIGN
    assert layout.end == 7 * ALIGN
    layout.check_integrity()


def test_small_tensors_do_not_divide_the_hole_of_a_large_one() -> None:
    layout = FileLayout()
    large, small = layout.allocate(2**20), layout.allocate(ALIGN)
    layout.free(large)
    assert layout.allocate(ALIGN).offset == small.offset + ALIGN
    assert layout.allocate(2**19).offset == 0, "a large one does"
    assert layout.allocate(2**19).offset == 2**19
    layout.check_integrity()


def test_freed_neighbours_are_joined() -> None:
    layout = FileLayout()
    first, second, third, _ = [layout.allocate(ALIGN) for _ in range(4)]
    layout.free(first)
    layout.free(third)
    layout.free(second)
    layout.check_integrity()
    assert layout.allocate(3 * ALIGN).offset == 0


def test_freeing_the_last_extent_lowers_the_end() -> None:
    layout = FileLayout()
    first, second, third = [layout.allocate(ALIGN) for _ in range(3)]
    layout.free(second)
    assert layout.end == 3 * ALIGN
    layout.free(third)
    assert layout.end == ALIGN
    layout.free(first)
    assert layout.end == 0
    layout.check_integrity()


def test_what_was_not_given_out_is_refused() -> None:
    layout = FileLayout()
    extent = layout.allocate(ALIGN)
    with pytest.raises(VerifyError, match="is not live in this layout"):
        layout.free(Extent(offset=0, nbytes=5, reserved_nbytes=ALIGN))
    layout.free(extent)
    with pytest.raises(VerifyError, match="it was freed before"):
        layout.free(extent)
    with pytest.raises(VerifyError, match="cannot lay out 0 bytes"):
        layout.allocate(0)


def test_check_integrity_finds_damage() -> None:
    def make_damaged(extent: Extent) -> FileLayout:
        layout = FileLayout()
        layout.allocate(2 * ALIGN)
        layout.allocate(ALIGN)
        layout._live[extent.offset] = extent
        return layout

    with pytest.raises(VerifyError, match="extents overlap at offset 4096: the one before it ends at 8192"):
        make_damaged(Extent(offset=ALIGN, nbytes=1, reserved_nbytes=ALIGN)).check_integrity()
    with pytest.raises(VerifyError, match=r"bytes \[4096, 8192\) of the store file leaked"):
        make_damaged(Extent(offset=0, nbytes=1, reserved_nbytes=ALIGN)).check_integrity()
    with pytest.raises(VerifyError, match="extents end at 16384, but the store file's end is 12288"):
        make_damaged(Extent(offset=3 * ALIGN, nbytes=1, reserved_nbytes=ALIGN)).check_integrity()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6 * ALIGN), st.integers(0, 1 << 30)), max_size=60))
def test_any_sequence_keeps_the_layout_whole(steps: list[tuple[bool, int, int]]) -> None:
    layout = FileLayout()
    live: list[Extent] = []
    for wants_free, nbytes, choice in steps:
        if wants_free and live:
            layout.free(live.pop(choice % len(live)))
        else:
            end = layout.end
            extent = layout.allocate(nbytes)
            live.append(extent)
            assert extent.nbytes == nbytes
            assert extent.offset % ALIGN == extent.reserved_nbytes % ALIGN == 0
            assert 0 <= extent.reserved_nbytes - nbytes < ALIGN
            assert layout.end in {end, end + extent.reserved_nbytes}
        layout.check_integrity()
        ends = sorted((extent.offset, extent.offset + extent.reserved_nbytes) for extent in live)
        assert all(one[1] <= other[0] for one, other in pairwise(ends))
        assert layout.end == max((end for _, end in ends), default=0)
    for extent in live:
        layout.free(extent)
    layout.check_integrity()
    assert layout.end == 0


def test_a_hole_is_never_laid_into_again() -> None:
    layout = FileLayout()
    extents = [layout.allocate(ALIGN) for _ in range(4)]
    layout.free(extents[1])
    ((offset, nbytes),) = layout.free_ranges
    layout.make_hole(offset)
    assert (layout.end, layout.taken_nbytes, layout.live_nbytes) == (4 * ALIGN, 3 * ALIGN, 3 * ALIGN)
    layout.free(extents[2])
    assert layout.free_ranges == ((2 * ALIGN, ALIGN),)
    assert [layout.allocate(ALIGN).offset for _ in range(2)] == [2 * ALIGN, 4 * ALIGN]
    layout.check_integrity()
    assert (offset, nbytes) == (ALIGN, ALIGN)
