"""One captured graph: chooses its split, plans it, and lowers it, again if parameters have moved since."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from zinf_compile.errors import CapacityError
from zinf_compile.facts import GraphFacts
from zinf_compile.hardware import Hardware
from zinf_compile.passes.analysis.collect import CapturedGraph, analyze_graph
from zinf_compile.passes.capture import BoxedCallable, Partition
from zinf_compile.passes.contract import LowerInputs
from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.pipeline import lower_graph
from zinf_compile.passes.planning.planner import Request, make_plan
from zinf_compile.plan import Plan
from zinf_compile.plan_verify import verify_plan
from zinf_compile.runtime.executor import Executor
from zinf_compile.terms import ActivationPolicy, Phase

if TYPE_CHECKING:
    from zinf_compile.session import Session


class Program:
    """One captured graph: chooses its split, plans it, and lowers it, again if parameters have moved since."""

    def __init__(self, session: "Session", name: str, hardware: Hardware) -> None:
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
