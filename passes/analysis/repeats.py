"""Extrapolates the facts of a shallow model to a deep one, by repeating its two middle blocks.

Of a run of identical blocks ``NUM_TEMPLATES`` are captured: the first, two in the middle, and the last. In the facts of
the whole model every further middle block relates to its neighbours as those two do::

    captured   0   1   2   3                    every tick of 1 has a counterpart in 2, at the same distance from its block
    expanded   0   1   1'  1''  1'''  2   3     in reverse order in backward

Callers check the result: they capture one block more, and compare its facts with the expanded ones.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from zinf_compile.ir.facts import GradientFact, GraphFacts, OpFact, RoutedFact, Routing, UseFact, ValueFact
from zinf_compile.ir.glossary import LiveRange, Phase
from zinf_compile.ir.schedule import Schedule
from zinf_compile.ir.sizes import Size

NUM_TEMPLATES = 4
_FIRST, _MIDDLE, _NEXT, _LAST = range(NUM_TEMPLATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive identical blocks of one module list: ``container.first`` and so on."""

    container: str
    first: int
    num_blocks: int

    def block_in(self, path: str) -> int | None:
        """Return the index in the run of the block that a module or parameter path is in; None if it is in none."""
        index = self._index(path)
        return None if index is None or not 0 <= index - self.first < self.num_blocks else index - self.first

    def move(self, path: str, distance: int) -> str:
        """Return a path in the container with its index increased by ``distance``."""
        index = self._index(path)
        prefix = f"{self.container}." if self.container else ""
        return path.replace(f"{prefix}{index}", f"{prefix}{index + distance}", 1) if index is not None else path

    def is_behind(self, path: str) -> bool:
        """Return whether a path is in the container, after the run."""
        index = self._index(path)
        return index is not None and index >= self.first + self.num_blocks

    def _index(self, path: str) -> int | None:
        prefix = f"{self.container}." if self.container else ""
        number = path.removeprefix(prefix).partition(".")[0]
        return int(number) if path.startswith(prefix) and number.isdigit() else None


class NotRepeatedError(Exception):
    """The blocks of a run differ in the facts; the message says where."""


def expand_run(facts: GraphFacts[Size], run: Run, num_blocks: int) -> GraphFacts[Size]:
    """Return the facts of the graph with ``num_blocks`` blocks in the run, from those with ``NUM_TEMPLATES``.

    Names of added nodes are derived: ``mm_7@5`` is the counterpart of ``mm_7`` in block 5. Raises NotRepeatedError.
    """
    return _Expansion(facts, replace(run, num_blocks=NUM_TEMPLATES), num_blocks).expand()


def expand_runs(facts: GraphFacts[Size], runs: Sequence[Run], depths: Sequence[int]) -> GraphFacts[Size]:
    """Return the facts with each run as deep as ``depths`` says; ``runs`` are as in the whole model, in module order.

    Raises NotRepeatedError.
    """
    for index in reversed(range(len(runs))):
        before = sum(run.num_blocks - NUM_TEMPLATES for run in runs[:index] if run.container == runs[index].container)
        facts = expand_run(facts, replace(runs[index], first=runs[index].first - before), depths[index])
    return facts


def whole_name(path: str, runs: Sequence[Run], num_blocks: int) -> str:
    """Return the path in the whole model of a path in the model with ``num_blocks`` blocks of each run.

    A path in a middle block, which stands for many, stays as it is. ``runs`` are as in the whole model, in module order.
    """
    for index in reversed(range(len(runs))):
        run = runs[index]
        before = sum(other.num_blocks - num_blocks for other in runs[:index] if other.container == run.container)
        captured = replace(run, first=run.first - before, num_blocks=num_blocks)
        if captured.block_in(path) == num_blocks - 1 or captured.is_behind(path):
            path = captured.move(path, run.num_blocks - num_blocks)
    return path


def without_names(facts: GraphFacts[Size]) -> GraphFacts[Size]:
    """Return facts in which nodes have no names, to compare two captures of different depth."""
    return replace(
        facts,
        ops=tuple(map(_without_name, facts.ops)),
        values=tuple(replace(value, name="") for value in facts.values),
    )


def _without_name(op: OpFact[Size]) -> OpFact[Size]:
    return replace(op, name="", op=_kind(op), inner=tuple(map(_without_name, op.inner)))


class _Place(NamedTuple):
    """The origin of a new tick: a tick of the captured facts and, in a middle block, the number of the new block."""

    tick: int
    block: int | None


