"""Updates ahead of ``step()`` are planned where the disk would be late otherwise, within its budget, and verified."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner_inputs import make_request
from zinf_compile.ir.errors import CapacityError, VerifyError
from zinf_compile.ir.glossary import Phase, StepTiming, Tier
from zinf_compile.ir.hardware import Rate
from zinf_compile.ir.plan import Plan, TierPart
from zinf_compile.passes.planner.search.planner import Request, make_plan, minimum_device_memory
from zinf_compile.passes.planner.search.search import EQUALLY_FAST
from zinf_compile.passes.planner.search.updates_ahead import _in_order_of_gradients, updates_to_compare
from zinf_compile.passes.planner.search.verify import verify_plan
from zinf_compile.passes.planner.simulator.bound import least_seconds
from zinf_compile.passes.planner.simulator.simulate import simulate

SEEDS = range(30)
HOST = 2**20
FLOPS = 1e9


def request_of(seed: int, **options: Any) -> Request:
    """Return the request of a random model in little memory, with a disk that needs about as long as compute."""
    request = make_request(seed, host=HOST)
    slow = replace(request.hardware, flops=(Rate(name="float32", per_second=FLOPS),), memory_bytes_per_second=FLOPS)
    request = replace(request, hardware=slow)
    tight = replace(request, config=replace(request.config, device_memory=minimum_device_memory(request)))
    return replace(tight, config=replace(tight.config, **{"speculate": None, **options}))


def without(plan: Plan) -> Plan:
    """Return a plan without updates ahead of the step."""
    tiers = tuple(
        replace(
            tier,
            predicted_peak=tier.predicted_peak - tier.nbytes_of(TierPart.SHADOWS),
            parts=tuple(part for part in tier.parts if part[0] != TierPart.SHADOWS),
        )
        for tier in plan.tiers
    )
    reloaded = sum(plan.placement(name).reloaded_nbytes(Tier.NVME) for name in plan.step.ahead)
    read, written = plan.step.nbytes_read - reloaded, plan.step.nbytes_written - reloaded
    return replace(plan, step=replace(plan.step, ahead=(), nbytes_read=read, nbytes_written=written), tiers=tiers)


def seconds(plan: Plan) -> float:
    return simulate(plan).step_seconds


@pytest.fixture(scope="module")
def plans() -> dict[int, Plan]:
    return {seed: make_plan(request_of(seed)) for seed in SEEDS}


def test_they_are_planned_where_the_step_is_shorter(plans: dict[int, Plan]) -> None:
    with_some = [plan for plan in plans.values() if plan.step.ahead]
    assert len(with_some) >= 3
    assert len(with_some) < len(plans)  # else the others show nothing
    for plan in plans.values():
        verify_plan(plan)
        assert least_seconds(plan).step <= seconds(plan)
    for plan in with_some:
        assert seconds(without(plan)) > EQUALLY_FAST * seconds(plan)
        shadows = sum(plan.placement(name).shadow_nbytes for name in plan.step.ahead)
        assert plan.tier(Tier.NVME).nbytes_of(TierPart.SHADOWS) == shadows > 0


def test_a_gradient_in_tiles_is_complete_with_its_last_one(plans: dict[int, Plan]) -> None:
    seed, plan = next((seed, plan) for seed, plan in plans.items() if len(plan.step.ahead) > 1)
    alone = without(plan)
    first = min(alone.sinks, key=lambda sink: sink.issue)
    last = replace(first, issue=1 + max(sink.issue for sink in alone.sinks))
    in_tiles = replace(alone, transfers=(*alone.transfers, last))
    assert _in_order_of_gradients(in_tiles)[-1].parameter == first.name
    config = replace(request_of(seed).config, speculate=True)
    (made,) = updates_to_compare(in_tiles, config)
    assert list(made.step.ahead) == sorted(set(made.step.ahead))


def test_speculate_turns_them_off_and_on(plans: dict[int, Plan]) -> None:
    for seed, plan in plans.items():
        never = make_plan(request_of(seed, speculate=False))
        assert never.step.ahead == ()
        assert seconds(plan) <= EQUALLY_FAST * seconds(never)
        assert make_request(seed).config.speculate is None  # the default
        always = make_plan(request_of(seed, speculate=True))
        sunk = {sink.name for sink in always.sinks}
        may = sorted(
            item.parameter for item in always.placements if item.may_update_ahead(Tier.NVME) and item.parameter in sunk
        )
        assert list(always.step.ahead) == may
        verify_plan(always)


@pytest.mark.parametrize("option", [{"overlap_step": False}, {"step_in_backward": True}])
def test_other_steps_have_none(option: dict[str, bool]) -> None:
    plan = make_plan(replace(make_request(0), config=replace(make_request(0).config, speculate=True, **option)))
    assert plan.step.timing is not StepTiming.OVERLAPPED
    assert plan.step.ahead == ()


def test_the_disk_limits_them(plans: dict[int, Plan]) -> None:
    seed, plan = next((seed, plan) for seed, plan in plans.items() if len(plan.step.ahead) > 1)
    taken = without(plan).tier(Tier.NVME).predicted_peak
    shadows = plan.tier(Tier.NVME).nbytes_of(TierPart.SHADOWS)
    budget = taken + shadows - 1
    limited = make_plan(request_of(seed, nvme_memory=budget))
    assert set(limited.step.ahead) < set(plan.step.ahead)
    assert limited.tier(Tier.NVME).predicted_peak <= budget
    verify_plan(limited)
    with pytest.raises(
        CapacityError, match=r"speculate=True .* nvme_memory leaves .*; raise it to \d+MiB, or say speculate='auto'"
    ):
        make_plan(request_of(seed, nvme_memory=budget, speculate=True))


def test_the_search_compares_plans_with_them() -> None:
    """The best plan with updates ahead is not always the best plan without, to which they are added."""
    is_another = []
    for seed in (6, 17, 23):
        request = request_of(seed)
        more = replace(request, config=replace(request.config, device_memory=int(1.3 * request.config.device_memory)))
        plan = make_plan(more)
        never = make_plan(replace(more, config=replace(more.config, speculate=False)))
        assert EQUALLY_FAST * seconds(plan) < seconds(never)
        is_another.append(without(plan) != never)
    assert any(is_another)


def test_what_backward_has_not_ended_waits_for_nobody_but_the_next_forward(plans: dict[int, Plan]) -> None:
    for plan in plans.values():
        if plan.step.ahead:
            phases = dict(simulate(plan).phase_seconds)
            assert phases[Phase.STEP] <= dict(simulate(without(plan)).phase_seconds)[Phase.STEP]


def test_plans_that_lie_are_refused(plans: dict[int, Plan]) -> None:
    plan = next(plan for plan in plans.values() if len(plan.step.ahead) > 1)

    def changed(**step: Any) -> Plan:
        return replace(plan, step=replace(plan.step, **step))

    with pytest.raises(VerifyError, match="not in order"):
        verify_plan(changed(ahead=plan.step.ahead[::-1]))
    with pytest.raises(VerifyError, match="part 'shadows' says"):
        verify_plan(changed(ahead=plan.step.ahead[1:]))
    with pytest.raises(VerifyError, match="'nobody' is updated ahead of step"):
        verify_plan(changed(ahead=(*plan.step.ahead, "nobody")))
    with pytest.raises(VerifyError, match="those of this plan are synchronous"):
        verify_plan(changed(timing=StepTiming.SYNCHRONOUS))


def test_the_newest_whose_gradient_is_home_begins_first() -> None:
    """So what is late is of parameters that the next forward needs last."""
    num_overtaken = 0
    for seed in SEEDS:
        plan = make_plan(request_of(seed, speculate=True))
        timeline = simulate(plan)
        forward = dict(timeline.phase_seconds)[Phase.FORWARD]
        homes = {
            sink.name: max((node.end_seconds for node in timeline.nodes if node.name == sink.label), default=0.0)
            for sink in sorted(plan.sinks, key=lambda sink: sink.issue)
            if sink.name in plan.step.ahead
        }
        begins: dict[str, float] = {}
        for node in timeline.nodes:
            if node.name.startswith("update of ") and node.start_seconds >= forward:
                begins.setdefault(node.name.removeprefix("update of "), node.start_seconds)
        begun = [name for name in homes if name in begins and homes[name] > 0.0]  # the oldest gradient first
        for number, older in enumerate(begun):
            for newer in begun[number + 1 :]:
                if homes[newer] < begins[older]:
                    assert begins[newer] <= begins[older], (seed, older, newer)
                num_overtaken += begins[newer] < begins[older]
    assert num_overtaken > 0
