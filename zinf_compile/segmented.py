"""A captured graph that computes in segments, if it fits the device so."""

import functools
import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from torch import fx

from zinf_compile.errors import CapacityError
from zinf_compile.facts import GraphFacts
from zinf_compile.ops import RUN_SEGMENT
from zinf_compile.passes.analysis.collect import CapturedGraph
from zinf_compile.passes.analysis.modules import blocks_of_nodes
from zinf_compile.passes.contract import SegmentInputs
from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.pipeline import segment_graph
from zinf_compile.passes.planning.placement import RESIDENT_THRESHOLD
from zinf_compile.passes.segments.structure import describe_structure
from zinf_compile.plans import Plan
from zinf_compile.runtime.compiled import find_compiler
from zinf_compile.runtime.segments import compile_segment, number_of
from zinf_compile.sizes import Size

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A captured graph with its facts and its plan."""

    captured: CapturedGraph
    facts: GraphFacts[Size]
    plan: Plan


def compute_in_segments(
    ops: Computed,
    param_ids: Mapping[str, int],
    analyze: Callable[[CapturedGraph], GraphFacts[Size]],
    make_plan: Callable[[GraphFacts[Size]], Plan],
) -> Computed:
    """Return a graph whose blocks are compiled; ``ops`` itself, which computes op by op, where that cannot be.

    A segment needs all of the parameters that it reads at once, and has all of their gradients at once. So it reads no two
    tiles; and where a block is too much, no two parameters that are large. ``param_ids`` are the numbers in its gathers.
    """
    tiles = {param_ids[item.parameter] for item in ops.plan.placements if item.tile_of is not None}
    large = {param_ids[item.parameter] for item in ops.plan.placements if item.compute_nbytes > RESIDENT_THRESHOLD}
    if find_compiler() is None:
        _say_without_compiler()
        return ops
    reason = None
    for apart in (tiles, large):
        captured = _cut(ops.captured, apart)
        facts = analyze(captured)
        try:
            plan = make_plan(facts)
        except CapacityError as error:
            reason = f"in segments it does not fit: {error}"
            continue
        for number in _numbers(captured):
            compile_segment(number)
        return Computed(captured=captured, facts=facts, plan=plan)
    _log.warning("%s computes op by op: %s", ops.facts.name, reason)
    return ops


@functools.cache  # once is enough
def _say_without_compiler() -> None:
    _log.warning(
        "graphs compute op by op: Inductor needs a C++ compiler, such as g++, and there is none on the PATH; install one, "
        "or say compute='aten'"
    )


def _cut(captured: CapturedGraph, apart: Container[int]) -> CapturedGraph:
    graphs = [captured.forward] + ([captured.backward] if captured.backward is not None else [])
    forward, *backward = copies = [copy_graph_module(graph) for graph in graphs]
    blocks = blocks_of_nodes(node for graph in copies for node in graph.graph.nodes)
    inputs = SegmentInputs(blocks=blocks, apart=apart, number_of=_number_of)
    for graph in copies:
        segment_graph(graph, inputs)
    return CapturedGraph(
        forward=forward,
        backward=backward[0] if backward else None,
        num_outputs=captured.num_outputs,
        policy=captured.policy,
    )


def _number_of(segment: fx.GraphModule) -> int:
    return number_of(describe_structure(segment.graph), segment)


def _numbers(captured: CapturedGraph) -> dict[int, None]:
    graphs = [captured.forward] + ([captured.backward] if captured.backward is not None else [])
    calls = (node for graph in graphs for node in graph.graph.find_nodes(op="call_function", target=RUN_SEGMENT))
    return dict.fromkeys(node.args[2] for node in calls)
