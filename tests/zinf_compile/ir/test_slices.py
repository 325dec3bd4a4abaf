"""Slices: parts add up to the whole, and their offsets are those of the tensor's elements."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.ir.slices import Slice, shard_size


def rows_of(num_rows: int, width: int = 3) -> Slice:
    return Slice.of_whole("head.weight", (num_rows, width))


@given(st.integers(1, 500), st.integers(1, 40), st.sampled_from([1, 2, 8, 32]))
def test_parts_are_all_rows_once(num_rows: int, num_parts: int, multiple: int) -> None:
    parts = rows_of(num_rows).split(num_parts, multiple)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))
    assert len(parts) <= num_parts
    assert all(part.start % multiple == 0 for part in parts)
    assert len({part.length for part in parts[:-1]}) <= 1
    assert parts[-1].length <= parts[0].length


def test_a_part_of_a_part_counts_from_its_own_first_row() -> None:
    part = rows_of(10).part(2, 8).part(1, 4)
    assert (part.start, part.stop, part.num_elements, part.sizes) == (3, 6, 9, (3, 3))
    assert part.whole == rows_of(10)
    assert not part.is_whole
    with pytest.raises(ValueError, match=r"\[1, 4\) is not within the 3 indices of head.weight\[3:6\]"):
        part.part(1, 4)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_elements_are_those_of_a_tensor(shape: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, shape[0] - 1))
    stop = data.draw(st.integers(start + 1, shape[0]))
    part = Slice.of_whole("weight", shape).part(start, stop)
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)[start:stop]
    assert part.num_elements == tensor.numel()
    assert part.sizes == tensor.shape
    assert part.flat.start == part.flat.offset_in(part.whole) == part.offset_in(part.whole.flat) == tensor.flatten()[0]
    assert part.flat.num_elements == part.num_elements


def test_columns_are_counted_and_are_not_contiguous() -> None:
    columns = Slice(parameter="weight", shape=(4, 6), dim=1, start=2, length=3)
    assert (columns.num_elements, columns.sizes) == (12, (4, 3))
    assert str(columns) == "weight[:, 2:5]"
    assert not columns.is_contiguous
    with pytest.raises(ValueError, match=r"it is cut along dimension 1 of \(4, 6\)"):
        _ = columns.flat
    assert columns.whole.flat == Slice.of_whole("weight", (4, 6)).flat  # all columns are the same elements as all rows
    lines = Slice(parameter="weight", shape=(1, 6, 2), dim=1, start=2, length=3)  # the first dimension has size 1
    assert (lines.flat.start, lines.flat.stop) == (4, 10)


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_slices_of_slices_meet_where_their_elements_do(num_rows: int, width: int, data: st.DataObject) -> None:
    """Nested slices of rows and of flat elements, compared with sets of elements."""

    def draw() -> Slice:
        whole = rows_of(num_rows, width)
        part = whole.flat if data.draw(st.booleans()) else whole
        for _ in range(data.draw(st.integers(0, 2))):
            start = data.draw(st.integers(0, part.length))
            part = part.part(start, data.draw(st.integers(start, part.length)))
        return part

    def elements(part: Slice) -> set[int]:
        return set(range(part.flat.start, part.flat.stop))

    one, other, third = draw(), draw(), draw()
    common = one.intersect(other)
    assert (elements(common) if common is not None else set()) == elements(one) & elements(other)
    if common is not None:
        inside = common.flat.offset_in(one)
        assert one.flat.part(inside, inside + common.num_elements) == common.flat
    rest = list(one.flat.without([other, third]))
    assert [index for part in rest for index in range(part.start, part.stop)] == sorted(
        elements(one) - elements(other) - elements(third)
    )


def test_rows_meet_in_rows() -> None:
    rows = rows_of(10)
    assert rows.part(2, 6).intersect(rows.part(4, 9)) == rows.part(4, 6)
    assert rows.part(2, 4).intersect(rows.part(4, 9)) is None
    assert rows.part(2, 4).intersect(Slice.of_whole("embed.weight", (10, 3))) is None
    assert list(rows.without([rows.part(6, 8), rows.part(1, 3)])) == [
        rows.part(0, 1),
        rows.part(3, 6),
        rows.part(8, 10),
    ]
    assert list(rows.without([])) == [rows]
    assert list(rows.part(1, 3).without([rows])) == []


def test_an_offset_is_inside() -> None:
    rows = rows_of(10)
    assert rows.part(4, 6).offset_in(rows.part(2, 8)) == 2 * 3
    for outside in (rows.part(1, 3), rows.part(7, 9), Slice.of_whole("embed.weight", (10, 3)).part(2, 3)):
        with pytest.raises(ValueError, match=r"weight\[\d+:\d+\] is not inside of head.weight\[2:8\]"):
            outside.offset_in(rows.part(2, 8))


def test_a_share_of_any_rank_has_no_place_and_the_shares_of_ranks_are_flat_slices() -> None:
    rows = rows_of(7)
    share = rows.among(4)
    assert not share.is_contiguous
    with pytest.raises(
        ValueError, match=r"1/4 of head.weight\[0:7\] is not contiguous in memory: it is any rank's share"
    ):
        share.intersect(share)
    shards = list(rows.flat.pieces(share.num_elements))
    assert [shard.num_elements for shard in shards] == [6, 6, 6, 3]  # the last shard is padded
    tile = rows.part(3, 6)
    met = [shard.intersect(tile) for shard in shards]  # elements 9 to 18
    assert [part and (part.start, part.stop) for part in met] == [None, (9, 12), (12, 18), None]
    assert [part.offset_in(shard) for part, shard in zip(met, shards, strict=True) if part] == [3, 0]


@pytest.mark.parametrize(("shape", "num_elements"), [((), 1), ((0,), 0), ((0, 5), 0), ((7,), 7)])
def test_scalars_and_empty_parameters(shape: tuple[int, ...], num_elements: int) -> None:
    whole = Slice.of_whole("scale", shape)
    assert whole.num_elements == num_elements
    assert whole.is_whole
    assert whole.flat.num_elements == num_elements
    assert whole.flat.offset_in(whole) == 0


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 500))
def test_shares_of_parts_add_up(num_rows: int, num_parts: int, total: int) -> None:
    assert sum(part.share_of(total) for part in rows_of(num_rows).split(num_parts)) == total


def test_shards_are_equal() -> None:
    assert [shard_size(size, 16) for size in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert rows_of(7).among(4).num_elements == 6  # of 21
    assert rows_of(7).among(4).is_whole
    assert str(rows_of(7).part(0, 2).among(4)) == "1/4 of head.weight[0:2]"
