"""Which saved values are rather made again in backward: per value, by the bytes saved per second lost.

What a value costs is the seconds of all ops on the way to it from values that stay saved, inputs and parameters, but for
those that are made again anyway. Alike values of alike blocks are decided together; the cheapest for their bytes come
first, so that what is made again already counts for those that follow::

    saved          norm -> up -> gelu -> (down)     norm, up and gelu rest on the device until backward
    gelu again             up -> gelu               one op over as many bytes: cheap
    norm again     norm ->                          one more
    up again       norm -> up -> gelu               a matrix product: later, if at all

Only what is idle where memory peaks counts as saved. What enters a block stays, and no value is made again from another of
its kind that is made again, too: else backward would begin with a chain of all blocks. The user's own checkpoint regions
are not saved in the first place: decisions start from there.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from zinf_compile.facts import GraphFacts, OpFact, ValueFact, working_set
from zinf_compile.hardware import Hardware
from zinf_compile.passes.planning.activations import MIN_BOUND_NBYTES, unbound_values
from zinf_compile.passes.planning.costs import op_seconds
from zinf_compile.passes.planning.placement import RESIDENT_THRESHOLD
from zinf_compile.plans import RecomputedValue
from zinf_compile.terms import ActivationPolicy

# Of what a graph computes, for all that is made again together, by the policy that asks for it. What is element by element
# in a transformer takes less than the one, and the widest of its matrix products beside that less than the other.
_SHARES: Mapping[ActivationPolicy, float] = {
    ActivationPolicy.RECOMPUTE_VALUES: 1 / 32,
    ActivationPolicy.RECOMPUTE_MORE: 1 / 8,
}


class Kind(NamedTuple):
    """What alike values of alike blocks have in common."""

    module: str  # its number left out: ``layers.#``
    op: str
    nbytes: int
    num_flops: int
    position: int  # among those of one module that have all else in common


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeLevel:
    """Kinds of values that backward makes again; those of a lower level and one more."""

    kinds: frozenset[Kind]
    values: frozenset[str]  # names of the saved values
    nbytes: int  # that need not rest where memory peaks
    seconds: float  # that backward takes longer


def recompute_levels(graph: GraphFacts, hardware: Hardware) -> Iterator[RecomputeLevel]:
    """Yield what to make again of what ``graph`` saves, each level with one kind more: the cheapest by its bytes.

    The seconds of a level are never more than those of the whole forward.
    """
    step = _Step(graph)
    seconds = [op_seconds(op, hardware) for op in graph.ops]
    forward_seconds = sum(seconds[: graph.num_forward_ticks])
    left = {kind: makers for kind, makers in step.kinds().items() if step.idle_nbytes(makers) >= MIN_BOUND_NBYTES}
    kept, remade = set(step.kept), set(step.remade)
    alike: dict[Kind, set[int]] = {}
    for kind, makers in left.items():
        alike.setdefault(kind._replace(position=0), set()).update(makers)
    chosen: frozenset[Kind] = frozenset()
    dropped: list[int] = []
    nbytes, lost = 0, 0.0
    while True:
        best: tuple[float, Kind, set[int]] | None = None
        for kind, makers in left.items():
            way = step.way_back(makers, kept)
            if way is None or step.is_chain(alike[kind._replace(position=0)] & way, way):
                continue
            cost = sum(seconds[tick] for tick in way - remade)
            if lost + cost > forward_seconds:
                continue
            price = cost / step.idle_nbytes(makers)
            if best is None or (price, kind) < best[:2]:
                best = price, kind, way
        if best is None:
            return
        _, kind, way = best
        makers = left.pop(kind)
        lost += sum(seconds[tick] for tick in way - remade)
        nbytes += step.idle_nbytes(makers)
        chosen |= {kind}
        dropped += makers
        kept.difference_update(makers)
        remade |= way
        yield RecomputeLevel(
            kinds=chosen,
            values=frozenset(value for maker in dropped for value in step.values_of[maker]),
            nbytes=nbytes,
            seconds=lost,
        )


def policy_levels(graph: GraphFacts, hardware: Hardware) -> dict[ActivationPolicy, RecomputeLevel]:
    """Return what is to be made again under each policy that says it by value, by the facts of ``SAVE``.

    A policy is left out if nothing is so cheap, or nothing more than under the one before it. They depend on no budget, so
    that more memory never makes a plan slower.
    """
    whole = sum(op_seconds(op, hardware) for op in graph.ops)
    found: dict[ActivationPolicy, RecomputeLevel] = {}
    left = list(_SHARES)
    last: RecomputeLevel | None = None
    for level in itertools.chain(recompute_levels(graph, hardware), (None,)):
        while left and (level is None or level.seconds > _SHARES[left[0]] * whole):
            policy = left.pop(0)
            if last is not None and last not in found.values():
                found[policy] = last
        if not left:
            break
        last = level
    return found


def ops_made_again(graph: GraphFacts, kinds: Collection[Kind]) -> frozenset[str]:
    """Return the names of the forward ops that backward runs again when values of these kinds are not saved.

    Raises ValueError if some cannot be had again; of the graph that the kinds were chosen for, all can.
    """
    step = _Step(graph)
    makers = [maker for kind, found in step.kinds().items() if kind in kinds for maker in found]
    way = step.way_back(makers, step.kept)
    if way is None:
        raise ValueError(f"in {graph.name} other values are on the way than where it was decided what to make again")
    return frozenset(graph.ops[tick].name for tick in way)


class _Step:
    """What saved values are made from. An op is known by its tick; one that returns several values makes all of them."""

    def __init__(self, graph: GraphFacts) -> None:
        self._graph = graph
        self._ops = graph.ops
        self.values_of: dict[int, list[str]] = {}
        self._nbytes: Counter[int] = Counter()  # saved, by maker
        self._idle_nbytes: Counter[int] = Counter()  # of those, what nothing reads where memory peaks
        live = working_set(unbound_values(graph), graph.num_ticks)
        peak_tick = max(range(len(live)), key=live.__getitem__, default=0)
        last_read, next_read = self._reads()
        partly: set[int] = set()
        self._returned: set[int] = set()  # what the caller holds rests anyway
        for value in graph.values:
            if value.live.start >= graph.num_forward_ticks:
                continue
            maker = value.live.start
            if not value.saved:
                if _is_result(value, self._ops[maker]):
                    partly.add(maker)
                continue
            self.values_of.setdefault(maker, []).append(value.name)
            self._nbytes[maker] += value.nbytes
            if last_read.get(maker, maker) < peak_tick < next_read.get(maker, maker):
                self._idle_nbytes[maker] += value.nbytes
            if value.live.end == graph.num_ticks:
                self._returned.add(maker)
        self.kept = (
            frozenset(self.values_of) - partly
        )  # of others the op has to run again for the rest of what it returns
        backward = graph.ops[graph.num_forward_ticks :]
        # What backward has anyway: inputs that it reads, and parameters that it gathers or that mostly are resident. Other
        # inputs may be gone by then, or written to.
        given = {op.name for op in backward if _is_input(op)}
        again = {op.name for op in backward if not _is_input(op)}
        self._given = frozenset(
            op.tick for op in self._forward if _is_input(op) and (op.name in given or _is_small_parameter(op))
        )
        self.remade = frozenset(op.tick for op in self._forward if op.name in again)

        self._leaving = self._find_leaving()

    def _find_leaving(self) -> set[int]:
        """Return the makers of values that another module than their block reads, where more than they rest of the block.

        In backward they would be made again among the ops of the block that reads them. A layer of a plain sequence is no
        block in that sense, though it has a number.
        """
        modules = Counter(
            self._ops[maker].module for maker in self.values_of if self._nbytes[maker] >= MIN_BOUND_NBYTES
        )
        return {
            tick
            for op in self._forward
            if op.op != "output"
            for tick in op.inputs
            if self._ops[tick].module != op.module
            and _is_block(self._ops[tick].module)
            and modules[self._ops[tick].module] > 1
        }

    @property
    def _forward(self) -> Sequence[OpFact]:
        return self._ops[: self._graph.num_forward_ticks]

    def _reads(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the last tick of forward and the first of backward that reads what appears at a tick."""
        last: dict[int, int] = {}
        following: dict[int, int] = {}
        for op in self._ops:
            if op.op == "output":
                continue
            for tick in op.inputs:
                if op.tick < self._graph.num_forward_ticks:
                    last[tick] = op.tick
                else:
                    following.setdefault(tick, op.tick)
        return last, following

    def idle_nbytes(self, makers: Collection[int]) -> int:
        """Return the bytes of saved values that nothing reads around the tick at which memory peaks."""
        return sum(self._idle_nbytes[maker] for maker in makers)

    def kinds(self) -> dict[Kind, list[int]]:
        """Return the makers of saved values by kind, in the order of the first of each."""
        found: dict[Kind, list[int]] = {}
        seen: Counter[tuple[str, Kind]] = Counter()
        for maker in sorted(self.values_of):
            op = self._ops[maker]
            if not op.repeatable or maker in self._returned or maker in self._leaving:
                continue
            kind = Kind(_without_number(op.module), op.op, self._nbytes[maker], op.num_flops, 0)
            position = seen[op.module, kind]
            seen[op.module, kind] += 1
            found.setdefault(kind._replace(position=position), []).append(maker)
        return found

    def way_back(self, makers: Collection[int], kept: Set[int]) -> set[int] | None:
        """Return all ops to run again for the values of ``makers``, from values of ``kept`` that are not of theirs.

        None if an op among them may give something else the second time, or reads what backward does not have otherwise.
        """
        kept = kept - set(makers)
        way, left = set(makers), list(makers)
        while left:
            op = self._ops[left.pop()]
            if not op.repeatable:
                return None
            new = [tick for tick in op.inputs if tick not in kept and tick not in way and tick not in self._given]
            way.update(new)
            left += new
        return way

    def is_chain(self, makers: Collection[int], way: Set[int]) -> bool:
        """Return whether on a way back a value of ``makers`` is made from another of them, directly or through others."""
        reaches = set()  # those of the way that are made from one of ``makers``
        for tick in sorted(way):
            comes_from_one = any(
                before in way and (before in makers or before in reaches) for before in self._ops[tick].inputs
            )
            if comes_from_one and tick in makers:
                return True
            if comes_from_one:
                reaches.add(tick)
        return False


