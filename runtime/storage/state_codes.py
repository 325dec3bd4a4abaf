"""Optimizer state in fewer bits: float32 values as pages of codes, each a sector of a disk, and back.

``int8`` is the dynamic data type of "8-bit optimizers via block-wise quantization" (Dettmers et al., arXiv 2110.02861). A
page holds 15 blocks of 256 elements::

    3840 bytes   codes of 256 values from -1 to 1, or from 0 to 1 in a block without negative elements
      60 bytes   scales, float32: of each block the element of largest magnitude, which codes are multiplied by
      15 bytes   which values each block has: 0 with negative ones, 1 without

The scale has the sign of its element, so that this is stored exactly, and what was decoded is encoded to the same codes
again. An element over its scale is cut to its upper 18 bits, of which 9 are a fraction, and the code of the value nearest to
their middle is looked up. A block with an element that is not finite is decoded to NaN.

``bfloat16`` is rounded stochastically: up with the probability that keeps the mean, from random bits that depend on the
element's number, a seed, and other values that change from step to step, as those of the parameter do. To the nearest,
second moments of Adam would stop shrinking, since 0.999 rounds to 1.

On a CPU this is done by compiled C++, on a GPU by the kernels of ``state_kernels``. The code in torch is the reference of
both, and takes their place where there is no compiler.
"""

import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zinf_compile.ir.copies import SECTOR_NBYTES, AnyCode, Code
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.native.compiled import load_compiled
from zinf_compile.runtime.storage.state_kernels import load_state_kernels

