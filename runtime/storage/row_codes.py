"""Frozen weights in fewer bits: matrices as rows of int8 with a scale each and some columns in 16 bits, and back.

After LLM.int8() (Dettmers et al., arXiv 2208.07339): vector-wise, with outliers kept apart at a threshold of 6. A row is::

    4 bytes       float32: of the elements that have codes, the magnitude of the largest, which 127 stands for
    4 each        uint32: the columns of the outliers, ascending; those not used are 2**32 - 1
    2 each        the outliers' values, in float16 for float16 weights, else in bfloat16
    1 a column    codes from -127 to 127, each the nearest; 0 for an outlier
    0 to 3 bytes  zeros, up to a multiple of 4

The paper finds outliers in what a layer reads, when it runs: columns of the input with an element of 6 or more. Here weights
are decoded before the product, so only the error of the weight counts, and outliers are those of the row, which share its
scale: at most one column of 256, the largest first, whose element is 6 times or more the root mean square of what is smaller
than all of these. Equal magnitudes are all outliers, or none is. Rows stay independent: any can be decoded by themselves.

What was decoded is encoded to the same values again: a row is first tried with no outlier, with the largest as one, and so
on, and if one of these loses nothing, it is taken. A row with an element that is not finite is decoded to NaN.

On a CPU this is done by compiled C++ for float32 and bfloat16; on a GPU kernels of ``row_kernels`` decode these. The code in
torch is the reference, and takes its place for float16, to encode on a GPU, and where nothing compiles.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from zinf_compile.ir.copies import RowCode
from zinf_compile.runtime.native.compiled import load_compiled
from zinf_compile.runtime.storage.row_kernels import load_row_kernels

THRESHOLD = 6.0  # LLM.int8()'s
_LARGEST_CODE = 127
_LANES = 16  # sums that are taken side by side, as the compiled code does
_LEAST_SCALE = 2.0**-100  # rows of smaller elements are zero
_NO_COLUMN = -1
_ELEMENTS_AT_ONCE = 2**20  # in torch, which holds about 60 bytes of each
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def decode_rows(code: RowCode, rows: Tensor, values: Tensor, *, num_threads: int = 1) -> None:
    """Fill flat ``values`` of whole rows, in any of three dtypes, from flat uint8 ``rows`` on the same device.

    On a GPU that is enqueued on the current stream. ``num_threads`` are those of a CPU.
    """
    count = _check(code, values, rows)
    if (kernels := load_row_kernels(values)) is not None:
        kernels.decode(code, rows, values)
        return
    if (library := _library_for(values)) is not None:
        function = getattr(library, f"zinf_decode_rows_{_NAMES[values.dtype]}")
        function(
            *(rows.data_ptr(), values.data_ptr(), count, code.columns, code.num_outliers, code.page_nbytes), num_threads
        )
        return
    step = max(1, _ELEMENTS_AT_ONCE // code.columns)
    for some, matrix in zip(_matrix(rows, count).split(step), _matrix(values, count).split(step), strict=True):
        _decode(code, some, matrix)


def encode_rows(code: RowCode, values: Tensor, rows: Tensor, *, num_threads: int = 1) -> None:
    """Fill flat uint8 ``rows`` with flat ``values`` of whole rows, in any of three dtypes, on the same device."""
    count = _check(code, values, rows)
    if (library := _library_for(values)) is not None:
        function = getattr(library, f"zinf_encode_rows_{_NAMES[values.dtype]}")
        function(
            *(values.data_ptr(), rows.data_ptr(), count, code.columns, code.num_outliers, code.page_nbytes),
            *(THRESHOLD, num_threads),
        )
        return
    step = max(1, _ELEMENTS_AT_ONCE // code.columns)
    for some, matrix in zip(_matrix(rows, count).split(step), _matrix(values, count).split(step), strict=True):
        _encode(code, matrix, some)


def round_to_rows(code: RowCode, values: Tensor) -> None:
    """Give flat ``values`` of whole rows the values that their rows are decoded to."""
    rows = torch.empty(code.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
    encode_rows(code, values, rows, num_threads=torch.get_num_threads())
    decode_rows(code, rows, values, num_threads=torch.get_num_threads())


def _check(code: RowCode, values: Tensor, rows: Tensor) -> int:
    """Return how many rows there are; ValueError unless both are flat, whole rows, of their dtypes, and on one device."""
    count, beyond = divmod(values.numel(), code.columns)
    is_flat = all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in (values, rows))
    is_of_dtype = values.dtype in (*_NAMES, torch.float16) and rows.dtype == torch.uint8
    if beyond or not is_flat or not is_of_dtype or rows.numel() != count * code.page_nbytes:
        raise ValueError(
            f"{values.numel()} values of {values.dtype} are no {rows.numel()} bytes of {rows.dtype} in rows of "
            f"{code.columns}: it takes flat float32, bfloat16 or float16, whole rows, and {code.page_nbytes} bytes for each"
        )
    if values.device != rows.device:
        raise ValueError(f"values on {values.device} are no rows on {rows.device}: both are to be on one device")
    return count


def _matrix(flat: Tensor, count: int) -> Tensor:
    return flat.view(count, -1) if count else flat.view(0, 1)


def _halves_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def _parts(code: RowCode, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views of the bytes of the scales, the columns and values of the outliers, and the codes."""
    sizes = [4, 4 * code.num_outliers, 2 * code.num_outliers, code.columns]
    largest, columns, halves, codes, _ = rows.split([*sizes, code.page_nbytes - sum(sizes)], dim=1)
    return largest, columns, halves, codes


