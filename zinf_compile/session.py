"""One model under zinf_compile: its budgets, its store, and the programs made of its captured graphs."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Parameter

from zinf_compile.config import Config
from zinf_compile.errors import CapacityError, ConfigError, StoreError, UnsupportedError
from zinf_compile.facts import ParameterFact
from zinf_compile.hardware import Hardware
from zinf_compile.passes.analysis.parameters import analyze_parameter
from zinf_compile.passes.capture import compile_graph, describe_break, refuse_writes_to_parameters
from zinf_compile.passes.planning.budgets import check_budgets
from zinf_compile.passes.planning.optimizer_step import device_chunk_elements
from zinf_compile.passes.planning.placement import place_narrowed, place_thawed, plan_placement
from zinf_compile.plans import WORKSPACE_PART, Placement, Plan
from zinf_compile.program import Program
from zinf_compile.runtime.accessors import Forward
from zinf_compile.runtime.adoption import NamedParameter, adopt_parameters
from zinf_compile.runtime.backward_step import BackwardStep
from zinf_compile.runtime.calibrate import measure_hardware
from zinf_compile.runtime.leaves import hang_on_parameters
from zinf_compile.runtime.measured import find_measured
from zinf_compile.runtime.moving import move_homes
from zinf_compile.runtime.numbers import find_record
from zinf_compile.runtime.op_impls import register
from zinf_compile.runtime.open_forwards import storages_of
from zinf_compile.runtime.slots import StoredParameter, torch_dtype
from zinf_compile.runtime.step_hooks import install_step_hooks
from zinf_compile.runtime.store import Store
from zinf_compile.runtime.thawing import thaw_parameter
from zinf_compile.runtime.tile_catalog import StoreCatalog
from zinf_compile.simulate import simulate
from zinf_compile.terms import Phase, Tier, dtype_name, format_bytes
from zinf_compile.tile_search import TiledGraph, check_tiles, fit_by_tiles
from zinf_compile.trial import plan_tiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowing:
    """Compute copies that parameters do not have yet, narrower than their model computes with."""

    dtypes: Mapping[int, torch.dtype]  # that a graph's gathers then move, by parameter
    parameters: tuple[ParameterFact, ...]
    placements: tuple[Placement, ...]


class Session:
    """One model under zinf_compile, or several that share budgets: their store, and the plans of their captured graphs."""

    def __init__(self, config: Config, model_name: str) -> None:
        register()
        install_step_hooks()
        self.config = config
        self.model_name = model_name
        self.store = Store(config)
        if config.step_in_backward:
            self.store.early_step = BackwardStep(self.store)
        self.store.session = self
        self.forwards: list[Forward] = []  # of the models' accessors, which hold theirs weakly
        self.programs: list[Program] = []
        self.graph_breaks: list[str] = []
        self.notes: list[str] = []  # sentences for a reader of the report
        self.promised: dict[Tier, int] = {}  # the highest peak of all plans, also of those that others have replaced
        self.placements: tuple[Placement, ...] = ()  # where the newest plan wants every parameter
        self.hardware: Hardware | None = None  # known from the first graph on; what steps have shown replaces it

    @property
    def facts(self) -> tuple[ParameterFact, ...]:
        """Return the facts of every parameter adopted so far, in module order."""
        return tuple(self.store.facts.values())

    def adopt(self, parameters: Mapping[str, Parameter], *, as_home: bool, with_values: bool = True) -> None:
        """Take parameters into the store. CapacityError before anything has moved when they cannot fit.

        Without ``with_values`` they get homes only, and whoever has the values writes them there. ConfigError for tiles of
        a parameter that is not there, or of too few rows.
        """
        check_tiles(
            self.config, {**{name: record.parameter for name, record in self.store.records.items()}, **parameters}
        )
        self.settle()
        named = [
            NamedParameter(
                parameter=parameter,
                fact=analyze_parameter(
                    name, parameter, compute_dtype=self.config.compute_dtype, is_apart=self.config.is_apart
                ),
            )
            for name, parameter in parameters.items()
        ]
        facts = [*self.facts, *(item.fact for item in named)]
        placements = plan_placement(facts, self.config)
        check_budgets(facts, placements, self.config)
        with self.store.staging.uncounted():  # what a step takes is what plans speak of
            adopt_parameters(self.store, named, placements[len(self.facts) :], as_home=as_home, with_values=with_values)
        self.placements = tuple(self.store.placements.values())
        if self.config.is_apart and not self.programs:  # a plan of a captured graph says more
            self.store.device_share = 0.0 if self.config.update_on == "host" else 1.0
            self.store.chunk_elements = device_chunk_elements(self.config, self.facts)

    def prefixed(self, parameters: Mapping[str, Parameter], model_name: str) -> dict[str, Parameter]:
        """Return the parameters of a model that joins, under names that no other here has: ``Critic.layers.0.weight``."""
        prefix = model_name
        while any(name.startswith(f"{prefix}.") for name in self.store.facts):
            prefix += "_"
        return {f"{prefix}.{name}": parameter for name, parameter in parameters.items()}

    def thaw(self, record: StoredParameter) -> None:
        """Let a parameter be trained that was frozen so far. CapacityError, before anything has changed, without room."""
        self.settle()
        fact = replace(self.store.facts[record.name], trainable=True)
        others = [placement for placement in self.placements if placement.parameter != record.name]
        master = record.master.tier if record.has_compute_copy else None
        thawed = place_thawed(fact, record.compute.tier, others, self.config, master=master)
        placements = tuple(thawed if item.parameter == record.name else item for item in self.placements)
        check_budgets([fact if item.name == fact.name else item for item in self.facts], placements, self.config)
        thaw_parameter(self.store, record, fact, thawed)
        self.placements = placements

    def narrow_copies(self, reads: Mapping[int, torch.dtype]) -> dict[int, torch.dtype]:
        """Return which of these parameters have a compute copy of the dtype that a graph casts their reads to."""
        facts = {param: self.store.facts[find_record(param).whole.name] for param in reads}
        return {
            param: dtype
            for param, dtype in reads.items()
            if facts[param].narrowed and torch_dtype(facts[param].compute_dtype) == dtype
        }

    def plan_narrowing(self, reads: Mapping[int, torch.dtype], streamed: Container[str]) -> Narrowing | None:
        """Return what there would be if streamed parameters with one copy got one of the dtype that a graph casts to.

        None if no parameter would, or if budgets or the disk have no room for it, which the notes then say.
        """
        asked = {param: self.store.facts[find_record(param).whole.name] for param in reads}
        fresh = {
            fact.name: fact.narrowed_to(dtype_name(reads[param]), reads[param].itemsize)
            for param, fact in asked.items()
            if fact.compute_dtype == fact.dtype and fact.name in streamed and (fact.trainable or not fact.is_apart)
        }
        if not fresh:
            return None
        facts = tuple(fresh.get(fact.name, fact) for fact in self.facts)
        try:
            if self.programs:
                placements = place_narrowed(facts, self.placements, self.config)
            else:
                placements = plan_placement(facts, self.config)
            check_budgets(facts, placements, self.config)
            self.store.reserve_growth(placements)
        except (CapacityError, StoreError) as error:
            nbytes = format_bytes(sum(fact.compute_nbytes for fact in fresh.values()))
            self.notes.append(
                f"{len(fresh)} parameters that are only read through a cast move in their own dtype, and are cast on the "
                f"device: there is no room for {nbytes} of narrower copies ({error})"
            )
            return None
        new = {param: reads[param] for param, fact in asked.items() if fact.name in fresh}
        return Narrowing(dtypes=self.narrow_copies(reads) | new, parameters=facts, placements=placements)

    def adopt_narrowing(self, narrowing: Narrowing) -> None:
        """Let parameters have the copies that were planned; ``settle`` makes them."""
        self.store.facts.update({fact.name: fact for fact in narrowing.parameters})
        self.placements = narrowing.placements

    def compile(self, graph_module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Return the planned and lowered callable for a torch-level graph whose parameters are all gathers."""
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.zinf.gather):
            if find_record(node.args[1]).store is not self.store:
                raise UnsupportedError(
                    f"one captured function uses {self.model_name} and another optimized model; call them one after the "
                    "other, outside of each other's forward"
                )
        refuse_writes_to_parameters(graph_module)
        where = describe_break(graph_module)
        if where is not None:
            self.graph_breaks.append(where)
        if self.hardware is None:
            found = {record.compute.tensor.dtype for record in self.store.records.values()}
            floating = frozenset(dtype for dtype in found if dtype.is_floating_point)
            dtypes = floating or frozenset({torch.float32})
            with self.store.staging.uncounted():
                kept = None if self.config.is_apart else find_measured(self.config.nvme, dtypes)  # of the CPU
                self.hardware = kept or measure_hardware(self.store, dtypes)
        program, compiled = fit_by_tiles(
            graph_module,
            StoreCatalog(self.store),
            partial(self._compile_tiled, inputs),
            partial(self._predict_tiled, inputs),
        )
        self.programs.append(program)
        self.store.ram.begin_again(after_capture=True)
        trained = program.trained_records

        def call(*args: Any) -> Any:
            anchor = hang_on_parameters(self.store.anchor, trained)
            return compiled(*(anchor if arg is self.store.anchor else arg for arg in args))

        return call

    def _compile_tiled(self, inputs: Sequence[Tensor], tiled: TiledGraph) -> tuple[Program, Callable[..., Any]]:
        """Return the program of a graph, and what it makes of it. DeviceCapacityError if it does not fit."""
        program = self._begin_program(inputs, tiled)
        return program, compile_graph(tiled.graph_module, inputs, program, added_at_home=tiled.numbers)

    def _predict_tiled(self, inputs: Sequence[Tensor], tiled: TiledGraph) -> float:
        """Return the simulated seconds of a step of a graph that is not compiled. DeviceCapacityError if it does not fit."""
        return simulate(plan_tiled(self._begin_program(inputs, tiled), tiled, inputs)).step_seconds

    def _begin_program(self, inputs: Sequence[Tensor], tiled: TiledGraph) -> Program:
        assert self.hardware is not None
        beside = self.store.open_forwards.nbytes_beside(storages_of(inputs))
        name = f"{self.model_name} graph {len(self.programs)}"
        return Program(self, name, self.hardware, open_nbytes=beside, tiled=tiled)

    def promise(self, plan: Plan) -> None:
        """Keep the device tier within what the plans say, of which this is the newest; remember what was promised so far."""
        plans = [plan, *(program.plan for program in self.programs if program.plan is not None)]
        reserve = self.config.reserve_memory  # a part of the peak that is not the tier's own
        largest = max((each.tier(Tier.DEVICE) for each in plans), key=lambda tier: tier.predicted_peak)
        self.store.ram.promise(largest.predicted_peak - reserve, dict(largest.parts)[WORKSPACE_PART])
        self.store.updates.may_allocate = self.config.is_apart or all(each.has_room_for_updates for each in plans)
        if (link := self.store.transfers.link) is not None:
            link.leaving_limit = min(each.leaving_nbytes for each in plans)
        for tier in plan.tiers:
            self.promised[tier.tier] = max(self.promised.get(tier.tier, 0), tier.predicted_peak)

    @property
    def step_programs(self) -> list[Program]:
        """Return the programs that ran in the last step of which a backward was seen; before that, the longest one."""
        planned = [program for program in self.programs if program.plan is not None]
        trained = [program.last_runs[Phase.BACKWARD] for program in planned if Phase.BACKWARD in program.last_runs]
        if not trained:
            return sorted(planned, key=lambda program: program.num_ticks)[-1:]
        return [program for program in planned if max(trained) in program.last_runs.values()]

    def settle(self) -> None:
        """Move parameters to where the newest plan wants them. Called before a graph runs, never while one is traced."""
        if self.placements != tuple(self.store.placements.values()):
            with self.store.staging.uncounted():
                move_homes(self.store, self.placements)


def session_of_store(store: Store) -> Session:
    """Return the session a store belongs to."""
    assert isinstance(store.session, Session)
    return store.session


def check_devices(parameters: Mapping[str, Parameter], device: str, *, may_be_meta: bool = False) -> None:
    """Raise unless all parameters are on the CPU, on the device that computes, or all on meta if they may be."""
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
