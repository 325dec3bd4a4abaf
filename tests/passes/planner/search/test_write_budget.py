"""``nvme_write_budget``: plans that would wear the disk out sooner are not chosen, or refused with a number that works."""

import re
from dataclasses import replace

import pytest

from tests.passes.planner.search.test_updates_ahead import request_of
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.search.planner import Request, check_fits, does_fit, make_plan
from zinf_compile.passes.planner.simulator.simulate import simulate
from zinf_compile.passes.planner.simulator.summary import measure_wear

SEEDS = range(6)


def request_with(seed: int, budget: int | None) -> Request:
    request = request_of(seed)
    config = replace(request.config, device_memory=request.config.device_memory * 3 // 2, nvme_write_budget=budget)
    return replace(request, config=config)


def written_per_day(plan: Plan) -> float:
    return measure_wear(simulate(plan)).nbytes_per_day


@pytest.fixture(scope="module")
def unlimited() -> dict[int, Plan]:
    return {seed: make_plan(request_with(seed, None)) for seed in SEEDS}


def test_a_plan_that_writes_less_is_chosen(unlimited: dict[int, Plan]) -> None:
    num_other = 0
    for seed, plan in unlimited.items():
        budget = int(0.9 * written_per_day(plan))
        if not does_fit(request_with(seed, budget)):
            continue
        limited = make_plan(request_with(seed, budget))
        assert written_per_day(limited) <= budget
        num_other += 1
    assert num_other >= 2


def test_a_budget_that_is_no_limit_changes_nothing(unlimited: dict[int, Plan]) -> None:
    for seed, plan in unlimited.items():
        assert make_plan(request_with(seed, int(1e18))) == plan


def test_what_no_plan_keeps_is_refused_with_a_budget_that_one_does(unlimited: dict[int, Plan]) -> None:
    for seed in SEEDS:
        request = request_with(seed, 10**9)
        assert not does_fit(request)
        with pytest.raises(CapacityError) as caught:
            check_fits(request)
        message = re.fullmatch(
            r"nvme_write_budget is 953\.\d MiB per day, and the plan that writes the least writes .* per step, .* per day "
            r"of such steps; raise it to '(\d+)GB/day', raise host_memory, or let a step have more tokens",
            str(caught.value),
        )
        assert message is not None, str(caught.value)
        enough = int(message[1]) * 10**9
        assert written_per_day(make_plan(request_with(seed, enough))) <= enough
        assert enough <= 1.01 * written_per_day(unlimited[seed]) + 10**9
