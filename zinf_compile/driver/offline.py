"""Planning without running: the model is captured over fake tensors, then planned like a model that runs."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor
from torch.nn import Module
from torch.utils import _pytree as pytree

from zinf_compile.driver.division import notes_of, policy_of_all
from zinf_compile.driver.offline_tiles import OfflineTiles
from zinf_compile.driver.paper_catalog import PaperCatalog
from zinf_compile.driver.planning import Chosen, GraphPlanner
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.errors import CapacityError, ConfigError, DeviceCapacityError, UnsupportedError
from zinf_compile.ir.glossary import ActivationPolicy, Tier, format_bytes
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.tiles import join_placements
from zinf_compile.passes.analysis.repeats import NotRepeatedError
from zinf_compile.passes.capture.offline.deep import trace_deep
from zinf_compile.passes.capture.offline.trace import Inputs, RankInRounds, Trace, TracedGraph
from zinf_compile.passes.contract import Division, TensorGroup
from zinf_compile.passes.planner.memory.policies import allowed_policies
from zinf_compile.passes.planner.search.planner import Searches, check_fits
from zinf_compile.passes.planner.simulator.several_graphs import share_updates
from zinf_compile.passes.planner.simulator.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to plan, and the inputs of its call."""

    model: Module
    name: str
    inputs: Inputs
    train: bool
    dynamic: bool  # whether batch and sequence are symbols
    parts: frozenset[str] = frozenset()  # names of parameters of which tensor-parallel ranks have a part each


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """The graphs of a model with some parameters in tiles, and a plan to compare the choice of tiles by."""

    trace: Trace
    plan: Plan  # of the main graph, op by op
    searches: Searches  # that were made for it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """The graphs of a model with some parameters in tiles, planned op by op."""

    trace: Trace
    main: TracedGraph
    chosen: Chosen  # of the main graph
    others: tuple[tuple[TracedGraph, Chosen], ...]

    @property
    def plan(self) -> Plan:
        """Return the plan of the main graph."""
        return self.chosen.planned.plan


