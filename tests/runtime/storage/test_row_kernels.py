"""Kernels for rows of frozen weights give the bits of compiled code, also where rows lie in the memory of their values."""

import pytest
import torch
from torch import Tensor

from tests.runtime.storage.test_row_codes import DTYPES, KINDS, SHAPES, decoded, encoded, is_same, weights
from tests.support.cuda_on_cpu import compile_for_cpu, on_a_gpu
from zinf_compile.ir.copies import SECTOR_NBYTES, RowCode
from zinf_compile.runtime.storage import row_codes
from zinf_compile.runtime.storage.row_codes import decode_rows
from zinf_compile.runtime.storage.row_kernels import RowKernels, load_row_kernels
from zinf_compile.runtime.storage.row_memory import decode_in_place


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> RowKernels:
    return compile_for_cpu(RowKernels, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_on_a_cpu_give_the_bits_of_compiled_code(
    dtype: torch.dtype, kind: str, kernels: RowKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shape in SHAPES:
        values = weights(kind, shape, dtype)
        rows = encoded(values)
        wanted = decoded(rows, values)
        with monkeypatch.context() as patch:
            on_a_gpu(patch)
            patch.setattr(row_codes, "load_row_kernels", lambda _: kernels)
            assert is_same(decoded(rows, values), wanted), shape
            shifted = torch.cat([torch.zeros(4, dtype=torch.uint8), rows])[4:]  # rows begin at any fourth byte
            assert is_same(decoded(shifted, values), wanted), shape


def test_no_rows(kernels: RowKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch)
    kernels.decode(RowCode(columns=64), torch.empty(0, dtype=torch.uint8), torch.empty(0))


@pytest.mark.parametrize("behind", [0, 4, 92, SECTOR_NBYTES - 4])
@pytest.mark.parametrize(
    "shape", [(1, 4096), (2, 4096), (64, 64), (129, 64), (700, 96), (33, 1030), (5000, 65), (3, 20_000)]
)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_rows_are_decoded_in_the_memory_of_their_values(
    dtype: torch.dtype, shape: tuple[int, int], behind: int
) -> None:
    """Behind them is less than a sector, as where they come from a file. Values are written where all rows were read."""
    values = weights("heavy tails", shape).clamp(-1000, 1000).to(dtype)
    code = RowCode(columns=shape[1])
    rows = encoded(values)
    wanted = decoded(rows, values)
    room = -(-max(values.nbytes, rows.numel() + behind) // SECTOR_NBYTES) * SECTOR_NBYTES
    memory = torch.full((room,), 77, dtype=torch.uint8)
    first = room - behind - rows.numel()
    memory[first : first + rows.numel()] = rows
    scratch = torch.empty(code.scratch_nbytes(dtype.itemsize), dtype=torch.uint8)
    found = memory[: values.nbytes].view(dtype)
    decode_in_place(code, memory, first, found, scratch)
    assert is_same(found, wanted)


def test_few_calls_decode_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """About half of the rows that are left at once."""
    calls: list[int] = []

    def count(code: RowCode, rows: Tensor, values: Tensor) -> None:
        calls.append(rows.numel() // code.page_nbytes)
        decode_rows(code, rows, values)

    monkeypatch.setattr("zinf_compile.runtime.storage.row_memory.decode_rows", count)
    code, values = RowCode(columns=1024), torch.zeros(4096 * 1024, dtype=torch.bfloat16)
    memory = torch.zeros(values.nbytes, dtype=torch.uint8)
    scratch = torch.empty(code.scratch_nbytes(2), dtype=torch.uint8)
    decode_in_place(code, memory, values.nbytes - code.nbytes(values.numel()), memory.view(torch.bfloat16), scratch)
    assert sum(calls) == 4096
    assert calls[0] > 1900
    assert len(calls) <= 12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("is_torch", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_the_bits_of_compiled_code(
    dtype: torch.dtype, is_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_torch:
        monkeypatch.setattr(row_codes, "load_row_kernels", lambda _: None)
    elif load_row_kernels(torch.empty(0, dtype=dtype, device="cuda:0")) is None:
        pytest.skip("CuPy compiles nothing")
    for kind in KINDS:
        for shape in (*SHAPES, (700, 4096)):
            values = weights(kind, shape, dtype)
            rows = encoded(values)
            found = decoded(rows.cuda(), values.cuda()).cpu()
            assert is_same(found, decoded(rows, values)), (kind, shape)
