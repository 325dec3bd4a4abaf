"""The Dynamo backend: captured graphs in, planned and lowered graphs out. Joins the passes and the runtime."""

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Parameter

from zinf_compile.config import Config, make_config
from zinf_compile.errors import CapacityError, ConfigError, UnsupportedError
from zinf_compile.facts import GraphFacts, ParameterFact
from zinf_compile.hardware import Hardware
from zinf_compile.ops import make_anchor
from zinf_compile.passes.analysis.collect import CapturedGraph, analyze_graph
from zinf_compile.passes.analysis.modules import block_of
from zinf_compile.passes.capture import (
    BoxedCallable,
    Partition,
    compile_graph,
    describe_break,
    parameter_placeholders,
)
from zinf_compile.passes.contract import LowerInputs, ParameterHandle, PrepareInputs
from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.pipeline import lower_graph, prepare_graph
from zinf_compile.passes.planning.placement import check_budgets, plan_placement
from zinf_compile.passes.planning.planner import Request, make_plan
from zinf_compile.plan import Placement, Plan
from zinf_compile.plan_verify import verify_plan
from zinf_compile.runtime.calibrate import measure_hardware
from zinf_compile.runtime.executor import Executor
from zinf_compile.runtime.op_impls import register
from zinf_compile.runtime.optimizer import install_step_hooks
from zinf_compile.runtime.slots import record_of
from zinf_compile.runtime.store import NamedParameter, Store, find_record
from zinf_compile.terms import ActivationPolicy, Phase


