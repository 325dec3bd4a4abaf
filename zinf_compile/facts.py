"""Facts: what is true of a captured graph, before anything is decided. Names, integers and enums; no torch types."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from zinf_compile.terms import ActivationPolicy, LiveRange, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFact:
    """One parameter of the model, whether this graph uses it or not."""

    name: str
    block: str  # module path of the repeated block it belongs to, or of its own module
    num_elements: int
    dtype: str  # of the master copy, e.g. "float32"
    compute_dtype: str  # of what a gather moves
    master_nbytes: int
    compute_nbytes: int
    state_nbytes: int  # of what the optimizer keeps of it, if it is trained
    trainable: bool

    @property
    def has_compute_copy(self) -> bool:
        """Return whether compute and master copies are two slots."""
        return self.compute_dtype != self.dtype

    @property
    def gradient_dtype(self) -> str | None:
        """Return the dtype of its gradient, which is the compute dtype; None for a frozen parameter."""
        return self.compute_dtype if self.trainable else None

    @property
    def gradient_nbytes(self) -> int:
        """Return the bytes of its gradient, which has the compute dtype; 0 for a frozen parameter."""
        return self.compute_nbytes if self.trainable else 0

    @property
    def optimizer_state_nbytes(self) -> int:
        """Return the bytes of its optimizer state; 0 for a frozen parameter."""
        return self.state_nbytes if self.trainable else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFact:
    """One operation of the flattened step, at its tick."""

    tick: int
    name: str
    op: str
    module: str
    dtype: str
    num_flops: int
    nbytes_accessed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFact:
    """One stretch of device memory that compute allocates (not a gathered parameter)."""

    name: str
    nbytes: int
    live: LiveRange
    saved: bool  # crosses from forward to backward
    bindable: bool = False  # its op can write it into given memory, and it does not outlive its graph


@dataclass(frozen=True, slots=True, kw_only=True)
class UseFact:
    """The ticks at which a parameter's value is read, sorted."""

    parameter: str
    ticks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFact:
    """The tick at which the gradient of a parameter is complete in this graph."""

    parameter: str
    tick: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """One captured graph under one activation policy. Ticks [0, num_forward_ticks) are forward, the rest backward."""

    name: str
    policy: ActivationPolicy
    num_forward_ticks: int
    num_ticks: int
    ops: tuple[OpFact, ...]
    values: tuple[ValueFact, ...]
    uses: tuple[UseFact, ...]
    gradients: tuple[GradientFact, ...]

    def phase_of(self, tick: int) -> Phase:
        """Return the phase a tick belongs to."""
        return Phase.FORWARD if tick < self.num_forward_ticks else Phase.BACKWARD


def working_set(values: Iterable[ValueFact], num_ticks: int) -> list[int]:
    """Return the bytes of ``values`` live at each tick."""
    change = [0] * (num_ticks + 1)
    for value in values:
        change[value.live.start] += value.nbytes
        change[value.live.end] -= value.nbytes
    return list(accumulate(change[:-1]))
