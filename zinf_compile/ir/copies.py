"""Copies: what is stored of a parameter. Each is one encoding of one slice, on one tier."""

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.slices import Slice

SECTOR_NBYTES = 4096  # extents of the store file are aligned to this: O_DIRECT needs it on disks with 4 KiB sectors
_ITEMSIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1, "quint8": 1, "qint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1,
    "uint1": 1, "uint2": 1, "uint3": 1, "uint4": 1, "uint5": 1, "uint6": 1, "uint7": 1,
    "int1": 1, "int2": 1, "int3": 1, "int4": 1, "int5": 1, "int6": 1, "int7": 1,
    "bits1x8": 1, "bits2x4": 1, "bits4x2": 1, "bits8": 1, "bits16": 2,
}  # fmt: skip


class Role(StrEnum):
    """What a copy is to its parameter."""

    COMPUTE = "compute"  # what gathers move
    MASTER = "master"  # what the optimizer updates, where that is not the compute copy
    GRADIENT = "gradient"
    STATE = "state"  # of the optimizer

    @property
    def label(self) -> str:
        """Return the role as people read it."""
        return _LABELS[self]


_LABELS = {
    Role.COMPUTE: "compute copy",
    Role.MASTER: "master copy",
    Role.GRADIENT: "gradient",
    Role.STATE: "optimizer state",
}


class CopyKey(NamedTuple):
    """Which copy of its parameter one is: its role, and of optimizer state its key in the optimizer's state.

    A tuple, whose hash takes a sixth of the time: every chunk of an update looks up dozens.
    """

    role: Role
    state: str | None = None  # "exp_avg"

    @property
    def label(self) -> str:
        """Return what people call it: "master copy", "exp_avg"."""
        return self.role.label if self.state is None else self.state


COMPUTE, MASTER, GRADIENT = CopyKey(Role.COMPUTE), CopyKey(Role.MASTER), CopyKey(Role.GRADIENT)


@functools.cache
def state_key(name: str) -> CopyKey:
    """Return the key of optimizer state: what ``optimizer.state[parameter]`` calls it may be "gradient" as well."""
    return CopyKey(Role.STATE, name)