class Session:
    """One model under zinf_compile: its budgets, its store, and the plans of its captured graphs."""

    def __init__(self, config: Config, model_name: str) -> None:
        register()
        install_step_hooks()
        self.config = config
        self.model_name = model_name
        self.store = Store(config)
        self.store.session = self
        self.programs: list[Program] = []
        self.graph_breaks: list[str] = []
        self.placements: tuple[Placement, ...] = ()  # where the newest plan wants every parameter
        self._hardware: Hardware | None = None

    @property
    def facts(self) -> tuple[ParameterFact, ...]:
        """Return the facts of every parameter adopted so far, in module order."""
        return tuple(self.store.facts.values())

    def adopt(self, parameters: Mapping[str, Parameter], *, as_home: bool) -> None:
        """Take parameters into the store. CapacityError before anything has moved when they cannot fit."""
        named = [
            NamedParameter(parameter=parameter, fact=_parameter_fact(name, parameter, self.config))
            for name, parameter in parameters.items()
        ]
        facts = [*self.facts, *(item.fact for item in named)]
        placements = plan_placement(facts, self.config)
        check_budgets(facts, placements, self.config)
        self.store.adopt(named, placements[len(self.facts) :], as_home=as_home)
        self.placements = tuple(self.store.placements.values())

    def compile(self, graph_module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Return the planned and lowered callable for a torch-level graph whose parameters are all gathers."""
        where = describe_break(graph_module)
        if where is not None:
            self.graph_breaks.append(where)
        if self._hardware is None:
            dtypes = {record.compute.tensor.dtype for record in self.store.records.values()}
            self._hardware = measure_hardware(self.store, frozenset(dtypes or {torch.float32}))
        program = Program(self, f"{self.model_name} graph {len(self.programs)}", self._hardware)
        compiled = compile_graph(graph_module, inputs, program)
        self.programs.append(program)
        return compiled

    def settle(self) -> None:
        """Move parameters to where the newest plan wants them. Called before a graph runs, never while one is traced."""
        if self.placements != tuple(self.store.placements.values()):
            self.store.place_again(self.placements)


class Program:
    """One captured graph: chooses its split, plans it, and lowers it, again if parameters have moved since."""

    def __init__(self, session: Session, name: str, hardware: Hardware) -> None:
        self._session = session
        self._name = name
        self._hardware = hardware
        self._captured: CapturedGraph | None = None
        self._facts: GraphFacts | None = None
        self._lowered: dict[Phase, Callable[[list[Any]], Sequence[Any]]] = {}
        self.plan: Plan | None = None

    def choose(self, partition: Partition) -> CapturedGraph:
        """Return the split to compile: with torch's own choice of what to save where it fits, else recomputing blocks."""
        recompute = self._session.config.recompute
        policies = {
            None: (ActivationPolicy.SAVE, ActivationPolicy.RECOMPUTE_BLOCKS),
            True: (ActivationPolicy.RECOMPUTE_BLOCKS,),
            False: (ActivationPolicy.SAVE,),
        }[recompute]
        tried: list[GraphFacts] = []
        for policy in policies:
            captured = partition(policy)
            tried.append(self._analyze(captured))
            self._captured, self._facts = captured, tried[-1]
            try:
                self._make_plan(tried if policy is policies[-1] else tried[-1:])
            except CapacityError:
                if policy is policies[-1]:
                    raise
                continue
            return captured
        raise AssertionError("unreachable: the last policy returns or raises")

    def choose_inference(self, captured: CapturedGraph) -> None:
        """Plan a graph without backward."""
        self._captured, self._facts = captured, self._analyze(captured)
        self._make_plan([self._facts])

    def compile_forward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        """Return the forward as a callable that plans again when parameters have moved."""
        return self._executor(Phase.FORWARD)

    def compile_backward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        """Return the backward that belongs to the forward."""
        return self._executor(Phase.BACKWARD)

    def _executor(self, phase: Phase) -> BoxedCallable:
        def run(inputs: list[Any]) -> Sequence[Any]:
            return self._lowered[phase](inputs)

        def prepare() -> int:
            assert self.plan is not None
            assert self._facts is not None
            if phase is Phase.FORWARD:
                if self.plan.placements != self._session.placements:
                    self._make_plan([self._facts])
                self._session.settle()
            return self.plan.arena_nbytes

        return Executor(self._session.store, run, phase, prepare=prepare)

    def _analyze(self, captured: CapturedGraph) -> GraphFacts:
        names = {record.param: name for name, record in self._session.store.records.items()}
        return analyze_graph(captured, name=self._name, param_names=names)

    def _make_plan(self, candidates: Sequence[GraphFacts]) -> None:
        """Plan, verify and lower. The last candidate is the one captured."""
        session = self._session
        plan = make_plan(
            Request(
                name=self._name,
                candidates=tuple(candidates),
                parameters=session.facts,
                config=session.config,
                hardware=self._hardware,
                placements=session.placements if session.programs else None,
            )
        )
        verify_plan(plan)
        session.placements = plan.placements
        session.store.chunk_elements = plan.step.chunk_elements
        self.plan = plan
        self._lower(plan)

    def _lower(self, plan: Plan) -> None:
        assert self._captured is not None
        store = self._session.store
        inputs = LowerInputs(
            plan=plan,
            store_id=store.store_id,
            param_ids={name: record.param for name, record in store.records.items()},
        )
        for phase, graph_module in (
            (Phase.FORWARD, self._captured.forward),
            (Phase.BACKWARD, self._captured.backward),
        ):
            if graph_module is not None:
                lowered = copy_graph_module(graph_module)
                lower_graph(lowered, inputs)
                self._lowered[phase] = lowered.forward


def _parameter_fact(name: str, parameter: Parameter, config: Config) -> ParameterFact:
    dtype = str(parameter.dtype).removeprefix("torch.")
    compute_dtype = config.compute_dtype if config.compute_dtype and parameter.is_floating_point() else dtype
    return ParameterFact(
        name=name,
        block=block_of(name),
        num_elements=parameter.numel(),
        dtype=dtype,
        compute_dtype=compute_dtype,
        master_nbytes=parameter.numel() * parameter.dtype.itemsize,
        compute_nbytes=parameter.numel() * getattr(torch, compute_dtype).itemsize,
        trainable=parameter.requires_grad,
    )


def check_devices(parameters: Mapping[str, Parameter]) -> None:
    """Raise unless all parameters are on the CPU, where this version computes."""
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        examples = ", ".join(
            f"'{next(name for name, parameter in parameters.items() if parameter.device == device)}' on {device}"
            for device in sorted(devices, key=str)
        )
        raise ConfigError(f"parameters are on {len(devices)} devices ({examples}); move the model to one device first")
    device = next(iter(devices), torch.device("cpu"))
    if device.type == "meta":
        raise UnsupportedError(
            "the model is on the meta device, so it has no values; this version needs it built in memory"
        )
    if device.type != "cpu":
        raise UnsupportedError(f"the model is on {device}; this version computes on the CPU: call model.cpu() first")


# The sessions of models that were compiled without ``optimize``, by the options object of their torch.compile call,
# which is one and the same for all graphs of that call. The options are kept alive so that ids are never reused.
_sessions_by_options: dict[int, tuple[object, "weakref.ref[Store]"]] = {}


def zinf(
    graph_module: fx.GraphModule, inputs: Sequence[Tensor], *, options: Mapping[str, object] | None = None
) -> Callable[..., Any]:
    """``torch.compile(model, backend="zinf", options={...})``: the options of ``optimize``, on a model as it is.

    Parameters are taken into a store at the first call. A model that was optimized before brings its own store.
    """
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.zinf.gather):
        return session_of_store(find_record(node.args[1]).store).compile(graph_module, inputs)
    parameters = parameter_placeholders(graph_module, inputs)
    session = _find_session(parameters, options)
    fresh = {name: parameter for name, parameter in parameters.items() if record_of(parameter) is None}
    check_devices(fresh)
    if fresh:
        session.adopt({_readable_name(name): parameter for name, parameter in fresh.items()}, as_home=False)
    handles = {name: _handle(parameter) for name, parameter in parameters.items()}
    graph_module = copy_graph_module(graph_module)  # Dynamo keeps reading its own
    prepare_graph(graph_module, PrepareInputs(handles=handles))
    anchors = [make_anchor(requires_grad=True), make_anchor(requires_grad=False)] if parameters else []
    compiled = session.compile(graph_module, [*anchors, *inputs])

    def call(*args: Any) -> Any:
        return compiled(*anchors, *args)

    return call


