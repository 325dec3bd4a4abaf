"""Facts: what is true of a captured graph, before anything is decided. Names, integers and enums; no torch types."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Generic, cast

from zinf_compile.ir.copies import Encoding, Granularity, Role, StateSpec
from zinf_compile.ir.glossary import ActivationPolicy, LiveRange
from zinf_compile.ir.schedule import Schedule
from zinf_compile.ir.sizes import ShapeSymbol, Size, SizeT_co, complete_sizes, evaluate_sizes
from zinf_compile.ir.slices import Slice


# Not slotted: its bytes are cached properties.
@dataclass(frozen=True, kw_only=True)
class ParameterFact:
    """One parameter of the model, or a tile of one, whether this graph uses it or not."""

    name: str  # of the parameter, or of the tile
    slice: Slice  # all of the parameter, or the rows that are a tile
    block: str  # module path of the repeated block it belongs to, or of its own module
    master: Encoding
    compute: Encoding
    states: tuple[StateSpec, ...]  # what the optimizer keeps of it, if it is trained
    trainable: bool
    narrowed: bool = False  # its compute copy is for graphs that cast it: the model itself computes with ``dtype``
    file_dtype: str | None = None  # a weight file has its value in this dtype; None: none has, or it is trained
    unified: bool = True  # the device computes in the host's memory; else compute and master are always two copies
    integrated: bool = False  # the device reads them in host memory, too

    @property
    def tile_of(self) -> str | None:
        """Return the parameter of which it is some rows, which have no homes of their own; None for a whole parameter."""
        return None if self.name == self.slice.parameter else self.slice.parameter

    @property
    def dtype(self) -> str:
        """Return the dtype of the master copy."""
        return self.master.dtype

    @property
    def compute_dtype(self) -> str:
        """Return the dtype of the compute copy."""
        return self.compute.dtype

    @cached_property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return self.slice.num_elements

    @cached_property
    def master_nbytes(self) -> int:
        """Return the bytes of the master copy."""
        return self.master.nbytes(self.num_elements)

    @cached_property
    def compute_nbytes(self) -> int:
        """Return the bytes of the compute copy as a gather gives it, and as it lives on the device."""
        return self.compute.decoded.nbytes(self.num_elements)

    def is_in_weights(self, encoding: Encoding) -> bool:
        """Return whether a weight file has a copy with this encoding, so that it need not be written to nvme."""
        return not self.trainable and encoding.has_values and encoding.dtype == self.file_dtype

    @property
    def has_compute_copy(self) -> bool:
        """Return whether it has a compute copy beside its master copy once it is trained."""
        return not self.unified or self.compute != self.master

    @property
    def has_two_copies(self) -> bool:
        """Return whether compute and master copies are two slots. A frozen parameter has only a compute copy."""
        return self.has_compute_copy and (self.trainable or self.narrowed)

    def nbytes_read(self, dtype: str) -> int:
        """Return the bytes that a gather of ``dtype`` moves."""
        return self.compute_nbytes if dtype == self.compute_dtype else self.master_nbytes

    def narrowed_to(self, dtype: str) -> "ParameterFact":
        """Return the fact of the parameter with a compute copy of a narrower dtype beside the master copy."""
        return replace(self, compute=Encoding(dtype=dtype), narrowed=True)

    def among(self, num_ranks: int) -> "ParameterFact":
        """Return the fact of one rank's shard of the parameter. Equal ones are the same object."""
        if num_ranks == 1:
            return self
        if num_ranks not in self._shards:  # asked for each level of each graph
            self._shards[num_ranks] = replace(self, slice=self.slice.among(num_ranks))
        return self._shards[num_ranks]

    @cached_property
    def _shards(self) -> "dict[int, ParameterFact]":
        return {}

    @property
    def gradient(self) -> Encoding | None:
        """Return the encoding of its gradient, which is what the model computes with; None for a frozen parameter."""
        if not self.trainable:
            return None
        return self.master if self.narrowed else self.compute

    @cached_property
    def gradient_nbytes(self) -> int:
        """Return the bytes of its gradient; 0 for a frozen parameter."""
        return 0 if self.gradient is None else self.gradient.nbytes(self.num_elements)

    @cached_property
    def state_nbytes(self) -> int:
        """Return the bytes of what the optimizer keeps of it, if it is trained."""
        return sum(state.encoding.nbytes(state.num_elements_of(self.slice)) for state in self.states)

    @cached_property
    def cut_state_nbytes(self) -> int:
        """Return the bytes of these of which each part of the parameter has a part: all but what belongs to the matrix."""
        whole = (state for state in self.states if state.granularity is Granularity.MATRIX)
        return self.state_nbytes - sum(state.encoding.nbytes(state.num_elements_of(self.slice)) for state in whole)

    @property
    def nbytes_updated_whole(self) -> int:
        """Return the bytes that its update needs at once, since some of its state cannot be cut with it; 0 if all can."""
        is_whole = self.trainable and any(each.granularity is not Granularity.ELEMENT for each in self.states)
        return sum(map(self.nbytes_of, Role)) if is_whole else 0

    @property
    def optimizer_state_nbytes(self) -> int:
        """Return the bytes of its optimizer state; 0 for a frozen parameter."""
        return self.state_nbytes if self.trainable else 0

    def nbytes_of(self, role: Role) -> int:
        """Return the bytes that it keeps of a role outside of the device; 0 where it has no such copy."""
        if role is Role.COMPUTE:
            return self.compute.nbytes(self.num_elements)
        if role is Role.MASTER:
            return self.master_nbytes if self.has_two_copies else 0
        return self.gradient_nbytes if role is Role.GRADIENT else self.optimizer_state_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFact(Generic[SizeT_co]):
    """One operation of the flattened step, at its tick."""

    tick: int
    name: str
    op: str
    module: str
    dtype: str
    num_flops: SizeT_co
    nbytes_accessed: SizeT_co
    inputs: tuple[int, ...] = ()  # ticks of the nodes whose results it reads, views looked through, sorted
    repeatable: bool = True  # gives the same when it runs again, and may
    inner: tuple["OpFact[SizeT_co]", ...] = ()  # of a segment: what it runs


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFact(Generic[SizeT_co]):
    """One stretch of device memory that compute allocates (not a gathered parameter)."""

    name: str
    nbytes: SizeT_co
    live: LiveRange
    saved: bool  # crosses from forward to backward
    bindable: bool = False  # its op can write it into given memory, and it does not outlive its graph
    idle: LiveRange | None = None  # from its last use in forward to its next; None if it cannot leave the device