class _InPages:
    """What holds a number of consecutive elements in each page of 4 KiB."""

    __slots__ = ()

    @property
    def page_elements(self) -> int:
        """Return the elements that one page holds."""
        raise NotImplementedError

    def nbytes(self, num_elements: int) -> int:
        """Return the bytes of the pages of so many elements."""
        return -(-num_elements // self.page_elements) * SECTOR_NBYTES

    def pages_shape(self, num_elements: int) -> tuple[int, int]:
        """Return the shape of the uint8 tensor that has the pages of so many elements as its rows."""
        return -(-num_elements // self.page_elements), SECTOR_NBYTES


class Code(_InPages, StrEnum):
    """How optimizer state is encoded in fewer bits. Each page of 4 KiB holds the codes of so many consecutive elements."""

    BFLOAT16 = "bfloat16"  # rounded stochastically
    INT8 = "int8"  # of a dynamic data type, in blocks of 256 elements that share a scale

    @property
    def page_elements(self) -> int:
        """Return the elements that one page holds."""
        return _PAGE_ELEMENTS[self]


class BlockKind(StrEnum):
    """A tensor class of torchao that holds optimizer state in codes."""

    BITS_8 = "OptimState8bit"
    BITS_4 = "OptimState4bit"
    FP8 = "OptimStateFp8"

    @property
    def num_bits(self) -> int:
        """Return the bits of an element's code."""
        return 4 if self is BlockKind.BITS_4 else 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(_InPages):
    """Codes that an optimizer makes itself, in blocks of elements that share a float32 scale. A page holds whole blocks.

    In a page first come the codes of its blocks, then their scales.
    """

    kind: BlockKind
    block: int  # elements that share a scale
    signed: bool  # whether codes stand for negative values, too

    @property
    def page_elements(self) -> int:
        """Return the elements that one page holds; 0 where a block is larger than a page."""
        return SECTOR_NBYTES // (self.block * self.kind.num_bits // 8 + BLOCK_SCALE_NBYTES) * self.block

    def codes_nbytes(self, num_elements: int) -> int:
        """Return the bytes of the codes of so many elements, without scales."""
        return num_elements * self.kind.num_bits // 8

    def __str__(self) -> str:
        return f"torchao.{self.kind}/{self.block}/{'signed' if self.signed else 'unsigned'}"


def code_of_name(name: str) -> "AnyCode":
    """Return the code with this name, as ``str`` gives it; ValueError if there is none."""
    if not name.startswith("torchao."):
        return Code(name)
    kind, block, signs = name.removeprefix("torchao.").split("/")
    if not block.isdigit() or int(block) == 0:
        raise ValueError(f"{name!r} is no code")
    found = Blocks(kind=BlockKind(kind), block=int(block), signed=signs == "signed")
    if str(found) != name or found.page_elements == 0:
        raise ValueError(f"{name!r} is no code")
    return found


AnyCode = Code | Blocks
BLOCK_SCALE_NBYTES = 4

_PAGE_ELEMENTS = {
    Code.BFLOAT16: SECTOR_NBYTES // 2,
    Code.INT8: 15 * 256,  # and their 15 scales
}
LEAST_CODED = 4096  # elements: smaller states and weights stay exact
_OUTLIER_SHARE = 256  # one of so many columns of a row may be an outlier
_OUTLIER_NBYTES = 4 + 2  # its number, and its value in 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCode:
    """How frozen weights of linear layers are encoded: rows of int8 that have a scale each, and some columns in 16 bits.

    The pages of this code are the rows, whatever bytes they take: each is decoded by itself.
    """

    columns: int  # the elements of a row

    @property
    def page_elements(self) -> int:
        """Return the elements of a row."""
        return self.columns

    @property
    def num_outliers(self) -> int:
        """Return how many columns of a row there is room for in 16 bits."""
        return max(1, self.columns // _OUTLIER_SHARE)

    @property
    def page_nbytes(self) -> int:
        """Return the bytes of a row, a multiple of four: the scale, the outliers, the codes."""
        return -(-(4 + _OUTLIER_NBYTES * self.num_outliers + self.columns) // 4) * 4

    def nbytes(self, num_elements: int) -> int:
        """Return the bytes of the rows of so many elements."""
        return -(-num_elements // self.columns) * self.page_nbytes

    def scratch_nbytes(self, itemsize: int) -> int:
        """Return the bytes that a device copies to, to decode rows to elements of so many bytes in their own memory.

        Rows lie at the end of the memory of their values, behind them less than a sector. The values of the last ones are
        written over these rows themselves, so they are copied first.
        """
        wide = self.columns * itemsize
        return -(-(wide + SECTOR_NBYTES) // (wide - self.page_nbytes)) * self.page_nbytes

    @staticmethod
    def of_weight(shape: Sequence[int], dtype: str) -> "RowCode | None":
        """Return the code of a weight of this shape, decoded to ``dtype``; None if it has to stay exact.

        That is so for what is no matrix, has less than ``LEAST_CODED`` elements or rows too short to save anything, and in
        other dtypes than float32, bfloat16 and float16.
        """
        if len(shape) != 2 or math.prod(shape) < LEAST_CODED or dtype not in ("float32", "bfloat16", "float16"):
            return None
        code = RowCode(columns=shape[1])
        return code if code.page_nbytes < shape[1] * _ITEMSIZES[dtype] else None


LOW_HALVES = 15 * 128  # float32 values of which a page holds what bfloat16 lacks: 16 bits of each, and a bit for ties
_CHUNK_MULTIPLE = 4096


def low_halves_nbytes(num_elements: int) -> int:
    """Return the bytes of the pages that hold, of so many float32 values, what their bfloat16 copies lack."""
    return -(-num_elements // LOW_HALVES) * SECTOR_NBYTES


def chunk_multiple(page_elements: Collection[int] = (), itemsizes: Collection[int] = ()) -> int:
    """Return of how many elements a chunk of an update is a multiple.

    ``page_elements`` are those in a page of each copy that is stored in pages, ``itemsizes`` the bytes of an element of the
    others. A slice of every dtype begins at a sector, what is in pages at a page, and vectorised kernels see the same
    alignment as on the whole tensor.
    """
    if not page_elements:
        return _CHUNK_MULTIPLE
    sectors = (SECTOR_NBYTES // math.gcd(SECTOR_NBYTES, itemsize) for itemsize in itemsizes)
    multiple = math.lcm(*sectors, *page_elements)
    return multiple * -(-_CHUNK_MULTIPLE // multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How values are stored: contiguous elements of one dtype, or pages or rows of their codes."""

    dtype: str  # "bfloat16"; of codes, what they are decoded to
    code: AnyCode | None = None
    columns: int | None = None  # of frozen weights that are stored as rows of int8

    @property
    def has_values(self) -> bool:
        """Return whether the stored bytes are those of the values themselves."""
        return self.code is None and self.columns is None

    @property
    def rows(self) -> RowCode | None:
        """Return the code of rows; None where values are stored otherwise."""
        return None if self.columns is None else RowCode(columns=self.columns)

    @property
    def decoded(self) -> "Encoding":
        """Return the encoding of the same values as a gather gives them: elements of a dtype."""
        return self if self.columns is None else Encoding(dtype=self.dtype)

    @property
    def is_known(self) -> bool:
        """Return whether there is such a dtype."""
        return self.dtype in _ITEMSIZES

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element, decoded."""
        return _ITEMSIZES[self.dtype]

    def nbytes(self, num_elements: int) -> int:
        """Return the bytes of ``num_elements``."""
        if self.columns is not None:
            return RowCode(columns=self.columns).nbytes(num_elements)
        return num_elements * self.itemsize if self.code is None else self.code.nbytes(num_elements)


def code_of_state(code: Code | None, *, dtype: str, num_elements: int) -> Code | None:
    """Return how a state with an element for each of its parameter's is encoded, where that is asked for; None: exactly.

    States in other dtypes than float32, and of parameters of less than ``LEAST_CODED`` elements, stay exact.
    """
    return code if dtype == "float32" and num_elements >= LEAST_CODED else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What a gather brings encoded, and decodes."""

    home_nbytes: int = 0  # that move
    nbytes: int = 0  # that they become

    @property
    def saved_nbytes(self) -> int:
        """Return by how many bytes fewer move than are gathered."""
        return self.nbytes - self.home_nbytes

    def __add__(self, other: "Decoded") -> "Decoded":
        """Return both together."""
        return Decoded(home_nbytes=self.home_nbytes + other.home_nbytes, nbytes=self.nbytes + other.nbytes)

    def of_ranks(self, num_ranks: int) -> "Decoded":
        """Return what so many ranks bring together, each as much as this."""
        return Decoded(home_nbytes=num_ranks * self.home_nbytes, nbytes=num_ranks * self.nbytes)


NOT_DECODED = Decoded()


class Granularity(StrEnum):
    """Which part of a parameter shares one number of optimizer state."""

    ELEMENT = "element"
    ROW = "row"
    MATRIX = "matrix"  # the whole parameter: the state cannot be split
    SCALAR = "scalar"  # the same, and the state is one number


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """One tensor that an optimizer keeps of a parameter."""

    name: str  # its key in the optimizer's state: "exp_avg"
    shape: tuple[int, ...]  # beside the whole parameter
    encoding: Encoding
    granularity: Granularity = Granularity.ELEMENT

    def num_elements_of(self, part: Slice) -> int:
        """Return the elements of state that belong to a slice of the parameter.

        What belongs to the matrix goes with the first index, and every rank has all of it.
        """
        total = 1
        for size in self.shape:
            total *= size
        if self.granularity is Granularity.ELEMENT:
            return part.num_elements
        if self.granularity is Granularity.ROW:
            return part.share_of(total)
        return total if part.start == 0 else 0


def element_states(names: Sequence[str], shape: Sequence[int], encoding: Encoding) -> tuple[StateSpec, ...]:
    """Return states that have an element for each of the parameter's."""
    return tuple(StateSpec(name=name, shape=tuple(shape), encoding=encoding) for name in names)


def encoded_state(state: StateSpec, code: Code | None) -> StateSpec:
    """Return a state encoded in fewer bits, if that is asked for and it can be."""
    if code is None or state.granularity is not Granularity.ELEMENT:
        return state
    chosen = code_of_state(code, dtype=state.encoding.dtype, num_elements=math.prod(state.shape))
    return replace(state, encoding=replace(state.encoding, code=chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One stored form of a slice of a parameter."""

    role: Role
    encoding: Encoding
    slice: Slice
    tier: Tier
    state: StateSpec | None = None  # which one, of a copy that is optimizer state
    in_weights: bool = False  # a weight file of the user's has its bytes

    @property
    def is_in_place(self) -> bool:
        """Return whether it is read from a weight file of the user's, and takes nothing of the store's file."""
        return self.in_weights and self.tier is Tier.NVME

    @property
    def key(self) -> CopyKey:
        """Return which copy of its parameter it is."""
        return CopyKey(self.role, None if self.state is None else self.state.name)

    @property
    def nbytes(self) -> int:
        """Return the bytes it takes. What is stored as rows of int8 is decoded where it lives on the device."""
        elements = self.slice.num_elements if self.state is None else self.state.num_elements_of(self.slice)
        return (self.encoding.decoded if self.tier is Tier.DEVICE else self.encoding).nbytes(elements)

    @property
    def gathered_nbytes(self) -> int:
        """Return the bytes of a compute or master copy as a gather gives it, decoded."""
        return self.encoding.decoded.nbytes(self.slice.num_elements)
