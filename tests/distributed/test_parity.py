"""Bit by bit: N ranks give what one process gives that accumulates their batches in the order of ranks."""

from pathlib import Path

import pytest

from tests.distributed.workloads import Loop, build_frozen, of_rank, placements, train_alone, train_on_ranks
from tests.support.rank_pool import RankPool
from tests.support.traces import assert_same

LOOPS = {
    "ordinary": Loop(),
    "accumulated": Loop(num_steps=2, num_accumulated=2),
    "frozen": Loop(build=build_frozen),
    "momentum": Loop(optimizer="SGD", optimizer_options={"lr": 0.1, "momentum": 0.9}),
    "summed": Loop(divide_by=1),
}


@pytest.mark.parametrize("placement", ["nvme", "resident"])
@pytest.mark.parametrize("loop", LOOPS)
def test_two_ranks(loop: str, placement: str, two: RankPool, tmp_path: Path) -> None:
    options = dict(placements(str(tmp_path))[placement])
    if LOOPS[loop].divide_by is not None:
        options["gradient_divide_factor"] = LOOPS[loop].divide_by
    plain = train_alone(LOOPS[loop], 2)
    for rank, ours in enumerate(two.run(train_on_ranks, LOOPS[loop], options)):
        assert_same(ours, of_rank(plain, rank, 2))


@pytest.mark.parametrize("options", [{}, {"capture": False}, {"overlap_step": False}, {"step_in_backward": True}])
def test_three_ranks_that_divide_nothing_evenly(options: dict[str, object], three: RankPool, tmp_path: Path) -> None:
    loop = Loop()
    plain = train_alone(loop, 3)
    given = placements(str(tmp_path))["nvme"] | options
    if "step_in_backward" in options:
        plain.gradients = []
    for rank, ours in enumerate(three.run(train_on_ranks, loop, given)):
        assert_same(ours, of_rank(plain, rank, 3))
