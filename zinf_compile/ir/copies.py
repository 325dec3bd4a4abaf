"""Copies: what is stored of a parameter. Each is one encoding of one slice, on one tier."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.slices import Slice

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


@dataclass(frozen=True, slots=True)
class CopyKey:
    """Which copy of its parameter one is: its role, and of optimizer state its key in the optimizer's state."""

    role: Role
    state: str | None = None  # "exp_avg"

    @property
    def label(self) -> str:
        """Return what people call it: "master copy", "exp_avg"."""
        return self.role.label if self.state is None else self.state


COMPUTE, MASTER, GRADIENT = CopyKey(Role.COMPUTE), CopyKey(Role.MASTER), CopyKey(Role.GRADIENT)


def state_key(name: str) -> CopyKey:
    """Return the key of optimizer state: what ``optimizer.state[parameter]`` calls it may be "gradient" as well."""
    return CopyKey(Role.STATE, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How values are stored: contiguous elements of one dtype."""

    dtype: str  # "bfloat16"

    @property
    def is_known(self) -> bool:
        """Return whether there is such a dtype."""
        return self.dtype in _ITEMSIZES

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element."""
        return _ITEMSIZES[self.dtype]

    def nbytes(self, num_elements: int) -> int:
        """Return the bytes of ``num_elements``."""
        return num_elements * self.itemsize


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One stored form of a slice of a parameter."""

    role: Role
    encoding: Encoding
    slice: Slice
    tier: Tier
    state: StateSpec | None = None  # which one, of a copy that is optimizer state

    @property
    def key(self) -> CopyKey:
        """Return which copy of its parameter it is."""
        return CopyKey(self.role, None if self.state is None else self.state.name)

    @property
    def nbytes(self) -> int:
        """Return the bytes it takes."""
        elements = self.slice.num_elements if self.state is None else self.state.num_elements_of(self.slice)
        return self.encoding.nbytes(elements)
