"""Slots: one stored copy of a slice of a parameter each, on one tier, with the home tensor that users see."""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zinf_compile.ir.copies import COMPUTE, LOW_HALVES, SECTOR_NBYTES, AnyCode, CopyKey, RowCode, low_halves_nbytes
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.storage.engine import whole_sectors
from zinf_compile.runtime.storage.layout import Extent, FileLayout
from zinf_compile.runtime.storage.row_memory import Rows
from zinf_compile.runtime.storage.state_codes import Paged

if TYPE_CHECKING:
    from zinf_compile.runtime.storage.nvme.weight_file import WeightSpan


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Slot:
    """One tensor's home. On nvme it has an extent of the store file, and ``tensor`` is a mapping of it.

    Or it is in place: it lies in a weight file, which is never written, and ``tensor`` is a private mapping of that.
    """

    slice: Slice  # what of its parameter it holds; of codes, all of its bytes
    num_ranks: int = 1  # of which each has a slot like it, with other rows; 1: every rank holds all that this one does
    key: CopyKey = COMPUTE  # which copy of it
    tier: Tier
    tensor: Tensor  # the home tensor, for the runtime, whose callers make sure that nothing is in flight for it
    extent: Extent | None = None
    weights: "WeightSpan | None" = None  # in place: where it lies in a weight file
    is_mapped: bool = False  # in host memory that the mapping of a weight file has become, which is never pinned
    coded: Paged | None = None  # what it holds, if that is codes, in pages
    per_element: bool = True  # False: state of a shape of its own, which belongs to the whole parameter and moves whole
    is_aside: bool = False  # state that updates neither read nor write: a copy of what work in the background was given
    row_code: RowCode | None = None  # of a frozen weight: its values are those that rows of int8 can have
    rows: Rows | None = None  # these rows, where they are stored; ``tensor`` is then the view of their values
    upper: "Slot | None" = None  # the compute copy, while an update has left here only what that lacks of a master copy
    on_device: bool = False  # in memory that only the device's streams reach; that of a CPU is host memory
    shown: Tensor | None = None  # the home tensor for users, of a gradient or optimizer state: using it waits
    num_own_references: int = field(init=False)  # to its bytes, by our tensors; further ones are aliases of others

    def __post_init__(self) -> None:
        self.num_own_references = self.num_references

    @property
    def name(self) -> str:
        """Return what messages call it: "layers.3.up.weight (gradient)"."""
        return self.slice.parameter if self.key == COMPUTE else f"{self.slice.parameter} ({self.key.label})"

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor."""
        return self.tensor.numel() * self.tensor.dtype.itemsize

    @property
    def taken_nbytes(self) -> int:
        """Return the bytes that it takes of its tier: those of the tensor, or of rows in its place; none in place."""
        if self.weights is not None:
            return 0
        return self.nbytes if self.rows is None else self.rows.nbytes

    @property
    def is_written_in_place(self) -> bool:
        """Return whether somebody has written to the mapping of a weight file, so that the value is in memory only."""
        return self.weights is not None and self.weights.is_written(self.tensor)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the values that it holds, decoded."""
        return self.tensor.dtype if self.coded is None else self.coded.dtype

    @property
    def code(self) -> AnyCode | None:
        """Return how the values are encoded in fewer bits; None if they are not."""
        return None if self.coded is None else self.coded.code

    def stored(self, part: Slice) -> Slice:
        """Return what of this slot holds a slice of its parameter: the slice itself, or the bytes of the pages with it.

        All of it, where it is state of a shape of its own.
        """
        if not self.per_element:
            return self.slice
        if self.coded is None:
            return part
        first, nbytes = self.coded.pages_of(part)
        return self.slice.part(first, first + nbytes)

    def staged_nbytes(self, num_elements: int) -> int:
        """Return the bytes, in whole sectors, that so many elements of the parameter take on their way."""
        if not self.per_element:
            return whole_sectors(self.nbytes)
        if self.coded is None:
            return whole_sectors(num_elements * self.tensor.dtype.itemsize)
        return self.coded.code.nbytes(num_elements)

    def low_halves_range(self, part: Slice) -> tuple[int, int]:
        """Return where in the file the pages are with what the compute copy lacks of a slice, and their bytes."""
        assert self.extent is not None
        first, beyond = divmod(part.offset_in(self.slice), LOW_HALVES)
        assert beyond == 0, f"{part} begins {beyond} elements behind the start of a page"
        return self.extent.offset + first * SECTOR_NBYTES, low_halves_nbytes(part.num_elements)

    @property
    def whole(self) -> "Slot":
        """Return the slot itself: a part of a slot answers with the slot that it is a part of."""
        return self

    def rows_of(self, value: Tensor) -> Tensor:
        """Return what it holds of the whole value of its parameter, as a view."""
        held = self.slice if self.coded is None else self.coded.slice
        return value if held.is_whole else value.narrow(held.dim, held.start, held.length)

    def part(self, part: Slice) -> "SlotPart":
        """Return what a slice of the same parameter has of this slot; ValueError if the slot does not hold all of it."""
        part.offset_in(self.slice)
        return SlotPart(whole=self, slice=part)

    def elements(self, part: Slice) -> Tensor:
        """Return the elements of a slice in the home tensor, flat."""
        if part is self.slice:
            return self.tensor.view(-1)
        return elements_of(self.tensor, self.slice, part)

    @property
    def in_memory(self) -> bool:
        """Return whether the home is RAM, so that the home tensor may be computed on by the CPU."""
        return self.tier is not Tier.NVME and not self.on_device and self.rows is None

    @property
    def device_bytes(self) -> Tensor | None:
        """Return the bytes of a home on the device, flat; None of any other."""
        return self.tensor.detach().view(-1).view(torch.uint8) if self.on_device else None

    def is_home_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor begins at this home's bytes."""
        with torch._C.DisableTorchFunctionSubclass():  # a look at the address is not a look at the value
            return memory_of(tensor).data_ptr() == self.tensor.data_ptr()

    @property
    def num_references(self) -> int:
        """Return how many tensors and arrays hold the bytes of this home, its own home tensors among them."""
        count: int = torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata)
        return count

    @property
    def is_aliased(self) -> bool:
        """Return whether somebody holds a plain tensor or an array over these bytes, whose writes cannot be observed.

        Of codes, over values that were decoded from them.
        """
        if self.coded is not None:
            return self.shown is not None and bool(getattr(local_of(self.shown), "is_aliased", False))
        return self.num_references > self.num_own_references + (self.shown is not None)

    @property
    def may_change_unseen(self) -> bool:
        """Return whether others hold a plain tensor or an array over these bytes, beside what users are shown of a slot.

        That is one tensor for each: the parameter itself for a master copy, ``shown`` for others.
        """
        return self.num_references > self.num_own_references + 1

    @property
    def is_forgotten(self) -> bool:
        """Return whether nobody but us holds the home tensor for users, or any other tensor over these bytes."""
        # The slot's own reference, and the call's.
        is_shown_to_others = self.shown is not None and sys.getrefcount(self.shown) > 2
        if self.coded is not None and self.shown is not None and (local := local_of(self.shown)) is not self.shown:
            is_shown_to_others |= sys.getrefcount(local) > 3  # that of the DTensor, too
        return not is_shown_to_others and not self.is_aliased

    def lives_like(self, other: "Slot") -> bool:
        """Return whether another slot is in memory of the same kind, so that the two may exchange their bytes."""
        return (self.tier is Tier.NVME, self.on_device) == (other.tier is Tier.NVME, other.on_device)

    def exchange(self, other: "Slot") -> None:
        """Exchange the bytes with a slot of the same kind: each holds what the other one held. Nothing moves."""
        self.tensor, other.tensor = other.tensor, self.tensor
        self.extent, other.extent = other.extent, self.extent
        own, others = self.num_own_references, other.num_own_references
        self.num_own_references, other.num_own_references = others, own

    def stay_in_memory(self) -> None:
        """Let the mapping of a weight file, which was written, be a home in host memory."""
        self.weights, self.tier, self.is_mapped = None, Tier.HOST, True

    def stay_exact(self) -> None:
        """Keep values that rows of int8 had where they live decoded, on the device, and encode them no more."""
        assert self.rows is None
        self.row_code = None

    def give_back(self, layout: FileLayout) -> None:
        """Free its extent, now that its value is elsewhere or not needed any more.

        Not while somebody holds an alias of the mapping: it would read and write whatever is stored there next.
        """
        if self.extent is not None and self.is_forgotten:
            layout.free(self.extent)

    def byte_range(self, part: Slice) -> tuple[int, int]:
        """Return the offset in a file or device memory and the sector-rounded length of a slice, which begins at a sector.

        Of one in place the length may reach beyond the tensor, and the offset is that in the weight file.
        """
        assert self.extent is not None or self.weights is not None or self.on_device
        first = 0
        if self.extent is not None:
            first = self.extent.offset
        elif self.weights is not None:
            first = self.weights.start  # any byte
        itemsize = self.tensor.dtype.itemsize
        return first + part.offset_in(self.slice) * itemsize, whole_sectors(part.num_elements * itemsize)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotPart:
    """A slot and a slice that it holds, such as a tile, to be moved like a slot. On nvme it begins at a whole sector."""

    whole: Slot
    slice: Slice

    @property
    def name(self) -> str:
        """Return the name of the slot: what went wrong with a part went wrong with all of it."""
        return self.whole.name

    @property
    def tier(self) -> Tier:
        """Return where the home is."""
        return self.whole.tier

    @property
    def in_memory(self) -> bool:
        """Return whether the home is RAM."""
        return self.whole.in_memory

    @property
    def device_bytes(self) -> Tensor | None:
        """Return the bytes of the whole home, if that is on the device."""
        return self.whole.device_bytes

    @property
    def num_ranks(self) -> int:
        """Return of how many ranks each has another part of the parameter."""
        return self.whole.num_ranks

    @property
    def tensor(self) -> Tensor:
        """Return its part of the home tensor. Made anew each time: kept, it would count as an alias that others hold."""
        return self.whole.elements(self.slice).view(self.slice.sizes)

    @property
    def nbytes(self) -> int:
        """Return its bytes."""
        return self.slice.num_elements * self.whole.tensor.dtype.itemsize

    def elements(self, part: Slice) -> Tensor:
        """Return the elements of a slice in the home tensor, flat."""
        return self.whole.elements(part)

    def byte_range(self, part: Slice) -> tuple[int, int]:
        """Return the offset and the sector-rounded length of a slice of the parameter, as the whole slot does."""
        return self.whole.byte_range(part)


def weights_of(moved: object) -> "WeightSpan | None":
    """Return where in a weight file something lies that is moved; None of all but slots in place, and parts of these."""
    return moved.whole.weights if isinstance(moved, Slot | SlotPart) else None


PAGES = "_zinf_pages"  # the attribute of a home tensor that shows decoded values, with the tensor of their codes


def memory_of(tensor: Tensor) -> Tensor:
    """Return the tensor over the bytes of a home tensor: its codes, or this rank's part; any other tensor as it is."""
    local = local_of(tensor)
    pages: Tensor | None = getattr(local, PAGES, None)
    return local if pages is None else pages


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's tensor of a DTensor; any other tensor as it is."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def elements_of(tensor: Tensor, held: Slice, part: Slice) -> Tensor:
    """Return the elements of a slice in a contiguous tensor, which holds another slice, flat; they share memory."""
    first = part.offset_in(held)
    return tensor.view(-1)[first : first + part.num_elements]


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that facts name, as "bfloat16"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def map_tensor(buffer: memoryview, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor over mapped file bytes."""
    return torch.frombuffer(buffer, dtype=dtype, count=shape.numel()).view(shape)
