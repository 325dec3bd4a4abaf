"""Ranks whose first steps show other rates than planned with: all of them adopt the same new plan, and no bit changes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import zinf_compile
from tests.distributed.workloads import Loop, of_rank, optimize, placements, train_alone, train_step
from tests.parity.test_remade_plan import RIGHT, WRONG, shown_by
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace, assert_same
from zinf_compile.driver import program, session
from zinf_compile.ir.plan_io import plan_to_json
from zinf_compile.runtime.observe import watch
from zinf_compile.runtime.ranks.ranks import Ranks

LOOP = Loop(num_steps=5)


def train_from_wrong_rates(
    options: Mapping[str, Any], seconds: tuple[float, ...]
) -> tuple[Trace, list[str], str, list[int]]:
    """Return the numbers of a rank, why it planned again, its last plan, and how often ranks asked who has seen enough.

    ``seconds`` are those of forward and backward that are enough, by rank.
    """
    asked: list[int] = []
    largest, agree = Ranks.largest, program.agree_on_observed

    def count(ranks: Ranks, what: str, *numbers: int) -> tuple[int, ...]:
        if what == "whether steps are to be measured":
            asked.extend(numbers)
        return largest(ranks, what, *numbers)

    def observe(ranks: Ranks, mine: Any) -> Any:
        assert agree(ranks, mine).num_steps == mine.num_steps
        return agree(ranks, shown_by(RIGHT, num_steps=mine.num_steps))

    with (
        mock.patch.object(session, "find_measured", return_value=WRONG),
        mock.patch.object(Ranks, "largest", count),
        mock.patch.object(program, "agree_on_observed", observe),
    ):
        model, trace = optimize(LOOP.build(), options), Trace()
        optimizer = LOOP.make_optimizer(model)
        rank = zinf_compile.report(model).ranks[0].rank
        with mock.patch.object(watch, "_LEAST_SECONDS", seconds[rank]):
            for step in range(LOOP.num_steps):
                train_step(LOOP, model, optimizer, step, trace)
    report = zinf_compile.report(model)
    (view,) = report.plans
    zinf_compile.close(model)
    return trace, [*report.replanned], plan_to_json(view.plan), asked


def test_all_ranks_adopt_one_plan(two: RankPool, tmp_path: Path) -> None:
    plain = train_alone(LOOP, 2)
    options = {**placements(str(tmp_path))["nvme"], "remake_plan": True}
    (_, sentences, plan, asked), *_ = results = two.run(train_from_wrong_rates, options, (0.0, 0.0))
    (sentence,) = sentences
    assert sentence.startswith("TinyGPT graph 0: planned again after step 3: ")
    assert asked == [0]
    for rank, (ours, *others) in enumerate(results):
        assert others == [sentences, plan, asked]
        assert_same(ours, of_rank(plain, rank, 2))


@pytest.mark.long
def test_a_rank_that_has_not_seen_enough_lets_the_others_wait(two: RankPool, tmp_path: Path) -> None:
    options = {**placements(str(tmp_path))["nvme"], "remake_plan": True}
    results = two.run(train_from_wrong_rates, options, (0.0, 1e9))
    assert [sentences for _, sentences, *_ in results] == [[], []]
    assert [asked for *_, asked in results] == [[0, 0], [1, 1]]  # before the fourth and the fifth forward