def _find_session(parameters: Mapping[str, Parameter], options: Mapping[str, object] | None) -> Session:
    for parameter in parameters.values():
        if (record := record_of(parameter)) is not None:
            return session_of_store(record.store)
    _, known = _sessions_by_options.get(id(options), (None, None))
    store = known() if known is not None and options is not None else None
    if store is not None:
        return session_of_store(store)
    session = Session(make_config(options or {}), "model")
    if options is not None:
        _sessions_by_options[id(options)] = (options, weakref.ref(session.store))
    return session


def session_of_store(store: Store) -> Session:
    """Return the session a store belongs to."""
    assert isinstance(store.session, Session)
    return store.session


def _handle(parameter: Parameter) -> ParameterHandle:
    record = record_of(parameter)
    assert record is not None
    tensor = record.compute.tensor
    return ParameterHandle(
        name=record.name,
        param=record.param,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        device=tensor.device,
        trainable=record.gradient is not None,
    )


_DYNAMO_NAME = re.compile(r"_(?:modules|parameters|buffers)_")


def _readable_name(placeholder: str) -> str:
    """Return a parameter's name from Dynamo's: ``l_self_modules_layers_modules_0_parameters_weight_`` and the like."""
    name = placeholder.removesuffix("_")
    name = re.sub(r"^l_[a-zA-Z0-9]+(?=_(?:modules|parameters)_)", "", name)
    return ".".join(part for part in _DYNAMO_NAME.split(name) if part)
