"""Chooses saved values that backward recomputes instead, by bytes saved per second of recomputation.

The cost of a value is the seconds of all ops between it and values that stay saved, inputs and parameters, without ops
that are recomputed anyway. Corresponding values of identical blocks are decided together. The cheapest for their bytes
come first, so that their recomputation is free for those that follow::

    saved               norm -> up -> gelu -> (down)     norm, up and gelu stay on the device until backward
    recompute gelu              up -> gelu               one op over as many bytes: cheap
    recompute norm      norm ->                          one more
    recompute up        norm -> up -> gelu               a matrix product: later, if at all

Only bytes that are idle when memory peaks count as saved. Inputs of a block stay saved, and no value is recomputed from
another recomputed value of its kind, or backward would begin with a chain through all blocks. Values in the user's own
checkpoint regions are not saved in the first place.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from zinf_compile.ir.facts import GraphFacts, OpFact, ValueFact, working_set
from zinf_compile.ir.glossary import ActivationPolicy, Phase
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.plan import RecomputedValue
from zinf_compile.passes.planner.cost.costs import RESIDENT_THRESHOLD, op_seconds
from zinf_compile.passes.planner.memory.activations import MIN_BOUND_NBYTES, unbound_values

# Limit on all recomputation as a share of the graph's compute, by policy. In a transformer, element-wise ops stay below
# the first, and with its widest matrix products below the second.
_SHARES: Mapping[ActivationPolicy, float] = {
    ActivationPolicy.RECOMPUTE_VALUES: 1 / 32,
    ActivationPolicy.RECOMPUTE_MORE: 1 / 8,
}


class Kind(NamedTuple):
    """What corresponding values of identical blocks have in common."""

    module: str  # without its number: ``layers.#``
    op: str
    nbytes: int
    num_flops: int
    position: int  # among values of one module that agree in everything else


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeLevel:
    """Kinds of values that backward recomputes: those of the level below and one more."""

    kinds: frozenset[Kind]
    values: frozenset[str]  # names of the saved values
    nbytes: int  # that are not kept when memory peaks
    seconds: float  # of additional backward time


def recompute_levels(graph: GraphFacts, hardware: Hardware) -> Iterator[RecomputeLevel]:
    """Yield levels of saved values to recompute, each with one more kind: the cheapest for its bytes.

    The seconds of a level never exceed those of the whole forward.
    """
    step = _Step(graph)
    seconds = [op_seconds(op, hardware) for op in graph.ops]
    forward_seconds = sum(seconds[tick] for tick in graph.schedule.ticks(Phase.FORWARD))
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
    """Return what each policy by value recomputes, from the facts under ``SAVE``.

    A policy is left out if nothing is cheap enough, or nothing more than under the policy before. The choice does not
    depend on budgets, so that more memory never makes a plan slower.
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


def recomputed_ops(graph: GraphFacts, kinds: Collection[Kind]) -> frozenset[str]:
    """Return the names of the forward ops that backward recomputes if values of these kinds are not saved.

    Raises ValueError if some cannot be recomputed, which never happens for the graph that the kinds were chosen for.
    """
    step = _Step(graph)
    makers = [maker for kind, found in step.kinds().items() if kind in kinds for maker in found]
    way = step.way_back(makers, step.kept)
    if way is None:
        raise ValueError(f"{graph.name} differs from the graph for which the values to recompute were chosen")
    return frozenset(graph.ops[tick].name for tick in way)


