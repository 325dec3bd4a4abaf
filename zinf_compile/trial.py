"""Plans a captured graph without compiling it, to compare it with another form of itself."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from zinf_compile.passes.analysis.collect import CapturedGraph
from zinf_compile.passes.capture import BoxedCallable, Partition, compile_graph
from zinf_compile.plans import Plan
from zinf_compile.program import Program
from zinf_compile.tile_search import TiledGraph


class _Planned(Exception):  # noqa: N818  # nothing is wrong
    """Leaves AOTAutograd once there is a plan: what it would go on with is not wanted."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


class _Trial:
    """A compiler that plans, and compiles nothing."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def choose(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> CapturedGraph:
        raise _Planned(self._program.plan_as_it_is(partition, reads))

    choose_inference = choose

    def compile_forward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        raise AssertionError("a trial ends with its plan")

    compile_backward = compile_forward


def plan_tiled(program: Program, tiled: TiledGraph, inputs: Sequence[Tensor]) -> Plan:
    """Return the plan that a graph would have. CapacityError if it has none."""
    try:
        compile_graph(tiled.graph_module, inputs, _Trial(program), added_at_home=tiled.numbers)
    except _Planned as planned:
        return planned.plan
    raise AssertionError("AOTAutograd asked for no split of the graph")
