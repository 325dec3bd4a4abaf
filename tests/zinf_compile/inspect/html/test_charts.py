"""The charts match the simulation: bytes by role, peaks, and the busy seconds of every lane."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from zinf_compile.inspect.html.lane_bars import GAPS, MAX_BARS, Bar, Kind, collect_bars, merge_bars
from zinf_compile.inspect.html.lanes_chart import draw_lanes, tell_merging
from zinf_compile.inspect.html.memory_chart import NUM_MOMENTS, draw_memory, thin_out
from zinf_compile.inspect.html.palette import ROLE_COLORS, role_name
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.timeline import COMPUTE_LANE
from zinf_compile.passes.planner.simulator.memory import memory_by_role
from zinf_compile.passes.planner.simulator.simulate import simulate

GIB = 2**30


def test_the_areas_of_a_tier_reach_its_peak(layered_plan: Plan) -> None:
    timeline = simulate(layered_plan)
    figure = draw_memory(timeline, layered_plan.tier(Tier.DEVICE))
    areas = [trace for trace in figure.data if trace.stackgroup]
    tops = [sum(sizes) for sizes in zip(*(area.y for area in areas), strict=True)]
    peak = layered_plan.tier(Tier.DEVICE).predicted_peak
    assert max(tops) == pytest.approx(peak / GIB)
    (marker,) = (trace for trace in figure.data if trace.name == "peak")
    assert (marker.x[0], marker.y[0]) == (timeline.seconds_at(layered_plan.activations.peak_tick), peak / GIB)
    (budget,) = (shape for shape in figure.layout.shapes if shape.line.dash == "dash")
    assert budget.y0 == 2.0
    assert {area.fillcolor for area in areas} <= set(ROLE_COLORS.values())
    assert {area.name for area in areas} == {"parameter", "activation", "reserve"}


def test_a_budget_that_would_flatten_the_chart_is_not_on_it(layered_plan: Plan) -> None:
    figure = draw_memory(simulate(layered_plan), layered_plan.tier(Tier.HOST))
    assert not [shape for shape in figure.layout.shapes if shape.line.dash == "dash"]


@pytest.mark.parametrize("num_layers", [4, 200])
def test_thinning_keeps_the_peak_and_stays_small(make_plan: Callable[..., Plan], num_layers: int) -> None:
    timeline = simulate(make_plan(num_layers, ticks_per_layer=10))
    points = memory_by_role(timeline, Tier.DEVICE)
    thin = thin_out(points, timeline.step_seconds)
    sums = [[sum(nbytes for _, nbytes in point.nbytes) for point in each] for each in (points, thin)]
    assert max(sums[0]) == max(sums[1])
    assert len(thin) <= NUM_MOMENTS + 1
    assert all(before.seconds < after.seconds for before, after in pairwise(thin))


def test_bars_are_the_events(small_plan: Plan) -> None:
    timeline = simulate(small_plan)
    shown = collect_bars(timeline)
    assert shown.lanes[0] == COMPUTE_LANE
    assert {(bar.lane, bar.first, bar.start_seconds, bar.end_seconds) for bar in shown.bars} == {
        (event.lane, event.name, event.start_seconds, event.end_seconds)
        for event in (*timeline.events, *timeline.stalls)
    }
    assert tell_merging(shown) == f"All {shown.num_events} events of the step are drawn one by one."


def test_bars_have_the_colours_of_roles(swapping_plan: Plan) -> None:
    figure, _ = draw_lanes(simulate(swapping_plan))
    colors = {trace.name: trace.marker.color for trace in figure.data}
    assert colors.keys() == {"compute", "stall: compute waits", *(map(role_name, list(ROLE_COLORS)[:4]))}
    for role in list(ROLE_COLORS)[:4]:
        assert colors[role_name(role)] == ROLE_COLORS[role]
    assert len(set(colors.values())) == len(colors)


def test_merged_bars_keep_every_second_and_byte(make_plan: Callable[..., Plan]) -> None:
    timeline = simulate(make_plan(300))
    shown = collect_bars(timeline)
    busy: dict[tuple[str, bool], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in timeline.events:
        busy[event.lane, False][0] += event.seconds
    for stall in timeline.stalls:
        busy[stall.lane, True][0] += stall.seconds
    for bar in shown.bars:
        busy[bar.lane, bar.kind.is_stall][1] += bar.busy_seconds
    for events, bars in busy.values():
        assert bars == pytest.approx(events)
    assert sum(bar.nbytes for bar in shown.bars) == sum(event.nbytes for event in timeline.events)
    assert sum(bar.num_events for bar in shown.bars) == shown.num_events
    assert len(shown.bars) < shown.num_events
    assert tell_merging(shown).startswith(f"The {shown.num_events:,} events of the step are drawn as")


def make_bars(num_bars: int, *, name: str = "layers.{block}.w{index}", gap: float = 0.0) -> list[Bar]:
    kind = Kind(None)
    return [
        Bar(
            lane="compute",
            kind=kind,
            first=name.format(block=index // 10, index=index),
            last=name.format(block=index // 10, index=index),
            start_seconds=index * (1 + gap),
            end_seconds=index * (1 + gap) + 1,
            busy_seconds=1.0,
            nbytes=0,
            num_events=1,
        )
        for index in range(num_bars)
    ]


def test_blocks_are_merged_first() -> None:
    assert len(merge_bars(make_bars(MAX_BARS), gap=0.5)) == MAX_BARS
    merged = merge_bars(make_bars(2000), gap=0.5)
    assert len(merged) == 200
    assert (merged[1].first, merged[1].last, merged[1].busy_seconds) == ("layers.1.w10", "layers.1.w19", 10.0)
    assert len(merge_bars(make_bars(8000), gap=0.5)) == 1  # too many blocks: merged by kind


def test_bars_that_are_apart_stay_apart() -> None:
    assert len(merge_bars(make_bars(2000, gap=0.6), gap=0.5)) == 2000


def test_a_lane_has_a_bounded_number_of_bars() -> None:
    """Bars are merged across kinds if kinds alternate: remaining bars are further apart than a share of the step."""
    bars = [replace(bar, kind=Kind(None, is_stall=index % 2 == 0)) for index, bar in enumerate(make_bars(5000))]
    (merged,) = merge_bars(bars, gap=bars[-1].end_seconds / GAPS)
    assert (merged.num_events, merged.busy_seconds) == (5000, 5000.0)