class _Owner(NamedTuple):
    """What refers to a tick: the captured block, if any, and for a middle block the number of the new block."""

    captured: int | None
    block: int | None


class _Expansion:
    """One run of one graph: the ticks of its blocks, before and after expanding."""

    def __init__(self, facts: GraphFacts[Size], run: Run, num_blocks: int) -> None:
        self._facts, self._run, self._num_blocks = facts, run, num_blocks
        self._block_of = _find_blocks(facts, run)
        self._ticks: list[list[int]] = [[] for _ in range(NUM_TEMPLATES)]
        self._position: dict[int, int] = {}
        for tick, block in enumerate(self._block_of):
            if block is not None:
                self._position[tick] = len(self._ticks[block])
                self._ticks[block].append(tick)
        if len(self._ticks[_MIDDLE]) != len(self._ticks[_NEXT]):
            counts = " and ".join(str(len(self._ticks[block])) for block in (_MIDDLE, _NEXT))
            raise NotRepeatedError(f"two blocks of {run.container} have {counts} ops")
        self._new_paths: dict[tuple[str, int | None], str] = {}
        self._check_middle()
        self._places = list(self._lay_out())
        self._fixed = {place.tick: new for new, place in enumerate(self._places) if place.block is None}
        self._middle = {
            (place.block, self._position[place.tick]): new
            for new, place in enumerate(self._places)
            if place.block is not None
        }

    @property
    def _copies(self) -> range:
        """Return the new blocks that are copies of the first middle one; the second middle block follows them."""
        return range(1, self._num_blocks - 2)

    def _check_middle(self) -> None:
        """Raise unless the two middle blocks have the same ops, apart from their ticks and what they read."""
        for pair in zip(self._ticks[_MIDDLE], self._ticks[_NEXT], strict=True):
            op, like = (self._facts.ops[tick] for tick in pair)
            kinds = [_without_place(item) for item in (op, like)]
            if kinds[0] != kinds[1] or self._renamed(op.module, _NEXT) != self._renamed(like.module, _NEXT):
                raise NotRepeatedError(f"{op.name} and {like.name} differ")

    def _lay_out(self) -> Iterable[_Place]:
        """Yield what is at each new tick. Copies are in the order of the captured middle blocks, ascending or descending."""
        segments = [
            (block, [tick for tick, _ in ticks])
            for block, ticks in groupby(enumerate(self._block_of), key=lambda item: item[1])
        ]
        blocks = [block for block, _ in segments]
        for index, (block, ticks) in enumerate(segments):
            if block == _NEXT:
                yield from (_Place(tick, self._num_blocks - 2) for tick in ticks)
            elif block == _MIDDLE:
                ascends = blocks[index + 1 : index + 2] == [_NEXT]
                if ascends == (blocks[max(0, index - 1)] == _NEXT):
                    raise NotRepeatedError(f"blocks of {self._run.container} are not computed one after the other")
                for copy in self._copies if ascends else reversed(self._copies):
                    yield from (_Place(tick, copy) for tick in ticks)
            else:
                yield from (_Place(tick, None) for tick in ticks)

    def expand(self) -> GraphFacts[Size]:
        facts = self._facts
        values: dict[int, list[ValueFact[Size]]] = {}  # by the tick that computes them
        for value in facts.values:
            values.setdefault(value.live.start, []).append(value)
        ticks = facts.schedule.ticks(Phase.FORWARD)
        num_forward = sum(place.tick in ticks for place in self._places)
        new_values = [value for new, place in enumerate(self._places) for value in self._values_at(new, place, values)]
        return replace(
            facts,
            schedule=Schedule.of_one_graph(num_forward, len(self._places)),
            ops=tuple(self._op_at(new, place) for new, place in enumerate(self._places)),
            values=tuple(sorted(new_values, key=lambda value: value.live.start)),  # of one tick in the order captured
            uses=tuple(sorted(self._uses(), key=lambda use: (use.parameter, use.dtype))),
            gradients=tuple(sorted(self._gradients(), key=lambda gradient: gradient.tick)),
            routed=tuple(sorted(self._routed(), key=lambda routed: (routed.parameter, routed.routing.ends))),
        )

    def _op_at(self, new: int, place: _Place) -> OpFact[Size]:
        op, like = self._facts.ops[place.tick], None
        if place.block is not None:
            op, like = (self._facts.ops[tick] for tick in self._pair(place.tick))
        owner = self._owner(place)
        if like is not None and op.inner:
            inputs = self._resolve_results(op.inputs, like.inputs, owner)
        else:
            inputs = self._resolve_all(op.inputs, like.inputs if like else None, owner)
        return self._moved(op, like, new, place, inputs)

    def _moved(
        self, op: OpFact[Size], like: OpFact[Size] | None, new: int, place: _Place, inputs: tuple[int, ...]
    ) -> OpFact[Size]:
        """Return an op with new inputs, and the ops inside a segment with their own, renamed for the new tick."""
        name = self._node_name(op.name, like.name if like else None, place.block)
        likes = [None] * len(op.inner) if like is None else like.inner
        # Not ``replace``, which takes several times as long: there are a hundred thousand ops.
        return OpFact(
            tick=new,
            name=name,
            op=name if op.op == op.name else op.op,
            module=self._renamed(op.module, place.block),
            dtype=op.dtype,
            num_flops=op.num_flops,
            nbytes_accessed=op.nbytes_accessed,
            inputs=inputs,
            repeatable=op.repeatable,
            inner=tuple(
                self._moved(each, other, new, place, each.inputs) for each, other in zip(op.inner, likes, strict=True)
            ),
        )

    def _values_at(
        self, new: int, place: _Place, values: Mapping[int, Sequence[ValueFact[Size]]]
    ) -> Iterable[ValueFact[Size]]:
        ticks = (place.tick, None) if place.block is None else self._pair(place.tick)
        ours = values.get(ticks[0], ())
        likes = values.get(ticks[1], ()) if ticks[1] is not None else [None] * len(ours)
        if len(ours) != len(likes):
            raise NotRepeatedError(f"two blocks of {self._run.container} compute different numbers of values")
        owner = self._owner(place)
        for value, like in zip(ours, likes, strict=True):
            if like is not None and _size_of(value) != _size_of(like):
                raise NotRepeatedError(f"{value.name} and {like.name} differ")
            last = self._resolve(value.live.end - 1, like.live.end - 1 if like else None, owner)
            yield ValueFact(  # not ``replace``, as above
                name=self._node_name(value.name, like.name if like else None, place.block),
                nbytes=value.nbytes,
                live=LiveRange(start=new, end=last + 1),
                saved=value.saved,
                bindable=value.bindable,
                idle=self._idle(value, like, owner),
            )

    def _idle(self, value: ValueFact[Size], like: ValueFact[Size] | None, owner: _Owner) -> LiveRange | None:
        """Return the new idle range of a value: from after its last use in forward to its next use."""
        idle, other = value.idle, like.idle if like is not None else None
        if idle is None:
            return None
        start = self._resolve(idle.start - 1, other.start - 1 if other else None, owner) + 1
        return LiveRange(start=start, end=self._resolve(idle.end, other.end if other else None, owner))

    def _uses(self) -> Iterable[UseFact]:
        likes = {(use.parameter, use.dtype): use for use in self._facts.uses}
        for use in self._facts.uses:
            for name, like_name, owner in self._namesakes(use.parameter):
                like = likes.get((like_name, use.dtype))
                ticks = self._resolve_all(use.ticks, like.ticks if like else None, owner)
                yield replace(use, parameter=name, ticks=ticks)

    def _gradients(self) -> Iterable[GradientFact[Size]]:
        likes = {gradient.parameter: gradient for gradient in self._facts.gradients}
        for gradient in self._facts.gradients:
            for name, like_name, owner in self._namesakes(gradient.parameter):
                like = likes.get(like_name)
                tick = self._resolve(gradient.tick, like.tick if like else None, owner)
                routing = gradient.routing and self._routing(gradient.routing, like.routing if like else None, owner)
                yield replace(gradient, parameter=name, tick=tick, routing=routing)

    def _routed(self) -> Iterable[RoutedFact[Size]]:
        phase_of = self._facts.schedule.phase_of
        likes = {(routed.parameter, phase_of(routed.routing.ends)): routed.routing for routed in self._facts.routed}
        for routed in self._facts.routed:
            for name, like_name, owner in self._namesakes(routed.parameter):
                like = likes.get((like_name, phase_of(routed.routing.ends)))
                yield RoutedFact(parameter=name, routing=self._routing(routed.routing, like, owner))

    def _routing(self, routing: Routing[Size], like: Routing[Size] | None, owner: _Owner) -> Routing[Size]:
        return replace(routing, ends=self._resolve(routing.ends, like.ends if like else None, owner))

    def _namesakes(self, parameter: str) -> Iterable[tuple[str, str, _Owner]]:
        """Yield the names of a captured parameter in the whole model, its counterpart, and the block of each."""
        captured = self._run.block_in(parameter)
        if captured == _MIDDLE:
            for block in range(1, self._num_blocks - 1):
                yield self._run.move(parameter, block - 1), self._run.move(parameter, 1), _Owner(_MIDDLE, block)
        elif captured != _NEXT:  # handled with its counterpart
            yield self._renamed(parameter, None), "", _Owner(captured, None)

    def _owner(self, place: _Place) -> _Owner:
        return _Owner(self._block_of[place.tick], place.block)

    def _pair(self, tick: int) -> tuple[int, int]:
        """Return the tick in the first of the middle blocks, and its counterpart in the second."""
        position = self._position[tick]
        return self._ticks[_MIDDLE][position], self._ticks[_NEXT][position]

    def _resolve(self, tick: int, like: int | None, owner: _Owner) -> int:
        """Return the new tick of a captured one as seen by ``owner``; ``like`` is what the second middle block sees."""
        target = self._block_of[tick]
        if owner.block is None:
            neighbour = {_FIRST: 1, _LAST: self._num_blocks - 2}.get(owner.captured)  # type: ignore[arg-type]  # None is no key
            if target in (_MIDDLE, _NEXT):
                if neighbour is None or (target == _MIDDLE) != (owner.captured == _FIRST):
                    raise NotRepeatedError(f"{self._facts.ops[tick].name} is used once, in one of many blocks")
                return self._middle[neighbour, self._position[tick]]
            return self._fixed[tick]
        if like is None:
            raise NotRepeatedError(f"{self._facts.ops[tick].name} has no counterpart in the next block")
        if tick == like and target not in (_MIDDLE, _NEXT):
            return self._fixed[tick]
        return self._resolve_relative(tick, like, owner)

    def _resolve_relative(self, tick: int, like: int, owner: _Owner) -> int:
        """Return the new tick, at the same distance from the owner's block as ``tick`` and ``like`` have from theirs."""
        target, like_target = self._block_of[tick], self._block_of[like]
        assert owner.block is not None
        if target is None or like_target is None:
            raise NotRepeatedError(f"{self._facts.ops[tick].name} and {self._facts.ops[like].name} are not alike")
        distance = target - _MIDDLE
        block = owner.block + distance
        if distance != like_target - _NEXT or not 0 <= block < self._num_blocks:
            raise NotRepeatedError(f"{self._facts.ops[tick].name} is used by blocks at different distances")
        if block in (0, self._num_blocks - 1):
            return self._fixed[tick if block == 0 else like]
        # Of the two, the one that lies in a middle block.
        return self._middle[block, self._position[tick if target in (_MIDDLE, _NEXT) else like]]

    def _resolve_all(self, ticks: Sequence[int], likes: Sequence[int] | None, owner: _Owner) -> tuple[int, ...]:
        """Return the new ticks as seen by ``owner``, sorted; an owner outside all blocks sees every copy of a block."""
        if owner.block is not None:
            if likes is None or len(ticks) != len(likes):
                raise NotRepeatedError(f"two blocks of {self._run.container} read different numbers of values")
            return tuple(sorted(self._resolve(tick, like, owner) for tick, like in zip(ticks, likes, strict=True)))
        found: list[int] = []
        for tick in ticks:
            target = self._block_of[tick]
            if owner.captured is None and target in (_MIDDLE, _NEXT):
                if not set(self._pair(tick)) <= set(ticks):
                    raise NotRepeatedError(f"{self._facts.ops[tick].name} is read for one of many blocks")
                blocks = self._copies if target == _MIDDLE else (self._num_blocks - 2,)
                found += (self._middle[block, self._position[tick]] for block in blocks)
            else:
                found.append(self._resolve(tick, None, owner))
        return tuple(sorted(found))

    def _resolve_results(self, ticks: Sequence[int], likes: Sequence[int], owner: _Owner) -> tuple[int, ...]:
        """Return the new ticks of what a segment in a middle block reads, sorted.

        A segment returns several results at one tick. So a block may read a tick for two reasons: it is in the neighbouring
        block, and it computes something that all blocks read::

            block 1 reads 2 and 3        block 2 reads 3, its neighbour, which also computes what all of them read
        """
        shared = {tick for tick in ticks if tick in likes and self._block_of[tick] not in (_MIDDLE, _NEXT)}
        found = {self._fixed[tick] for tick in shared}
        ours = self._by_distance(ticks, _MIDDLE, shared)
        theirs = self._by_distance(likes, _NEXT, shared)
        for distance in ours.keys() | theirs.keys():
            pair = ours.get(distance, []), theirs.get(distance, [])
            alone = [[tick for tick in each if tick not in shared] for each in pair]
            if len(alone[0]) > len(alone[1]):
                alone[1] = pair[1]
            elif len(alone[0]) < len(alone[1]):
                alone[0] = pair[0]
            if len(alone[0]) != len(alone[1]):
                raise NotRepeatedError(f"two blocks of {self._run.container} read different numbers of values")
            found |= {self._resolve_relative(tick, like, owner) for tick, like in zip(*alone, strict=True)}
        return tuple(sorted(found))

    def _by_distance(self, ticks: Sequence[int], block: int, shared: Container[int]) -> dict[int, list[int]]:
        """Return ticks by their distance in blocks from a captured block; ticks outside all blocks must be ``shared``."""
        found: dict[int, list[int]] = {}
        for tick in ticks:
            target = self._block_of[tick]
            if target is not None:
                found.setdefault(target - block, []).append(tick)
            elif tick not in shared:
                raise NotRepeatedError(f"{self._facts.ops[tick].name} has no counterpart in the next block")
        return found

    def _renamed(self, path: str, block: int | None) -> str:
        """Return a captured path as it is in the whole model; a path in a middle block is moved to ``block``."""
        new = self._new_paths.get((path, block))
        if new is None:  # a block has many ops in each of its modules
            new = self._new_paths[path, block] = self._rename(path, block)
        return new

    def _rename(self, path: str, block: int | None) -> str:
        captured = self._run.block_in(path)
        if captured in (_MIDDLE, _NEXT):
            if block is None:
                raise NotRepeatedError(f"{path} is used outside its own block")
            return self._run.move(path, block - captured)
        moves = captured == _LAST or self._run.is_behind(path)
        return self._run.move(path, self._num_blocks - NUM_TEMPLATES) if moves else path

    def _node_name(self, name: str, like: str | None, block: int | None) -> str:
        if block is None or block == 1:
            return name
        if block == self._num_blocks - 2 and like is not None:
            return like
        return f"{name}@{self._run.first + block}"


