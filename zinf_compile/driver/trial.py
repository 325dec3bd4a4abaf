"""Plans a captured graph without compiling it, to compare choices of tiles."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor, fx

from zinf_compile.driver.planning import GraphPlanner
from zinf_compile.driver.tile_search import TiledGraph
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.capture.aot import BoxedCallable, Partition, compile_graph
from zinf_compile.passes.capture.splits import JointGraph
from zinf_compile.runtime.observe.progress import say
from zinf_compile.runtime.process.interrupts import interruptible, uninterrupted


class _Planned(Exception):  # noqa: N818  # not an error
    """Raised to leave AOTAutograd as soon as there is a plan, since nothing is compiled."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


class _Trial:
    """A compiler that only plans."""

    def __init__(self, planner: GraphPlanner, param_names: Mapping[int, str]) -> None:
        self._planner, self._param_names = planner, param_names

    def choose(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> NoReturn:
        self._plan(partition, reads, has_backward=True)

    def choose_inference(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> NoReturn:
        self._plan(partition, reads, has_backward=False)

    def _plan(self, partition: Partition, reads: Mapping[int, torch.dtype], *, has_backward: bool) -> NoReturn:
        say(f"planning {self._planner.name} to see whether it fits so")
        graph = JointGraph(
            partition,
            name=self._planner.name,
            param_names=self._param_names,
            number_of=_never_segmented,
            has_backward=has_backward,
        )
        with interruptible():
            raise _Planned(self._planner.plan_as_it_is(graph, reads))

    def compile_forward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        raise AssertionError("a trial ends with its plan")

    compile_backward = compile_forward


def _never_segmented(segment: fx.GraphModule) -> int:
    raise AssertionError("a trial plans op by op")


def plan_tiled(
    planner: GraphPlanner, param_ids: Mapping[str, int], tiled: TiledGraph, inputs: Sequence[Tensor]
) -> Plan:
    """Return the plan that a graph would have. Raises CapacityError if it does not fit.

    ``param_ids`` are the numbers under which ops find parameters and tiles.
    """
    trial = _Trial(planner, {number: name for name, number in param_ids.items()})
    try:
        with uninterrupted():  # torch traces backward in its autograd engine, where an interrupt may end the process
            compile_graph(tiled.graph_module, inputs, trial, added_at_home=tiled.numbers)
    except _Planned as planned:
        return planned.plan
    raise AssertionError("AOTAutograd asked for no split of the graph")
