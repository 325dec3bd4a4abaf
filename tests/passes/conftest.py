"""What the pass tests share: lambdas traced to ATen graphs under fake tensors, and plans made by hand to lower them by."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.planner_inputs import make_parameter
from zinf_compile.ir.config import Config
from zinf_compile.ir.copies import Role
from zinf_compile.ir.facts import GraphFacts, at_sizes
from zinf_compile.ir.glossary import ActivationPolicy, Tier
from zinf_compile.ir.hardware import Hardware, Rate, make_route
from zinf_compile.ir.ops import GATHER, STORE_GRAD
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.sizes import Size
from zinf_compile.ir.transfers import Moved, Transfer, order_transfers
from zinf_compile.passes.analysis.collect import CapturedGraph, analyze_graph
from zinf_compile.passes.contract import LowerInputs, Pass, Property, run_pipeline
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.planner.search.planner import Request, make_plan
from zinf_compile.passes.properties import VALUES_KNOWN

STORE_ID = 7
PARAM_IDS = {"a": 1, "b": 2, "c": 3}


@pytest.fixture(scope="session")
def gather() -> Callable[..., Tensor]:
    """Return ``gather(anchor, name, *shape)``, to be called in a traced function."""

    def call(anchor: Tensor, name: str, *shape: int) -> Tensor:
        gathered: Tensor = GATHER(anchor, PARAM_IDS[name], list(shape), torch.float32, torch.device("cpu"))
        return gathered

    return call


@pytest.fixture(scope="session")
def store_grad() -> Callable[[Tensor, str], Tensor]:
    """Return ``store_grad(grad, name)``, to be called in a traced function."""

    def call(grad: Tensor, name: str) -> Tensor:
        token: Tensor = STORE_GRAD(grad, PARAM_IDS[name])
        return token

    return call


@pytest.fixture(scope="session")
def trace() -> Callable[..., fx.GraphModule]:
    """Return ``trace(function, *shapes)``: the ATen graph of a function of an anchor and float inputs of these shapes."""

    def run(function: Callable[..., object], *shapes: Sequence[int]) -> fx.GraphModule:
        inputs = [torch.empty(0), *(torch.empty(tuple(shape)) for shape in shapes)]
        return make_fx(function, tracing_mode="fake")(*inputs)

    return run


@pytest.fixture(scope="session")
def trace_dynamic() -> Callable[..., fx.GraphModule]:
    """Return ``trace_dynamic(function, *inputs)``: the ATen graph of a function of an anchor and inputs of changing shapes.

    As Dynamo has it, dimensions of equal size are one and the same, and those of size 0 or 1 are fixed.
    """

    def run(function: Callable[..., object], *inputs: Tensor) -> fx.GraphModule:
        return make_fx(function, tracing_mode="symbolic")(torch.empty(0), *inputs)

    return run


@pytest.fixture(scope="session")
def analyze() -> Callable[..., GraphFacts[Size]]:
    """Return ``analyze(forward, backward)``: the facts of graphs that use the parameters a, b and c. Numbers the nodes."""

    def run(
        forward: fx.GraphModule, backward: fx.GraphModule | None = None, *, num_outputs: int = 1
    ) -> GraphFacts[Size]:
        captured = CapturedGraph(
            forward=forward, backward=backward, num_outputs=num_outputs, policy=ActivationPolicy.SAVE
        )
        return analyze_graph(captured, name="graph", param_names={number: name for name, number in PARAM_IDS.items()})

    return run


@pytest.fixture(scope="session")
def make_transfer() -> Callable[..., Transfer]:
    """Return ``make_transfer({name: offset}, issue, need_by, release)``."""

    def make(offsets: Mapping[str, int], issue: int, need_by: int, release: int) -> Transfer:
        return Transfer(
            what=Moved.PARAMETERS,
            name="_".join(offsets),
            parameters=tuple(offsets),
            source=Tier.HOST,
            destination=Tier.DEVICE,
            offsets=tuple(offsets.values()),
            nbytes=4096 * len(offsets),
            issue=issue,
            need_by=need_by,
            release=release,
        )

    return make


@pytest.fixture(scope="session")
def hand_made_plan() -> Callable[..., Plan]:
    """Return ``hand_made_plan(facts, transfers)``, of which lowering reads the homes and the transfers."""

    def make(facts: GraphFacts, transfers: Sequence[Transfer] = ()) -> Plan:
        return _make_plan(facts, transfers)

    return make


@pytest.fixture(scope="session")
def lower(analyze: Callable[..., GraphFacts]) -> Callable[..., str]:
    """Return ``lower(graph_module, passes, transfers)``: numbers the nodes, runs the passes, dumps the graph.

    What no transfer holds is resident. ``properties`` are taken as given.
    """

    def run(
        graph_module: fx.GraphModule,
        passes: Sequence[Pass[LowerInputs]],
        transfers: Sequence[Transfer] = (),
        *,
        properties: frozenset[Property] = frozenset({VALUES_KNOWN}),
    ) -> str:
        facts = analyze(graph_module)
        inputs = LowerInputs(plan=_make_plan(facts, transfers), store_id=STORE_ID, param_ids=PARAM_IDS)
        run_pipeline(graph_module, passes, inputs, given=properties)
        return dump_graph(graph_module.graph)

    return run


def _make_plan(facts: GraphFacts, transfers: Sequence[Transfer]) -> Plan:
    """Return a plan of which lowering reads the homes and the transfers; nothing else in it is meant."""
    parameters = tuple(make_parameter(name, 16, block=name) for name in PARAM_IDS)
    routes = tuple(make_route(source, target, 1.0) for source in Tier for target in Tier)
    hardware = Hardware(
        name="none",
        unified=True,
        flops=(Rate(name="float32", per_second=1.0),),
        memory_bytes_per_second=1.0,
        routes=routes,
        optimizer_elements_per_second=1.0,
    )
    plan = make_plan(
        Request(
            name=facts.name,
            candidates=(at_sizes(facts),),
            parameters=parameters,
            config=Config(device_memory=2**30, host_memory=2**30, nvme=None, nvme_memory=None),
            hardware=hardware,
        )
    )
    streamed = {name for transfer in transfers for name in transfer.parameters}
    placements = tuple(
        placement.moved({Role.COMPUTE: Tier.HOST}) if placement.parameter in streamed else placement
        for placement in plan.placements
    )
    return replace(plan, placements=placements, transfers=order_transfers(transfers))
