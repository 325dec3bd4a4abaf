"""Rows of frozen weights in int8: compiled code and torch agree bit for bit, and lose as little as the literature says."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zinf_compile.ir.copies import RowCode
from zinf_compile.runtime.native.compiled import load_compiled
from zinf_compile.runtime.storage import row_codes
from zinf_compile.runtime.storage.row_codes import decode_rows, encode_rows

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((3, 16), (17, 255), (5, 256), (9, 513), (8, 1030))


def weights(kind: str, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator)
    some = torch.rand(shape, generator=generator) < 0.01
    made = {
        "normal": values * 0.02,
        "heavy tails": values / torch.randn(shape, generator=generator).abs().clamp(min=1e-3),
        "some columns": values * torch.where(some[:1], 60.0, 1.0),
        "one is huge": torch.where(torch.arange(shape[1]) == shape[1] // 2, -3e37, values),
        "zero": torch.zeros(shape),
        "negative zero": -torch.zeros(shape),
        "tiny": values * 1e-38,
        "every magnitude": values * torch.logspace(-44, 37, shape[1]),
        "largest twice": torch.where(some, -40.0, values),
        "some nan": torch.where(some, torch.nan, values),
        "some infinite": torch.where(some, -torch.inf, values),
        "not in bfloat16": torch.where(some, 3.4e38, values),
    }
    return made[kind].to(dtype)


KINDS = (
    *("normal", "heavy tails", "some columns", "one is huge", "zero", "negative zero", "tiny", "every magnitude"),
    *("largest twice", "some nan", "some infinite", "not in bfloat16"),
)


def encoded(values: Tensor, **options: int) -> Tensor:
    code = RowCode(columns=values.shape[1])
    rows = torch.full((code.nbytes(values.numel()),), 77, dtype=torch.uint8)
    encode_rows(code, values.reshape(-1), rows, **options)
    return rows


def decoded(rows: Tensor, like: Tensor, **options: int) -> Tensor:
    values = torch.full_like(like, 99.0).view(-1)
    decode_rows(RowCode(columns=like.shape[1]), rows, values, **options)
    return values.view(like.shape)


def is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Tensor]], Tensor]:
    """Return a function that calls another without compiled code."""

    def call(function: Callable[[], Tensor]) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(row_codes, "_library", lambda: None)
            return function()

    return call


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_code_gives_the_bits_of_torch(
    dtype: torch.dtype, kind: str, in_torch: Callable[[Callable[[], Tensor]], Tensor]
) -> None:
    assert load_compiled("row_codes.cpp") is not None
    for shape in SHAPES:
        values = weights(kind, shape, dtype)
        rows = encoded(values, num_threads=3)
        assert is_same(rows, in_torch(lambda v=values: encoded(v))), shape  # type: ignore[misc]
        back = decoded(rows, values, num_threads=2)
        assert is_same(back, in_torch(lambda r=rows, v=values: decoded(r, v))), shape  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_what_was_decoded_is_encoded_to_the_same_values(dtype: torch.dtype, kind: str) -> None:
    for shape in SHAPES:
        values = (
            weights(kind, shape).clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else weights(kind, shape, dtype)
        )
        once = decoded(encoded(values), values)
        assert is_same(decoded(encoded(once), values), once), shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    values = weights("heavy tails", (8, 1030), dtype)
    code = RowCode(columns=1030)
    rows = encoded(values).view(8, code.page_nbytes)
    assert is_same(rows[3:6], encoded(values[3:6]))
    assert is_same(decoded(rows[3:6].reshape(-1), values[3:6]), decoded(rows.view(-1), values)[3:6])


def test_outliers_are_kept_and_the_rest_is_near() -> None:
    values = weights("normal", (64, 1024), torch.bfloat16)
    values[:, 7], values[:, 900] = 2.0, -3.5
    back = decoded(encoded(values), values)
    assert torch.equal(back[:, [7, 900]], values[:, [7, 900]])
    rest = [column for column in range(1024) if column not in (7, 900)]
    kept, lost = values[:, rest].float(), (back - values)[:, rest].float()
    step = kept.abs().amax(1, keepdim=True) / 127
    assert bool((lost.abs() <= step / 2 + kept.abs() * 2**-8).all())


def test_a_row_has_no_more_outliers_than_there_is_room_for() -> None:
    """Beyond that the largest are kept; of equals that would not all fit, none is."""
    values = torch.full((2, 512), 0.01)
    values[0, :3] = torch.tensor([30.0, 20.0, 10.0])
    values[1, :3] = 20.0
    back = decoded(encoded(values), values)
    assert back[0, :3].tolist() == [30.0, 20.0, 10.0]  # two are outliers, and 10 has the code 127
    assert back[0, 3:].unique().tolist() == [0.0]
    assert back[1, :3].tolist() == [20.0] * 3
    assert encoded(values).view(2, -1)[1, 4:8].tolist() == [255] * 4  # no column


def test_what_cannot_be_encoded_stays_exact() -> None:
    assert RowCode.of_weight((64, 64), "bfloat16") == RowCode(columns=64)
    for shape, dtype in (
        ((63, 64), "bfloat16"),  # less than 4,096 elements
        ((4096,), "bfloat16"),
        ((4096, 4, 4), "bfloat16"),
        ((4096, 8), "bfloat16"),  # 20 bytes a row in place of 16
        ((64, 64), "float64"),
        ((64, 64), "int8"),
    ):
        assert RowCode.of_weight(shape, dtype) is None, (shape, dtype)
    with pytest.raises(ValueError, match="whole rows"):
        encode_rows(RowCode(columns=64), torch.zeros(100), torch.zeros(10, dtype=torch.uint8))


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "some columns"])
def test_products_lose_no_more_than_without_outliers(kind: str) -> None:
    """Against plain vector-wise int8, whose scale is each row's largest element."""
    values, x = weights(kind, (256, 1024)), torch.randn(32, 1024, generator=torch.Generator().manual_seed(3))
    scale = values.abs().amax(1, keepdim=True) / 127
    exact = x @ values.T

    def error(weight: Tensor) -> float:
        return float((x @ weight.T - exact).norm() / exact.norm())

    plain, ours = error((values / scale).round() * scale), error(decoded(encoded(values), values))
    assert ours <= plain * 1.0001
    assert kind == "normal" or ours < plain / 1.5
