"""Swaps: a value is offloaded once computed, reloaded as late as is still hidden, and not counted in between."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.facts import GraphFacts, ValueFact, working_set
from zinf_compile.ir.glossary import LiveRange, Tier
from zinf_compile.ir.hardware import Hardware, Rate, make_route
from zinf_compile.ir.transfers import Swap, pair_swaps
from zinf_compile.passes.planner.memory.activations import bind_values, plan_activations
from zinf_compile.passes.planner.memory.arena import align
from zinf_compile.passes.planner.schedule.swaps import least_seconds, plan_swaps, without_swapped

FORWARD, TICKS = 10, 20
PAGE = 4096


def _hardware(*, pages_per_second: float, is_duplex: bool = True, latency_seconds: float = 0.0) -> Hardware:
    """Return a machine that takes a second per op of ``make_graph``, and moves ``pages_per_second`` to and from nvme."""
    pairs = ((Tier.DEVICE, Tier.NVME), (Tier.NVME, Tier.DEVICE), (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE))
    return Hardware(
        name="paper",
        unified=True,
        flops=(Rate(name="float32", per_second=1e6),),
        memory_bytes_per_second=1e9,
        routes=tuple(
            make_route(*pair, pages_per_second * PAGE, latency_seconds=latency_seconds, is_duplex=is_duplex)
            for pair in pairs
        ),
        optimizer_elements_per_second=1.0,
    )


def _saved(name: str, birth: int, idle: tuple[int, int], end: int, *, pages: int = 2) -> ValueFact:
    return ValueFact(
        name=name,
        nbytes=pages * PAGE,
        live=LiveRange(start=birth, end=end),
        saved=True,
        idle=LiveRange(start=idle[0], end=idle[1]),
    )


def _times(swap: Swap) -> tuple[int, ...]:
    offload, reload = swap
    return offload.made_at, offload.need_by, reload.issue, reload.need_by, reload.release


@pytest.fixture
def plan(graph: Callable[..., GraphFacts]) -> Callable[..., tuple[Swap, ...]]:
    """Return ``plan(values, hardware)``, which plans swaps of all values to nvme."""

    def run(values: list[ValueFact], hardware: Hardware) -> tuple[Swap, ...]:
        facts = graph({}, num_forward_ticks=FORWARD, num_ticks=TICKS, values=values)
        return pair_swaps(plan_swaps(facts, {value.name: Tier.NVME for value in values}, hardware))

    return run


def test_a_value_leaves_at_birth_and_comes_back_just_in_time(plan: Callable[..., tuple[Swap, ...]]) -> None:
    value = _saved("x", 2, (4, 15), 18)
    (swap,) = plan([value], _hardware(pages_per_second=1.0))  # two seconds each way: [3, 5) and [13, 15)
    assert _times(swap) == (2, 5, 13, 15, 18)
    assert (swap.nbytes, swap.rests_on) == (2 * PAGE, Tier.NVME)
    (swap,) = plan([value], _hardware(pages_per_second=1.0, latency_seconds=0.5))
    assert _times(swap) == (2, 6, 12, 15, 18)


def test_a_value_that_is_still_read_stays_until_its_last_use(plan: Callable[..., tuple[Swap, ...]]) -> None:
    (swap,) = plan([_saved("x", 2, (8, 15), 18)], _hardware(pages_per_second=1.0))
    assert _times(swap) == (2, 8, 13, 15, 18)


def test_what_cannot_be_hidden_is_as_early_as_may_be(plan: Callable[..., tuple[Swap, ...]]) -> None:
    (swap,) = plan([_saved("x", 7, (8, 11), 12)], _hardware(pages_per_second=0.1))
    assert _times(swap) == (7, FORWARD - 1, FORWARD, 11, 12)


def test_values_take_turns_on_a_lane(plan: Callable[..., tuple[Swap, ...]]) -> None:
    values = [_saved("x", 1, (2, 17), 18), _saved("y", 1, (2, 17), 18), _saved("z", 2, (3, 16), 20)]
    swaps = plan(values, _hardware(pages_per_second=1.0))
    assert {swap.value: (swap.offload.need_by, swap.reload.issue) for swap in swaps} == {
        "x": (4, 15),
        "y": (6, 13),
        "z": (8, 11),
    }


def test_one_at_a_time_each_leaves_before_the_next(graph: Callable[..., GraphFacts]) -> None:
    """And comes back once the one before is read. What forward still reads stays."""
    values = [
        _saved("x", 1, (2, 18), 19),
        _saved("read", 3, (6, 15), 17),
        _saved("y", 4, (5, 13), 14),
        _saved("z", 4, (5, 13), 14),
        _saved("last", 7, (8, 11), 12),
    ]
    facts = graph({}, num_forward_ticks=FORWARD, num_ticks=TICKS, values=values)
    plan = partial(plan_swaps, facts, dict.fromkeys([value.name for value in values], Tier.NVME))
    slow = pair_swaps(plan(_hardware(pages_per_second=0.1), one_at_a_time=True))
    assert {swap.value: (swap.offload.need_by, swap.reload.issue, swap.reload.need_by) for swap in slow} == {
        "x": (3, 15, 18),
        "read": (6, 13, 15),
        "y": (7, 11, 13),
        "z": (7, 11, 13),
        "last": (FORWARD - 1, FORWARD, 11),
    }
    fast = _hardware(pages_per_second=100.0)
    assert plan(fast, one_at_a_time=True) == plan(fast)


@pytest.mark.parametrize(("one_at_a_time", "waited"), [(False, 2.0), (True, 3.0)])
def test_compute_waits_for_what_does_not_leave_or_come_in_time(
    graph: Callable[..., GraphFacts], waited: float, *, one_at_a_time: bool
) -> None:
    values = [_saved("x", 1, (2, 17), 18), _saved("y", 5, (6, 13), 14)]
    facts = graph({}, num_forward_ticks=FORWARD, num_ticks=TICKS, values=values)
    names = dict.fromkeys(("x", "y"), Tier.NVME)
    hardware = _hardware(pages_per_second=0.5)  # four seconds for each of them, and one for each op
    swaps = plan_swaps(facts, names, hardware, one_at_a_time=one_at_a_time)
    assert least_seconds(facts, swaps, hardware, [1.0] * len(facts.ops)) == TICKS + waited


def test_what_rests_in_host_memory_may_be_read_there(graph: Callable[..., GraphFacts]) -> None:
    """Then its reload moves nothing, takes no turn on a lane and no bytes of the arena."""
    values = [_saved("x", 1, (2, 17), 18), _saved("y", 1, (2, 17), 18)]
    facts = graph({}, num_forward_ticks=FORWARD, num_ticks=TICKS, values=values)
    tiers = {"x": Tier.HOST, "y": Tier.NVME}
    planned = plan_swaps(facts, tiers, _hardware(pages_per_second=1.0), in_place=True)
    swaps = {swap.value: swap for swap in pair_swaps(planned)}
    assert _times(swaps["x"])[2:] == (17, 17, 18)
    assert _times(swaps["y"])[2:] == (15, 17, 18)
    assert [swaps[name].reload.stays for name in "xy"] == [True, False]
    assert [swaps[name].reload.destination for name in "xy"] == [Tier.HOST, Tier.DEVICE]
    bound = bind_values(without_swapped(facts, planned), base=0, swaps=planned)
    assert bound.nbytes == 2 * PAGE
    offsets = {swap.value: swap.reload.offsets for swap in pair_swaps(bound.moved(PAGE).swaps)}
    assert offsets == {"x": (), "y": (PAGE,)}


def test_only_values_that_may_leave_are_taken(graph: Callable[..., GraphFacts]) -> None:
    stays = replace(_saved("x", 1, (2, 17), 18), idle=None)
    facts = graph({}, num_forward_ticks=FORWARD, num_ticks=TICKS, values=[stays, _saved("y", 1, (2, 17), 18)])
    hardware = _hardware(pages_per_second=1.0)
    with pytest.raises(VerifyError, match="'x' is no value that can leave the device"):
        plan_swaps(facts, {"x": Tier.HOST, "y": Tier.HOST}, hardware)
    assert plan_swaps(facts, {}, hardware) == ()
    assert without_swapped(facts, ()) == facts


@given(st.data())
def test_what_is_away_is_not_counted_and_shares_no_bytes_when_it_is_back(
    graph: Callable[..., GraphFacts], data: st.DataObject
) -> None:
    values = []
    for index in range(data.draw(st.integers(1, 12))):
        birth = data.draw(st.integers(0, FORWARD - 3))
        idle = (data.draw(st.integers(birth + 1, FORWARD - 1)), data.draw(st.integers(FORWARD, TICKS - 1)))
        end = data.draw(st.integers(idle[1] + 1, TICKS))
        values.append(_saved(f"value_{index}", birth, idle, end, pages=data.draw(st.integers(1, 40))))
    values.append(ValueFact(name="bound", nbytes=2**20, live=LiveRange(start=9, end=16), saved=False, bindable=True))
    facts = graph({}, num_forward_ticks=FORWARD, num_ticks=TICKS, values=values)
    names = data.draw(st.sets(st.sampled_from([value.name for value in values[:-1]])))
    hardware = _hardware(
        pages_per_second=data.draw(st.floats(0.01, 100)), is_duplex=data.draw(st.booleans()), latency_seconds=0.1
    )
    swaps = plan_swaps(facts, {name: data.draw(st.sampled_from((Tier.HOST, Tier.NVME))) for name in names}, hardware)

    pairs = pair_swaps(swaps)
    assert {swap.value for swap in pairs} == names
    by_name = {value.name: value for value in facts.values}
    for swap in pairs:
        value = by_name[swap.value]
        out, left_at, issue, need_by, release = _times(swap)
        assert value.idle is not None
        assert value.live.start == out < value.idle.start <= left_at < FORWARD <= issue <= need_by
        assert (need_by, release) == (value.idle.end, value.live.end)

    left = without_swapped(facts, swaps)
    live = working_set(left.values, TICKS)
    gone = {swap.value: swap.offload.need_by for swap in pairs}
    assert live == [
        sum(
            value.nbytes
            for value in values
            if value.live.start <= tick < min(value.live.end, gone.get(value.name, TICKS))
        )
        for tick in range(TICKS)
    ]
    assert plan_activations(left).saved_nbytes == sum(
        value.nbytes for value in values if value.saved and value.name not in names
    )

    placed = bind_values(left, base=PAGE, swaps=swaps)
    assert [replace(each, offsets=(0,)) if each.is_reload else each for each in placed.swaps] == list(swaps)
    reloads = [swap.reload for swap in pair_swaps(placed.swaps)]
    uses = [(item.offset, align(item.nbytes), item.live) for item in (*placed.values, *reloads)]
    assert len(uses) == len(pairs) + 1
    for index, (offset, nbytes, live_range) in enumerate(uses):
        assert PAGE <= offset <= offset + nbytes <= PAGE + placed.nbytes
        for other, other_nbytes, other_live in uses[:index]:
            assert not live_range.overlaps(other_live) or offset >= other + other_nbytes or other >= offset + nbytes