class OfflinePlanner:
    """Plans a model by its main graph, whose backward computes the most gradients; notes describe the other graphs."""

    def __init__(
        self,
        subject: Subject,
        catalog: PaperCatalog,
        hardware: Hardware,
        *,
        num_ranks: int,
        num_replicas: int,
        kernel_cache_nbytes: int,
        op_by_op: str | None,
        num_tensor_ranks: int = 1,
        num_open: int = 0,
        open_nbytes: int = 0,
        keeps_unread: bool = True,
        in_rounds: RankInRounds | None = None,
    ) -> None:
        """``op_by_op`` is the reason why graphs cannot compute in segments; None if they can.

        ``num_open`` and ``open_nbytes`` are what ``GraphPlanner`` counts for open forwards. Without ``keeps_unread``,
        parameters that no graph reads are not stored: other stages of a pipeline have them. ``in_rounds`` is the rank whose
        stages are planned, for the batches of all; the catalog has its parameters.
        """
        self._subject, self._catalog, self._hardware = subject, catalog, hardware
        self._num_ranks, self._num_replicas, self._num_tensor_ranks = num_ranks, num_replicas, num_tensor_ranks
        self._num_open, self._open_nbytes = num_open, open_nbytes
        self._keeps_unread = keeps_unread
        self._in_rounds = in_rounds
        self._kernel_cache_nbytes = kernel_cache_nbytes
        self._op_by_op = op_by_op
        self._tiles = OfflineTiles(catalog)
        self._waits = False  # for activations that leave one at a time
        self._dividing: ActivationPolicy | None = None  # the policy under which ranks divide what they save, if they do

    def plan(self) -> PlanView:
        """Return the plan. CapacityError if the model does not fit, UnsupportedError if it cannot be captured."""
        with _collector_paused():
            return self._plan_dividing() if self._may_divide else self._compute(self._fit())

    @property
    def _may_divide(self) -> bool:
        partition = self._catalog.config.partition_activations
        return self._num_tensor_ranks > 1 and self._subject.train and partition is not False

    def _plan_dividing(self) -> PlanView:
        """Return the plan of one of several tensor-parallel ranks, which divide activations as ``Dividing`` has them do."""
        whole: _Attempt | None = None
        refused: CapacityError | None = None
        try:
            whole = self._fit()
        except CapacityError as error:
            refused = error.with_traceback(None)
        if whole is not None and not whole.chosen.form.lets_dividable_leave(whole.plan):
            return self._compute(whole)
        policies = [None if whole is None else whole.plan.activations.policy]
        of_whole, self._tiles = (self._tiles, self._waits), OfflineTiles(self._catalog)
        self._dividing = policy_of_all(policies, recompute=self._catalog.config.recompute)
        gc.collect()  # cycles of the capture
        with suppress(CapacityError):
            divided = self._fit()
            if divided.chosen.form.is_divided:
                return self._compute(divided)
        self._dividing = None
        self._tiles, self._waits = of_whole
        if refused is not None:
            raise refused
        assert whole is not None
        return self._compute(whole)

    def _fit(self) -> _Attempt:
        """Return the graphs, tiled if necessary. If nothing else fits, compute waits for activations to leave."""
        self._waits = False
        try:
            return self._tiles.fit(self._attempt, self._predict, self._finish)
        except DeviceCapacityError as error:
            if not error.waiting_helps:
                raise
        self._waits, self._tiles = True, OfflineTiles(self._catalog)
        gc.collect()  # cycles of the captures
        return self._tiles.fit(self._attempt, self._predict, self._finish)

    def _compute(self, made: _Attempt) -> PlanView:
        if self._catalog.config.compute != "inductor":
            return self._describe(made, made.chosen, made.others)
        if self._op_by_op is not None:
            return self._describe(made, replace(made.chosen, op_by_op=self._op_by_op), made.others)
        try:
            return self._in_segments(made)
        except NotRepeatedError as error:
            return self._in_segments(self._attempt(not_repeated=str(error)))

    def _divide(self, param_names: Mapping[int, str]) -> Division:
        """Return which saved values the tensor-parallel ranks divide."""
        trusts = self._catalog.config.partition_activations is True
        group = TensorGroup(name="tensor", size=self._num_tensor_ranks, rank=0)
        alike = (number for number, name in param_names.items() if trusts and name not in self._subject.parts)
        return Division(
            groups={group.name: group},
            names=frozenset() if self._dividing is None else None,
            alike=frozenset(alike),
            are_inputs_alike=trusts,
        )

    def _attempt(self, *, not_repeated: str | None = None) -> _Attempt:
        """Return the graphs with the tiles of this attempt. Raises CapacityError if they do not fit.

        ``not_repeated`` is the reason why identical blocks are captured one by one; None if they are not.
        """
        trace = self._trace(not_repeated)
        try:
            return self._plan_ops(trace)
        except NotRepeatedError as error:
            return self._plan_ops(self._trace(str(error)))

    def _predict(self) -> _Trial:
        """Return the graphs of this attempt, planned with few policies. CapacityError if they do not fit."""
        trace = self._trace(None, every_policy=False)
        try:
            return self._plan_as_it_is(trace)
        except NotRepeatedError as error:
            return self._plan_as_it_is(self._trace(str(error)))

    def _plan_as_it_is(self, trace: Trace) -> _Trial:
        main, searches = _main_graph(trace), Searches()
        plan = self._planner(main, self._catalog).plan_as_it_is(main.graph, {}, searches=searches)
        homes = self._catalog.with_homes(join_placements(plan.placements))
        for graph in trace.graphs:
            if graph is not main:
                self._planner(graph, homes).plan_as_it_is(graph.graph, {})
        return _Trial(trace=trace, plan=plan, searches=searches)

    def _finish(self, trial: _Trial) -> _Attempt:
        """Return the trial planned with all policies."""
        try:
            return self._plan_ops(trial.trace, trial.searches)
        except NotRepeatedError as error:
            return self._plan_ops(self._trace(str(error)))

    def _trace(self, not_repeated: str | None, *, every_policy: bool = True) -> Trace:
        subject, config = self._subject, self._catalog.config
        trace = trace_deep(
            subject.model,
            subject.inputs,
            name=subject.name,
            compute_dtype=config.compute_dtype,
            policies=allowed_policies(config.recompute if subject.train else False),
            train=subject.train,
            dynamic=subject.dynamic,
            tile=self._tiles.apply,
            look_at_short=self._look_at_short,
            look_at_unchecked=partial(self._look_at_unchecked, every_policy=every_policy),
            not_repeated=not_repeated,
            in_rounds=self._in_rounds,
            divide=self._divide if self._may_divide else None,
        )
        _check_result(trace, subject.name, train=subject.train, has_loss=subject.inputs.loss is not None)
        if not self._keeps_unread:
            self._catalog = self._catalog.only(set().union(*map(self._read_in, trace.graphs)))
        return replace(trace, notes=(*trace.notes, *self._tiles.notes))

    def _look_at_short(self, graph: TracedGraph) -> None:
        """Raise CapacityError if a graph with few of the blocks does not fit, with only the parameters it reads."""
        planner = self._planner(graph, self._catalog.only(self._read_in(graph)))
        self._tiles.refuse_early(lambda: check_fits(planner.request_as_it_is(graph.graph)))

    def _look_at_unchecked(self, graph: TracedGraph, *, every_policy: bool) -> None:
        """Raise CapacityError if a graph with all blocks, not confirmed yet, does not fit under the policies to plan."""
        planner = self._planner(graph, self._catalog.only(self._read_in(graph)))

        def check() -> None:
            few = planner.request_as_it_is(graph.graph)
            check_fits(few, (lambda: planner.request_for_all(graph.graph)) if every_policy else None)

        self._tiles.refuse_early(check)

    def _read_in(self, graph: TracedGraph) -> set[str]:
        """Return the parameters that a graph reads, whole or in tiles."""
        tiled = self._tiles.tiled_in(graph)
        return {tiled.whole_name(use.parameter) for use in graph.facts.uses}

    def _planner(self, graph: TracedGraph, catalog: PaperCatalog) -> GraphPlanner:
        return GraphPlanner(
            graph.facts.name,
            catalog,
            self._hardware,
            tiled=self._tiles.tiled_in(graph),
            kernel_cache_nbytes=self._kernel_cache_nbytes,
            num_ranks=self._num_ranks,
            num_replicas=self._num_replicas,
            num_tensor_ranks=self._num_tensor_ranks,
            num_open=self._num_open,
            open_nbytes=self._open_nbytes,
            every_policy=True,
            policy=self._dividing,
            waits_for_activations=self._waits,
            notes=() if self._dividing is None else tuple(notes_of(self._divide({}))),
        )

    def _plan_ops(self, trace: Trace, searches: Searches | None = None) -> _Attempt:
        main = _main_graph(trace)
        chosen = self._planner(main, self._catalog).choose(main.graph, {}, searches=searches)
        homes = self._catalog.with_homes(join_placements(chosen.planned.placements))
        others = tuple(
            (graph, self._planner(graph, homes).choose(graph.graph, {})) for graph in trace.graphs if graph is not main
        )
        return _Attempt(trace=trace, main=main, chosen=chosen, others=others)

    def _in_segments(self, made: _Attempt) -> PlanView:
        """Return the plan with the graphs in segments, if they fit."""
        chosen = self._planner(made.main, self._catalog).compute_in_segments(made.main.graph, made.chosen)
        homes = self._catalog.with_homes(join_placements(chosen.planned.placements))
        others = []
        for graph, _ in made.others:
            planner = self._planner(graph, homes)
            try:
                ops = planner.choose(graph.graph, {})
            except CapacityError as error:  # next to the homes that the main graph in segments has chosen
                reason = f"in segments it leaves no room for {graph.facts.name}: {error}"
                return self._describe(made, replace(made.chosen, op_by_op=reason), made.others)
            others.append((graph, planner.compute_in_segments(graph.graph, ops)))
        return self._describe(made, chosen, tuple(others))

    def _describe(self, made: _Attempt, chosen: Chosen, others: tuple[tuple[TracedGraph, Chosen], ...]) -> PlanView:
        """Return the main graph's plan, with notes about the capture and the other graphs."""
        first = chosen.planned.plan
        notes = [*made.trace.notes]
        if made.main.ended_by is not None:
            notes.append(f"{first.name} ends early, at {made.main.ended_by}.")
        if chosen.op_by_op is not None:
            notes.append(f"{first.name} computes op by op: {chosen.op_by_op}.")
        plans = share_updates([first, *(other.planned.plan for _, other in others)])[1:]
        for (graph, other), plan in zip(others, plans, strict=True):
            ended = f"; it ends at {graph.ended_by}" if graph.ended_by is not None else ""
            op_by_op = f"; it computes op by op: {other.op_by_op}" if other.op_by_op is not None else ""
            notes.append(
                f"{plan.name} is planned by itself: {plan.tier(Tier.DEVICE).predicted_peak:,} bytes on device, "
                f"{simulate(plan).step_seconds:.3g} s{ended}{op_by_op}."
            )
        notes += _tell_unused(first)
        if made.trace.stopped_by is not None:
            notes.append(f"What follows could not be planned, since it depends on values: {made.trace.stopped_by}.")
        return PlanView(replace(first, notes=(*first.notes, *notes)), chosen.planned.request)


