"""Stages of about equal work are dealt out to ranks in turn."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zinf_compile.ir.errors import ConfigError
from zinf_compile.passes.planner.schedule.rounds import Deal, Dealt, deal_stages


def model(sizes: list[int], *, embedding: int = 0, head: int = 0) -> list[Dealt]:
    """Return the parameters of a model with blocks of these sizes."""
    blocks = [Dealt(f"blocks.{number}.weight", f"blocks.{number}", size) for number, size in enumerate(sizes)]
    return [
        *([Dealt("embed", "", embedding)] if embedding else []),
        *blocks,
        *([Dealt("head", "", head)] if head else []),
    ]


def test_equal_blocks_go_round() -> None:
    deal = deal_stages(model([10] * 6), 3)
    assert deal.stages == tuple((f"blocks.{number}.weight",) for number in range(6))
    assert deal.owners == {f"blocks.{number}.weight": number % 3 for number in range(6)}
    assert deal.efficiency == 6 / 8 == efficiency_of([10] * 6, 3)  # the last rank waits for two stages


def test_what_comes_first_is_in_the_first_stage_and_what_comes_last_is_a_stage_of_its_own() -> None:
    deal = deal_stages(model([10, 10, 10], embedding=1000, head=10), 2)
    assert deal.stages[0] == ("embed", "blocks.0.weight")
    assert deal.stages[-1] == ("head",)


def test_a_small_head_is_where_a_pass_is_shorter() -> None:
    apart, joined = efficiency_of([10, 10, 10, 10, 1], 2), efficiency_of([10, 10, 10, 11], 2)
    assert apart > joined
    assert deal_stages(model([10] * 4, head=1), 2).efficiency == apart


def test_there_are_as_few_stages_as_make_a_pass_as_short() -> None:
    deal = deal_stages(model([1, 1, 1, 1, 4, 4]), 2)
    assert [len(stage) for stage in deal.stages] == [4, 1, 1]
    assert deal.efficiency == efficiency_of([1, 1, 1, 1, 4, 4], 2)


def efficiency_of(stages: list[int], num_ranks: int) -> float:
    """Return the share of their time in which ranks work, from the end of each stage of each batch."""
    ends: dict[tuple[int, int], float] = {}
    busy = [0.0] * num_ranks
    for stage, size in enumerate(stages):
        for batch in range(num_ranks):
            begin = max(busy[stage % num_ranks], ends.get((stage - 1, batch), 0.0))
            busy[stage % num_ranks] = ends[stage, batch] = begin + size
    return sum(stages) / max(busy)


def test_fewer_blocks_than_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="deals blocks of the model out to 4 ranks, and it has 3"):
        deal_stages(model([10] * 3), 4)


@examples(40)
@given(seed=st.integers(0, 10**6))
def test_every_parameter_is_in_one_stage_and_the_order_is_kept(seed: int) -> None:
    generator = random.Random(seed)
    sizes = [generator.randint(1, 50) for _ in range(generator.randint(2, 14))]
    parameters = model(sizes, embedding=generator.randint(0, 1) * 30, head=generator.randint(0, 60))
    num_ranks = generator.randint(2, len(sizes))
    deal: Deal = deal_stages(parameters, num_ranks)
    assert [name for stage in deal.stages for name in stage] == [each.name for each in parameters]
    assert num_ranks <= len(deal.stages)
    assert all(deal.stages)
    work = [
        sum(each.num_elements for each in parameters if each.name in stage and each.name != "embed")
        for stage in deal.stages
    ]
    assert deal.efficiency == pytest.approx(efficiency_of(work, num_ranks))
    assert deal.efficiency >= efficiency_of(sizes, num_ranks) - 1e-9 or parameters[-1].name == "head"
