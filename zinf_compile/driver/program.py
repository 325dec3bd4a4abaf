"""One captured graph: split, planned and lowered. Replanned if parameters move, inputs grow or steps are measured."""

import gc
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from zinf_compile.driver.division import Leaving
from zinf_compile.driver.planned_shapes import PlannedShapes, dump_sizes
from zinf_compile.driver.planning import Chosen, GraphPlanner
from zinf_compile.driver.segmented import (
    compile_segments,
    describe_missing_compiler,
    find_fallbacks,
    number_of_segment,
    with_compiled_workspaces,
)
from zinf_compile.driver.store_catalog import StoreCatalog
from zinf_compile.driver.tile_search import TiledGraph
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.inspect.what_if import describe_largest
from zinf_compile.ir.errors import CapacityError, StoreError
from zinf_compile.ir.facts import GraphFacts, at_sizes
from zinf_compile.ir.glossary import ActivationPolicy, Phase, Tier, format_bytes, printable
from zinf_compile.ir.plan import Plan, TierPart
from zinf_compile.ir.plan_io import plan_to_json
from zinf_compile.ir.tiles import join_placements
from zinf_compile.passes.analysis.collect import CapturedGraph
from zinf_compile.passes.analysis.collectives import find_collectives
from zinf_compile.passes.capture.aot import BoxedCallable, Partition
from zinf_compile.passes.capture.splits import JointGraph
from zinf_compile.passes.contract import Division, LowerInputs
from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.pipeline import lower_graph
from zinf_compile.passes.planner.memory.activations import plan_activations
from zinf_compile.passes.planner.search.planner import Request
from zinf_compile.passes.planner.search.remake import with_open_forwards
from zinf_compile.passes.transforms.lowering.swap_activations import swapped_inputs
from zinf_compile.runtime.execute.executor import Executor
from zinf_compile.runtime.observe.open_forwards import storages_of
from zinf_compile.runtime.observe.progress import say
from zinf_compile.runtime.observe.watch import StepWatch
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.process.interrupts import interruptible
from zinf_compile.runtime.ranks.agreement import agree_on_observed, check_inputs
from zinf_compile.runtime.ranks.ranks import hash_of

_log = logging.getLogger(__name__)
_PAGE_NBYTES = 4096  # smaller growth, such as a loss that the caller holds during backward, causes no replanning
_LEAST_FREED = 1 / 16  # of the memory of activations: planning again for less is not worth its seconds


class Backward(NamedTuple):
    """A lowered backward, and the arena bytes it needs."""

    run: BoxedCallable
    arena_nbytes: int


