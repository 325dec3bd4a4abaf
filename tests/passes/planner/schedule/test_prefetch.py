"""Which parameters move together, how long they stay, and how far ahead of compute they are issued."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from zinf_compile.ir.config import Config
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.glossary import Phase, Tier
from zinf_compile.ir.plan import Placement
from zinf_compile.passes.planner.placement.homes import plan_placement
from zinf_compile.passes.planner.schedule.prefetch import (
    MadeTransfers,
    Residency,
    ResidencyPlanner,
    bind_transfers,
    plan_transfers,
)

Function = Callable[..., Any]
ELEMENTS = 25_600  # 100 KiB, 25 pages: too large to be resident as a small parameter
NBYTES = 4 * ELEMENTS
NO_DEVICE = Config(device_memory=0, host_memory=2**30, nvme=None, nvme_memory=None)


def place(parameters: Sequence[ParameterFact]) -> tuple[Placement, ...]:
    placements = plan_placement(parameters, NO_DEVICE)
    assert {placement.compute for placement in placements} == {Tier.HOST}
    return placements


def spell(residencies: Sequence[Residency]) -> list[tuple[str, tuple[str, ...], int, int]]:
    return [(item.name, item.parameters, item.need_by, item.release) for item in residencies]


def test_parameters_of_one_block_move_together(parameter: Function, graph: Function) -> None:
    names = ["layers.0.up", "layers.0.down", "layers.1.up"]
    parameters = [parameter(name, ELEMENTS) for name in names]
    facts = graph({"layers.0.up": [1], "layers.0.down": [2], "layers.1.up": [3]}, num_forward_ticks=4, num_ticks=4)
    residencies = ResidencyPlanner(facts, parameters).plan(place(parameters), group_nbytes=2 * NBYTES)
    assert spell(residencies) == [
        ("layers.0", ("layers.0.up", "layers.0.down"), 1, 3),
        ("layers.1.up", ("layers.1.up",), 3, 4),
    ]
    assert [item.nbytes for item in residencies] == [2 * NBYTES, NBYTES]


def test_a_group_is_no_larger_than_asked_for(parameter: Function, graph: Function) -> None:
    parameters = [parameter(f"layers.0.{name}", ELEMENTS) for name in "abc"]
    facts = graph({item.name: [1] for item in parameters}, num_forward_ticks=2, num_ticks=2)
    for group_nbytes, sizes in ((0, [1, 1, 1]), (2 * NBYTES, [2, 1]), (3 * NBYTES, [3])):
        residencies = ResidencyPlanner(facts, parameters).plan(place(parameters), group_nbytes=group_nbytes)
        assert sorted((len(item.parameters) for item in residencies), reverse=True) == sizes


def test_phases_are_residencies_of_their_own(parameter: Function, graph: Function) -> None:
    parameters = [parameter("up.weight", ELEMENTS)]
    facts = graph({"up.weight": [3, 4]}, num_forward_ticks=4, num_ticks=8)
    residencies = ResidencyPlanner(facts, parameters).plan(place(parameters), group_nbytes=0)
    assert [(item.phase, item.need_by, item.release) for item in residencies] == [
        (Phase.FORWARD, 3, 4),
        (Phase.BACKWARD, 4, 5),
    ]


@pytest.mark.parametrize(("num_between", "stretches"), [(0, [(1, 9)]), (1, [(1, 9)]), (2, [(1, 2), (8, 9)])])
def test_a_parameter_used_again_is_held_unless_two_others_come_in_between(
    parameter: Function, graph: Function, num_between: int, stretches: list[tuple[int, int]]
) -> None:
    parameters = [parameter(f"w{index}.weight", ELEMENTS) for index in range(3)]
    uses = {"w0.weight": [1, 8], **{f"w{index}.weight": [2 * index + 1] for index in range(1, num_between + 1)}}
    facts = graph(uses, num_forward_ticks=10, num_ticks=10)
    residencies = ResidencyPlanner(facts, parameters).plan(place(parameters), group_nbytes=0)
    assert [(item.need_by, item.release) for item in residencies if item.name == "w0.weight"] == stretches


def test_what_was_needed_before_comes_in_between_like_what_was_not(parameter: Function, graph: Function) -> None:
    """Every piece of a chain reads all tiles in order. Holding them for the next piece would hold the whole parameter."""
    parameters = [parameter(f"w{index}.weight", ELEMENTS) for index in range(4)]
    uses = {item.name: [index, 4 + index, 8 + index] for index, item in enumerate(parameters)}
    facts = graph(uses, num_forward_ticks=12, num_ticks=12)
    residencies = ResidencyPlanner(facts, parameters).plan(place(parameters), group_nbytes=0)
    assert [(item.need_by, item.release) for item in residencies] == [(tick, tick + 1) for tick in range(12)]


def test_residents_and_what_is_not_read_do_not_move(parameter: Function, graph: Function) -> None:
    parameters = [parameter("small.bias", 16), parameter("unread.weight", ELEMENTS), parameter("read.weight", ELEMENTS)]
    config = Config(device_memory=2**20, host_memory=2**30, nvme=None, nvme_memory=None)
    facts = graph({"small.bias": [1], "read.weight": [1]}, num_forward_ticks=2, num_ticks=2)
    residencies = ResidencyPlanner(facts, parameters).plan(plan_placement(parameters, config), group_nbytes=2**30)
    assert [item.parameters for item in residencies] == [("read.weight",)]


def _chain(parameter: Function, graph: Function, length: int) -> tuple[Residency, ...]:
    """Return the residencies of parameters that are read in sequence, in forward and then backward, two ticks each."""
    parameters = [parameter(f"w{index}.weight", ELEMENTS) for index in range(length)]
    last = 4 * length - 1
    uses = {item.name: [2 * index + 1, last - 2 * index] for index, item in enumerate(parameters)}
    facts = graph(uses, num_forward_ticks=2 * length, num_ticks=4 * length)
    return ResidencyPlanner(facts, parameters).plan(place(parameters), group_nbytes=0)


@pytest.mark.parametrize("num_ahead", [0, 1, 2, 4])
def test_transfers_run_no_further_ahead_than_allowed(parameter: Function, graph: Function, num_ahead: int) -> None:
    residencies = _chain(parameter, graph, 6)
    plan = plan_transfers(residencies, prefetch_nbytes=num_ahead * NBYTES)
    half = 12  # ticks of forward
    for transfer in plan.gathers:
        alike = [item for item in plan.gathers if (item.issue < half) == (transfer.issue < half)]
        before = [item for item in alike if item.need_by < transfer.need_by]
        ahead = [item for item in before if item.need_by > transfer.issue]  # issued by then, and not yet needed
        if transfer.issue < transfer.need_by:
            assert sum(item.nbytes for item in ahead) + transfer.nbytes <= num_ahead * NBYTES
        assert transfer.need_by - transfer.issue == 2 * min(num_ahead, len(before))
    assert plan.arena_nbytes == min(num_ahead + 1, 6) * NBYTES


def test_no_transfer_is_issued_in_another_phase(parameter: Function, graph: Function) -> None:
    residencies = _chain(parameter, graph, 4)
    plan = plan_transfers(residencies, prefetch_nbytes=2**30)
    assert {item.need_by >= 8 for item in plan.gathers if item.issue >= 8} == {True}
    assert {item.need_by < 8 for item in plan.gathers if item.issue < 8} == {True}


def test_parameters_of_a_transfer_lie_in_pages_of_their_own(parameter: Function, graph: Function) -> None:
    parameters = [parameter("layers.0.up", ELEMENTS + 1), parameter("layers.0.down", ELEMENTS)]
    facts = graph({item.name: [1] for item in parameters}, num_forward_ticks=2, num_ticks=2)
    residencies = ResidencyPlanner(facts, parameters).plan(place(parameters), group_nbytes=2**30)
    plan = plan_transfers(residencies, prefetch_nbytes=0)
    (transfer,) = plan.gathers
    assert transfer.offsets == (0, NBYTES + 4096)
    assert transfer.nbytes == plan.arena_nbytes == 2 * NBYTES + 4096


def test_transfers_that_two_plans_have_in_common_are_the_same_object(parameter: Function, graph: Function) -> None:
    parameters = [parameter(f"layers.{index}.up", ELEMENTS) for index in range(3)]
    facts = graph({item.name: [index] for index, item in enumerate(parameters)}, num_forward_ticks=3, num_ticks=3)
    residencies = ResidencyPlanner(facts, parameters).plan(place(parameters), group_nbytes=0)
    made = MadeTransfers()
    first, second = (bind_transfers(residencies, issues, made=made).gathers for issues in ([0, 1, 2], [0, 0, 2]))
    assert [one is other for one, other in zip(first, second, strict=True)] == [True, False, True]
    assert second == bind_transfers(residencies, [0, 0, 2]).gathers
