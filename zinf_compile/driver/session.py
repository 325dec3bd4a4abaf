"""One optimized model: its budgets, its store, and the programs of its captured graphs."""

import gc
import logging
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zinf_compile.driver.components import bind_components
from zinf_compile.driver.division import Dividing, notes_of
from zinf_compile.driver.planning import GraphPlanner
from zinf_compile.driver.program import Program
from zinf_compile.driver.rounds import BoundRounds, Rounds
from zinf_compile.driver.store_catalog import StoreCatalog
from zinf_compile.driver.tile_search import TiledGraph, check_tiles, fit_by_tiles
from zinf_compile.driver.trial import plan_tiled
from zinf_compile.ir.config import Config
from zinf_compile.ir.copies import Role
from zinf_compile.ir.errors import (
    CapacityError,
    ConfigError,
    DeviceCapacityError,
    NotCapturedError,
    StoreError,
    UnsupportedError,
)
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.glossary import Phase, Tier, dtype_name, format_bytes, printable
from zinf_compile.ir.plan import Placement, Plan
from zinf_compile.passes.analysis.parameters import analyze_parameter
from zinf_compile.passes.capture.aot import compile_graph, describe_break, refuse_writes_to_parameters
from zinf_compile.passes.contract import Division
from zinf_compile.passes.planner.optimizer.optimizer_step import device_chunk_elements
from zinf_compile.passes.planner.placement.budgets import check_budgets, check_staying
from zinf_compile.passes.planner.placement.homes import check_file, place_unfrozen, plan_placement
from zinf_compile.passes.planner.simulator.simulate import simulate
from zinf_compile.passes.transforms.prepare.work_in_rounds import count_under_way
from zinf_compile.runtime.calibration.calibrate import measure_hardware, with_coded_states, with_rows
from zinf_compile.runtime.calibration.machine import kernel_cache_nbytes
from zinf_compile.runtime.calibration.measured import find_measured
from zinf_compile.runtime.device.cpu import has_fast_bfloat16
from zinf_compile.runtime.execute.leaves import hang_on_parameters, refuse_double_backward
from zinf_compile.runtime.execute.op_bodies import register
from zinf_compile.runtime.model.accessors import Forward
from zinf_compile.runtime.model.adoption import NamedParameter, adopt_parameters
from zinf_compile.runtime.model.in_place import move_out_of_weights, stays_in_memory
from zinf_compile.runtime.model.unfreezing import unfreeze_parameter
from zinf_compile.runtime.observe.open_forwards import storages_of
from zinf_compile.runtime.observe.progress import say, timed
from zinf_compile.runtime.optim.backward_step import BackwardStep
from zinf_compile.runtime.optim.step_hooks import install_step_hooks
from zinf_compile.runtime.optim.updates_ahead import UpdatesAhead
from zinf_compile.runtime.params.numbers import find_record
from zinf_compile.runtime.params.records import StoredParameter, holders_of
from zinf_compile.runtime.process.call_stack import with_room_for_calls
from zinf_compile.runtime.process.garbage import fewer_collections
from zinf_compile.runtime.process.inference import outside_inference
from zinf_compile.runtime.process.interrupts import uninterrupted
from zinf_compile.runtime.process.ram import return_freed_memory
from zinf_compile.runtime.ranks.agreement import SAME_GRAPH, agree_on_hardware, check_alike, check_parameters
from zinf_compile.runtime.ranks.ranks import ALONE, Ranks, describe, hash_of
from zinf_compile.runtime.storage.nvme.weight_file import WeightSpan
from zinf_compile.runtime.store.store import Store

_log = logging.getLogger(__name__)
_LARGE_NBYTES = 2**28  # takes long enough to move to log it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saving:
    """How what backward needs is kept until then."""

    division: Division | None = None  # of what tensor-parallel ranks save
    waits: bool = False  # for what leaves the device, one value at a time


class _Captured(NamedTuple):
    """The callable of a captured graph, and the parameters that its backward computes gradients of."""

    run: Callable[..., Any]
    trained: list[StoredParameter]


