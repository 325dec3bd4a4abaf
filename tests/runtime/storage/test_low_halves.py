"""Float32 values are joined again, bit for bit, from their bfloat16 copies and what these lack."""

import pytest
import torch
from torch import Tensor

from zinf_compile.ir.copies import LOW_HALVES, SECTOR_NBYTES, chunk_multiple, low_halves_nbytes
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.native.compiled import load_compiled
from zinf_compile.runtime.storage import low_halves
from zinf_compile.runtime.storage.layout import Extent
from zinf_compile.runtime.storage.low_halves import join, split
from zinf_compile.runtime.storage.slots import Slot

SIZES = (1, 7, 8, 63, 64, 65, LOW_HALVES - 1, LOW_HALVES, LOW_HALVES + 1, 20 * LOW_HALVES + 77)
NUM_PATTERNS = 2**24  # at once


def patterns(size: int) -> Tensor:
    """Return float32 values among which every kind is: ties of both directions, NaNs, infinities, zeros and denormals."""
    generator = torch.Generator().manual_seed(size)
    upper = torch.randint(-(2**15), 2**15, (size,), generator=generator, dtype=torch.int32)
    special = torch.tensor([0, 0x7F80, -0x80, 0x7F7F, -0x81, -0x8000, 0x7FC0, 0x3F80, 0x3F81], dtype=torch.int32)
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    is_special = torch.rand(size, generator=generator) < 0.5
    upper = torch.where(is_special, special[torch.randint(len(special), (size,), generator=generator)], upper)
    low = lower[torch.randint(len(lower), (size,), generator=generator)]
    return ((upper << 16) | low).view(torch.float32)


def halved(values: Tensor, **options: int) -> tuple[Tensor, Tensor]:
    upper = values.bfloat16()
    pages = torch.full((low_halves_nbytes(values.numel()),), 77, dtype=torch.uint8)
    split(values, upper, pages, **options)
    return upper, pages


def joined(upper: Tensor, pages: Tensor, **options: int) -> Tensor:
    values = torch.full((upper.numel(),), 99.0)
    join(pages, upper, values, **options)
    return values


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    assert torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_values_come_back(size: int, num_threads: int) -> None:
    values = patterns(size)
    upper, pages = halved(values, num_threads=num_threads)
    assert_same_bits(joined(upper, pages, num_threads=num_threads), values)
    is_number = ~values.isnan()
    assert_same_bits(upper[is_number], values.bfloat16()[is_number])
    assert upper[~is_number].isnan().all()


@pytest.mark.parametrize("size", SIZES)
def test_compiled_code_and_torch_agree(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if load_compiled("low_halves.cpp") is None:
        pytest.skip("there is no compiler")
    values = patterns(size)
    compiled = halved(values)
    monkeypatch.setattr(low_halves, "_library", lambda: None)
    in_torch = halved(values)
    for one, other in zip(compiled, in_torch, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert_same_bits(joined(*compiled), values)


@pytest.mark.long
def test_all_patterns_come_back() -> None:
    """Of all 2**32 float32 values: the copy is torch's, but for NaNs, which stay NaNs; and every bit comes back."""
    pages, room = torch.empty(low_halves_nbytes(NUM_PATTERNS), dtype=torch.uint8), torch.empty(NUM_PATTERNS)
    num_nans = 0
    for start in range(-(2**31), 2**31, NUM_PATTERNS):
        values = torch.arange(start, start + NUM_PATTERNS, dtype=torch.int32).view(torch.float32)
        plain = values.bfloat16()
        upper = plain.clone()
        split(values, upper, pages)
        join(pages, upper, room)
        assert_same_bits(room, values)
        if not torch.equal(upper.view(torch.int16), plain.view(torch.int16)):
            is_nan = values.isnan()
            num_nans += int(is_nan.sum())
            assert_same_bits(upper[~is_nan], plain[~is_nan])
            assert upper[is_nan].isnan().all()
    assert num_nans == 2 * (2**23 - 1)


def test_pages_are_smaller_than_what_they_stand_for() -> None:
    assert low_halves_nbytes(LOW_HALVES) == SECTOR_NBYTES
    assert low_halves_nbytes(LOW_HALVES + 1) == 2 * SECTOR_NBYTES
    assert low_halves_nbytes(100 * LOW_HALVES) / (100 * LOW_HALVES) == pytest.approx(2.1333, abs=1e-4)
    assert chunk_multiple([LOW_HALVES], [4, 2]) == 30_720
    _, pages = halved(patterns(LOW_HALVES - 3))
    assert not pages[2 * LOW_HALVES + LOW_HALVES // 8 :].any()


def test_values_may_lie_over_their_own_pages() -> None:
    """What an update reads whole, and writes split, takes one buffer: pages end before the values that they stand for."""
    size = 8 * LOW_HALVES
    buffer = torch.empty(4 * size, dtype=torch.uint8)
    values = buffer.view(torch.float32)
    values.copy_(patterns(size))
    whole, upper = values.clone(), values.bfloat16()
    for first in range(0, size, 2 * LOW_HALVES):
        part = values[first : first + 2 * LOW_HALVES].clone()
        assert_same_bits(part, whole[first : first + 2 * LOW_HALVES])  # no page has been written over it
        pages = buffer[low_halves_nbytes(first) : low_halves_nbytes(first + 2 * LOW_HALVES)]
        split(part, upper[first : first + 2 * LOW_HALVES], pages)
    assert_same_bits(joined(upper, buffer[: low_halves_nbytes(size)].clone()), whole)


def test_pages_of_a_part_of_a_slot() -> None:
    held = Slice.of_whole("w", (100, 100))
    extent = Extent(offset=2**20, nbytes=40_000, reserved_nbytes=40_960)
    slot = Slot(slice=held, tier=Tier.NVME, tensor=torch.empty(100, 100), extent=extent)
    part = held.flat.part(2 * LOW_HALVES, 10_000)
    assert slot.low_halves_range(part) == (2**20 + 2 * SECTOR_NBYTES, 4 * SECTOR_NBYTES)
    with pytest.raises(AssertionError, match="begins 8 elements behind the start of a page"):
        slot.low_halves_range(held.flat.part(LOW_HALVES + 8, 10_000))


@pytest.mark.parametrize(
    ("values", "upper", "nbytes"),
    [
        (torch.ones(8, dtype=torch.float64), torch.ones(8, dtype=torch.bfloat16), SECTOR_NBYTES),
        (torch.ones(8), torch.ones(8, dtype=torch.float16), SECTOR_NBYTES),
        (torch.ones(8), torch.ones(7, dtype=torch.bfloat16), SECTOR_NBYTES),
        (torch.ones(8), torch.ones(8, dtype=torch.bfloat16), 2 * SECTOR_NBYTES),
        (torch.ones(4, 2), torch.ones(4, 2, dtype=torch.bfloat16), SECTOR_NBYTES),
    ],
)
def test_others_are_refused(values: Tensor, upper: Tensor, nbytes: int) -> None:
    pages = torch.zeros(nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="are not split into"):
        split(values, upper, pages)
    with pytest.raises(ValueError, match="it takes float32 values, as many of bfloat16, and 4096 bytes"):
        join(pages, upper, values)
