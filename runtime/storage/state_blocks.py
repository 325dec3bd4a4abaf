"""Optimizer state that torchao keeps in codes of its own: its tensors as pages, and back, bit for bit.

A tensor of torchao's has inner tensors: ``codes``, uint8 or float8, 4 or 8 bits an element; ``scale``, float32, one for each
block of elements; and in all but ``OptimStateFp8`` ``qmap``, the values of the codes, which is the same for all of a class.
A page holds whole blocks, so that a chunk of an update is a tensor of the same class with some of the blocks.
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zinf_compile.ir.copies import BLOCK_SCALE_NBYTES, SECTOR_NBYTES, AnyCode, BlockKind, Blocks
from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.storage.state_codes import Coded, Paged

_MODULES = {
    BlockKind.BITS_8: "torchao.optim.subclass_8bit",
    BlockKind.BITS_4: "torchao.optim.subclass_4bit",
    BlockKind.FP8: "torchao.optim.subclass_fp8",
}


def blocks_of(value: object) -> Blocks | None:
    """Return how a tensor of torchao's holds optimizer state; None for anything else.

    UnsupportedError if its codes stand for other values than those of this version of torchao.
    """
    cls, tensor = type(value), value
    if cls.__module__ not in _MODULES.values() or not isinstance(tensor, Tensor):
        return None
    own: Any = tensor
    blocks = Blocks(kind=BlockKind(cls.__name__), block=own.block_size, signed=getattr(own, "signed", True))
    if blocks.kind is not BlockKind.FP8 and not torch.equal(own.qmap.cpu(), _values_of_codes(blocks)):
        raise UnsupportedError(
            f"a state in {cls.__name__} has codes for other values (its qmap) than torchao {_version()} gives them, so it "
            "is of another version; load it with that one, or start with a new optimizer"
        )
    return blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked(Paged):
    """What a slot of torchao's codes holds: the inner tensors of a tensor of its own, which is what "values" are here.

    ``dtype`` is what that tensor says its dtype is.
    """

    code: Blocks

    def room(self, num_elements: int, device: torch.device) -> Tensor:
        """Return a flat tensor of so many zeros, as the optimizer makes it."""
        with torch.device("cpu"):
            codes = torch.zeros(self.code.codes_nbytes(num_elements), dtype=torch.uint8, device=device)
            scale = torch.zeros(num_elements // self.code.block, dtype=torch.float32, device=device)
        return self._made(codes, scale, torch.Size([num_elements]))

    def first_of(self, values: Tensor, num_elements: int) -> Tensor:
        """Return the first of some values."""
        codes, scale = _inner(values)
        blocks = self.code.codes_nbytes(num_elements), num_elements // self.code.block
        return self._made(codes[: blocks[0]], scale[: blocks[1]], torch.Size([num_elements]))

    def shaped(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Return flat values in a shape."""
        return self._made(*_inner(values), shape)

    def flat(self, value: Tensor) -> Tensor:
        """Return all values, which a user has in some shape, flat."""
        return self.shaped(value, torch.Size([value.numel()]))

    def piece_of(self, values: Tensor, part: Slice) -> Tensor:
        """Return a part of all flat values, on the CPU. It begins with a block."""
        codes, scale = (each.cpu() for each in _inner(values))
        first, length = part.offset_in(self.slice), part.num_elements
        return self._made(
            codes[self.code.codes_nbytes(first) : self.code.codes_nbytes(first + length)],
            scale[first // self.code.block : (first + length) // self.code.block],
            torch.Size([length]),
        )

    def decode(self, pages: Tensor, values: Tensor, *, num_threads: int = 1) -> Tensor:
        """Fill the inner tensors of flat ``values`` from the uint8 pages of as many elements; return them."""
        for inner, in_pages in zip(_inner_bytes(values), self._parts_of(pages, values.numel()), strict=True):
            at = 0
            for part in in_pages:
                inner[at : at + part.numel()].view(part.shape).copy_(part)
                at += part.numel()
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
        """Fill uint8 pages from the inner tensors of as many values; nothing is rounded."""
        pages.zero_()
        for inner, in_pages in zip(_inner_bytes(values), self._parts_of(pages, values.numel()), strict=True):
            at = 0
            for part in in_pages:
                part.copy_(inner[at : at + part.numel()].view(part.shape))
                at += part.numel()

    def _parts_of(self, pages: Tensor, num_elements: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return where in pages the codes of so many elements are, and where their scales: first of all full pages."""
        rows = pages[: self.code.nbytes(num_elements)].view(-1, SECTOR_NBYTES)
        in_page = self.code.page_elements
        scales_at = self.code.codes_nbytes(in_page)
        codes, scales = [], []
        num_full, left = divmod(num_elements, in_page)
        for part, count in ((rows[:num_full], in_page), (rows[num_full:], left)):
            if part.numel():
                codes.append(part[:, : self.code.codes_nbytes(count)])
                nbytes = count // self.code.block * BLOCK_SCALE_NBYTES
                scales.append(part[:, scales_at : scales_at + nbytes])
        return codes, scales

    def over(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the tensor of torchao's of the slice, over these inner tensors."""
        return self._made(codes.reshape(-1).view(torch.uint8), scale, torch.Size(self.slice.sizes))

    def _made(self, codes: Tensor, scale: Tensor, shape: torch.Size) -> Tensor:
        """Return the tensor of torchao's with these inner tensors, which are flat."""
        cls, kind, signed, dtype = _class_of(self.code.kind), self.code.kind, self.code.signed, self.dtype
        given: tuple[object, ...]
        if kind is BlockKind.FP8:
            given = codes.view(torch.float8_e4m3fn).view(shape), scale, dtype
        elif kind is BlockKind.BITS_8:
            given = codes.view(shape), scale, _values_of_codes(self.code).to(codes.device), signed, dtype
        else:
            given = codes, scale, _values_of_codes(self.code).to(codes.device), signed, tuple(shape), dtype
        made: Tensor = cls(*given)
        return made


def pages_of_code(code: AnyCode, held: Slice, dtype: torch.dtype) -> Paged:
    """Return what a slot of pages holds: our codes, or those of an optimizer."""
    if isinstance(code, Blocks):
        return Blocked(code=code, slice=held, dtype=dtype)
    return Coded(code=code, slice=held, dtype=dtype)


def _inner(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, as flat bytes, and the scales of a tensor of torchao's."""
    own: Any = value
    return own.codes.detach().reshape(-1).view(torch.uint8), own.scale.detach()


def _inner_bytes(value: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = _inner(value)
    return codes, scale.view(torch.uint8)


def _class_of(kind: BlockKind) -> Any:
    try:
        return getattr(importlib.import_module(_MODULES[kind]), kind)
    except ImportError as error:
        raise UnsupportedError(
            f"this optimizer state is torchao's ({kind}), which cannot be imported here ({error}); install torchao"
        ) from error


@functools.cache
def _values_of_codes(blocks: Blocks) -> Tensor:
    """Return what the codes stand for, float32, on the CPU: ``qmap``."""
    _class_of(blocks.kind)
    module = importlib.import_module(_MODULES[blocks.kind])
    values = module.get_qmap_signed() if blocks.signed else module.get_qmap_unsigned()
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _version() -> str:
    return str(getattr(importlib.import_module("torchao"), "__version__", ""))
