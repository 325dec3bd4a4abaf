"""A float32 value as its bfloat16 copy and what that lacks: 16 lower bits, and a bit that tells how a tie was rounded.

The compute copy of a master copy has its upper 16 bits already, rounded to the nearest, ties to even. So the master copy
is ``upper - 1`` where its lower half is above the middle, since then it was rounded up, and ``upper`` where it is below.
In the middle a bit says which: one value in 65,536. A page of 4 KiB has what 1,920 values lack::

    3840 bytes   their lower halves
     240 bytes   a bit of each: a tie that was rounded up, or a NaN without bits in its upper half
      16 bytes   zero

Every NaN is kept with all of its bits: its copy in bfloat16 is its upper half, made quiet where that alone would be
infinite. The code in torch is the reference of the compiled one, and takes its place where there is no compiler.
"""

import ctypes
import functools

import torch
from torch import Tensor

from zinf_compile.ir.copies import LOW_HALVES, SECTOR_NBYTES, low_halves_nbytes
from zinf_compile.runtime.native.compiled import load_compiled

_BITS = 2 * LOW_HALVES  # where in a page the bits begin
_END = _BITS + LOW_HALVES // 8
_TIE = 0x8000
_INFINITE = 0x7F80
_SIGN_AND_INFINITE = 0xFF80
_QUIET = 0x40
_WORD = 0xFFFF


def split(values: Tensor, upper: Tensor, pages: Tensor, *, num_threads: int = 1) -> None:
    """Fill flat uint8 ``pages`` with what flat bfloat16 ``upper`` lacks of float32 ``values``, which it was cast from.

    Where a value is a NaN, ``upper`` gets its upper bits.
    """
    _check(values, upper, pages)
    if (library := _library()) is None:
        _split(values, upper, pages)
    else:
        library.zinf_split_float32(values.data_ptr(), upper.data_ptr(), pages.data_ptr(), values.numel(), num_threads)


def join(pages: Tensor, upper: Tensor, values: Tensor, *, num_threads: int = 1) -> None:
    """Fill flat float32 ``values`` from flat bfloat16 ``upper``, and the pages of what that lacks."""
    _check(values, upper, pages)
    if (library := _library()) is None:
        _join(pages, upper, values)
    else:
        library.zinf_join_float32(pages.data_ptr(), upper.data_ptr(), values.data_ptr(), values.numel(), num_threads)


def _check(values: Tensor, upper: Tensor, pages: Tensor) -> None:
    """Raise ValueError unless all are flat, contiguous, of their dtypes, and of lengths that belong together."""
    nbytes = low_halves_nbytes(values.numel())
    is_flat = all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in (values, upper, pages))
    dtypes, sizes = (values.dtype, upper.dtype, pages.dtype), (upper.numel(), pages.numel())
    wanted = (torch.float32, torch.bfloat16, torch.uint8)
    if not is_flat or (dtypes, sizes) != (wanted, (values.numel(), nbytes)):
        raise ValueError(
            f"{values.numel()} values of {values.dtype} are not split into {upper.numel()} of {upper.dtype} and "
            f"{pages.numel()} bytes of {pages.dtype}: it takes float32 values, as many of bfloat16, and {nbytes} bytes of "
            "uint8, all flat"
        )


def _split(values: Tensor, upper: Tensor, pages: Tensor) -> None:
    bits = values.view(torch.int32)
    low, high = bits & _WORD, (bits >> 16) & _WORD
    is_nan = values.isnan()
    lacks_bits = is_nan & (high & ~_SIGN_AND_INFINITE == 0)
    quiet = torch.where(lacks_bits, high | _QUIET, high)
    upper.copy_(torch.where(is_nan, quiet, _bits_of(upper)).to(torch.int16).view(torch.bfloat16))
    flags = torch.where(is_nan, lacks_bits, (low == _TIE) & (high & 1 == 1))
    missing = pages.numel() // SECTOR_NBYTES * LOW_HALVES - values.numel()
    rows = pages.view(-1, SECTOR_NBYTES)
    rows.zero_()
    rows[:, :_BITS] = _padded(low, missing).to(torch.int16).view(torch.uint8).view(-1, _BITS)
    weights = 1 << torch.arange(8)
    rows[:, _BITS:_END] = (_padded(flags, missing).view(-1, LOW_HALVES // 8, 8) * weights).sum(2).to(torch.uint8)


def _join(pages: Tensor, upper: Tensor, values: Tensor) -> None:
    rows, count = pages.view(-1, SECTOR_NBYTES), values.numel()
    low = rows[:, :_BITS].contiguous().view(torch.int16).view(-1)[:count].int() & _WORD
    flags = (rows[:, _BITS:_END].int().unsqueeze(2) >> torch.arange(8, dtype=torch.int32)) & 1
    is_marked = flags.view(-1)[:count] == 1
    was = _bits_of(upper)
    is_nan = was & 0x7FFF > _INFINITE
    rounded_up = (low > _TIE) | ((low == _TIE) & is_marked)
    high = torch.where(is_nan, torch.where(is_marked, was & _SIGN_AND_INFINITE, was), was - rounded_up.int())
    values.copy_(((high << 16) | low).view(torch.float32))


def _bits_of(upper: Tensor) -> Tensor:
    return upper.view(torch.int16).int() & _WORD


def _padded(tensor: Tensor, missing: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, missing))


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled code; None where it cannot be built."""
    if (library := load_compiled("low_halves.cpp")) is None:
        return None
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    for function in (library.zinf_split_float32, library.zinf_join_float32):
        function.restype, function.argtypes = None, (pointer, pointer, pointer, count, number)
    return library