class _Step:
    """The dependencies of saved values. An op is identified by its tick, also if it returns several values."""

    def __init__(self, graph: GraphFacts) -> None:
        self._graph = graph
        self._ops = graph.ops
        self.values_of: dict[int, list[str]] = {}
        self._nbytes: Counter[int] = Counter()  # saved, by the op that computes them
        self._idle_nbytes: Counter[int] = Counter()  # those that nothing reads when memory peaks
        live = working_set(unbound_values(graph), graph.num_ticks)
        peak_tick = max(range(len(live)), key=live.__getitem__, default=0)
        last_read, next_read = self._reads()
        partly: set[int] = set()
        self._returned: set[int] = set()  # the caller keeps these anyway
        forward = graph.schedule.ticks(Phase.FORWARD)
        for value in graph.values:
            if value.live.start not in forward:
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
        )  # for others the op would have to run again for its other results
        backward = graph.ops[forward.stop :]
        # Available in backward anyway: inputs that it reads, and parameters that it gathers or that are mostly
        # resident. Other inputs may be freed or overwritten by then.
        given = {op.name for op in backward if _is_input(op)}
        again = {op.name for op in backward if not _is_input(op)}
        self._given = frozenset(
            op.tick for op in self._forward if _is_input(op) and (op.name in given or _is_small_parameter(op))
        )
        self.remade = frozenset(op.tick for op in self._forward if op.name in again)

        self._leaving = self._find_leaving()

    def _find_leaving(self) -> set[int]:
        """Return the ops whose values another block reads, if other values of their own block are saved too.

        Backward would recompute them among the ops of the block that reads them. A layer of a plain sequence does not
        count as a block here, though it has a number.
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
        return self._ops[: self._graph.schedule.ticks(Phase.FORWARD).stop]

    def _reads(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return, for the value of each tick, the last forward tick and the first backward tick that read it."""
        last: dict[int, int] = {}
        following: dict[int, int] = {}
        forward = self._graph.schedule.ticks(Phase.FORWARD)
        for op in self._ops:
            if op.op == "output":
                continue
            for tick in op.inputs:
                if op.tick in forward:
                    last[tick] = op.tick
                else:
                    following.setdefault(tick, op.tick)
        return last, following

    def idle_nbytes(self, makers: Collection[int]) -> int:
        """Return the bytes of saved values that nothing reads around the tick at which memory peaks."""
        return sum(self._idle_nbytes[maker] for maker in makers)

    def kinds(self) -> dict[Kind, list[int]]:
        """Return the ops of saved values by kind, in order of first appearance."""
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
        """Return all ops to recompute for the values of ``makers``, from ``kept`` values other than theirs.

        None if one of them may give another result the second time, or reads something that backward does not have.
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
        """Return whether recomputing a value of ``makers`` needs another of them, directly or indirectly."""
        reaches = set()  # recomputed ops that depend on one of ``makers``
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
    """Return whether a node is an input of the graph, or the gather of a parameter, which backward gathers again."""
    return op.op == op.name or op.op.startswith("zinf.")


def _is_block(module: str) -> bool:
    return module.rpartition(".")[2].isdigit()


def _is_small_parameter(op: OpFact) -> bool:
    return op.op != op.name and op.nbytes_accessed <= RESIDENT_THRESHOLD


def _without_number(module: str) -> str:
    path, _, number = module.rpartition(".")
    return f"{path}.#" if number.isdigit() else module


def find_recomputed(graph: GraphFacts, hardware: Hardware) -> tuple[RecomputedValue, ...]:
    """Return the large values that forward does not save and backward recomputes, by the tick of the recomputation."""
    ticks = graph.schedule.ticks(Phase.FORWARD)
    forward = {
        value.name
        for value in graph.values
        if value.live.start in ticks and not value.saved and value.nbytes >= MIN_BOUND_NBYTES
    }
    again = (
        (value, graph.ops[value.live.start])
        for value in graph.values
        if value.live.start not in ticks and value.name in forward
    )
    return tuple(
        RecomputedValue(value=value.name, nbytes=value.nbytes, tick=value.live.start, seconds=op_seconds(op, hardware))
        for value, op in again
        if _is_result(value, op)
    )


def _is_result(value: ValueFact, op: OpFact) -> bool:
    """Return whether a value is a result of an op, and not temporary memory of its kernel."""
    return _stem(value.name) == _stem(op.name)


def _stem(name: str) -> str:
    """Return a node's name without its block (``mm_7@5``) or the index of a result (``max_1.0``)."""
    return name.partition("@")[0].partition(".")[0]