def _scale_of(largest: Tensor) -> Tensor:
    return torch.where(largest < _LEAST_SCALE, 0, largest / _LARGEST_CODE)


def _products(codes: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what codes stand for, float32 [rows, columns], rounded to ``dtype``. ``largest`` is float32 [rows, 1]."""
    products = codes * _scale_of(largest)
    products = torch.where(codes == _LARGEST_CODE, largest, torch.where(codes == -_LARGEST_CODE, -largest, products))
    return products.to(dtype).float()


def _decode(code: RowCode, rows: Tensor, values: Tensor) -> None:
    largest, columns, halves, codes = (part.contiguous() for part in _parts(code, rows))
    scales = largest.view(torch.float32)
    made = torch.nn.functional.pad(_products(codes.view(torch.int8).float(), scales, values.dtype), (0, 1))
    where = columns.view(torch.int32).long()
    kept = halves.view(_halves_of(values.dtype)).float()
    made.scatter_(1, torch.where(where == _NO_COLUMN, code.columns, where), kept)  # those not used go to the padding
    made = torch.where(made == 0, 0, made)[:, : code.columns]
    values.copy_(made)
    values.masked_fill_(scales.isnan(), torch.nan)  # vectorised casts give NaN other bits


def _encode(code: RowCode, matrix: Tensor, rows: Tensor) -> None:
    half = _halves_of(matrix.dtype)
    values = matrix.float()
    kept = values.to(half).float()
    magnitudes = kept.abs()
    is_finite = magnitudes.isfinite().all(1, keepdim=True)
    values, kept, magnitudes = (torch.where(is_finite, each, 0) for each in (values, kept, magnitudes))
    largest_first = magnitudes.topk(code.num_outliers + 1, dim=1).values
    rest = torch.where(magnitudes > largest_first[:, -1:], 0, values)
    needed = THRESHOLD * THRESHOLD * _sum_of_squares(rest)
    by_rule = chosen = largest_first.new_zeros(matrix.shape[0], 1, dtype=torch.long)
    is_chosen = torch.zeros_like(is_finite)
    for count in range(code.num_outliers + 1):
        bound = largest_first[:, count : count + 1]
        last = largest_first[:, count - 1 : count].double() if count else None
        is_clear = torch.ones_like(is_finite) if last is None else last != bound
        codes, largest = _codes_within(values, magnitudes, bound)
        back = torch.where(magnitudes > bound, kept, _products(codes, largest, matrix.dtype))
        takes = is_clear & ~is_chosen & (back == values).all(1, keepdim=True)
        chosen, is_chosen = torch.where(takes, count, chosen), is_chosen | takes
        if last is not None:
            by_rule = torch.where(is_clear & (last * last * code.columns >= needed), count, by_rule)
    bound = largest_first.gather(1, torch.where(is_chosen, chosen, by_rule))
    codes, largest = _codes_within(values, magnitudes, bound)
    is_outlier = magnitudes > bound
    number = torch.arange(code.columns, device=rows.device).expand_as(codes)
    first = torch.where(is_outlier, number, code.columns).sort(1).values[:, : code.num_outliers]
    is_used = first < code.columns
    halves = torch.where(is_used, kept.gather(1, torch.where(is_used, first, 0)), 0).to(half)
    rows.zero_()
    of_largest, of_columns, of_halves, of_codes = _parts(code, rows)
    of_largest.copy_(torch.where(is_finite, largest, torch.nan).contiguous().view(torch.uint8))
    of_columns.copy_(torch.where(is_used, first, _NO_COLUMN).int().contiguous().view(torch.uint8))
    of_halves.copy_(halves.contiguous().view(torch.uint8))
    of_codes.copy_(torch.where(is_outlier, 0, codes).to(torch.int8).view(torch.uint8))


def _codes_within(values: Tensor, magnitudes: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, in float32, and of each row the largest magnitude of what is no outlier: those are above a bound."""
    largest = torch.where(magnitudes > bound, 0, values.abs()).amax(1, keepdim=True)
    scales = _scale_of(largest)
    return torch.where(scales == 0, 0, (values / scales).round()), largest


def _sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of squares of each row, float64 [rows, 1], in the order in which the compiled code adds them."""
    padded = torch.nn.functional.pad(values.double(), (0, -values.shape[1] % _LANES)).view(len(values), -1, _LANES)
    lanes = torch.zeros_like(padded[:, 0])
    for step in range(padded.shape[1]):
        lanes = lanes + padded[:, step] * padded[:, step]
    total = torch.zeros_like(lanes[:, 0])
    for lane in range(_LANES):
        total = total + lanes[:, lane]
    return total.unsqueeze(1)


def _library_for(values: Tensor) -> ctypes.CDLL | None:
    """Return the compiled code for tensors like these, if there is some."""
    return _library() if values.device.type == "cpu" and values.dtype in _NAMES else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled code; None where it cannot be built."""
    if (library := load_compiled("row_codes.cpp")) is None:
        return None
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    shape: tuple[Any, ...] = (count, count, count, count)
    for dtype in _NAMES.values():
        for name, arguments in (
            (f"zinf_decode_rows_{dtype}", (pointer, pointer, *shape, number)),
            (f"zinf_encode_rows_{dtype}", (pointer, pointer, *shape, ctypes.c_double, number)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = None, arguments
    return library