def _is_input(op: OpFact) -> bool:
    """Return whether a node only gives what is there: an input of the graph, or a parameter, which is gathered again."""
    return op.op == op.name or op.op.startswith("zinf.")


def _is_block(module: str) -> bool:
    return module.rpartition(".")[2].isdigit()


def _is_small_parameter(op: OpFact) -> bool:
    return op.op != op.name and op.nbytes_accessed <= RESIDENT_THRESHOLD


def _without_number(module: str) -> str:
    path, _, number = module.rpartition(".")
    return f"{path}.#" if number.isdigit() else module


def find_recomputed(graph: GraphFacts, hardware: Hardware) -> tuple[RecomputedValue, ...]:
    """Return the large values that forward makes and does not save, and that backward makes again, by the tick of that."""
    forward = {
        value.name: value
        for value in graph.values
        if value.live.start < graph.num_forward_ticks and not value.saved and value.nbytes >= MIN_BOUND_NBYTES
    }
    again = (
        (value, graph.ops[value.live.start])
        for value in graph.values
        if value.live.start >= graph.num_forward_ticks and value.name in forward
    )
    return tuple(
        RecomputedValue(value=value.name, nbytes=value.nbytes, tick=value.live.start, seconds=op_seconds(op, hardware))
        for value, op in again
        if _is_result(value, op)
    )


def _is_result(value: ValueFact, op: OpFact) -> bool:
    """Return whether a value is what an op returns, and not what its kernel takes and frees again."""
    return _stem(value.name) == _stem(op.name)


def _stem(name: str) -> str:
    """Return a node's name, without the block that it stands for (``mm_7@5``) or the result that is meant (``max_1.0``)."""
    return name.partition("@")[0].partition(".")[0]