def _main_graph(trace: Trace) -> TracedGraph:
    return max(trace.graphs, key=lambda graph: (len(graph.facts.gradients), len(graph.facts.uses)))


def _check_result(trace: Trace, name: str, *, train: bool, has_loss: bool) -> None:
    """Raise unless there is something to plan."""
    if trace.stopped_by is not None:
        if train and not any(graph.facts.gradients for graph in trace.graphs):
            raise UnsupportedError(
                f"{name} cannot be planned: before any parameter is read that is trained, its shapes or branches depend on "
                f"values, which planning does not have ({trace.stopped_by}); make them depend on shapes alone"
            )
        return
    if has_loss and not (isinstance(trace.result, Tensor) and trace.result.numel() == 1):
        raise ConfigError(f"loss returned {describe(trace.result)}; it has to return a tensor of one element")
    leaves = [leaf for leaf in pytree.tree_leaves(trace.result) if isinstance(leaf, Tensor)]
    if train and not any(leaf.requires_grad for leaf in leaves):
        raise UnsupportedError(
            f"{name} returns {describe(trace.result)}, of which nothing depends on a parameter that requires grad, so "
            "there is no training step to plan; say train=False to plan its forward"
        )


def describe(result: object) -> str:
    if isinstance(result, Tensor):
        return f"a tensor {str(result.dtype).removeprefix('torch.')}{list(result.shape)}"
    return f"{'an' if type(result).__name__[0] in 'aeiouAEIOU' else 'a'} {type(result).__name__}"


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector. It would scan millions of facts repeatedly, none of which is in a cycle.

    The scans take a third of the time of planning a deep model. Each capture leaves tens of MB in cycles, so a caller
    with several captures calls ``gc.collect`` between them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _tell_unused(plan: Plan) -> list[str]:
    """Return a note if the device has unused bytes that the master copies and gradients would fit in, else nothing."""
    device = plan.tier(Tier.DEVICE)
    trained = [placement for placement in plan.placements if placement.gradient_nbytes and plan.sinks]
    seen = sum(placement.master_nbytes + placement.gradient_nbytes for placement in trained if placement.master_nbytes)
    free = (device.capacity or 0) - device.predicted_peak
    if not plan.updates_on_device or not 0 < seen <= free:
        return []
    return [
        f"{format_bytes(free)} of the device stay unused: master copies and gradients, {format_bytes(seen)}, live in host "
        "memory, where the parameters and their .grad are seen, and cross the link for every update."
    ]
