"""One captured graph: chooses its split, plans it, lowers it; again if parameters move, inputs grow, steps are measured."""

import gc
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from zinf_compile.errors import CapacityError, StoreError
from zinf_compile.facts import GraphFacts, ParameterFact, at_sizes
from zinf_compile.hardware import Hardware
from zinf_compile.passes.analysis.collect import CapturedGraph, analyze_graph
from zinf_compile.passes.capture import BoxedCallable, Partition
from zinf_compile.passes.contract import JointInputs, LowerInputs
from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.lowering.swap_activations import swapped_inputs
from zinf_compile.passes.pipeline import lower_graph
from zinf_compile.passes.planning.planner import Request, make_plan
from zinf_compile.passes.planning.policies import allowed_policies, other_splits
from zinf_compile.passes.planning.questions import describe_largest
from zinf_compile.passes.planning.remake import remake_plan, with_open_forwards
from zinf_compile.plan_verify import verify_plan
from zinf_compile.planned_shapes import PlannedShapes, dump_sizes
from zinf_compile.plans import Placement, Plan
from zinf_compile.runtime.executor import Executor
from zinf_compile.runtime.machine import kernel_cache_nbytes
from zinf_compile.runtime.open_forwards import storages_of
from zinf_compile.runtime.slots import StoredParameter
from zinf_compile.runtime.watch import StepWatch
from zinf_compile.segmented import Computed, compute_in_segments
from zinf_compile.simulate import simulate
from zinf_compile.sizes import Size
from zinf_compile.terms import ActivationPolicy, Phase, Tier, format_bytes
from zinf_compile.tile_search import TiledGraph
from zinf_compile.tiles import join_placements, tile_name

