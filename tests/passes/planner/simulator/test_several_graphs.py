"""A step of several graphs: the simulation of each updates its share, so that every parameter is updated once."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from zinf_compile.ir.facts import UseFact
from zinf_compile.ir.glossary import Phase, StepTiming
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.simulator.several_graphs import phases_of_step, share_updates
from zinf_compile.passes.planner.simulator.simulate import simulate

MakePlan = Callable[..., Plan]


@pytest.fixture
def whole(random_plan: MakePlan) -> Plan:
    """Return a plan that updates several parameters during its forward."""
    plan = random_plan(3, StepTiming.OVERLAPPED)
    assert sum(item.gradient_nbytes > 0 for item in plan.placements) >= 3
    assert plan.step.num_chunks > 0
    return plan


def reading(plan: Plan, *parameters: str) -> Plan:
    uses = [UseFact(parameter=name, dtype="bfloat16", ticks=(0,)) for name in parameters]
    return replace(plan, uses=tuple(uses), transfers=())


def test_each_parameter_is_updated_with_the_first_graph_that_reads_it(whole: Plan) -> None:
    first, second, *others = (item.parameter for item in whole.placements)
    plans = reading(whole, first), reading(whole, first, second)
    shared = share_updates(plans)
    assert [[item.parameter for item in plan.placements] for plan in shared] == [[first, *others], [second]]
    for total in ("num_elements", "nbytes_read", "nbytes_written"):
        rounded = sum(getattr(plan.step, total) for plan in shared)
        assert 0 <= getattr(whole.step, total) - rounded <= 1
    assert [plan.uses for plan in shared] == [plan.uses for plan in plans]


def test_tiles_are_updated_with_the_parameter_that_they_are_of(whole: Plan) -> None:
    first, *others = whole.placements
    tile = replace(first, parameter="tile")
    tiled = replace(whole, placements=(tile, *others))
    shared = share_updates((reading(whole, first.parameter), reading(tiled, "tile")))
    assert [len(plan.placements) for plan in shared] == [len(whole.placements), 0]


@pytest.mark.parametrize("timing", [StepTiming.SYNCHRONOUS, StepTiming.OVERLAPPED])
def test_a_step_is_shorter_than_if_every_graph_updated_everything(whole: Plan, timing: StepTiming) -> None:
    whole = replace(whole, step=replace(whole.step, timing=timing))
    names = [item.parameter for item in whole.placements]
    halves = reading(whole, *names[::2]), reading(whole, *names[1::2])
    together = phases_of_step([simulate(plan) for plan in share_updates(halves)])
    apart = phases_of_step([simulate(plan) for plan in halves])
    assert sum(together.values()) < sum(apart.values())


def test_one_graph_has_all_updates(whole: Plan) -> None:
    assert share_updates((whole,)) == (whole,)
    timeline = simulate(whole)
    assert phases_of_step([timeline]) == dict(timeline.phase_seconds)
    assert set(phases_of_step([timeline, timeline])) == set(Phase)
