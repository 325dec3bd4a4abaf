"""Codes of optimizer state: the compiled code and torch agree bit for bit, and round as the literature says."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zinf_compile.ir.copies import SECTOR_NBYTES, Code, Encoding, chunk_multiple, code_of_state
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.native.compiled import load_compiled
from zinf_compile.runtime.params.coded_state import CodedHomeTensor
from zinf_compile.runtime.storage import state_codes
from zinf_compile.runtime.storage.state_codes import Coded, decode, dynamic_values, encode

SIZES = (1, 255, 256, 257, 3840, 3841, 2048 * 3 + 5, 40_000)


def numbers(kind: str, size: int) -> Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    some = torch.rand(size, generator=torch.Generator().manual_seed(1)) < 0.01
    return {
        "normal": values,
        "positive": values.square(),
        "negative": -values.abs(),
        "zero": torch.zeros(size),
        "negative zero": -torch.zeros(size),
        "every magnitude": values * torch.logspace(-44, 37, size),
        "one is huge": torch.where(torch.arange(size) == size // 2, -3e38, values),
        "denormal": values * 1e-42,
        "some nan": torch.where(some, torch.nan, values),
        "some infinite": torch.where(some, -torch.inf, values),
        "largest twice": torch.where(some, -7.0, values.clamp(-1, 7.0)),
    }[kind]


KINDS = (
    *("normal", "positive", "negative", "zero", "negative zero", "every magnitude", "one is huge", "denormal"),
    *("some nan", "some infinite", "largest twice"),
)


def encoded(code: Code, values: Tensor, **options: int) -> Tensor:
    pages = torch.full((Encoding(dtype="float32", code=code).nbytes(values.numel()),), 77, dtype=torch.uint8)
    encode(code, values, pages, **options)
    return pages


def decoded(code: Code, pages: Tensor, size: int, **options: int) -> Tensor:
    values = torch.full((size,), 99.0)
    decode(code, pages, values, **options)
    return values


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Tensor]], Tensor]:
    """Return a function that calls another without compiled code."""

    def call(function: Callable[[], Tensor]) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(state_codes, "_library", lambda: None)
            return function()

    return call


def is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", Code)
def test_compiled_code_gives_the_bits_of_torch(
    code: Code, kind: str, in_torch: Callable[[Callable[[], Tensor]], Tensor]
) -> None:
    assert load_compiled("state_codes.cpp") is not None
    for size in SIZES:
        values = numbers(kind, size)
        for first, seed in ((0, 0), (2**40 + 61_440, 2**32 - 1)):
            pages = encoded(code, values, first=first, seed=seed, num_threads=3)
            expected = in_torch(lambda v=values, f=first, s=seed: encoded(code, v, first=f, seed=s))  # type: ignore[misc]
            assert is_same(pages, expected), (size, first)
        back = decoded(code, pages, size, num_threads=2)
        assert is_same(back, in_torch(lambda p=pages, n=size: decoded(code, p, n)))  # type: ignore[misc]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("some")])
@pytest.mark.parametrize("code", Code)
def test_what_was_decoded_is_encoded_to_the_same_codes(code: Code, kind: str) -> None:
    for size in SIZES:
        pages = encoded(code, numbers(kind, size), seed=3)
        again = encoded(code, decoded(code, pages, size), first=12_345, seed=4)
        assert is_same(decoded(code, again, size), decoded(code, pages, size))


@pytest.mark.parametrize("signed", [True, False])
def test_the_data_type_is_that_of_bitsandbytes(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    assert torch.equal(dynamic_values(signed=signed), functional.create_dynamic_map(signed=signed))


@pytest.mark.parametrize("kind", ["normal", "positive"])
def test_blocks_are_rounded_as_in_bitsandbytes_or_nearer(kind: str) -> None:
    """Blocks whose largest element is negative differ: we store it exactly, and bitsandbytes has no -1.

    Of small values bitsandbytes does not always take the nearest on a CPU.
    """
    functional = pytest.importorskip("bitsandbytes").functional
    values = numbers(kind, 40_960)
    blocks, ours = values.view(-1, 256), decoded(Code.INT8, encoded(Code.INT8, values), values.numel()).view(-1, 256)
    extremes = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)).view(-1)
    num_compared = 0
    for signed in (True, False):
        codes, state = functional.quantize_blockwise(values, code=dynamic_values(signed=signed), blocksize=256)
        theirs = functional.dequantize_blockwise(codes, state).view(-1, 256)
        alike = (extremes > 0) & ((blocks < 0).any(1) == signed)
        assert not signed or kind == "positive" or alike.any()
        one, other, exact = ours[alike], theirs[alike], blocks[alike]
        assert ((one - exact).abs() <= (other - exact).abs() + 2**-9 * exact.abs()).all()
        assert (one - exact).abs().sum() <= 1.001 * (other - exact).abs().sum()
        assert (one == other).sum() >= 0.95 * one.numel()
        num_compared += one.numel()
    assert num_compared > 5000


@pytest.mark.parametrize("kind", ["normal", "positive", "negative", "largest twice"])
def test_the_error_of_int8_is_about_half_a_step(kind: str) -> None:
    values = numbers(kind, 40_960)
    back = decoded(Code.INT8, encoded(Code.INT8, values), values.numel())
    blocks, errors = values.view(-1, 256), (back - values).view(-1, 256).abs()
    largest = blocks.abs().amax(1, keepdim=True)
    steps = torch.where(
        (blocks < 0).any(1, keepdim=True), *(dynamic_values(signed=each).diff().max() for each in (True, False))
    )
    assert (errors <= (0.5 * steps + 2**-10) * largest).all()
    assert (errors.gather(1, blocks.abs().argmax(1, keepdim=True)) == 0).all()  # the largest is exact
    assert errors.mean() < 0.01 * largest.mean()


def test_a_block_that_is_not_finite_becomes_nan_and_no_other() -> None:
    values = torch.ones(1024)
    values[300] = math.inf
    back = decoded(Code.INT8, encoded(Code.INT8, values), 1024)
    assert back[256:512].isnan().all()
    assert torch.equal(back[:256], torch.ones(256))
    assert torch.equal(back[512:], torch.ones(512))
    kept = decoded(Code.BFLOAT16, encoded(Code.BFLOAT16, torch.tensor([math.inf, -math.inf, math.nan, 1.0]), seed=9), 4)
    assert kept[:2].tolist() == [math.inf, -math.inf]
    assert kept[2].isnan()
    assert kept[3] == 1


def test_bfloat16_keeps_the_mean() -> None:
    """An average over seeds is nearer than one step; and a moment of 0.999 shrinks, which to the nearest it does not."""
    values = numbers("normal", 4096)
    rounded = torch.stack(
        [decoded(Code.BFLOAT16, encoded(Code.BFLOAT16, values, seed=seed), 4096) for seed in range(400)]
    )
    step = values.abs() * 2**-7
    assert ((rounded - values).abs() <= step).all()
    assert ((rounded.mean(0) - values).abs() / step).mean() < 0.03  # 0.25 where all were rounded to the nearest
    assert (rounded.amin(0) != rounded.amax(0)).double().mean() > 0.9
    moment = torch.ones(4096)
    for seed in range(1000):
        moment = decoded(Code.BFLOAT16, encoded(Code.BFLOAT16, moment * 0.999, seed=seed), 4096)
    assert moment.mean() == pytest.approx(0.999**1000, rel=0.02)
    assert (torch.ones(1) * 0.999).bfloat16() == 1


def test_draws_depend_on_the_element_not_on_where_it_is_cut() -> None:
    values = numbers("normal", 8192)
    whole = encoded(Code.BFLOAT16, values, first=4096, seed=5)
    halves = [encoded(Code.BFLOAT16, values[start : start + 4096], first=4096 + start, seed=5) for start in (0, 4096)]
    assert torch.equal(whole, torch.cat(halves))
    assert not torch.equal(whole, encoded(Code.BFLOAT16, values, first=4096, seed=6))


def test_pages_of_a_part() -> None:
    coded = Coded(code=Code.INT8, slice=Slice.of_whole("w", (100, 100)))
    flat = coded.slice.flat
    assert coded.code.nbytes(10_000) == 3 * SECTOR_NBYTES
    assert coded.pages_of(flat) == (0, 3 * SECTOR_NBYTES)
    assert coded.pages_of(flat.part(3840, 10_000)) == (SECTOR_NBYTES, 2 * SECTOR_NBYTES)
    pages = Slice.of_whole("w", (3 * SECTOR_NBYTES,))
    assert coded.values_of(pages.part(SECTOR_NBYTES, 3 * SECTOR_NBYTES)) == flat.part(3840, 10_000)
    with pytest.raises(ValueError, match="begins 100 elements behind the start of a page"):
        coded.pages_of(flat.part(3940, 10_000))


def test_sizes() -> None:
    bfloat16, int8 = Code.BFLOAT16.page_elements, Code.INT8.page_elements
    assert chunk_multiple(()) == 4096
    assert chunk_multiple([bfloat16]) == chunk_multiple([bfloat16], [4, 2, 1]) == 4096
    assert chunk_multiple([int8], [4]) == 15_360  # of float32 a sector is 1024 elements, and a page of codes 3840
    assert chunk_multiple([int8], [4, 2]) == chunk_multiple([bfloat16, int8], [4, 2]) == 30_720
    assert chunk_multiple([int8], [1, 16]) == 61_440
    assert chunk_multiple([int8]) == 7680
    assert Encoding(dtype="float32", code=Code.INT8).nbytes(30_720 * 100) / (30_720 * 100) == pytest.approx(
        1.0667, abs=1e-4
    )
    assert code_of_state(Code.INT8, dtype="float32", num_elements=4095) is None
    assert code_of_state(Code.INT8, dtype="bfloat16", num_elements=2**20) is None
    assert code_of_state(None, dtype="float32", num_elements=2**20) is None
    assert code_of_state(Code.INT8, dtype="float32", num_elements=4096) is Code.INT8


@pytest.mark.parametrize(
    ("values", "nbytes"),
    [
        (torch.zeros(10), 2 * SECTOR_NBYTES),
        (torch.zeros(10, dtype=torch.float64), SECTOR_NBYTES),
        (torch.zeros(2, 5), SECTOR_NBYTES),
        (torch.zeros(20)[::2], SECTOR_NBYTES),
    ],
)
@pytest.mark.parametrize("code", Code)
def test_bad_input(code: Code, values: Tensor, nbytes: int) -> None:
    pages = torch.zeros(nbytes, dtype=torch.uint8)
    for function in (lambda: encode(code, values, pages), lambda: decode(code, pages, values)):
        with pytest.raises(ValueError, match=f"bytes of {code}"):
            function()
    assert not pages.any()


@pytest.mark.parametrize("code", Code)
def test_on_another_device_everything_stays_there_and_nothing_waits(code: Code) -> None:
    """The meta device has no values: whoever asks for one, or how many there are of a kind, gets an error."""
    coded = Coded(code=code, slice=Slice.of_whole("w", (100, 100)))
    pages = torch.empty(code.nbytes(10_000), dtype=torch.uint8, device="meta")
    home = CodedHomeTensor.of(coded, pages)
    value = coded.value(pages)
    encode(code, value.view(-1), pages, drawn_from=value.view(-1))
    assert (value.device.type, value.shape, home.device.type, home.shape) == ("meta", (100, 100)) * 2