if TYPE_CHECKING:
    from zinf_compile.session import Narrowing, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A way to compile a graph."""

    captured: CapturedGraph
    facts: GraphFacts[Size]
    narrowed: Mapping[int, torch.dtype]  # what its gathers move in place of the parameter's own dtype, by parameter
    plan: Plan | None = None  # None: it does not fit, or was not looked at alone


_log = logging.getLogger(__name__)
_PAGE_NBYTES = 4096  # of memory: a loss that the caller holds during backward is no reason to plan again


class Backward(NamedTuple):
    """A lowered backward, and the arena bytes it needs."""

    run: BoxedCallable
    arena_nbytes: int


class Program:
    """One captured graph: chooses its split, plans it, and lowers it, again if parameters have moved or inputs grown."""

    def __init__(
        self, session: "Session", name: str, hardware: Hardware, *, open_nbytes: int, tiled: TiledGraph
    ) -> None:
        """``open_nbytes`` are held now by forwards whose backward has not run, beside the graph's inputs.

        ``tiled`` is the graph, and which parameters it gathers by tiles.
        """
        self._session = session
        self._name = name
        self._hardware = hardware
        self._tiled = tiled.tiled
        self._notes = () if tiled.note is None else (tiled.note,)
        self._captured: CapturedGraph | None = None
        self._shapes: PlannedShapes | None = None
        self._forward: BoxedCallable | None = None
        # By which of their inputs are tokens: a plan made after a forward may keep other values on the device.
        self._backwards: dict[frozenset[int], Backward] = {}
        self.plan: Plan | None = None
        self.replanned: list[str] = []  # why it was planned again, in words
        self._watch = StepWatch(session.store.meter)
        # What a device with streams does is not seen from here: how long ops are told is not how long they take.
        self._is_watched = session.config.remake_plan and not session.config.is_apart
        self._open_nbytes = open_nbytes  # what it is planned for
        self._most_open = open_nbytes  # that was found before any of its runs
        self.last_runs: dict[Phase, int] = {}  # how many steps had begun by then

    @property
    def num_ticks(self) -> int:
        """Return the ticks of its plan; 0 before there is one."""
        return 0 if self.plan is None else self.plan.num_ticks

    @property
    def read_records(self) -> list[StoredParameter]:
        """Return the parameters that the graph reads."""
        assert self._shapes is not None
        return self._records(use.parameter for use in self._shapes.captured.uses)

    @property
    def trained_records(self) -> list[StoredParameter]:
        """Return the parameters that the graph's backward gives a gradient."""
        assert self._shapes is not None
        return self._records(gradient.parameter for gradient in self._shapes.captured.gradients)

    def _records(self, names: Iterable[str]) -> list[StoredParameter]:
        """Return each of the parameters once that names of the plan stand for."""
        return [self._session.store.records[name] for name in dict.fromkeys(map(self._tiled.whole_name, names))]

    def choose(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> CapturedGraph:
        """Return the split whose plan has the shortest step; torch's own choice of what to save is looked at first."""
        first, *others = allowed_policies(self._session.config.recompute)
        saving = self._choose_dtypes(partition, first, reads)
        candidates = [saving]
        for split in other_splits(others, at_sizes(saving.facts), self._hardware, saving.plan):
            inputs = JointInputs(policy=split.policy, narrowed=saving.narrowed, made_again=split.made_again)
            captured = partition(inputs)
            candidates.append(replace(saving, captured=captured, facts=self._analyze(captured), plan=None))
        return self._adopt_best(candidates)

    def plan_as_it_is(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> Plan:
        """Return the best plan of a training graph with the copies that parameters have, and adopt nothing."""
        narrowed = self._session.narrow_copies(reads)
        # Between the fastest and the smallest nothing is looked at: a search for tiles asks this many times.
        policies = [each for each in allowed_policies(self._session.config.recompute) if not each.is_by_value]
        splits = [partition(JointInputs(policy=policy, narrowed=narrowed)) for policy in policies]
        return self._plan_for([self._analyze(split) for split in splits])

    def choose_inference(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> CapturedGraph:
        """Plan a graph without backward, and return it as it is to be compiled."""
        return self._adopt_best([self._choose_dtypes(partition, ActivationPolicy.SAVE, reads)])

    def _choose_dtypes(
        self, partition: Partition, policy: ActivationPolicy, reads: Mapping[int, torch.dtype]
    ) -> "_Candidate":
        """Return the split in which gathers move narrower copies, where the graph casts what it reads.

        Copies that exist are read. More are made of what would have to move, if it moves faster then.
        """
        session = self._session
        own = self._make_candidate(partition, policy, session.narrow_copies(reads))
        placements = join_placements(own.plan.placements) if own.plan is not None else session.placements
        streamed = {item.parameter for item in placements if item.compute is not Tier.DEVICE}
        narrowing = session.plan_narrowing(reads, streamed)
        if narrowing is None:
            return own
        narrower = self._make_candidate(partition, policy, narrowing.dtypes, narrowing)
        if own.plan is not None and (
            narrower.plan is None or simulate(narrower.plan).step_seconds > simulate(own.plan).step_seconds
        ):
            return own
        session.adopt_narrowing(narrowing)
        return narrower

    def _make_candidate(
        self,
        partition: Partition,
        policy: ActivationPolicy,
        narrowed: Mapping[int, torch.dtype],
        narrowing: "Narrowing | None" = None,
    ) -> "_Candidate":
        captured = partition(JointInputs(policy=policy, narrowed=narrowed))
        facts = self._analyze(captured)
        plan = None
        with suppress(CapacityError):
            plan = self._plan_for([facts], narrowing)
        return _Candidate(captured=captured, facts=facts, narrowed=narrowed, plan=plan)

    def _adopt_best(self, candidates: "Sequence[_Candidate]") -> CapturedGraph:
        """Plan for the candidates together, unless that is done, and adopt the best. CapacityError if none fits."""
        alone = candidates[0].plan if len(candidates) == 1 else None
        plan = alone or self._plan_for([candidate.facts for candidate in candidates])
        best = next(item for item in candidates if item.facts.policy is plan.activations.policy)
        chosen = Computed(captured=best.captured, facts=best.facts, plan=plan)
        if self._session.config.compute == "inductor":
            chosen = compute_in_segments(chosen, self._numbers(), self._analyze, lambda facts: self._plan_for([facts]))
        self._captured = chosen.captured
        self._shapes = PlannedShapes(chosen.captured.forward.graph, chosen.facts)
        self._adopt(chosen.plan)
        return best.captured

    def compile_forward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        """Return the forward as a callable that plans again when parameters have moved or inputs have grown."""
        return self._executor(Phase.FORWARD)

    def compile_backward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        """Return the backward that belongs to the forward."""
        return self._executor(Phase.BACKWARD)

    def _executor(self, phase: Phase) -> BoxedCallable:
        def run(inputs: list[Any]) -> Sequence[Any]:
            self.last_runs[phase] = self._session.store.meter.num_steps
            with self._watch.run(phase):
                return self._run_backward(inputs) if phase is Phase.BACKWARD else self._run_forward(inputs)

        def prepare(inputs: list[Any]) -> int:
            assert self.plan is not None
            assert self._shapes is not None
            self._find_open(inputs)
            if phase is Phase.FORWARD:
                self._make_room(inputs)
                self._make_room_beside_open(inputs)
                if join_placements(self.plan.placements) != self._session.placements:
                    self._adopt(self._plan_for([self._shapes.facts]))
                self._look_at_first_steps()
                self._session.settle()
            return max([self.plan.arena_nbytes, *(backward.arena_nbytes for backward in self._backwards.values())])

        return Executor(self._session.store, run, phase, prepare=prepare, records=lambda: self.read_records)

    def _make_room(self, inputs: list[Any]) -> None:
        """Plan again if inputs are larger than the plan holds for; CapacityError, before anything runs, without room."""
        assert self._shapes is not None
        sizes = self._shapes.read(inputs)
        if sizes and not self._shapes.is_seen(sizes):  # libraries make kernels for it, and keep them
            self._session.store.ram.begin_again()
        facts = self._shapes.grown(sizes)
        if facts is None:
            return
        before = {symbol.name: symbol.value for symbol in self._shapes.facts.symbols}
        try:
            plan = self._plan_for([facts])
        except CapacityError as error:
            request = self._request([self._shapes.facts])
            raise CapacityError(
                f"this call has {dump_sizes(sizes)}, and {self._name} is planned for {dump_sizes(before)}; "
                f"{describe_largest(request, sizes)}; {error}"
            ) from error
        self._shapes.facts = facts
        self.replanned.append(f"{self._name}: planned for {dump_sizes(before)}, and again for {dump_sizes(sizes)}")
        _log.info(self.replanned[-1])
        self._adopt(plan)

    def _find_open(self, inputs: list[Any]) -> None:
        """Find out what other forwards hold before a run."""
        found = self._session.store.open_forwards.nbytes_beside(storages_of(inputs))
        if found >= self._most_open + _PAGE_NBYTES:
            self._most_open = found

    def _make_room_beside_open(self, inputs: list[Any]) -> None:
        """Plan again if other forwards hold more than the plan says; CapacityError, before anything runs, without room.

        What was first found before a backward counts from the next forward on.
        """
        if self._most_open <= self._open_nbytes:
            return
        assert self.plan is not None
        assert self._shapes is not None
        before, found = self._open_nbytes, self._most_open
        self._open_nbytes = found
        plan = with_open_forwards(self.plan, self._request([self._shapes.facts]))
        if plan is None:
            gc.collect()  # an error leaves its forward in a cycle with the frames it came through
            self._open_nbytes = self._most_open = before
            self._find_open(inputs)
            found = self._open_nbytes = self._most_open
            if found == before:
                return
            plan = with_open_forwards(self.plan, self._request([self._shapes.facts]))
        if plan is not None:
            self.plan = plan
            self._session.promise(plan)
            return
        try:
            self._adopt(self._plan_for([self._shapes.facts]))
        except CapacityError as error:
            self._open_nbytes = self._most_open = before  # the caller may close some and go on
            raise CapacityError(
                f"forwards whose backward has not run hold {format_bytes(found)} on device beside {self._name}, which is "
                f"planned for {format_bytes(before)}; {error}; or run backward after each forward, forwards that need none "
                "under torch.no_grad(), or say recompute=True"
            ) from error

    def _look_at_first_steps(self) -> None:
        """Once the first steps have been watched, go on with the plan that is best by what they have shown."""
        observed = self._watch.look() if self._is_watched else None
        if observed is None:
            return
        self._is_watched = False
        assert self.plan is not None
        assert self._shapes is not None
        request = self._request([self._shapes.facts])
        if len(self._session.programs) == 1:  # homes that several graphs share stay
            request = replace(request, placements=None)
        with self._session.store.planning():
            remade = remake_plan(self.plan, request, observed)
            verify_plan(remade.plan)
        try:
            self._session.store.reserve_growth(join_placements(remade.plan.placements))
        except StoreError as error:
            _log.info("%s; the plan stays, since the disk has no room for it: %s", remade.sentence, error)
            return
        _log.info(remade.sentence)
        self._hardware = self._session.hardware = remade.plan.hardware
        if remade.is_new:
            self.replanned.append(remade.sentence)
            self._session.store.begin_again()  # what is reported is measured under the plan that predicts it
            self._adopt(replace(remade.plan, notes=(*remade.plan.notes, *self._notes, *self._session.notes)))
        else:
            self.plan = remade.plan

    def _run_forward(self, inputs: list[Any]) -> Sequence[Any]:
        assert self._forward is not None
        assert self._captured is not None
        if self._captured.backward is None:
            return self._forward(inputs)
        given = storages_of(inputs)
        outputs = self._forward(inputs)
        returned = self._captured.num_outputs
        self._session.store.open_forwards.add(given, outputs[:returned], outputs[returned:])
        return outputs

    def _run_backward(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the backward that was lowered under the plan of the forward whose values these are."""
        if len(self._backwards) == 1:
            return next(iter(self._backwards.values())).run(inputs)
        is_token = self._session.store.activations.is_token
        return self._backwards[frozenset(index for index, given in enumerate(inputs) if is_token(given))].run(inputs)

    def _analyze(self, captured: CapturedGraph) -> GraphFacts[Size]:
        names = {number: name for name, number in self._numbers().items()}
        return analyze_graph(captured, name=self._name, param_names=names)

    def _numbers(self) -> dict[str, int]:
        """Return the numbers under which ops find the parameters and tiles that plans name."""
        store = self._session.store
        numbers = {name: record.param for name, record in store.records.items()}
        for name, tiles in self._tiled.tiles.items():
            for number, rows in enumerate(tiles):
                numbers[tile_name(name, number)] = store.tile(store.records[name], number, rows).param
        return numbers

    def _plan_for(self, candidates: Sequence[GraphFacts[Size]], narrowing: "Narrowing | None" = None) -> Plan:
        request = self._request(candidates)
        if narrowing is not None:
            placements = narrowing.placements if self._session.programs else None
            request = self._with_homes(request, narrowing.parameters, placements)
        plan = make_plan(request)
        plan = replace(plan, notes=(*plan.notes, *self._notes, *self._session.notes))
        verify_plan(plan)
        return plan

    def _request(self, candidates: Sequence[GraphFacts[Size]]) -> Request:
        session = self._session
        request = Request(
            name=self._name,
            candidates=tuple(at_sizes(candidate) for candidate in candidates),
            captured=tuple(candidates) if self._shapes is None else (self._shapes.captured,),
            parameters=(),
            config=session.config,
            hardware=self._hardware,
            kernel_cache_nbytes=0 if session.config.is_apart else kernel_cache_nbytes(),  # of oneDNN
            open_nbytes=self._open_nbytes,
        )
        return self._with_homes(request, session.facts, session.placements if session.programs else None)

    def _with_homes(
        self, request: Request, parameters: Iterable[ParameterFact], placements: Iterable[Placement] | None
    ) -> Request:
        """Return a request for parameters of the model, with tiles in place of those that are tiled here."""
        cut = None if placements is None else self._tiled.cut_placements(placements)
        return replace(request, parameters=self._tiled.cut_facts(parameters), placements=cut)

    def _adopt(self, plan: Plan) -> None:
        """Make a plan this program's, and its placements the session's; parameters move before the next run."""
        self._session.placements = join_placements(plan.placements)
        self._session.store.chunk_elements = plan.step.chunk_elements
        self._session.store.device_share = plan.step.device_share
        self._session.store.activations.reserve(plan.swapped_nbytes(Tier.NVME))
        by_first_use = sorted(plan.uses, key=lambda use: use.ticks[0])
        names = dict.fromkeys(self._tiled.whole_name(use.parameter) for use in by_first_use)
        self._session.store.update_order = {name: position for position, name in enumerate(names)}
        self.plan = plan
        self._watch = StepWatch(self._session.store.meter)
        self._session.promise(plan)
        self._lower(plan)

    def _lower(self, plan: Plan) -> None:
        assert self._captured is not None
        store = self._session.store
        inputs = LowerInputs(
            plan=plan,
            store_id=store.store_id,
            param_ids=self._numbers(),
        )
        forward = copy_graph_module(self._captured.forward)
        lower_graph(forward, inputs)
        self._forward = forward.forward
        if self._captured.backward is not None:
            backward = copy_graph_module(self._captured.backward)
            tokens = swapped_inputs(backward.graph, plan)
            lower_graph(backward, inputs)
            self._backwards[tokens] = Backward(run=backward.forward, arena_nbytes=plan.arena_nbytes)
