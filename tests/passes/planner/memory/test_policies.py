"""Recomputation is considered where it could be faster, by the same rule offline and on the machine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zinf_compile.ir.glossary import ActivationPolicy, Phase
from zinf_compile.passes.planner.memory.policies import (
    allowed_policies,
    compute_seconds,
    least_recompute_seconds,
    may_be_faster,
)
from zinf_compile.passes.planner.search.planner import Request, make_plan
from zinf_compile.passes.planner.simulator.simulate import simulate

Function = Callable[..., Any]


def test_the_option_fixes_the_policy() -> None:
    assert allowed_policies(None) == tuple(ActivationPolicy)
    assert allowed_policies(True) == (ActivationPolicy.RECOMPUTE_BLOCKS,)
    assert allowed_policies(False) == (ActivationPolicy.SAVE,)


def test_half_of_what_blocks_compute_in_forward_is_expected_again(request_of: Function) -> None:
    request: Request = request_of(1)
    graph, hardware = request.candidates[0], request.hardware
    per_op = compute_seconds(graph, hardware) / graph.num_ticks  # hand-made facts: all ops take equally long
    again = per_op * len(graph.schedule.ticks(Phase.FORWARD)) / 2
    assert abs(least_recompute_seconds(graph, hardware) - compute_seconds(graph, hardware) - again) < per_op / 1000
    outside = replace(graph, ops=tuple(replace(op, module="head") for op in graph.ops))
    assert least_recompute_seconds(outside, hardware) == compute_seconds(outside, hardware)


def test_a_step_takes_at_least_as_long_as_its_graph_computes(request_of: Function) -> None:
    plan = make_plan(request_of(1))
    step_seconds = simulate(plan).step_seconds
    assert may_be_faster(step_seconds * 0.99, plan)
    assert not may_be_faster(step_seconds * 1.01, plan)
    assert may_be_faster(step_seconds * 1.01, None)


def test_what_is_passed_over_would_not_have_been_taken(request_of: Function) -> None:
    request: Request = request_of(1)
    saving, recomputing = request.candidates
    slow = replace(recomputing, ops=tuple(replace(op, num_flops=10**9) for op in recomputing.ops))
    assert make_plan(replace(request, candidates=(saving, slow))) == make_plan(replace(request, candidates=(saving,)))
    assert not may_be_faster(compute_seconds(slow, request.hardware), make_plan(request))