_BLOCK = 256
_BLOCKS = Code.INT8.page_elements // _BLOCK
_SCALES = Code.INT8.page_elements  # offset in a page
_MAPS = _SCALES + 4 * _BLOCKS
_DECADES = 7
_DROPPED = 14  # bits of an element over its scale that do not count
_UPPER = 2 ** (32 - _DROPPED)
_WORD = 0xFFFFFFFF
# What torch encodes at once, of which it holds about 60 bytes an element: a quarter of all pages, and no more than these.
_PIECES = 4
_MOST_PAGES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged(ABC):
    """What a slot of pages holds: the codes of a slice of a parameter. A subclass says what they are decoded to."""

    code: AnyCode
    slice: Slice
    dtype: torch.dtype = torch.float32  # of the values

    def pages_of(self, part: Slice) -> tuple[int, int]:
        """Return the first byte and the number of bytes of the pages with a part, which begins with a page."""
        first, beyond = divmod(part.offset_in(self.slice), self.code.page_elements)
        if beyond:
            raise ValueError(f"{part} begins {beyond} elements behind the start of a page")
        return first * SECTOR_NBYTES, self.code.nbytes(part.num_elements)

    def values_of(self, pages: Slice) -> Slice:
        """Return the elements whose codes are in some whole pages of the slot, as a flat slice of the parameter."""
        first, last = (index // SECTOR_NBYTES * self.code.page_elements for index in (pages.start, pages.stop))
        return self.slice.flat.part(first, min(last, self.slice.num_elements))

    @abstractmethod
    def room(self, num_elements: int, device: torch.device) -> Tensor:
        """Return memory for so many values, flat, whatever the user's defaults are."""

    @abstractmethod
    def first_of(self, values: Tensor, num_elements: int) -> Tensor:
        """Return the first of some values that ``room`` has made, in the same memory."""

    @abstractmethod
    def shaped(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Return flat values in a shape, in the same memory."""

    @abstractmethod
    def flat(self, value: Tensor) -> Tensor:
        """Return all values, which a user has in some shape, flat."""

    @abstractmethod
    def piece_of(self, values: Tensor, part: Slice) -> Tensor:
        """Return a part of all flat values, on the CPU."""

    @abstractmethod
    def decode(self, pages: Tensor, values: Tensor, *, num_threads: int = 1) -> Tensor:
        """Fill flat ``values`` from the uint8 pages of as many elements; return them."""

    @abstractmethod
    def encode(
        self,
        values: Tensor,
        pages: Tensor,
        *,
        first: int = 0,
        seed: int = 0,
        drawn_from: Tensor | None = None,
        num_threads: int = 1,
    ) -> None:
        """Fill uint8 pages from as many flat values; see ``encode`` below."""

    def value(self, pages: Tensor) -> Tensor:
        """Return all values, from all pages, in new memory and in the shape of the slice."""
        flat = self.decode(pages, self.room(self.slice.num_elements, pages.device))
        return self.shaped(flat, torch.Size(self.slice.sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded(Paged):
    """What a slot of our own codes holds: float32 values of a slice of a parameter."""

    code: Code

    def decode(self, pages: Tensor, values: Tensor, *, num_threads: int = 1) -> Tensor:
        """Fill flat float32 ``values`` from the uint8 pages of as many elements; return them."""
        decode(self.code, pages, values, num_threads=num_threads)
        return values

    def encode(
        self,
        values: Tensor,
        pages: Tensor,
        *,
        first: int = 0,
        seed: int = 0,
        drawn_from: Tensor | None = None,
        num_threads: int = 1,
    ) -> None:
        """Fill uint8 pages from as many flat values; see ``encode`` below."""
        encode(self.code, values, pages, first=first, seed=seed, drawn_from=drawn_from, num_threads=num_threads)

    def room(self, num_elements: int, device: torch.device) -> Tensor:
        """Return memory for so many values, flat, whatever the user's defaults are."""
        return torch.empty(num_elements, dtype=self.dtype, device=device)

    def first_of(self, values: Tensor, num_elements: int) -> Tensor:
        """Return the first of some values."""
        return values[:num_elements]

    def shaped(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Return flat values in a shape."""
        return values.view(shape)

    def flat(self, value: Tensor) -> Tensor:
        """Return all values, which a user has in some shape, flat."""
        return value.detach().reshape(-1).contiguous()

    def piece_of(self, values: Tensor, part: Slice) -> Tensor:
        """Return a part of all flat values, on the CPU."""
        first = part.offset_in(self.slice)
        return values[first : first + part.num_elements].cpu()


def decode(code: Code, pages: Tensor, values: Tensor, *, num_threads: int = 1) -> None:
    """Fill flat float32 ``values`` from flat uint8 ``pages`` on the same device, which hold as many elements.

    On a GPU that is enqueued on the current stream. ``num_threads`` are those of a CPU.
    """
    _check(code, values, pages)
    if (kernels := load_state_kernels(values.device)) is not None:
        kernels.decode(code, pages, values, _tables(values.device).values if code is Code.INT8 else None)
        return
    if (library := _library_on(values.device)) is not None:
        if code is Code.INT8:
            library.zinf_decode_int8(pages.data_ptr(), values.data_ptr(), values.numel(), c_maps(), num_threads)
        else:
            library.zinf_decode_bfloat16(pages.data_ptr(), values.data_ptr(), values.numel(), num_threads)
        return
    for elements, nbytes in _pieces(code, values.numel()):
        if code is Code.INT8:
            _decode_int8(pages[nbytes], values[elements])
        else:
            _decode_bfloat16(pages[nbytes], values[elements])


def encode(
    code: Code,
    values: Tensor,
    pages: Tensor,
    *,
    first: int = 0,
    seed: int = 0,
    drawn_from: Tensor | None = None,
    num_threads: int = 1,
) -> None:
    """Fill flat uint8 ``pages`` with flat float32 ``values`` on the same device.

    The rest is used where values are rounded stochastically: ``first`` is the number of the first element in its
    parameter, ``seed`` a number below 2**32, and ``drawn_from`` has a float32 number for each element, which makes its
    random bits others. On a GPU that is enqueued on the current stream. ``num_threads`` are those of a CPU.
    """
    _check(code, values, pages)
    if (kernels := load_state_kernels(values.device)) is not None:
        codes = _tables(values.device).codes if code is Code.INT8 else None
        kernels.encode(code, values, pages, codes, first=first, seed=seed, drawn_from=drawn_from)
        return
    if (library := _library_on(values.device)) is not None:
        if code is Code.INT8:
            library.zinf_encode_int8(values.data_ptr(), pages.data_ptr(), values.numel(), c_maps(), num_threads)
        else:
            others = None if drawn_from is None else drawn_from.data_ptr()
            library.zinf_encode_bfloat16(
                values.data_ptr(), pages.data_ptr(), values.numel(), first, seed, others, num_threads
            )
        return
    for elements, nbytes in _pieces(code, values.numel()):
        if code is Code.INT8:
            _encode_int8(values[elements], pages[nbytes])
        else:
            drawn = None if drawn_from is None else drawn_from[elements]
            _encode_bfloat16(values[elements], pages[nbytes], first + elements.start, seed, drawn)


def _check(code: Code, values: Tensor, pages: Tensor) -> None:
    """Raise ValueError unless both are flat, contiguous, of their dtypes, on one device, and of lengths that agree."""
    nbytes = code.nbytes(values.numel())
    is_flat = all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in (values, pages))
    if not is_flat or (values.dtype, pages.dtype, pages.numel()) != (torch.float32, torch.uint8, nbytes):
        raise ValueError(
            f"{values.numel()} values of {values.dtype} are no {pages.numel()} bytes of {code} in {pages.dtype}: it takes "
            f"float32 values, flat, and {nbytes} bytes of uint8"
        )
    if values.device != pages.device:
        raise ValueError(
            f"values on {values.device} are no bytes of {code} on {pages.device}: both are to be on one device"
        )


# The 256 values


@functools.cache
def dynamic_values(*, signed: bool) -> Tensor:
    """Return the values of the dynamic data type, float32 [256], ascending: seven decades, finer towards 1.

    They are those of ``create_dynamic_map`` in bitsandbytes.
    """
    values = [0.0, 1.0]
    with torch.device("cpu"):
        for decade in range(_DECADES):
            count = 2**decade if signed else 2 ** (decade + 1)
            bounds = torch.linspace(0.1, 1, count + 1, dtype=torch.float32)
            means = (10.0 ** (decade - _DECADES + 1) * ((bounds[:-1] + bounds[1:]) / 2.0)).tolist()
            values += means
            if signed:
                values += [-mean for mean in means]
        return torch.tensor(sorted(values), dtype=torch.float32)


@functools.cache
def _codes(*, signed: bool) -> Tensor:
    """Return the codes by the upper bits of a float32, uint8: of the value nearest to the middle of all with these bits."""
    values = dynamic_values(signed=signed).double()
    with torch.device("cpu"):
        bits = (torch.arange(_UPPER, dtype=torch.int64) << _DROPPED) + (1 << (_DROPPED - 1))
        middles = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
        return torch.searchsorted((values[:-1] + values[1:]) / 2, middles.nan_to_num(0).double()).to(torch.uint8)


class _Map(ctypes.Structure):
    """Mirrors ``Map`` in the C++ source."""

    _fields_ = (("values", ctypes.c_float * 256), ("codes", ctypes.c_uint8 * _UPPER))


@functools.cache
def c_maps() -> Any:
    """Return the maps with and without negative values, as C++ reads them: ``Map`` in ``native/state_codes.h``."""
    maps = (_Map * 2)()
    for made, signed in zip(maps, (True, False), strict=True):
        made.values[:] = dynamic_values(signed=signed).tolist()
        made.codes[:] = _codes(signed=signed).tolist()
    return maps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """What codes stand for, and which code a number gets, on a device: first with negative values, and then without."""

    values: Tensor  # float32 [2, 256]
    codes: Tensor  # uint8 [2, 2**18], by the upper bits of a float32


@functools.cache
def _tables(device: torch.device) -> _Tables:
    """Return the tables on a device, to which they are copied once."""
    values, codes = (
        torch.stack([function(signed=signed) for signed in (True, False)]).to(device)
        for function in (dynamic_values, _codes)
    )
    return _Tables(values=values, codes=codes)


# In torch, on any device


def _pieces(code: Code, num_elements: int) -> Iterator[tuple[slice, slice]]:
    """Yield the elements and the bytes of some pages at a time."""
    num_pages = -(-num_elements // code.page_elements)
    size = max(1, min(-(-num_pages // _PIECES), _MOST_PAGES))
    for page in range(0, num_pages, size):
        end = min(page + size, num_pages)
        elements = slice(page * code.page_elements, min(end * code.page_elements, num_elements))
        yield elements, slice(page * SECTOR_NBYTES, end * SECTOR_NBYTES)


def _decode_int8(pages: Tensor, values: Tensor) -> None:
    pages = pages.view(-1, SECTOR_NBYTES)
    scales = _copied(pages[:, _SCALES:_MAPS]).view(torch.float32)
    which = pages[:, _MAPS : _MAPS + _BLOCKS].long() & 1
    maps = _tables(pages.device).values
    found = maps.view(-1)[pages[:, :_SCALES].view(-1, _BLOCKS, _BLOCK).long() + 256 * which.unsqueeze(2)]
    scales = scales.unsqueeze(2)
    made = torch.where(scales.isnan(), scales, found * scales)  # a GPU gives a product of NaN other bits
    values.copy_(made.view(-1)[: values.numel()])


def _encode_int8(values: Tensor, pages: Tensor) -> None:
    pages = pages.view(-1, SECTOR_NBYTES)
    num_pages = pages.shape[0]
    padded = torch.nn.functional.pad(values, (0, num_pages * Code.INT8.page_elements - values.numel()))
    blocks = padded.view(-1, _BLOCK)
    is_finite = blocks.isfinite().all(1, keepdim=True)
    scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    is_unsigned = ~is_finite | ~(blocks < 0).any(1, keepdim=True)
    is_zero = ~is_finite | (scales == 0)
    scaled = torch.where(is_zero, 0, blocks / scales)
    upper = (scaled.view(torch.int32).long() & _WORD) >> _DROPPED
    codes = [each[upper] for each in _tables(pages.device).codes]
    pages.zero_()
    pages[:, :_SCALES] = torch.where(is_unsigned, codes[1], codes[0]).view(num_pages, -1)
    kept = torch.where(is_finite, scales.masked_fill(scales == 0, 0), torch.nan).view(num_pages, _BLOCKS)
    pages[:, _SCALES:_MAPS] = kept.contiguous().view(torch.uint8)
    pages[:, _MAPS : _MAPS + _BLOCKS] = is_unsigned.to(torch.uint8).view(num_pages, _BLOCKS)


def _decode_bfloat16(pages: Tensor, values: Tensor) -> None:
    values.copy_(_copied(pages).view(torch.bfloat16)[: values.numel()])


def _encode_bfloat16(values: Tensor, pages: Tensor, first: int, seed: int, drawn_from: Tensor | None) -> None:
    bits = values.view(torch.int32).long() & _WORD
    number = torch.arange(first, first + values.numel(), device=values.device) & _WORD
    if drawn_from is not None:
        number = number + (drawn_from.view(torch.int32).long() & _WORD) * 0xC2B2AE3D & _WORD
    mixed = (number * 0x9E3779B1 & _WORD) ^ seed
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B & _WORD
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35 & _WORD
    rounded = (bits + ((mixed ^ (mixed >> 16)) & 0xFFFF)) >> 16
    kept = torch.where(values.isnan(), bits >> 16 | 0x40, bits >> 16)
    upper = torch.where(values.isfinite(), rounded, kept)
    pages.zero_()
    pages[: 2 * values.numel()] = upper.to(torch.int16).view(torch.uint8)


def _copied(pages: Tensor) -> Tensor:
    """Return bytes in memory that begins where elements of any dtype may."""
    return pages.clone(memory_format=torch.contiguous_format)


def _library_on(device: torch.device) -> ctypes.CDLL | None:
    """Return the compiled code for tensors on a device: there is some for a CPU."""
    return _library() if device.type == "cpu" else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled code; None where it cannot be built."""
    if (library := load_compiled("state_codes.cpp")) is None:
        return None
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    for name, arguments in (
        ("zinf_decode_int8", (pointer, pointer, count, ctypes.POINTER(_Map), number)),
        ("zinf_encode_int8", (pointer, pointer, count, ctypes.POINTER(_Map), number)),
        ("zinf_decode_bfloat16", (pointer, pointer, count, number)),
        ("zinf_encode_bfloat16", (pointer, pointer, count, count, ctypes.c_uint32, pointer, number)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = None, arguments
    return library