def _find_blocks(facts: GraphFacts[Size], run: Run) -> list[int | None]:
    """Return the captured block of each tick, or None.

    A backward input belongs to the block that saved it, or else to the one that reads it. Ops between neighbouring
    blocks, such as those of the model's own loop, belong to the block before them.
    """
    ticks = facts.schedule.ticks(Phase.FORWARD)
    forward = {op.name: run.block_in(op.module) for op in facts.ops[: ticks.stop]}
    readers: dict[int, set[int | None]] = {}
    for op in facts.ops:
        for tick in op.inputs:
            readers.setdefault(tick, set()).add(run.block_in(op.module))
    blocks: list[int | None] = []
    for op in facts.ops:
        if op.op == "output":
            blocks.append(None)
        elif op.op == op.name and op.tick not in ticks:
            read_in = readers.get(op.tick, set())
            blocks.append(forward.get(op.name, next(iter(read_in)) if len(read_in) == 1 else None))
        else:
            blocks.append(run.block_in(op.module))
    segments = [(block, len(list(ticks))) for block, ticks in groupby(blocks)]

    def is_between(index: int, length: int) -> set[int | None]:
        """Return the two blocks that a stretch of ``length`` ticks lies between; empty if it does not lie between blocks."""
        if not 0 < index < len(segments) - 1 or segments[index] != (None, length):
            return set()
        return {segments[index - 1][0], segments[index + 1][0]}

    found: list[int | None] = []
    for index, (block, length) in enumerate(segments):
        between = is_between(index, length)
        joins = between == {_MIDDLE, _NEXT} or (
            between in ({_FIRST, _MIDDLE}, {_NEXT, _LAST})
            and {_MIDDLE, _NEXT} in (is_between(index - 2, length), is_between(index + 2, length))
        )
        found += [segments[index - 1][0] if joins else block] * length
    return found


def _without_place(op: OpFact[Size]) -> OpFact[Size]:
    inner = tuple(map(_without_place, op.inner))
    return replace(op, tick=0, name="", op=_kind(op), module="", inputs=(), inner=inner)


def _kind(op: OpFact[Size]) -> str:
    return "placeholder" if op.op == op.name else op.op


def _size_of(value: ValueFact[Size]) -> tuple[Size, bool, bool, bool]:
    return value.nbytes, value.saved, value.bindable, value.idle is None