class Session:
    """One optimized model, or several that share budgets: the store, and the programs of the captured graphs."""

    def __init__(self, config: Config, model_name: str, ranks: Ranks = ALONE, rounds: Rounds | None = None) -> None:
        register()
        install_step_hooks()
        self.model_name = model_name
        self.rounds = rounds
        self.store = Store(config, ranks=ranks if rounds is None else rounds.worker)
        self.store.messages = None if rounds is None else rounds.messages
        if config.step_in_backward:
            self.store.early_step = BackwardStep(self.store)
        elif config.speculate is not False:
            self.store.updates_ahead = UpdatesAhead(self.store)
        self.store.session = self
        self.store.elsewhere = None if rounds is None else rounds.elsewhere
        self.forwards: list[Forward] = []  # of the models; their accessors hold them weakly
        self.programs: list[Program] = []
        self._captured: list[_Captured] = []  # in the order of ``programs``
        self.graph_breaks: list[str] = []
        self.fallbacks: list[str] = []  # why a model is not captured, for reports
        self._has_warned = False  # of a slow dtype
        self.catalog = StoreCatalog(self.store)

    @property
    def config(self) -> Config:
        """Return the options of the model, with the current reserve."""
        return self.catalog.config

    def adopt(
        self,
        parameters: Mapping[str, Parameter],
        *,
        as_home: bool,
        with_values: bool = True,
        weights: Mapping[str, WeightSpan] = MappingProxyType({}),
        linear: Container[Parameter] = (),
    ) -> None:
        """Take parameters into the store. ``linear`` are those that are weights of linear layers.

        Without ``with_values`` they get homes only, and the caller writes the values there, but for those in place: frozen
        ones on nvme whose value ``weights`` has in the dtype that is stored. Raises CapacityError,
        before anything has moved, if they cannot fit, and ConfigError for tiles of a parameter that does not exist or
        has too few rows, and for exact state of one that does not exist.
        """
        check_parameters(self.store.ranks, parameters, with_values=with_values)
        known = {name: record.parameter for name, record in self.store.records.items()}
        # A backend gets parameters graph by graph: those of later ones are not known yet.
        check_tiles(self.config, {**known, **parameters}, self.store.ranks.size, are_all=as_home)
        if as_home:
            self.config.check_exact({**known, **parameters})
        self.catalog.settle()
        named = [
            NamedParameter(
                parameter=parameter,
                fact=analyze_parameter(
                    name,
                    parameter,
                    compute_dtype=None if holders_of(parameter) else self.config.compute_dtype,
                    state_code=self.config.state_code_of(name),
                    is_encoded=parameter in linear and self.config.encodes_frozen(name),  # no component is in a layer
                    memory=self.config.memory,
                ),
            )
            for name, parameter in parameters.items()
        ]
        named = [
            replace(item, fact=replace(item.fact, file_dtype=dtype_name(weights[item.fact.name].dtype)))
            if item.fact.name in weights and _may_be_in_place(item.fact, weights[item.fact.name])
            else item
            for item in named
        ]
        facts = [*self.catalog.facts, *(item.fact for item in named)]
        self._warn_of_slow_dtype(item.fact for item in named)
        placements = plan_placement(facts, self.config, num_ranks=self.store.ranks.size)
        check_budgets(facts, placements, self.config)
        is_first = not self.store.records
        if is_first:
            self.store.held.note_process(is_adopted=False)
        progress = self.progress("moving home the parameters of", parameters.values()) if with_values else nullcontext()
        with self.store.staging.uncounted(), progress:  # plans predict only what a step takes
            adopt_parameters(
                self.store,
                named,
                placements[len(self.catalog.facts) :],
                as_home=as_home,
                with_values=with_values,
                weights=weights,
            )
        if is_first:
            self.store.held.note_process(is_adopted=True)
        self.catalog.placements = tuple(self.store.placements.values())
        if not self.config.memory.unified and not self.programs:  # plans of captured graphs set these later
            self.store.device_share = 0.0 if self.config.update_on == "host" else 1.0
            self.store.chunk_elements = device_chunk_elements(self.config, self.catalog.facts)

    def _warn_of_slow_dtype(self, facts: Iterable[ParameterFact]) -> None:
        """Say once what a dtype costs that this CPU has no instructions for."""
        is_slow = any(fact.compute_dtype == "bfloat16" for fact in facts) and not has_fast_bfloat16()
        if is_slow and not self._has_warned and self.store.device.torch_device.type == "cpu":
            self._has_warned = True
            _log.warning(
                "%s computes in bfloat16, which torch multiplies up to 200 times slower than float32 on this CPU: it has no "
                "instructions for it, such as AVX-512; leave out compute_dtype, or build the model in float32",
                printable(self.model_name),
            )

    def progress(self, doing: str, parameters: Iterable[Parameter]) -> AbstractContextManager[None]:
        """Return a context that logs the start and end of work on parameters, if they are large."""
        nbytes = sum(parameter.nbytes for parameter in parameters)
        if nbytes < _LARGE_NBYTES:
            return nullcontext()
        return timed(f"{doing} {self.model_name}, {format_bytes(nbytes)}", f"{self.model_name} is at home")

    def prefixed(self, parameters: Mapping[str, Parameter], model_name: str) -> dict[str, Parameter]:
        """Return the parameters of a model that joins, under unique names such as ``Critic.layers.0.weight``."""
        prefix = model_name
        while any(name.startswith(f"{prefix}.") for name in self.store.facts):
            prefix += "_"
        return {f"{prefix}.{name}": parameter for name, parameter in parameters.items()}

    def unfreeze(self, record: StoredParameter) -> None:
        """Make a frozen parameter trainable. Raises CapacityError, before anything has changed, if there is no room."""
        self.store.check_open()
        self.catalog.settle()
        self.leave_weights(record)
        fact = replace(self.store.facts[record.name], trainable=True)
        fact = replace(fact, compute=fact.compute.decoded)
        others = [placement for placement in self.catalog.placements if placement.parameter != record.name]
        master = record.copies.master.tier if record.copies.are_two else None
        unfrozen = place_unfrozen(
            fact, record.copies.compute.tier, others, self.config, master=master, num_ranks=self.store.ranks.size
        )
        placements = tuple(unfrozen if item.parameter == record.name else item for item in self.catalog.placements)
        check_budgets(
            [fact if item.name == fact.name else item for item in self.catalog.facts], placements, self.config
        )
        unfreeze_parameter(self.store, record, fact, unfrozen)
        self.catalog.placements = placements

    def check_leaving(self, records: Sequence[StoredParameter]) -> None:
        """See Owner.check_leaving."""
        check_file(self._outside_of_weights(records), self.config)
        in_place = [record.name for record in records if record.copies.in_place is not None]
        self.store.reserve([self.store.placements[name].without_weights() for name in in_place])

    def _outside_of_weights(self, records: Sequence[StoredParameter]) -> tuple[Placement, ...]:
        """Return the placements of the newest plan, with some parameters in the store's file."""
        names = {record.name for record in records}
        return tuple(item.without_weights() if item.parameter in names else item for item in self.catalog.placements)

    def leave_weights(self, record: StoredParameter, *, with_value: bool = True) -> None:
        """See Owner.leave_weights."""
        name, catalog = record.name, self.catalog
        if self.store.facts[name].file_dtype is None:
            return
        self.check_leaving([record])
        placements = self._outside_of_weights([record])
        is_settled = catalog.placements == tuple(self.store.placements.values())
        if catalog.plans and stays_in_memory(record):
            staying = self.store.placements[name].without_weights().moved({Role.COMPUTE: Tier.HOST})
            beside = max((_host_nbytes_beside_homes(plan) for plan in catalog.plans.values()), default=0)
            check_staying([*(self.store.placements | {name: staying}).values()], self.config, name, beside=beside)
        move_out_of_weights(self.store, record, with_value=with_value)
        self.store.facts[name] = replace(self.store.facts[name], file_dtype=None)
        role = Role.MASTER if record.copies.are_two else Role.COMPUTE
        placement = self.store.placements[name].without_weights()
        self.store.placements[name] = placement.moved({role: record.copies.master.tier})
        catalog.placements = tuple(self.store.placements.values()) if is_settled else placements

    @with_room_for_calls
    def compile(self, graph_module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Return the planned and lowered callable of a torch-level graph that reads all parameters through gathers."""
        try:
            with timed(None, f"{self._next_name()} ready"), fewer_collections():
                return self._compile(graph_module, inputs)
        except (CapacityError, UnsupportedError, ConfigError):  # every rank raises them
            raise
        except BaseException as error:
            self.store.ranks.fail(f"capturing broke off: {describe(error)}")
            raise

    def _compile(self, graph_module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        self.store.ranks.meet(f"capture of {self._next_name()}, {len(graph_module.graph.nodes)} nodes")
        where = describe_break(graph_module)
        self.store.ranks.meet_beside(
            f"capture of {self._next_name()}{'' if where is None else ', up to a graph break'}"
        )
        if where is not None and self.store.ranks.beside and not self.programs:
            self._refuse_pieces(where)
        graph_module, inputs, check = bind_components(self.store, graph_module, inputs)
        in_rounds: BoundRounds | None = None
        if self.rounds is not None:
            in_rounds = self.rounds.bind(self._next_name(), self.store, graph_module, inputs)
        if in_rounds is not None:
            graph_module, inputs = in_rounds.graph_module, in_rounds.inputs
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.zinf.gather):
            if find_record(node.args[1]).store is not self.store:
                raise UnsupportedError(
                    f"one captured function uses {self.model_name} and another optimized model; call them one after the "
                    "other, outside of each other's forward"
                )
        refuse_writes_to_parameters(graph_module)
        if where is not None:
            self.graph_breaks.append(where)
        if self.catalog.hardware is None:
            plain = (record for record in self.store.records.values() if not holders_of(record.parameter))
            found = {record.copies.compute.tensor.dtype for record in plain}
            floating = frozenset(dtype for dtype in found if dtype.is_floating_point)
            dtypes = floating or frozenset({torch.float32})
            unified = self.config.memory.unified
            beside = nullcontext() if unified else self.store.ram.apart()
            with self.store.staging.uncounted(), outside_inference(), torch.enable_grad(), beside:
                kept = find_measured(self.config.nvme, dtypes) if unified else None  # stored rates are of the CPU
                if kept is None:
                    say("measuring what this machine does per second; zinf doctor does so once for all")
                measured = kept or measure_hardware(self.store, dtypes)
                if self.config.state_dtype is not None:
                    measured = with_coded_states(measured, self.config.state_dtype)
                if self.config.frozen_dtype is not None:
                    measured = with_rows(measured)
                self.catalog.hardware = agree_on_hardware(self.store.ranks, measured, self.store.device)
        fit = partial(self._fit_waiting_if_need_be, graph_module, inputs, where)
        if (dividing := self._find_dividing(inputs)) is not None:
            program, compiled = dividing.fit(self.store.ranks, fit)
        elif in_rounds is None or self.rounds is None:
            program, compiled = self.store.ranks.do_alike_beside("planning", fit)
        else:
            program, compiled = self.rounds.ranks.do_alike("planning", fit)
        for ranks in self.store.ranks.beside:
            check_alike(ranks, "captured graphs", program.describe_collectives(), remedy=SAME_GRAPH)
        self.programs.append(program)
        assert program.plan is not None
        self.catalog.plans[program.plan.name] = program.plan
        self._captured.append(_Captured(run=compiled, trained=program.trained_records))
        self.store.ram.begin_again(after_capture=True)
        if program.trained_records:
            self.store.cuts.add(program.cut)
        # Dynamo keeps this callable as long as the model's code: it must not keep the session and the model alive.
        number, of_session, name = len(self._captured) - 1, weakref.ref(self), self.model_name

        def call(*args: Any) -> Any:
            session = of_session()
            if session is None:
                raise StoreError(f"a captured graph of {name} was called after the model was dropped; keep the model")
            return session._run(number, check.arguments(args), in_rounds)

        return call

    def _refuse_pieces(self, where: str) -> None:
        """Raise NotCapturedError for a model with DTensors of which only pieces would be captured.

        What is between them often has sizes that depend on values, as rows of experts do, which differ from rank to rank.
        """
        self.fallbacks.append(
            f"{self.model_name} runs eagerly, gathering as it goes: it has DTensors, and its graph breaks at {where}"
        )
        _log.warning("%s", printable(self.fallbacks[-1]))
        raise NotCapturedError(self.fallbacks[-1])

    def _find_dividing(self, inputs: Sequence[Tensor]) -> Dividing | None:
        """Return the ranks that may divide the activations of a graph; None if there are none."""
        partition = self.config.partition_activations
        divided = [each for each in self.store.ranks.beside if each.group_name is not None]
        if partition is False or len(divided) != 1:
            return None
        if not partition:
            return Dividing(ranks=divided[0], recompute=self.config.recompute)
        alike = frozenset(record.param for record in self.store.records.values() if record.views.distribution is None)
        return Dividing(
            ranks=divided[0],
            recompute=self.config.recompute,
            alike=alike,
            are_inputs_alike=not any(map(is_traceable_wrapper_subclass, inputs)),
        )

    def _fit_waiting_if_need_be(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[Tensor],
        where: str | None,
        division: Division | None = None,
    ) -> tuple[Program, Callable[..., Any]]:
        """Return the program of a graph, and its callable. If nothing else fits, compute waits for activations to leave."""
        before, saving = self.config.reserve_memory, _Saving(division=division)
        try:
            return self._fit_beside_process(graph_module, inputs, where, saving)
        except DeviceCapacityError as error:
            if not error.waiting_helps:
                raise
        self.catalog.reserve(before)
        return self._fit_beside_process(graph_module, inputs, where, replace(saving, waits=True))

    def _fit_beside_process(
        self, graph_module: fx.GraphModule, inputs: Sequence[Tensor], where: str | None, saving: "_Saving"
    ) -> tuple[Program, Callable[..., Any]]:
        """Return the program of a graph, and its callable, in what the process leaves of the budget."""
        before = self.config.reserve_memory
        self.catalog.reserve(self.catalog.process.expect(self.config))
        try:
            return self._fit(graph_module, inputs, where, saving, kept_nbytes=before)
        except CapacityError:
            expected, least = self.config.reserve_memory, self.catalog.process.expect_least(self.config)
            (least,) = self.store.ranks.largest("the least memory of the process", least)
            if least >= expected:
                raise
            self.catalog.reserve(least)
            return self._fit(graph_module, inputs, where, saving, kept_nbytes=before)

    def _fit(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[Tensor],
        where: str | None,
        saving: "_Saving",
        *,
        kept_nbytes: int,
    ) -> tuple[Program, Callable[..., Any]]:
        """Return the program of a graph, tiled if necessary, and its callable. Raises CapacityError if nothing fits.

        ``where`` is the place of the graph break that ends the graph; None if there is none. ``kept_nbytes`` was reserved
        for the process before this capture.
        """
        may_save = self.config.measures_reserve and self.config.compute == "inductor"
        try:
            return fit_by_tiles(
                graph_module,
                self.catalog,
                partial(self._compile_tiled, inputs, saving),
                partial(self._predict_tiled, inputs, saving),
                compile_op_by_op=partial(self._compile_op_by_op, inputs, kept_nbytes, saving) if may_save else None,
                stays_whole=bool(self.store.ranks.beside),
            )
        except DeviceCapacityError as error:
            if where is not None:  # the rest is captured after this part has run
                error.args = (
                    f"{error}; that is for {self._next_name()} alone, which ends at {where}: what the model computes after "
                    "it is not captured yet, and may need more",
                )
            raise

    def _run(self, number: int, args: Sequence[Any], in_rounds: BoundRounds | None) -> Any:
        """Run a captured graph."""
        self.store.check_open()
        captured = self._captured[number]
        if in_rounds is not None:
            args = in_rounds.arguments(args)
        anchor = hang_on_parameters(self.store.anchor, captured.trained)
        outputs = captured.run(*(anchor if arg is self.store.anchor else arg for arg in args))
        if torch.is_grad_enabled():
            refuse_double_backward(outputs)
        return outputs if in_rounds is None else in_rounds.results(outputs)

    def close(self) -> None:
        """Close the store and release captured graphs. Their plans stay, for reports. Safe to call twice."""
        if self.rounds is not None:
            self.rounds.messages.close()
        self.store.close()
        self._captured.clear()
        for program in self.programs:
            program.drop()

    def _compile_tiled(
        self, inputs: Sequence[Tensor], saving: "_Saving", tiled: TiledGraph
    ) -> tuple[Program, Callable[..., Any]]:
        """Return the program of a graph and its callable. Raises DeviceCapacityError if it does not fit."""
        program = Program(self.catalog, self._make_planner(inputs, saving, tiled), tiled, division=saving.division)
        with uninterrupted():  # torch traces backward in its autograd engine, where an interrupt may end the process
            return program, compile_graph(
                tiled.graph_module, inputs, program, added_at_home=tiled.numbers, divisor=self._divisor
            )

    def _compile_op_by_op(
        self,
        inputs: Sequence[Tensor],
        kept_nbytes: int,
        saving: "_Saving",
        tiled: TiledGraph,
        refused: DeviceCapacityError,
    ) -> tuple[Program, Callable[..., Any]]:
        """Return the program of a graph that is not compiled, so that the process takes less of the device budget."""
        expected = self.config.reserve_memory
        gc.collect()  # what was captured to be compiled: the process would grow by as much again
        return_freed_memory()
        self.catalog.reserve(self.catalog.process.expect_op_by_op(kept_nbytes))
        reason = (
            f"compiling would leave the process {format_bytes(expected)} of device_memory, and the model the rest, in which "
            f"it does not fit: {refused}"
        )
        try:
            planner = self._make_planner(inputs, saving, tiled)
            program = Program(self.catalog, planner, tiled, op_by_op=reason, division=saving.division)
            with uninterrupted():  # see _compile_tiled
                compiled = compile_graph(
                    tiled.graph_module, inputs, program, added_at_home=tiled.numbers, divisor=self._divisor
                )
        except BaseException:
            self.catalog.reserve(expected)
            raise
        _log.warning("%s computes op by op: %s", printable(planner.name), printable(reason))
        return program, compiled

    def _predict_tiled(self, inputs: Sequence[Tensor], saving: "_Saving", tiled: TiledGraph) -> float:
        """Return the simulated seconds of a step without compiling. DeviceCapacityError if the graph does not fit."""
        planner, numbers = self._make_planner(inputs, saving, tiled), self.catalog.numbers(tiled.tiled)
        return simulate(plan_tiled(planner, numbers, tiled, inputs)).step_seconds

    @property
    def _divisor(self) -> float:
        """Return what gradients are divided by in captured graphs."""
        return 1.0 if self.rounds is None else self.rounds.divisor

    def _make_planner(self, inputs: Sequence[Tensor], saving: "_Saving", tiled: TiledGraph) -> GraphPlanner:
        assert self.catalog.hardware is not None
        name, ranks = self._next_name(), self.store.ranks
        say(f"tracing forward and backward of {name}{', in tiles' if tiled.numbers else ''}")
        ranks.meet(f"planning {name} in {len(tiled.numbers)} tiles, {hash_of(tiled.cut.encode()):016x}")
        cache = kernel_cache_nbytes() if self.config.memory.unified else 0  # of oneDNN
        opened = self.store.open_forwards.nbytes_beside(storages_of(inputs))
        if self.rounds is not None:
            opened += count_under_way(tiled.graph_module.graph, self.rounds.ranks.size)
        cache, opened = ranks.largest("memory beside a plan", cache, opened)  # so that all choose the same tiles
        return GraphPlanner(
            name,
            self.catalog,
            self.catalog.hardware,
            tiled=tiled.tiled,
            notes=(*tiled.notes, *notes_of(saving.division)),
            kernel_cache_nbytes=cache,
            open_nbytes=opened,
            num_ranks=ranks.size,
            num_replicas=ranks.num_replicas,
            ranks=ranks,
            policy=None if saving.division is None else saving.division.policy,
            waits_for_activations=saving.waits,
        )

    def _next_name(self) -> str:
        """Return the name of the graph that is captured next."""
        return f"{self.model_name} graph {len(self.programs)}"

    @property
    def step_programs(self) -> list[Program]:
        """Return the programs that ran in the last step with a backward; before any backward, the longest program."""
        planned = [program for program in self.programs if program.plan is not None]
        trained = [program.last_runs[Phase.BACKWARD] for program in planned if Phase.BACKWARD in program.last_runs]
        if not trained:
            return sorted(planned, key=lambda program: program.num_ticks)[-1:]
        return [program for program in planned if max(trained) in program.last_runs.values()]


def _host_nbytes_beside_homes(plan: Plan) -> int:
    """Return what a plan needs of host memory for staging and activations."""
    homes = sum(placement.nbytes_on(Tier.HOST) for placement in plan.placements)
    return next(tier.predicted_peak for tier in plan.tiers if tier.tier is Tier.HOST) - homes


def _may_be_in_place(fact: ParameterFact, weights: WeightSpan) -> bool:
    """Return whether a weight file has just what would be stored of a parameter: not of one that is encoded."""
    return not fact.trainable and fact.compute.has_values and fact.compute_dtype == dtype_name(weights.dtype)


def session_of_store(store: Store) -> Session:
    """Return the session that a store belongs to."""
    assert isinstance(store.session, Session)
    return store.session


def check_devices(parameters: Mapping[str, Parameter], device: str, *, may_be_meta: bool = False) -> None:
    """Raise unless all parameters are on the CPU, all on the compute device, or, if ``may_be_meta``, all on meta."""
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        examples = ", ".join(
            f"'{next(name for name, parameter in parameters.items() if parameter.device == device)}' on {device}"
            for device in sorted(devices, key=str)
        )
        raise ConfigError(f"parameters are on {len(devices)} devices ({examples}); move the model to one device first")
    found = next(iter(devices), torch.device("cpu"))
    if found.type == "meta" and may_be_meta:
        return
    if found.type == "meta":
        raise UnsupportedError(
            "the model is on the meta device, so it has no values; give it some with zinf_compile.optimize(model, init=...)"
        )
    if found.type not in ("cpu", torch.device(device).type):
        raise ConfigError(
            f"the model is on {found} and device={device!r} is to compute; say device='{found}', or call model.cpu() first"
        )
