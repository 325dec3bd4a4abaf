"""The device arena: one allocation, divided by the offsets that a plan states."""

import itertools

import torch
from torch import Tensor

from zinf_compile.ir.errors import VerifyError
from zinf_compile.runtime.device.cpu import CPU
from zinf_compile.runtime.device.device import Block, Device


class Arena:
    """One allocation on the device; grown between calls, and dropped when its memory is needed elsewhere.

    It knows which ranges are taken, and refuses to hand out a byte twice: a wrong plan is an error, not silent corruption.
    """

    def __init__(self, device: Device = CPU) -> None:
        """``device`` is what computes."""
        self._device = device
        self._block: Block | None = None  # until something is reserved
        self._taken: dict[int, int] = {}  # offset -> end

    @property
    def nbytes(self) -> int:
        """Return the bytes of the allocation."""
        return 0 if self._block is None else self._block.bytes.numel()

    @property
    def taken_nbytes(self) -> int:
        """Return the bytes now taken."""
        return sum(end - offset for offset, end in self._taken.items())

    def reserve(self, nbytes: int) -> None:
        """Grow to at least ``nbytes``; VerifyError while anything is taken, since its address would change."""
        if nbytes <= self.nbytes:
            return
        if self._taken:
            raise VerifyError(f"the arena cannot grow to {nbytes} bytes while {self.taken_nbytes} are taken")
        self._block = None  # first, or both would be allocated at once
        self._block = self._device.allocate_block(nbytes)

    def drop(self) -> None:
        """Give the memory back; the next ``reserve`` takes it again. VerifyError while anything is taken."""
        if self._taken:
            raise VerifyError(f"the arena cannot be dropped while {self.taken_nbytes} of its bytes are taken")
        self._block = None

    def take(self, offset: int, nbytes: int) -> None:
        """Mark bytes as taken; VerifyError if any of them already are, or lie outside."""
        end = offset + nbytes
        if offset < 0 or end > self.nbytes:
            raise VerifyError(f"arena bytes [{offset}, {end}) lie outside its {self.nbytes}")
        for other, other_end in self._taken.items():
            if other < end and offset < other_end:
                raise VerifyError(f"arena bytes [{offset}, {end}) are taken by [{other}, {other_end})")
        self._taken[offset] = end

    def give_back(self, offset: int) -> None:
        """Mark the bytes taken at ``offset`` as free."""
        if offset not in self._taken:
            raise VerifyError(f"no arena bytes are taken at offset {offset}")
        del self._taken[offset]

    def give_back_all(self) -> None:
        """Mark everything as free, after an error."""
        self._taken.clear()

    def view(self, offset: int, shape: torch.Size | list[int] | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return arena bytes as a tensor of this shape and dtype."""
        return self._elements(offset, torch.Size(shape).numel(), dtype).view(shape)

    def strided_view(
        self,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        *,
        storage_offset: int = 0,
    ) -> Tensor:
        """Return arena bytes as a tensor of these strides, whose storage begins ``storage_offset`` elements before it."""
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        return self._elements(offset, storage_offset + reach, dtype).as_strided(shape, stride, storage_offset)

    def _elements(self, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return arena bytes as a flat tensor over a storage of its own, as traced code expects of every value.

        In a view of the whole arena, an ``as_strided`` that states its storage offset would find other bytes.
        """
        if num_elements == 0:
            return torch.empty(0, dtype=dtype, device=self._device.torch_device)
        return self._reserved.elements(offset, num_elements, dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies here, so that its bytes are reused when compute has done with it."""
        return self._block is not None and 0 <= tensor.data_ptr() - self._block.bytes.data_ptr() < self.nbytes

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        """Return arena bytes, flat, to be copied to or from."""
        return self._reserved.bytes[offset : offset + nbytes]

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        """Return arena bytes for disk I/O. VerifyError on a device whose memory the disk does not reach."""
        return self._reserved.buffer(offset, nbytes)

    @property
    def _reserved(self) -> Block:
        assert self._block is not None
        return self._block

    def check_integrity(self, *, expect_idle: bool = False) -> None:
        """Raise VerifyError if taken ranges overlap, or if any is left and the arena should be idle."""
        ends = sorted(self._taken.items())
        for (first, first_end), (second, _) in itertools.pairwise(ends):
            if second < first_end:
                raise VerifyError(f"arena ranges at {first} and {second} overlap")
        if expect_idle and ends:
            raise VerifyError(f"{len(ends)} arena ranges are still taken, the first at offset {ends[0][0]}")
