"""Replays what a planned step allocates on a GPU through the tests' model of torch's allocator.

The order is that of the graph: results and what ops take beside them, gradients that leave, and beside that buffers and
temporaries of updates, on a stream of their own. Sizes are those of facts and plan, so models may be of any size.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import fx

from tests.support.caching_allocator import AllocatedBytes, CachingAllocator
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.copies import Role
from zinf_compile.ir.facts import GraphFacts, OpFact, ValueFact
from zinf_compile.ir.glossary import Phase, Tier
from zinf_compile.ir.ops import RUN_SEGMENT
from zinf_compile.ir.plan import SMALL_UPDATE_PART, SMALL_UPDATE_SETS, UPDATE_SETS, TierPart
from zinf_compile.ir.transfers import Moved
from zinf_compile.passes.analysis import collect
from zinf_compile.passes.analysis.collect import workspace_name
from zinf_compile.passes.analysis.peaks import scratch_of
from zinf_compile.passes.analysis.storages import StorageRoot, find_roots
from zinf_compile.passes.contract import SEGMENT
from zinf_compile.passes.planner.memory.activations import unbound_values
from zinf_compile.passes.planner.optimizer.optimizer_step import chunk_nbytes_per_element, device_chunk_elements
from zinf_compile.passes.planner.schedule.swaps import without_swapped

_UPDATED_EVERY = 4  # ticks
_COPIES_OUTSIDE = 4  # of a loss outside of the graph: see ``collect.py``
Inside = Mapping[tuple[str, int], Sequence[tuple[str, int]]]


@contextmanager
def recording_segments() -> Iterator[Inside]:
    """A block that records what each segment that is analyzed allocates, op by op, by its workspace's name and bytes.

    Each of its allocations is ``("+", nbytes)``, and ``("-", nbytes)`` frees one. Its results stay.
    """
    found: dict[tuple[str, int], Sequence[tuple[str, int]]] = {}
    original = collect._workspaces

    def record(nodes: list[fx.Node], shapes: Any) -> list[ValueFact[Any]]:
        workspaces = original(nodes, shapes)
        nbytes_of = {each.name: each.nbytes for each in workspaces}
        for node in nodes:
            name = workspace_name(node)
            if node.target is RUN_SEGMENT and name in nbytes_of:
                found[name, int(nbytes_of[name])] = list(_allocations(node.meta[SEGMENT].graph))
        return workspaces

    with mock.patch.object(collect, "_workspaces", record):
        yield found


def _allocations(graph: fx.Graph) -> Iterator[tuple[str, int]]:
    roots, given = find_roots(graph), set(graph.find_nodes(op="placeholder"))
    results = {roots[node] for node in graph.output_node().all_input_nodes}
    last = {roots[used]: node for node in graph.nodes for used in (*node.all_input_nodes, node) if used in roots}
    made: dict[StorageRoot, None] = {}  # in order, so that every run is alike
    for node in graph.nodes:
        root = roots.get(node)
        if root is not None and root not in made and root.node not in given:
            made[root] = None
            yield "+", int(root.nbytes)
        if scratch := int(scratch_of(node)):
            yield from (("+", scratch), ("-", scratch))
        for gone in [each for each in made if last[each] is node and each not in results]:
            yield "-", int(gone.nbytes)


class PlannedMemory:
    """What a plan holds and allocates on its device."""

    def __init__(self, planned: PlanView, allocator: CachingAllocator, inside: Inside) -> None:
        """``inside`` has what segments allocate: see ``recording_segments``."""
        assert planned.request is not None
        self._plan, self._request, self._allocator, self._inside = planned.plan, planned.request, allocator, inside
        graphs = (each for each in planned.request.candidates if each.policy is planned.plan.activations.policy)
        self._graph: GraphFacts = next(graphs)
        self._swapped = tuple(each for each in planned.plan.transfers if each.what is Moved.ACTIVATION)
        device = planned.plan.tier(Tier.DEVICE)
        self._workspace, self._leaving = device.nbytes_of(TierPart.WORKSPACE), device.nbytes_of(TierPart.LEAVING)
        self._reserve, self._updates = device.nbytes_of(TierPart.RESERVE), device.nbytes_of(TierPart.UPDATES)
        self._libraries: dict[Phase, AllocatedBytes] = {}  # workspaces of cuBLAS, which has one for each thread
        self._left: deque[AllocatedBytes] = deque()  # gradients whose copies may not have landed
        self._temporaries = 0
        self._arena: AllocatedBytes | None = None
        self._is_begun = False

    def _begin(self) -> None:
        """Allocate what stays: residents, and buffers of updates."""
        for placement in self._plan.placements:
            for role in Role if placement.tile_of is None else ():
                nbytes = placement.nbytes_of(role)
                if placement.home_of(role) is Tier.DEVICE and nbytes:
                    self._allocator.allocate(nbytes, "compute")
        if self._updates:
            trained = [each for each in self._request.parameters if each.trainable]
            elements = min(
                device_chunk_elements(self._request.config, self._request.parameters),
                max(each.num_elements for each in trained),
            )
            large = elements * max(map(chunk_nbytes_per_element, trained))
            sizes = [large] * UPDATE_SETS + [large // SMALL_UPDATE_PART] * SMALL_UPDATE_SETS
            for nbytes in sizes:
                self._allocator.allocate(nbytes, "update")
            self._temporaries = self._updates - sum(sizes)
        self._is_begun = True

    def _reserve_arena(self, nbytes: int) -> None:
        if self._arena is not None and self._arena.requested_nbytes < nbytes:
            self._allocator.free(self._arena)
            self._arena = None
        self._arena = self._arena or self._allocator.allocate(nbytes, "compute")

    def run_step(self, arena_nbytes: int | None = None) -> None:
        """Allocate and free what a forward and its backward do, with updates beside both.

        The arena grows to ``arena_nbytes``, or to what the plan says.
        """
        if not self._is_begun:
            self._begin()
        self._reserve_arena(self._plan.arena_nbytes if arena_nbytes is None else arena_nbytes)
        born, dead = defaultdict(list), defaultdict(list)
        for value in unbound_values(without_swapped(self._graph, self._swapped)):
            born[value.live.start].append(value)
            dead[value.live.end - 1].append(value)
        gradients = {each.tick: each.nbytes for each in self._graph.gradients}
        held: dict[ValueFact, AllocatedBytes] = {}
        backward = self._plan.schedule.ticks(Phase.BACKWARD)
        for op in self._graph.ops:
            if op.tick == backward.start:
                self._run_loss()
            if op.tick % _UPDATED_EVERY == 0:
                self._run_update()
            self._run_op(op, born[op.tick], held, Phase.BACKWARD if op.tick in backward else Phase.FORWARD)
            for value in dead[op.tick]:
                if (block := held.pop(value, None)) is not None:
                    if gradients.get(op.tick) == value.nbytes:
                        self._leave(block)
                    else:
                        self._allocator.free(block)
        while self._left:
            self._allocator.free(self._left.popleft())
        assert not held

    def _run_op(
        self, op: OpFact, born: Sequence[ValueFact], held: dict[ValueFact, AllocatedBytes], phase: Phase
    ) -> None:
        multiplies = op.num_flops > 0
        if multiplies and phase not in self._libraries:
            self._libraries[phase] = self._allocator.allocate(self._reserve // 2, "compute")
        kept: list[AllocatedBytes] = []
        for value in born:
            if value.name == f"{op.name}_workspace":
                once = ("+", value.nbytes), ("-", value.nbytes)
                kept += self._run_inside(self._inside.get((value.name, value.nbytes), once))
        for value in born:
            if value.name != f"{op.name}_workspace":
                made = next((each for each in kept if each.requested_nbytes == value.nbytes), None)
                if made is not None:
                    kept.remove(made)
                assert value not in held
                held[value] = made or self._allocator.allocate(value.nbytes, "compute")
        for each in kept:
            self._allocator.free(each)
        if multiplies and (repacked := min(self._workspace, op.nbytes_accessed // 3)):
            self._allocator.free(self._allocator.allocate(repacked, "compute"))

    def _run_inside(self, allocations: Sequence[tuple[str, int]]) -> list[AllocatedBytes]:
        """Allocate and free what a segment does; return what it keeps, its results."""
        live: list[AllocatedBytes] = []
        for what, nbytes in allocations:
            if what == "+":
                live.append(self._allocator.allocate(nbytes, "compute"))
            else:
                freed = next(each for each in live if each.requested_nbytes == nbytes)
                live.remove(freed)
                self._allocator.free(freed)
        return live

    def _leave(self, block: AllocatedBytes) -> None:
        """Free a gradient once its copy has landed: later, as far as plans have room for it."""
        self._left.append(block)
        while sum(each.requested_nbytes for each in self._left) > self._leaving:
            self._allocator.free(self._left.popleft())

    def _run_loss(self) -> None:
        pieces = [self._allocator.allocate(nbytes, "compute") for nbytes in self._outside()]
        for piece in pieces:
            self._allocator.free(piece)

    def _outside(self) -> Iterator[int]:
        if self._graph.outside_nbytes:
            yield from [self._graph.outside_nbytes // _COPIES_OUTSIDE] * _COPIES_OUTSIDE

    def _run_update(self) -> None:
        if self._temporaries > 0:
            pieces = [self._allocator.allocate(self._temporaries // 2, "update") for _ in range(2)]
            for piece in pieces:
                self._allocator.free(piece)
