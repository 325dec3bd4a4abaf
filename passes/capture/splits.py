"""The forms of a captured graph to plan and compare: split under an activation policy, op by op or in segments."""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import fx

from zinf_compile.ir.facts import GraphFacts, at_sizes
from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.sizes import Size
from zinf_compile.passes.analysis.collect import CapturedGraph, analyze_graph
from zinf_compile.passes.analysis.modules import blocks_of_nodes
from zinf_compile.passes.capture.aot import Partition
from zinf_compile.passes.contract import Division, FormInputs, SegmentInputs
from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.pipeline import segment_graph
from zinf_compile.passes.planner.memory.policies import other_splits
from zinf_compile.passes.planner.memory.recompute import Kind, recomputed_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to compute a captured graph: its facts, and the graphs that they describe."""

    facts: GraphFacts[Size]
    captured: CapturedGraph | None = None  # None: the graphs are those of ``parts``
    narrowed: Mapping[int, torch.dtype] = field(default_factory=dict)  # dtypes of narrowed gathers, by parameter
    parts: tuple["Form", ...] = ()  # of a deep model: forms of graphs with few of its blocks

    @property
    def dividable(self) -> frozenset[str]:
        """Return the names of saved values of which tensor-parallel ranks could save a part each; copies have '@2' added."""
        return frozenset(name for captured in self._graphs for name in captured.dividable)

    @property
    def is_divided(self) -> bool:
        """Return whether tensor-parallel ranks save a part each of some values."""
        return any(captured.divided for captured in self._graphs)

    @property
    def _graphs(self) -> list[CapturedGraph]:
        return [each.captured for each in self.parts or (self,) if each.captured is not None]

    def lets_dividable_leave(self, plan: Plan) -> bool:
        """Return whether some of what could be divided leaves the device in a plan."""
        return any(swap.value.partition("@")[0] in self.dividable for swap in plan.swaps)


class Splitter(Protocol):
    """A captured graph that can be split under any policy, and cut into segments."""

    @property
    def has_backward(self) -> bool:
        """Return whether the graph is trained."""

    def split(
        self,
        policy: ActivationPolicy,
        *,
        saving: Form | None = None,
        kinds: frozenset[Kind] = frozenset(),
        narrowed: Mapping[int, torch.dtype] | None = None,
    ) -> Form:
        """Return the graph split under a policy.

        Values of ``kinds`` that the form ``saving`` saves are recomputed. Gathers move the ``narrowed`` dtypes.
        """

    def segment(self, form: Form, apart: Container[str]) -> Form:
        """Return a form of the graph in segments, none of which reads two parameters of those ``apart``, by name."""


class JointGraph:
    """A graph that AOTAutograd hands to its compiler: all of its forms come from its joint graph."""

    def __init__(
        self,
        partition: Partition,
        *,
        name: str,
        param_names: Mapping[int, str],
        number_of: Callable[[fx.GraphModule], int],
        has_backward: bool,
        keeps_collectives: bool = False,
        division: Division | None = None,
    ) -> None:
        """``param_names`` maps the numbers in its gathers to names. ``number_of`` returns the number of a segment.

        With ``keeps_collectives`` no form has collectives in backward that the others do not have. ``division`` says which
        saved values are divided among tensor-parallel ranks.
        """
        self._division = division
        self._keeps_collectives = keeps_collectives
        self._partition, self._name, self._param_names, self._number_of = partition, name, param_names, number_of
        self.has_backward = has_backward
        self._plain: dict[ActivationPolicy, Form] = {}  # forms that were requested by policy alone

    def split(
        self,
        policy: ActivationPolicy,
        *,
        saving: Form | None = None,
        kinds: frozenset[Kind] = frozenset(),
        narrowed: Mapping[int, torch.dtype] | None = None,
    ) -> Form:
        """Return the graph split under a policy.

        Values of ``kinds`` that the form ``saving`` saves are recomputed. Gathers move the ``narrowed`` dtypes.
        """
        is_plain = not kinds and not narrowed
        if is_plain and policy in self._plain:
            return self._plain[policy]
        recomputed: frozenset[str] = frozenset()
        if kinds:
            assert saving is not None
            recomputed = recomputed_ops(at_sizes(saving.facts), kinds)
        inputs = FormInputs(
            policy=policy,
            narrowed=narrowed or {},
            recomputed=recomputed,
            keeps_collectives=self._keeps_collectives,
            division=self._division,
        )
        form = self._analyze(self._partition(inputs), inputs.narrowed)
        if is_plain:
            self._plain[policy] = form
        return form

    def segment(self, form: Form, apart: Container[str]) -> Form:
        """Return a form of the graph in segments, none of which reads two parameters of those ``apart``, by name."""
        numbers = {number for number, name in self._param_names.items() if name in apart}
        assert form.captured is not None
        return self._analyze(_cut(form.captured, numbers, self._number_of), form.narrowed)

    def _analyze(self, captured: CapturedGraph, narrowed: Mapping[int, torch.dtype]) -> Form:
        facts = analyze_graph(captured, name=self._name, param_names=self._param_names)
        return Form(facts=facts, captured=captured, narrowed=narrowed)


def other_forms(
    graph: Splitter, saving: Form, policies: Iterable[ActivationPolicy], hardware: Hardware, plan: Plan | None
) -> list[Form]:
    """Return the forms under ``policies`` that may have a better plan than ``plan``, the plan of ``saving``."""
    return [
        graph.split(each.policy, saving=saving, kinds=each.kinds, narrowed=saving.narrowed)
        for each in other_splits(policies, at_sizes(saving.facts), hardware, plan)
    ]


def _cut(captured: CapturedGraph, apart: Container[int], number_of: Callable[[fx.GraphModule], int]) -> CapturedGraph:
    """Return a captured graph in segments."""
    graphs = [captured.forward] + ([captured.backward] if captured.backward is not None else [])
    forward, *backward = copies = [copy_graph_module(graph) for graph in graphs]
    blocks = blocks_of_nodes(node for graph in copies for node in graph.graph.nodes)
    inputs = SegmentInputs(blocks=blocks, apart=apart, number_of=number_of)
    for graph in copies:
        segment_graph(graph, inputs)
    return replace(captured, forward=forward, backward=backward[0] if backward else None)
