"""Properties of every simulated step, on random plans."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zinf_compile.ir.glossary import StepTiming, Tier
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.simulator.bound import least_seconds
from zinf_compile.passes.planner.simulator.critical_path import critical_path, share_path
from zinf_compile.passes.planner.simulator.memory import live_set, memory_by_role
from zinf_compile.passes.planner.simulator.simulate import COMPUTE_LANE, Event, simulate, simulate_within
from zinf_compile.passes.planner.simulator.step_graph import build_step_graph
from zinf_compile.passes.planner.simulator.summary import busy_lanes

Function = Callable[..., Any]
many = examples(150)
seeds = st.integers(0, 10**6)
timings = st.sampled_from(list(StepTiming))
worlds = st.sampled_from(((1, 1), (2, 1), (8, 1), (1, 2), (1, 4), (2, 2), (4, 3)))  # ranks of a replica, and replicas


@many
@given(seed=seeds, timing=timings, is_duplex=st.booleans(), world=worlds)
def test_a_lane_does_one_thing_at_a_time(
    random_plan: Function, seed: int, timing: StepTiming, is_duplex: bool, world: tuple[int, int]
) -> None:
    timeline = simulate(random_plan(seed, timing, is_duplex=is_duplex, world=world))
    lanes_of = {route.name: route.lanes for route in timeline.plan.hardware.routes}
    lanes: dict[str, list[Event]] = defaultdict(list)
    for event in (*timeline.nodes, *timeline.stalls):
        for lane in lanes_of.get(event.lane, (event.lane,)):
            lanes[lane].append(event)
    for events in lanes.values():
        events.sort(key=lambda event: (event.start_seconds, event.end_seconds))
        for before, after in pairwise(events):
            assert before.end_seconds <= after.start_seconds
    # The compute lane has no gaps: it computes or it waits.
    assert sum(event.seconds for event in lanes[COMPUTE_LANE]) == pytest.approx(timeline.step_seconds)


@many
@given(seed=seeds, timing=timings, is_duplex=st.booleans(), world=worlds)
def test_the_graph_says_the_same_as_the_walk(
    random_plan: Function, seed: int, timing: StepTiming, is_duplex: bool, world: tuple[int, int]
) -> None:
    """Every node starts when its last predecessor ends. networkx finds the length of the step from the graph alone."""
    timeline = simulate(random_plan(seed, timing, is_duplex=is_duplex, world=world))
    graph = build_step_graph(timeline)
    for index in nx.topological_sort(graph):
        node = timeline.nodes[index]
        ends = [timeline.nodes[before].end_seconds for before in graph.predecessors(index)]
        assert node.start_seconds == max(ends, default=0.0)
        assert graph.nodes[index]["seconds"] == node.seconds
    end = graph.number_of_nodes()
    for index, seconds in list(graph.nodes(data="seconds")):
        graph.add_edge(index, end, seconds=seconds)
    assert nx.dag_longest_path_length(graph, weight="seconds") == pytest.approx(timeline.step_seconds)


@many
@given(seed=seeds, timing=timings, is_duplex=st.booleans(), world=worlds)
def test_the_critical_path_is_the_step(
    random_plan: Function, seed: int, timing: StepTiming, is_duplex: bool, world: tuple[int, int]
) -> None:
    timeline = simulate(random_plan(seed, timing, is_duplex=is_duplex, world=world))
    path = critical_path(timeline)
    assert path[0].start_seconds == 0
    assert all(before.end_seconds == after.start_seconds for before, after in pairwise(path))
    assert path[-1].end_seconds == pytest.approx(timeline.step_seconds)
    assert sum(share.seconds for share in share_path(path)) == pytest.approx(timeline.step_seconds)


@many
@given(seed=seeds, timing=timings, is_duplex=st.booleans(), world=worlds)
def test_a_step_takes_as_long_as_its_busiest_lane(
    random_plan: Function, seed: int, timing: StepTiming, is_duplex: bool, world: tuple[int, int]
) -> None:
    timeline = simulate(random_plan(seed, timing, is_duplex=is_duplex, world=world))
    assert max(lane.seconds for lane in busy_lanes(timeline)) <= timeline.step_seconds * (1 + 1e-9)


@many
@given(seed=seeds, timing=timings, is_duplex=st.booleans(), world=worlds)
def test_no_step_is_shorter_than_its_bound(
    random_plan: Function, seed: int, timing: StepTiming, is_duplex: bool, world: tuple[int, int]
) -> None:
    plan = random_plan(seed, timing, is_duplex=is_duplex, world=world)
    timeline = simulate(plan)
    assert 0 < least_seconds(plan).step <= timeline.step_seconds
    takes = any(route.takes_of_compute for route in plan.hardware.routes)  # they make compute's lane longer
    if timing is StepTiming.SYNCHRONOUS and not takes:  # otherwise updates on their own lane may be the longest
        assert least_seconds(plan).step >= busy_lanes(timeline)[0].seconds * (1 - 1e-8)


@many
@given(seed=seeds, timing=timings, is_duplex=st.booleans(), world=worlds, share=st.floats(0.1, 1.5))
def test_a_step_that_is_too_long_is_found_to_be(
    random_plan: Function, seed: int, timing: StepTiming, is_duplex: bool, world: tuple[int, int], share: float
) -> None:
    plan = random_plan(seed, timing, is_duplex=is_duplex, world=world)
    seconds = simulate(plan).step_seconds
    for allowed in (share * seconds, seconds):
        found = simulate_within(plan, allowed, least_seconds(plan).after_forward)
        assert (found is None) == (allowed < seconds)
        assert found is None or found.step_seconds == seconds


@many
@given(seed=seeds, timing=timings)
def test_bytes_by_role_are_the_bytes_of_the_tier(random_plan: Function, seed: int, timing: StepTiming) -> None:
    plan = random_plan(seed, timing)
    timeline = simulate(plan)
    device = plan.tier(Tier.DEVICE)
    for tier in Tier:
        points = memory_by_role(timeline, tier)
        assert points[0].seconds == 0
        assert [point.seconds for point in points] == sorted(point.seconds for point in points)
        totals = [sum(nbytes for _, nbytes in point.nbytes) for point in points]
        assert max(totals) == live_set(timeline, tier).nbytes == plan.tier(tier).predicted_peak
        if tier is not Tier.DEVICE:
            assert set(totals) == {plan.tier(tier).predicted_peak}
        else:
            held = {device.predicted_peak - plan.activations.peak_nbytes + span.peak_nbytes for span in plan.spans}
            assert set(totals) == held | {device.predicted_peak - plan.activations.peak_nbytes}
        if not any(nbytes < 0 for point in points for _, nbytes in point.nbytes):
            continue
        raise AssertionError(points)


def make_faster(plan: Plan, factor: float) -> Plan:
    """Return the plan with all routes ``factor`` times as fast."""
    routes = tuple(
        replace(
            route,
            bytes_per_second=factor * route.bytes_per_second,
            latency_seconds=route.latency_seconds / factor,
        )
        for route in plan.hardware.routes
    )
    return replace(plan, hardware=replace(plan.hardware, routes=routes))


@many
@given(seed=seeds, factor=st.floats(1, 8), is_duplex=st.booleans(), route=st.integers(0, 5))
def test_a_faster_route_makes_no_step_slower(
    random_plan: Function, seed: int, factor: float, is_duplex: bool, route: int
) -> None:
    """If compute issues every transfer, each lane serves in an order independent of rates, so nothing can get later."""
    plan = random_plan(seed, StepTiming.SYNCHRONOUS, is_duplex=is_duplex)
    routes = plan.hardware.routes
    one = (*routes[:route], make_faster(plan, factor).hardware.routes[route], *routes[route + 1 :])
    for faster in (make_faster(plan, factor), replace(plan, hardware=replace(plan.hardware, routes=one))):
        assert simulate(faster).step_seconds <= simulate(plan).step_seconds * (1 + 1e-9)