@dataclass(frozen=True, slots=True, kw_only=True)
class UseFact:
    """The ticks at which a parameter's value is read, sorted."""

    parameter: str
    dtype: str  # that the graph reads it in: of the compute copy, or else of the master copy
    ticks: tuple[int, ...]


# A larger share of experts is not worth the wait for the routing, and not trying it keeps the search short.
_MOST_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing(Generic[SizeT_co]):
    """Which experts have rows, as a graph knows it: ``ends`` is the tick of what says where those of each end."""

    ends: int
    num_experts: int
    num_rows: SizeT_co  # of all experts together: tokens, each as often as it is routed

    @property
    def share(self) -> float:
        """Return the share of experts that are expected to have rows if each row goes to any expert alike."""
        rows = cast(int, self.num_rows)
        return min(1.0, rows / self.num_experts, 1.0 - (1.0 - 1.0 / self.num_experts) ** rows)

    @property
    def leaves_out_enough(self) -> bool:
        """Return whether so few experts are expected to have rows that moving these alone may be worth waiting for them."""
        return self.share <= _MOST_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedFact(Generic[SizeT_co]):
    """A parameter of which one phase reads only the experts that have rows: slices of its first dimension."""

    parameter: str
    routing: Routing[SizeT_co]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFact(Generic[SizeT_co]):
    """The tick at which the gradient of a parameter is complete in this graph."""

    parameter: str
    tick: int
    nbytes: int
    routing: Routing[SizeT_co] | None = None  # if it is zero for experts without rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts(Generic[SizeT_co]):
    """One captured graph under one activation policy. Its schedule says which ticks are forward, and which backward.

    Capture gives sizes as expressions in ``symbols``; ``at_sizes`` puts numbers in, and planning takes nothing else.
    """

    name: str
    policy: ActivationPolicy
    schedule: Schedule
    ops: tuple[OpFact[SizeT_co], ...]
    values: tuple[ValueFact[SizeT_co], ...]
    uses: tuple[UseFact, ...]
    gradients: tuple[GradientFact[SizeT_co], ...]
    routed: tuple[RoutedFact[SizeT_co], ...] = ()  # at most one of a parameter in each phase
    symbols: tuple[ShapeSymbol, ...] = ()  # with the value that the sizes are at, or were captured at
    # Bytes held outside of the graph between forward and backward, if the loss is computed there.
    outside_nbytes: SizeT_co = 0  # type: ignore[assignment]  # a number is a size

    @property
    def num_ticks(self) -> int:
        """Return the ticks of forward and backward together."""
        return self.schedule.num_ticks


