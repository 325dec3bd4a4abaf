"""The exact solver finds the same optimum as brute force, and no plan is faster than its bound."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.oracles.exact import plan_exactly
from tests.support.examples import examples
from zinf_compile.ir.errors import CapacityError, ConfigError
from zinf_compile.ir.facts import GradientFact, GraphFacts, ValueFact
from zinf_compile.ir.glossary import LiveRange, Phase, Tier
from zinf_compile.ir.plan import Placement, Plan
from zinf_compile.passes.planner.placement.homes import count_placed, plan_placement
from zinf_compile.passes.planner.schedule.prefetch import Residency, ResidencyPlanner, bind_transfers
from zinf_compile.passes.planner.search.build import Choice, Homes, LookAhead, PlanBuilder, Request
from zinf_compile.passes.planner.search.planner import make_plan, minimum_device_memory
from zinf_compile.passes.planner.search.verify import verify_plan
from zinf_compile.passes.planner.simulator.simulate import simulate

pytest.importorskip("scipy", reason="scipy, of the extra dev, is not in this environment: make setup")
Function = Callable[..., Any]
MIB = 2**20
PAGE = 4096
ROUNDING = 1e-6  # relative tolerance of the solver's constraints and optimum
ALONE = LookAhead(prefetch_nbytes=0, group_nbytes=0)


def with_options(request: Request, **options: object) -> Request:
    return replace(request, config=replace(request.config, **options))


def all_homes(parameter: Placement) -> Iterator[Placement]:
    """Yield every assignment of the copies of a parameter to tiers."""
    roles = tuple(parameter.by_role)
    for homes in product(Tier, repeat=len(roles)):
        yield parameter.moved(dict(zip(roles, homes, strict=True)))


def all_issues(graph: GraphFacts, residencies: Sequence[Residency]) -> Iterator[tuple[int, ...]]:
    """Yield every set of ticks at which the transfers could be issued."""
    half = graph.schedule.ticks(Phase.FORWARD).stop
    starts = [0 if item.need_by < half else half for item in residencies]
    yield from product(*(range(start, item.need_by + 1) for start, item in zip(starts, residencies, strict=True)))


def all_plans(request: Request, graph: GraphFacts) -> Iterator[Plan]:
    """Yield every plan that fits, over all homes and issue ticks, with one transfer per parameter."""
    builder = PlanBuilder(request, graph)
    for placements in product(*map(all_homes, plan_placement(request.parameters, request.config))):
        residencies = ResidencyPlanner(graph, request.parameters).plan(placements, group_nbytes=0)
        for issues in all_issues(graph, residencies):
            homes = Homes(placed=count_placed(placements), moved=bind_transfers(residencies, issues))
            plan = builder.build_with(homes, Choice(look_ahead=ALONE))
            if plan is None:
                continue
            # Placement leaves the staging share of the host free, even if nothing is staged.
            on_host = sum(item.nbytes_on(Tier.HOST) for item in placements)
            has_homes = on_host <= request.config.host_memory - request.config.staging_memory
            if has_homes and all(tier.capacity is None or tier.predicted_peak <= tier.capacity for tier in plan.tiers):
                yield plan


@pytest.fixture
def tiny(parameter: Function, graph: Function, request_of: Function) -> Callable[..., Request]:
    """Return ``tiny(sizes, device, host)``: a request whose layers are each read once in forward and once in backward."""

    def make(sizes: Sequence[int], *, device: int, host: int, num_states: int = 0) -> Request:
        parameters = tuple(
            parameter(f"layers.{index}.weight", size // 4, num_states=num_states, trainable=num_states > 0)
            for index, size in enumerate(sizes)
        )
        last = 4 * len(sizes) - 1
        facts = graph(
            {item.name: [2 * index + 1, last - 2 * index] for index, item in enumerate(parameters)},
            num_forward_ticks=2 * len(sizes),
            num_ticks=last + 1,
            gradients=[
                GradientFact(parameter=item.name, tick=last - 2 * index, nbytes=item.gradient_nbytes)
                for index, item in enumerate(parameters)
                if item.trainable
            ],
        )
        template: Request = request_of(0)
        config = replace(template.config, compute_dtype=None, overlap_step=False, host_memory=host)
        request = replace(template, candidates=(facts,), parameters=parameters, config=config)
        floor = PlanBuilder(request, facts).floor_nbytes
        return with_options(request, device_memory=floor + device)

    return make


@pytest.mark.parametrize(
    ("sizes", "device", "host", "num_states"),
    [
        ((4 * MIB, 4 * MIB), 4 * MIB, 0, 0),  # one after the other
        ((4 * MIB, 4 * MIB), 8 * MIB, 0, 0),  # both fit: nothing moves
        ((MIB, 3 * MIB), 4 * MIB - PAGE, 0, 0),
        ((2 * MIB, 4 * MIB), 5 * MIB, 8 * MIB, 0),  # one is resident, the other is gathered from the host
        # The second can be on the device together with the first or the last. Trying everything for three takes a while.
        pytest.param((2 * MIB, MIB, 2 * MIB), 3 * MIB, 0, 0, marks=pytest.mark.long),
        pytest.param((MIB, 2 * MIB, 2 * MIB), 4 * MIB, 4 * MIB, 0, marks=pytest.mark.long),
        ((MIB,), MIB, 4 * MIB, 1),  # fits what the step moves, or what gathers and gradients move
        ((4 * MIB,), 16 * MIB, 12 * MIB, 1),
    ],
)
def test_it_finds_what_trying_everything_finds(
    tiny: Function, sizes: tuple[int, ...], device: int, host: int, num_states: int
) -> None:
    request = tiny(sizes, device=device, host=host, num_states=num_states)
    (graph,) = request.candidates
    best = min(simulate(plan).step_seconds for plan in all_plans(request, graph))
    exact = plan_exactly(request, graph)
    assert exact is not None
    assert exact.is_optimal
    assert exact.bound_seconds == pytest.approx(best, rel=ROUNDING)
    assert exact.plan is not None
    verify_plan(exact.plan)
    assert simulate(exact.plan).step_seconds == pytest.approx(best, rel=ROUNDING)


@examples(24)
@given(
    seed=st.integers(0, 10**6),
    host=st.sampled_from((MIB, 4 * MIB, 64 * MIB)),
    share=st.floats(1, 4),
)
def test_no_plan_is_faster_than_the_bound(request_of: Function, seed: int, host: int, share: float) -> None:
    request = with_options(request_of(seed, host=host), overlap_step=False)
    request = with_options(request, device_memory=int(minimum_device_memory(request) * share))
    found = simulate(make_plan(request)).step_seconds
    # The bound is valid even if time runs out.
    solved = [exact for graph in request.candidates if (exact := plan_exactly(request, graph, seconds=5))]
    bound = min(exact.bound_seconds for exact in solved)
    assert 0 < bound <= found * (1 + ROUNDING)
    for exact in solved:
        if exact.plan is not None:
            verify_plan(exact.plan)
            assert simulate(exact.plan).step_seconds >= exact.bound_seconds * (1 - ROUNDING)
            for tier in exact.plan.tiers:
                assert tier.capacity is None or tier.predicted_peak <= tier.capacity


def test_what_does_not_fit_has_no_exact_plan(tiny: Function) -> None:
    request = tiny((MIB, MIB), device=MIB - PAGE, host=4 * MIB)
    with pytest.raises(CapacityError):
        make_plan(request)
    assert plan_exactly(request, request.candidates[0]) is None


@pytest.mark.parametrize(("options", "ranks"), [({}, 2), ({"overlap_step": True}, 1), ({"step_in_backward": True}, 1)])
def test_refusals(tiny: Function, options: dict[str, bool], ranks: int) -> None:
    request = replace(with_options(tiny((MIB,), device=MIB, host=0), **options), num_ranks=ranks)
    with pytest.raises(ConfigError, match=r"one rank with a synchronous step.*give overlap_step=False"):
        plan_exactly(request, request.candidates[0])


@pytest.mark.parametrize(("room", "leave"), [(4 * MIB, set()), (3 * MIB, {"value_2", "value_6"})])
def test_values_leave_where_there_is_no_room_for_them(
    graph: Function, request_of: Function, room: int, leave: set[str]
) -> None:
    saved = [
        ValueFact(
            name=f"value_{tick}",
            nbytes=MIB,
            live=LiveRange(start=tick, end=40 - tick),
            saved=True,
            idle=LiveRange(start=tick + 1, end=39 - tick),
        )
        for tick in (2, 6)
    ]
    between = ValueFact(name="between", nbytes=2 * MIB, live=LiveRange(start=18, end=22), saved=True)
    facts = graph({}, num_forward_ticks=20, num_ticks=40, values=(*saved, between))
    request = with_options(request_of(0), compute_dtype=None, overlap_step=False, device_memory=room)
    exact = plan_exactly(replace(request, parameters=()), facts)
    assert exact is not None
    assert exact.plan is not None
    verify_plan(exact.plan)
    assert {swap.value for swap in exact.plan.swaps} == leave
    timeline = simulate(exact.plan)
    assert timeline.stalls == ()
    assert timeline.step_seconds == pytest.approx(exact.bound_seconds, rel=ROUNDING)
