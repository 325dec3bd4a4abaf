"""Planning again with measured rates: the new plan is faster at those rates, or the old one is kept."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zinf_compile.hardware.observed import BusyTime, Observed, RouteBytes
from zinf_compile.ir.glossary import Phase
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.search.planner import Request, make_plan, minimum_device_memory
from zinf_compile.passes.planner.search.remake import remake_plan
from zinf_compile.passes.planner.search.verify import verify_plan
from zinf_compile.passes.planner.simulator.simulate import simulate

Function = Callable[..., Any]
MIB = 2**20


def tight(request: Request, share: float = 1.5) -> Request:
    budget = int(minimum_device_memory(request) * share)
    return replace(request, config=replace(request.config, device_memory=budget))


def compute_seconds(plan: Plan) -> float:
    """Return the simulated seconds of forward and backward without stalls."""
    timeline = simulate(plan)
    stalls = sum(stall.seconds for phase in (Phase.FORWARD, Phase.BACKWARD) for stall in timeline.stalls_in(phase))
    return sum(seconds for phase, seconds in timeline.phase_seconds if phase is not Phase.STEP) - stalls


def observe(plan: Plan, *, compute: float = 1.0, disk: float = 1.0, memory: float = 1.0) -> Observed:
    """Return observations in which each part took a multiple of its predicted time."""
    routes = plan.hardware.routes
    return Observed(
        num_steps=3,
        compute_seconds=compute_seconds(plan) * compute,
        step_seconds=1.5,
        moved=tuple(RouteBytes(route.name, 64 * MIB) for route in routes),
        busy=tuple(
            BusyTime((route.name,), 64 * MIB / route.bytes_per_second * (disk if "nvme" in route.name else memory))
            for route in routes
        ),
    )


@examples(40)
@given(
    seed=st.integers(0, 10**6),
    compute=st.sampled_from((0.02, 1.0, 50.0)),
    disk=st.sampled_from((0.05, 1.0, 20.0)),
    memory=st.sampled_from((0.05, 1.0, 20.0)),
)
def test_never_worse_by_what_was_observed(
    request_of: Function, seed: int, compute: float, disk: float, memory: float
) -> None:
    request = tight(request_of(seed, host=8 * MIB))
    plan = make_plan(request)
    candidates = tuple(graph for graph in request.candidates if graph.policy is plan.activations.policy)
    observed = observe(plan, compute=compute, disk=disk, memory=memory)
    remade = remake_plan(plan, replace(request, candidates=candidates), observed)
    verify_plan(remade.plan)
    assert remade == remake_plan(plan, replace(request, candidates=candidates), observed)
    hardware = remade.plan.hardware
    assert remade.request.hardware == hardware
    factor = plan.hardware.flops[0].per_second / hardware.flops[0].per_second
    spans = tuple(replace(span, seconds=span.seconds * factor) for span in plan.spans)
    if remade.is_new:
        kept_seconds = simulate(replace(plan, hardware=hardware, spans=spans)).step_seconds
        assert simulate(remade.plan).step_seconds < 0.971 * kept_seconds
        assert remade.plan.activations.policy is plan.activations.policy
    else:  # the same plan, with predictions at the measured rates
        assert [span.seconds for span in remade.plan.spans] == pytest.approx([span.seconds for span in spans])
        same = replace(remade.plan, hardware=plan.hardware, spans=plan.spans, notes=plan.notes)
        assert same == plan
        assert remade.plan.notes == (*plan.notes, f"{remade.sentence}.")


def test_with_times_as_predicted_the_plan_stays(request_of: Function) -> None:
    request = tight(request_of(8, host=8 * MIB))
    plan = make_plan(request)
    remade = remake_plan(plan, request, observe(plan))
    assert not remade.is_new
    assert simulate(remade.plan).step_seconds == pytest.approx(simulate(plan).step_seconds)
    assert "its plan stays after step 3: predicted" in remade.sentence


def test_predicted_compute_becomes_what_was_observed(request_of: Function) -> None:
    request = request_of(8, host=8 * MIB)
    everything = replace(request, config=replace(request.config, device_memory=512 * MIB))
    plan = make_plan(everything)
    remade = remake_plan(plan, everything, observe(plan, compute=3.0))
    assert not remade.is_new, "everything is resident, so there is no other plan to search for"
    assert compute_seconds(remade.plan) == pytest.approx(3.0 * compute_seconds(plan), rel=1e-6)


def test_a_disk_that_is_slow_after_all_makes_another_plan(request_of: Function) -> None:
    request = tight(request_of(8, host=8 * MIB))
    plan = make_plan(request)
    remade = remake_plan(plan, request, observe(plan, disk=20.0))
    assert remade.is_new
    assert remade.plan.placements != plan.placements
    assert "planned again after step 3: predicted 0.00683 s, measured 1.5 s, 0.041 s by measured rates; new plan" in (
        remade.sentence
    )
    kept = replace(plan, hardware=remade.plan.hardware)  # ops take as long as predicted
    assert simulate(remade.plan).step_seconds < 0.97 * simulate(kept).step_seconds