class Program:
    """One captured graph: splits, plans and lowers it. Replans when parameters have moved or inputs have grown."""

    def __init__(
        self,
        catalog: StoreCatalog,
        planner: GraphPlanner,
        tiled: TiledGraph,
        *,
        op_by_op: str | None = None,
        division: Division | None = None,
    ) -> None:
        """``tiled`` is the graph that ``planner`` plans, with the parameters that it gathers by tiles.

        ``op_by_op`` is the reason why it is not compiled, if it is not to be. ``division`` says which saved values are
        divided among tensor-parallel ranks.
        """
        self._division = division
        self.leaving = Leaving(ActivationPolicy.SAVE)  # what leaves the device, of what these ranks can divide
        self.divided: tuple[str, ...] = ()  # saved values of which each of these ranks has a part
        self._has_run = False  # whether its forward has
        self._catalog = catalog
        self._store = catalog.store
        self._planner = planner
        self._name = planner.name
        self._tiled = tiled.tiled
        self.cut = tiled.cut  # describes what is tiled
        self._captured: CapturedGraph | None = None
        self._op_by_op = op_by_op  # why it has no segments although they were asked for
        self._shapes: PlannedShapes | None = None
        self._forward: BoxedCallable | None = None
        # Keyed by the indices of token inputs: a plan made after a forward may offload other activations.
        self._backwards: dict[frozenset[int], Backward] = {}
        self.planned: PlanView | None = None  # its plan, with the request
        self._hash = ""  # of the plan, where several ranks have to have the same
        self.replanned: list[str] = []  # the reasons for replanning, as sentences
        self._watch = StepWatch(self._store.meter)
        # Enqueueing an op takes as long as the op itself only on a synchronous stream.
        self._is_watched = catalog.config.remake_plan and self._store.device.compute.synchronous
        self._refused_reserve: int | None = None  # a reserve for which replanning found no room after the first run
        self._most_open = planner.open_nbytes  # the most bytes of open forwards seen before a run
        self.last_runs: dict[Phase, int] = {}  # the number of steps begun at the last run

    @property
    def plan(self) -> Plan | None:
        """Return the plan; None before there is one."""
        return None if self.planned is None else self.planned.plan

    @property
    def num_ticks(self) -> int:
        """Return the number of ticks of the plan; 0 before there is one."""
        return 0 if self.plan is None else self.plan.num_ticks

    @property
    def fallbacks(self) -> list[str]:
        """Return sentences about what has not run compiled so far, with the reasons."""
        if self._op_by_op is not None:
            return [f"{self._name}: runs op by op: {self._op_by_op}"]
        found = [] if self._captured is None else find_fallbacks(self._captured)
        return [f"{self._name}, {sentence}" for sentence in found]

    def describe_collectives(self) -> dict[str, str]:
        """Return the collectives of the user's in each graph, as text that differs if they do."""
        assert self._captured is not None
        graphs = {Phase.FORWARD: self._captured.forward, Phase.BACKWARD: self._captured.backward}
        found = {phase: find_collectives(each.graph) for phase, each in graphs.items() if each is not None}
        return {
            f"{phase} of {self._name}": f"{len(names)} collectives ({hash_of(repr(names).encode()):016x})"
            for phase, names in found.items()
        }

    @property
    def read_records(self) -> list[StoredParameter]:
        """Return the parameters that the graph reads."""
        assert self._shapes is not None
        return self._records(use.parameter for use in self._shapes.captured.uses)

    @property
    def trained_records(self) -> list[StoredParameter]:
        """Return the parameters that the graph's backward computes gradients of."""
        assert self._shapes is not None
        return self._records(gradient.parameter for gradient in self._shapes.captured.gradients)

    def _records(self, names: Iterable[str]) -> list[StoredParameter]:
        """Return the parameters behind names in the plan, each once."""
        return [self._store.records[name] for name in dict.fromkeys(map(self._tiled.whole_name, names))]

    def choose(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> CapturedGraph:
        """Return the split whose plan has the shortest step, and adopt that plan. Raises CapacityError if none fits."""
        with interruptible():
            return self._choose(partition, reads, has_backward=True)

    def choose_inference(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> CapturedGraph:
        """Plan a graph without backward, and return the graph to compile."""
        with interruptible():
            return self._choose(partition, reads, has_backward=False)

    def _choose(self, partition: Partition, reads: Mapping[int, torch.dtype], *, has_backward: bool) -> CapturedGraph:
        say(f"planning {self._name}")
        graph = JointGraph(
            partition,
            name=self._name,
            param_names={number: name for name, number in self._catalog.numbers(self._tiled).items()},
            number_of=number_of_segment,
            has_backward=has_backward,
            keeps_collectives=bool(self._store.ranks.beside),
            division=self._division if has_backward else None,
        )
        ops = self._planner.choose(graph, reads)
        self._note_division(ops)
        computed = self._compute_in_segments(graph, ops) if self._catalog.config.compute == "inductor" else ops
        assert computed.form.captured is not None
        assert ops.form.captured is not None
        self._op_by_op = computed.op_by_op
        self._captured = computed.form.captured
        self._shapes = PlannedShapes(self._captured.forward.graph, computed.form.facts)
        self._adopt(computed.planned)
        return ops.form.captured

    def _note_division(self, ops: Chosen) -> None:
        """Note what is divided among ranks, and what of the rest leaves the device and could be."""
        captured = ops.form.captured
        assert captured is not None
        leaves = ops.form.lets_dividable_leave(ops.planned.plan)
        self.leaving, self.divided = Leaving(captured.policy, leaves), captured.divided

    def _compute_in_segments(self, graph: JointGraph, ops: Chosen) -> Chosen:
        """Return the graph in compiled segments; ``ops``, with the reason, if that is not possible."""
        reason = self._op_by_op or describe_missing_compiler()
        if reason is not None:
            return replace(ops, op_by_op=reason)
        computed = self._planner.compute_in_segments(graph, ops)
        if computed.op_by_op is None:
            assert computed.form.captured is not None
            with self._store.held.compiling():
                compile_segments(computed.form.captured)
            try:
                computed = self._plan_as_compiled(computed)
            except CapacityError as error:
                computed = replace(ops, op_by_op=f"compiled, it does not fit: {error}")
        if computed.op_by_op is not None:
            _log.warning("%s computes op by op: %s", printable(self._name), printable(computed.op_by_op))
        return computed

    def _plan_as_compiled(self, computed: Chosen) -> Chosen:
        """Plan again with the memory that compiled segments need, instead of that of their ops, where it is known.

        On a CPU it stays theirs: the system's allocator keeps what is freed. So it does on several ranks, whose Inductor
        might decide differently.
        """
        if self._store.device.memory.unified or not self._store.ranks.is_alone:
            return computed
        assert computed.form.captured is not None
        facts = with_compiled_workspaces(computed.form.captured, computed.form.facts)
        before, now = (plan_activations(at_sizes(each)).peak_nbytes for each in (computed.form.facts, facts))
        if 0 <= before - now <= _LEAST_FREED * before:
            return computed
        say(
            f"planning {self._name} again: compiled, its ops need {format_bytes(now)} instead of {format_bytes(before)}"
        )
        form = replace(computed.form, facts=facts)
        return replace(computed, form=form, forms=(form,), planned=self._planner.plan_for([facts]))

    def compile_forward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        """Return the forward as a callable that replans when parameters have moved or inputs have grown."""
        return self._executor(Phase.FORWARD)

    def compile_backward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        """Return the backward that belongs to the forward."""
        return self._executor(Phase.BACKWARD)

    def _executor(self, phase: Phase) -> BoxedCallable:
        def run(inputs: list[Any]) -> Sequence[Any]:
            self.last_runs[phase] = self._store.meter.num_steps
            with self._watch.run(phase):
                return self._run_backward(inputs) if phase is Phase.BACKWARD else self._run_forward(inputs)

        def prepare(inputs: list[Any]) -> int:
            assert self.plan is not None
            assert self._shapes is not None
            self._find_open(inputs)
            if phase is Phase.FORWARD:
                self._make_room_for_process()
                self._make_room(inputs)
                self._make_room_beside_open(inputs)
                self._make_room_for_states()
                if join_placements(self.plan.placements) != self._catalog.placements:
                    self._adopt(self._plan_for(self._shapes.facts))
                self._look_at_first_steps()
                self._catalog.settle()
            return max([self.plan.arena_nbytes, *(backward.arena_nbytes for backward in self._backwards.values())])

        return Executor(
            self._store,
            run,
            phase,
            prepare=prepare,
            records=lambda: self.read_records,
            graph=self._name,
            describe_run=lambda: f"a {phase} of {self._name}" + (f", plan {self._hash}" if self._hash else ""),
        )

    def drop(self) -> None:
        """Release the graphs. The plan stays."""
        self._captured = self._forward = None
        self._backwards.clear()

    def _make_room(self, inputs: list[Any]) -> None:
        """Replan if inputs are larger than planned. Raises CapacityError, before anything runs, if there is no room."""
        assert self._shapes is not None
        sizes = self._shapes.read(inputs)
        sizes = dict(zip(sizes, self._store.ranks.largest("the sizes of inputs", *sizes.values()), strict=True))
        if sizes and not self._shapes.is_seen(sizes):  # libraries create and cache kernels for new sizes
            self._store.ram.begin_again()
        facts = self._shapes.grown(sizes)
        if facts is None:
            return
        before = {symbol.name: symbol.value for symbol in self._shapes.facts.symbols}
        try:
            planned = self._plan_for(facts)
        except CapacityError as error:
            request = self._request()

            def describe() -> str:
                with interruptible():  # safe: planning changes no state
                    return describe_largest(request, sizes)

            largest = self._store.ranks.do_on_first(f"looking for the largest inputs of {self._name}", describe)
            raise CapacityError(
                f"this call has {dump_sizes(sizes)}, and {self._name} is planned for {dump_sizes(before)}; {largest}; "
                f"{error}"
            ) from error
        self._shapes.facts = facts
        self.replanned.append(f"{self._name}: planned for {dump_sizes(before)}, and again for {dump_sizes(sizes)}")
        say(self.replanned[-1])
        self._adopt(planned)

    def _make_room_for_process(self) -> None:
        """Replan if the process takes more of the device budget than the plan reserves, or much less.

        Without room, raises CapacityError before the first run. After it, keeps the plan and reports the excess.
        """
        self._catalog.look_at_process()
        assert self.plan is not None
        assert self._shapes is not None
        wanted = self._catalog.config.reserve_memory
        if wanted in (self.plan.tier(Tier.DEVICE).nbytes_of(TierPart.RESERVE), self._refused_reserve):
            return
        try:
            with self._store.held.planning():
                planned = self._plan_for_process()
        except CapacityError as error:
            if not self.last_runs:
                raise
            self._refused_reserve = wanted
            self.replanned.append(
                f"{self._name}: the process takes {format_bytes(wanted)}, and its plan stays: {error}"
            )
            _log.warning("%s", printable(self.replanned[-1]))
            return
        if self.last_runs:
            self._store.held.begin_again()  # what is reported is measured under the plan that predicts it
        self._adopt(planned)

    def _plan_for_process(self) -> PlanView:
        """Return a plan under the current reserve; before the first run, if there is none, under what is held already."""
        assert self._shapes is not None
        try:
            return self._plan_for(self._shapes.facts)
        except CapacityError as error:
            if self.last_runs:
                raise
            wanted = self._catalog.config.reserve_memory
            (least,) = self._store.ranks.largest("the least memory of the process", self._catalog.process.least)
            if least >= wanted:
                raise
            self._catalog.reserve(least)  # what steps add is measured after them
            try:
                return self._plan_for(self._shapes.facts)
            except CapacityError:
                self._catalog.reserve(wanted)
                raise error from None  # its budgets have room for the steps

    def _find_open(self, inputs: list[Any]) -> None:
        """Update the most bytes that other open forwards hold before a run."""
        found = self._store.open_forwards.nbytes_beside(storages_of(inputs))
        (found,) = self._store.ranks.largest("the memory of open forwards", found)
        if found >= self._most_open + _PAGE_NBYTES:
            self._most_open = found

    def _make_room_beside_open(self, inputs: list[Any]) -> None:
        """Replan if other open forwards hold more than planned. CapacityError, before anything runs, without room.

        Bytes that are first seen before a backward count from the next forward.
        """
        if self._most_open <= self._planner.open_nbytes:
            return
        assert self.plan is not None
        assert self._shapes is not None
        before, found = self._planner.open_nbytes, self._most_open
        self._planner.open_nbytes = found
        request = self._request()
        plan = with_open_forwards(self.plan, request)
        if plan is None:
            gc.collect()  # an exception keeps its forward alive in a cycle with its traceback
            self._planner.open_nbytes = self._most_open = before
            self._find_open(inputs)
            found = self._planner.open_nbytes = self._most_open
            if found == before:
                return
            request = self._request()
            plan = with_open_forwards(self.plan, request)
        if plan is not None:
            self.planned = PlanView(plan, request)
            self._catalog.promise(plan)
            return
        try:
            self._adopt(self._plan_for(self._shapes.facts))
        except BaseException as error:
            self._planner.open_nbytes = self._most_open = before  # the caller may finish some forwards and continue
            if not isinstance(error, CapacityError):
                raise
            raise CapacityError(
                f"forwards whose backward has not run hold {format_bytes(found)} on device beside {self._name}, which is "
                f"planned for {format_bytes(before)}; {error}; or run backward after each forward, forwards that need none "
                "under torch.no_grad(), or say recompute=True"
            ) from error

    def _look_at_first_steps(self) -> None:
        """After the first steps have been measured, switch to the plan that is best by the measured times."""
        ranks = self._store.ranks

        def agree(is_enough: bool) -> bool:
            return ranks.largest("whether steps are to be measured", int(not is_enough)) == (0,)

        observed = self._watch.look(agree) if self._is_watched else None
        if observed is None:
            return
        self._is_watched = False
        observed = agree_on_observed(ranks, observed)
        assert self.plan is not None
        assert self._shapes is not None
        before = self._catalog.adopt_states({})
        with suppress(
            CapacityError
        ):  # it is less in all, and cannot be where it was assumed: the plan counts more, then
            self._catalog.adopt_states(self._catalog.find_smaller_states())
        request = self._request()
        # Several graphs share homes, so those stay; and what cannot be cut may be where it is for want of staging.
        if len(self._catalog.plans) == 1 and not any(item.has_whole_state for item in self._catalog.placements):
            request = replace(request, placements=None)
        try:
            with self._store.held.planning():
                remade = self._planner.remake(self.plan, request, observed)
        except BaseException:
            self._catalog.go_back_to(before)
            raise
        placements = join_placements(remade.plan.placements)
        try:
            ranks.do_alike("reserving room for a new plan", lambda: self._store.reserve_growth(placements))
        except StoreError as error:
            _log.info("%s; the plan stays, since the disk has no room for it: %s", printable(remade.sentence), error)
            self._catalog.go_back_to(before)
            return
        say(remade.sentence)
        self._planner.hardware = self._catalog.hardware = remade.plan.hardware
        if remade.is_new:
            self.replanned.append(remade.sentence)
            self._store.held.begin_again()  # what is reported is measured under the plan that predicts it
            self._adopt(PlanView(self._planner.with_notes(remade.plan), remade.request))
        else:
            self._catalog.go_back_to(before)
            self.planned = PlanView(remade.plan, remade.request)

    def _make_room_for_states(self) -> None:
        """Plan again if optimizers keep more in all than was planned. Without room, keeps the plan and says so.

        For less, a new plan waits until steps have been measured.
        """
        found = self._catalog.look_at_states()
        if not found:
            return
        assert self._shapes is not None
        now = sum(found.get(fact.name, fact).optimizer_state_nbytes for fact in self._catalog.facts)
        what = f"{self._name}: its optimizer keeps {format_bytes(now)}, more than planned"
        before = self._catalog.adopt_states({})
        try:
            self._catalog.adopt_states(found)
            with self._store.held.planning():
                planned = self._plan_for(self._shapes.facts)
            placements = join_placements(planned.plan.placements)
            self._store.ranks.do_alike(
                "reserving room for optimizer state", lambda: self._store.reserve_growth(placements)
            )
        except (CapacityError, StoreError) as error:
            self._catalog.go_back_to(before)
            self._store.ranks.check_together()  # a rank may be gone, which is no lack of room
            self._store.check_not_failed()
            self.replanned.append(f"{what}, for which there is no room; its plan stays: {error}")
            _log.warning("%s", printable(self.replanned[-1]))
            return
        except BaseException:  # an interrupt, which may come while a plan is made
            self._catalog.go_back_to(before)
            self._catalog.look_again()
            raise
        self.replanned.append(f"{what}; planned again")
        say(self.replanned[-1])
        self._store.held.begin_again()  # what is reported is measured under the plan that predicts it
        self._adopt(planned)

    def _run_forward(self, inputs: list[Any]) -> Sequence[Any]:
        assert self._forward is not None
        assert self._captured is not None
        if self._captured.backward is None:
            return self._forward(inputs)
        if self.divided and self._division is not None and self._division.are_inputs_alike and not self._has_run:
            for ranks in self._store.ranks.beside:
                check_inputs(ranks, self._name, inputs)
        self._has_run = True
        given = storages_of(inputs)
        outputs = self._forward(inputs)
        returned = self._captured.num_outputs
        self._store.open_forwards.add(given, outputs[:returned], outputs[returned:])
        return outputs

    def _run_backward(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the backward that was lowered with the same plan as the forward that saved these inputs."""
        if len(self._backwards) == 1:
            return next(iter(self._backwards.values())).run(inputs)
        is_token = self._store.activations.is_token
        return self._backwards[frozenset(index for index, given in enumerate(inputs) if is_token(given))].run(inputs)

    def _plan_for(self, facts: GraphFacts) -> PlanView:
        """Return the best plan of the captured graph for the input sizes of ``facts``."""
        assert self._shapes is not None
        return self._planner.plan_for([facts], captured=self._shapes.captured)

    def _request(self) -> Request:
        """Return the current request for a plan at the planned sizes."""
        assert self._shapes is not None
        return self._planner.request_for([self._shapes.facts], captured=self._shapes.captured)

    def _adopt(self, planned: PlanView) -> None:
        """Adopt a plan, and its placements for the whole session. Parameters move before the next run."""
        plan = planned.plan
        self._catalog.placements = join_placements(plan.placements)
        self._store.chunk_elements = plan.step.chunk_elements
        self._store.device_share = plan.step.device_share
        if self._store.updates_ahead is not None:
            self._store.updates_ahead.plan(plan.name, frozenset(map(self._tiled.whole_name, plan.step.ahead)))
        swapped = plan.swapped_nbytes(Tier.NVME)
        self._store.ranks.do_alike("reserving room for activations", lambda: self._store.activations.reserve(swapped))
        by_first_use = sorted(plan.uses, key=lambda use: use.ticks[0])
        names = dict.fromkeys(self._tiled.whole_name(use.parameter) for use in by_first_use)
        self._store.update_order = {name: position for position, name in enumerate(names)}
        self.planned = planned
        if not self._store.ranks.is_alone:
            self._hash = f"{hash_of(plan_to_json(plan).encode()):016x}"
        self._watch = StepWatch(self._store.meter)
        self._catalog.promise(plan)
        self._lower(plan)

    def _lower(self, plan: Plan) -> None:
        assert self._captured is not None
        store = self._store
        inputs = LowerInputs(
            plan=plan,
            store_id=store.store_id,
            param_ids=self._catalog.numbers(self._tiled),
        )
        forward = copy_graph_module(self._captured.forward)
        lower_graph(forward, inputs)
        self._forward = forward.forward
        if self._captured.backward is not None:
            backward = copy_graph_module(self._captured.backward)
            tokens = swapped_inputs(backward.graph, plan)
            lower_graph(backward, inputs)
            self._backwards[tokens] = Backward(run=backward.forward, arena_nbytes=plan.arena_nbytes)