def at_sizes(facts: GraphFacts[Size], sizes: Mapping[str, int] | None = None) -> GraphFacts:
    """Return facts of numbers only, with ``sizes`` put in for the symbols; those left out are as at capture.

    Raises ConfigError for a name that is no symbol of the graph.
    """
    complete = complete_sizes(facts.symbols, sizes or {})
    every_op = chain(facts.ops, chain.from_iterable(op.inner for op in facts.ops))
    counts = ((op.num_flops, op.nbytes_accessed) for op in every_op)
    nbytes = (value.nbytes for value in facts.values)
    rows = (routing.num_rows for routing in _routings(facts))
    numbers = evaluate_sizes(chain(chain.from_iterable(counts), nbytes, rows, [facts.outside_nbytes]), complete)
    if not numbers and all(symbol.value == complete[symbol.name] for symbol in facts.symbols):
        return cast(GraphFacts, facts)  # a deep graph has 100,000s of facts to copy

    def op_at(op: OpFact[Size]) -> OpFact:
        inner = tuple(map(op_at, op.inner))
        numbered = replace(op, num_flops=number(op.num_flops), nbytes_accessed=number(op.nbytes_accessed), inner=inner)
        return cast(OpFact, numbered)  # for mypy, ``replace`` keeps the type

    def number(size: Size) -> int:
        return size if isinstance(size, int) else numbers[size]

    def routing_at(routing: Routing[Size]) -> Routing:
        return cast(Routing, replace(routing, num_rows=number(routing.num_rows)))

    facts_of_numbers = replace(
        facts,
        ops=tuple(map(op_at, facts.ops)),
        values=tuple(replace(value, nbytes=number(value.nbytes)) for value in facts.values),
        gradients=tuple(
            each if each.routing is None else replace(each, routing=routing_at(each.routing))
            for each in facts.gradients
        ),
        routed=tuple(replace(each, routing=routing_at(each.routing)) for each in facts.routed),
        symbols=tuple(ShapeSymbol(name=symbol.name, value=complete[symbol.name]) for symbol in facts.symbols),
        outside_nbytes=number(facts.outside_nbytes),
    )
    return cast(GraphFacts, facts_of_numbers)


def _routings(facts: GraphFacts[Size]) -> Iterable[Routing[Size]]:
    of_gradients = (each.routing for each in facts.gradients if each.routing is not None)
    return chain((each.routing for each in facts.routed), of_gradients)


def symbols_of(facts: GraphFacts[Size]) -> set[str]:
    """Return the names of the symbols that some size depends on."""
    every_op = chain(facts.ops, chain.from_iterable(op.inner for op in facts.ops))
    counts = chain.from_iterable((op.num_flops, op.nbytes_accessed) for op in every_op)
    rows = (routing.num_rows for routing in _routings(facts))
    sizes = {*counts, *rows, *(value.nbytes for value in facts.values), facts.outside_nbytes}
    return {symbol.name for size in sizes if not isinstance(size, int) for symbol in size.free_symbols}


def _join_counts(first: OpFact, second: OpFact) -> OpFact:
    return replace(
        first,
        num_flops=max(first.num_flops, second.num_flops),
        nbytes_accessed=max(first.nbytes_accessed, second.nbytes_accessed),
        inner=tuple(map(_join_counts, first.inner, second.inner)),
    )


def _join_rows(first: Routing, second: Routing) -> Routing:
    return replace(first, num_rows=max(first.num_rows, second.num_rows))


def is_within(facts: GraphFacts, planned: GraphFacts) -> bool:
    """Return whether a plan made for ``planned`` holds for the same graph at other sizes: no value is larger."""
    values = zip(facts.values, planned.values, strict=True)
    return facts.outside_nbytes <= planned.outside_nbytes and all(value.nbytes <= room.nbytes for value, room in values)


def join_sizes(first: GraphFacts, second: GraphFacts) -> GraphFacts:
    """Return facts of which a plan holds for the same graph at the sizes of both: the larger of every number.

    That is less than the sizes' own maximum: many short sequences and few long ones need no room for many long ones.
    """
    return replace(
        first,
        ops=tuple(map(_join_counts, first.ops, second.ops)),
        values=tuple(
            replace(value, nbytes=max(value.nbytes, other.nbytes))
            for value, other in zip(first.values, second.values, strict=True)
        ),
        symbols=tuple(
            replace(symbol, value=max(symbol.value, other.value))
            for symbol, other in zip(first.symbols, second.symbols, strict=True)
        ),
        gradients=tuple(
            each
            if each.routing is None or other.routing is None
            else replace(each, routing=_join_rows(each.routing, other.routing))
            for each, other in zip(first.gradients, second.gradients, strict=True)
        ),
        routed=tuple(
            replace(each, routing=_join_rows(each.routing, other.routing))
            for each, other in zip(first.routed, second.routed, strict=True)
        ),
        outside_nbytes=max(first.outside_nbytes, second.outside_nbytes),
    )


def working_set(values: Iterable[ValueFact], num_ticks: int) -> list[int]:
    """Return the bytes of ``values`` live at each tick."""
    change = [0] * (num_ticks + 1)
    for value in values:
        change[value.live.start] += value.nbytes
        change[value.live.end] -= value.nbytes
    return list(accumulate(change[:-1]))
