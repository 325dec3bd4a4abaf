"""Offloaded activations: which are offloaded together, to which tier, and that plans with them are valid and no slower."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zinf_compile.ir.config import Config
from zinf_compile.ir.facts import ValueFact
from zinf_compile.ir.glossary import LiveRange, Tier
from zinf_compile.ir.plan import TierPart
from zinf_compile.ir.transfers import Moved, pair_swaps
from zinf_compile.passes.planner.cost.costs import ops_seconds
from zinf_compile.passes.planner.schedule.leaving import count_resting, leaving_levels, waiting_level
from zinf_compile.passes.planner.schedule.swaps import least_seconds
from zinf_compile.passes.planner.search.planner import make_plan, minimum_device_memory
from zinf_compile.passes.planner.search.search import EQUALLY_FAST, minimum_memory, score_plan, search_front
from zinf_compile.passes.planner.search.verify import verify_plan
from zinf_compile.passes.planner.simulator.simulate import simulate

Function = Callable[..., Any]
KIB, MIB = 2**10, 2**20
# Of random models: a third of them in ``make test``, the others in ``make test-long``.
some_seeds = pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 60), marks=pytest.mark.long)])
ROOMY = Config(device_memory=MIB, host_memory=2**30, nvme="/disk", nvme_memory=None)


def saved(tick: int, nbytes: int = 128 * KIB, *, may_leave: bool = True) -> ValueFact:
    """Return a value computed at a tick of forward, and read at the mirrored tick of backward."""
    idle = LiveRange(start=tick + 1, end=39 - tick)
    return ValueFact(
        name=f"value_{tick}",
        nbytes=nbytes,
        live=LiveRange(start=tick, end=40 - tick),
        saved=True,
        idle=idle if may_leave else None,
    )


@pytest.fixture
def levels(graph: Function, request_of: Function) -> Callable[..., list[dict[str, Tier]]]:
    """Return a function of a config and values that gives the levels: the destination of each offloaded value by name."""

    def find(config: Config, *values: ValueFact) -> list[dict[str, Tier]]:
        facts = graph({}, num_forward_ticks=20, num_ticks=40, values=values)
        found = leaving_levels(facts, config, request_of(0).hardware)
        return [{swap.value: swap.rests_on for swap in pair_swaps(swaps)} for swaps in found]

    return find


def test_half_of_the_bytes_leave_and_then_all_those_idle_the_longest_first(levels: Function) -> None:
    values = [saved(1), saved(2), saved(3), saved(4)]
    first, second = levels(ROOMY, *values)
    assert set(first) == {"value_1", "value_2"}
    assert set(second) == {"value_1", "value_2", "value_3", "value_4"}


def test_what_is_small_or_may_not_leave_stays(levels: Function) -> None:
    assert levels(ROOMY, saved(1, 63 * KIB), saved(2, may_leave=False)) == []
    assert levels(ROOMY, saved(1, 63 * KIB), saved(2)) == [{"value_2": Tier.HOST}]


def test_they_go_to_half_of_the_host_or_else_to_nvme(levels: Function) -> None:
    """Offloads take at most half of the host memory besides staging, and never shrink the staging memory."""
    values = [saved(tick, 256 * KIB) for tick in range(1, 5)]  # 1 MiB
    tight = replace(ROOMY, host_memory=2 * MIB)
    assert {tier for level in levels(tight, *values) for tier in level.values()} == {Tier.NVME}
    assert levels(replace(tight, nvme=None), *values) == []
    assert [len(level) for level in levels(replace(tight, nvme_memory=MIB // 2), *values)] == [2]
    # Of 386 MiB, staging takes 192, and half of the rest is 97. 2 MiB remain if staging is counted twice.
    enough = replace(ROOMY, host_memory=386 * MIB)
    assert {tier for level in levels(enough, *values) for tier in level.values()} == {Tier.HOST}


def test_what_rests_is_taken_from_the_other_tiers_and_staging_stays(graph: Function, request_of: Function) -> None:
    facts = graph({}, num_forward_ticks=20, num_ticks=40, values=[saved(1), saved(2)])
    for config in (ROOMY, replace(ROOMY, host_memory=2 * MIB, nvme_memory=8 * MIB)):
        for swaps in leaving_levels(facts, config, request_of(0).hardware):
            resting = count_resting(swaps)
            left = resting.taken_from(config)
            assert left.staging_memory == config.staging_memory
            assert resting.returned_to(left) == config
            assert resting.host + resting.nvme == sum(swap.nbytes for swap in pair_swaps(swaps))


def test_all_may_leave_one_at_a_time(graph: Function, request_of: Function) -> None:
    """The same values to the same tiers, if that needs another schedule, since links are slower than compute."""
    facts = graph({}, num_forward_ticks=20, num_ticks=40, values=[saved(1), saved(3)])
    given = request_of(0).hardware
    hardware, fast = (
        replace(given, routes=tuple(replace(each, bytes_per_second=rate, latency_seconds=0.0) for each in given.routes))
        for rate in (1.0, 1e18)
    )
    *_, last = leaving_levels(facts, ROOMY, hardware)
    waiting = waiting_level(facts, ROOMY, hardware)
    moves = [{swap.value: swap.rests_on for swap in pair_swaps(swaps)} for swaps in (last, waiting)]
    assert moves == [{"value_1": Tier.HOST, "value_3": Tier.HOST}] * 2
    first = next(swap for swap in pair_swaps(waiting) if swap.value == "value_1")
    assert first.offload.need_by == 3
    assert waiting_level(facts, ROOMY, fast) == ()
    assert waiting_level(facts, replace(ROOMY, nvme=None), hardware, num_forwards=10**6) == ()


@some_seeds
def test_plans_with_less_on_the_device_than_activations_take_are_sound(request_of: Function, seeds: range) -> None:
    """At the smallest budget of random models: the plan verifies, fits, and counts offloaded bytes on their tier."""
    leaving = 0
    for seed in seeds:
        request = replace(request_of(seed), waits_for_activations=bool(seed % 2))
        least = minimum_device_memory(request)
        plain = min(minimum_memory(request, graph) for graph in request.candidates)
        assert least <= plain
        plan = make_plan(replace(request, config=replace(request.config, device_memory=least)))
        verify_plan(plan)
        assert plan.tier(Tier.DEVICE).predicted_peak <= least
        for tier in (Tier.HOST, Tier.NVME):
            assert plan.tier(tier).nbytes_of(TierPart.SWAPPED) == plan.swapped_nbytes(tier)
        assert plan.tier(Tier.HOST).capacity == request.config.host_memory
        graph = next(graph for graph in request.candidates if graph.policy is plan.activations.policy)
        swaps = [each for each in plan.transfers if each.what is Moved.ACTIVATION]
        at_least = least_seconds(graph, swaps, plan.hardware, ops_seconds(graph.ops, plan.hardware))
        assert at_least <= (1 + 1e-9) * simulate(plan).step_seconds
        leaving += bool(plan.swaps)
        assert bool(plan.swaps) or least == plain
    assert leaving > len(seeds) / 6


@some_seeds
def test_no_slower_than_when_all_stay(request_of: Function, seeds: range) -> None:
    faster = 0
    for seed in seeds:
        request = request_of(seed, host=4 * MIB)
        device = int(1.3 * min(minimum_memory(request, graph) for graph in request.candidates))
        request = replace(request, config=replace(request.config, device_memory=device))
        plan = make_plan(request)
        verify_plan(plan)
        nanoseconds = score_plan(plan).nanoseconds
        staying = [found for graph in request.candidates if (found := search_front(request, graph).best) is not None]
        best = min(found.score.nanoseconds for found in staying)
        assert nanoseconds <= EQUALLY_FAST * best
        faster += EQUALLY_FAST * nanoseconds < best
    assert faster > 0
