"""Offsets in the arena: live pieces never overlap, and the arena is no larger than all pieces side by side."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zinf_compile.ir.glossary import LiveRange
from zinf_compile.passes.planner.memory.arena import (
    ARENA_ALIGN,
    ArenaLayout,
    Piece,
    align,
    plan_sequential,
)
from zinf_compile.passes.planner.memory.arena import plan_arena as plan_columns


def plan_arena(pieces: Sequence[Piece]) -> ArenaLayout:
    starts, ends = [piece.live.start for piece in pieces], [piece.live.end for piece in pieces]
    return plan_columns([piece.nbytes for piece in pieces], starts=starts, ends=ends)


PLANNERS = (plan_arena, plan_sequential)


def make_piece(nbytes: int, start: int, end: int) -> Piece:
    return Piece(nbytes=nbytes, live=LiveRange(start=start, end=end))


pieces_by_start = st.lists(
    st.builds(
        lambda pages, start, length: make_piece(pages * 1000, start, start + length),
        pages=st.integers(1, 40),
        start=st.integers(0, 30),
        length=st.integers(1, 10),
    ),
    max_size=25,
).map(lambda pieces: sorted(pieces, key=lambda piece: piece.live.start))


def check_layout(pieces: list[Piece], layout: ArenaLayout) -> None:
    placed = list(zip(pieces, layout.offsets, strict=True))
    for piece, offset in placed:
        assert offset % ARENA_ALIGN == 0
        assert 0 <= offset <= offset + piece.nbytes <= layout.nbytes
    for (one, at), (other, other_at) in combinations(placed, 2):
        if one.live.overlaps(other.live):
            assert at + one.nbytes <= other_at or other_at + other.nbytes <= at
    total = sum(align(piece.nbytes) for piece in pieces)
    ticks = {piece.live.start for piece in pieces}
    live = [sum(align(piece.nbytes) for piece in pieces if piece.live.start <= tick < piece.live.end) for tick in ticks]
    assert max(live, default=0) <= layout.nbytes <= total


@pytest.mark.parametrize("plan", PLANNERS)
@examples(100)
@given(pieces=pieces_by_start)
def test_layouts_hold(plan: type, pieces: list[Piece]) -> None:
    check_layout(pieces, plan(pieces))


@pytest.mark.parametrize("plan", PLANNERS)
def test_nothing_needs_nothing(plan: type) -> None:
    assert plan([]) == ArenaLayout(offsets=(), nbytes=0)


@pytest.mark.parametrize("plan", PLANNERS)
def test_pieces_one_after_the_other_share_their_bytes(plan: type) -> None:
    layout = plan([make_piece(5000, tick, tick + 1) for tick in range(5)])
    assert layout == ArenaLayout(offsets=(0,) * 5, nbytes=8192)


@pytest.mark.parametrize("plan", PLANNERS)
def test_the_smallest_gap_that_holds_a_piece_is_taken(plan: type) -> None:
    page = ARENA_ALIGN
    pieces = [
        make_piece(3 * page, 0, 2),  # leaves a gap of three pages at 0
        make_piece(4 * page, 0, 9),
        make_piece(1 * page, 0, 2),  # leaves a gap of one page
        make_piece(4 * page, 0, 9),
        make_piece(1 * page, 2, 9),
    ]
    layout = plan(pieces)
    check_layout(pieces, layout)
    assert layout.nbytes == 12 * page


def test_the_largest_goes_first() -> None:
    pieces = [make_piece(4096, 0, 2), make_piece(40960, 1, 3)]
    assert plan_arena(pieces).offsets == (40960, 0)


@pytest.mark.parametrize(("nbytes", "aligned"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_alignment(nbytes: int, aligned: int) -> None:
    assert align(nbytes) == aligned
