"""The step of a pipeline: how long micro-batches take on several stages, and what its seconds divide into."""

from dataclasses import replace

import pytest

from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.pipeline import PipelinePlan, StagePlan, StepPart, plan_pipeline

STAGE = StagePlan(
    first=0,
    num_stages=1,
    num_blocks=3,
    num_elements=10,
    num_open=1,
    micro_batch_seconds=0.5,
    compute_seconds=0.25,
    collective_seconds=0.0625,
    send_seconds=0.0625,
    update_seconds=2.0,
    num_flops=1000,
    peaks=tuple((tier, 7) for tier in Tier),
)


def plan(*stages: StagePlan, num_micro_batches: int = 4) -> PipelinePlan:
    return plan_pipeline(stages, num_micro_batches=num_micro_batches, num_tokens=100, num_data_ranks=3)


@pytest.mark.parametrize(("micro_batches", "stages"), [(1, 1), (4, 1), (1, 4), (8, 4), (4, 8), (64, 8)])
def test_equal_stages_take_as_many_turns_as_micro_batches_and_other_stages(micro_batches: int, stages: int) -> None:
    """(m + p - 1) t, of which (p - 1) t is the bubble: Narayanan et al., arXiv 2104.04473, section 2.2."""
    made = plan(replace(STAGE, num_stages=stages), num_micro_batches=micro_batches)
    assert made.num_stages == stages
    assert made.step_seconds == (micro_batches + stages - 1) * 0.5 + 2.0
    assert made.seconds_of(StepPart.BUBBLE) == (stages - 1) * 0.5
    assert made.seconds_of(StepPart.COMPUTE) == micro_batches * 0.25
    assert made.seconds_of(StepPart.COLLECTIVES) == made.seconds_of(StepPart.SENDS) == micro_batches * 0.0625
    assert made.seconds_of(StepPart.WAITS) == micro_batches * 0.125  # what is left of a micro-batch
    assert made.tokens_per_second == 3 * micro_batches * 100 / made.step_seconds
    assert made.flops_per_second == micro_batches * 1000 / made.step_seconds


def test_the_slowest_stage_sets_the_pace_and_the_others_fill_the_pipeline() -> None:
    slow = replace(STAGE, first=2, micro_batch_seconds=1.0, update_seconds=1.0)
    made = plan(replace(STAGE, num_stages=2), slow)
    assert made.slowest == slow
    assert made.step_seconds == 4 * 1.0 + 2 * 0.5 + 2.0
    assert made.bound is StepPart.WAITS
    assert made.slowest.peak(Tier.HOST) == 7


def test_more_micro_batches_and_fewer_stages_leave_less_of_a_bubble() -> None:
    def share(micro_batches: int, stages: int) -> float:
        made = plan(replace(STAGE, num_stages=stages), num_micro_batches=micro_batches)
        return made.seconds_of(StepPart.BUBBLE) / made.step_seconds

    assert share(8, 8) > share(16, 8) > share(64, 8)
    assert share(16, 16) > share(16, 8) > share(16, 2) > share(16, 1) == 0
