"""A step on the stages of a model: what a rank of each kind of stage does, and how the step's seconds divide.

Stages run micro-batches in 1F1B order (Narayanan et al., https://arxiv.org/abs/2104.04473): stage ``s`` of ``p`` has up to
``p - s`` forwards open at once, and a step of ``m`` micro-batches takes as long as ``m`` on the slowest stage, and as one
on each of the others, which fill and drain the pipeline meanwhile. With equal stages of ``t`` seconds these are
``(m + p - 1) t``, of which ``(p - 1) t`` are the bubble.

Ranks that work in rounds have several stages each, and compute them for one batch of each (``driver/offline_rounds.py``).
"""

from dataclasses import dataclass
from enum import StrEnum

from zinf_compile.ir.glossary import Tier


class PipelineSchedule(StrEnum):
    """In which order ranks compute stages and batches."""

    ONE_F_ONE_B = "1F1B"
    ROUNDS = "rounds"


class StepPart(StrEnum):
    """What a rank of the slowest stage does in a part of a step."""

    COMPUTE = "compute"
    COLLECTIVES = "tensor-parallel collectives"
    WAITS = "waits for transfers"  # all-gathers and reductions of ZeRO, host, disk
    SENDS = "sends between stages"
    BUBBLE = "the bubble of the pipeline"
    UPDATE = "the update"  # with what is reduced or gathered once in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One rank of some consecutive stages that are alike. Where they differ, of the first of them, which needs the most.

    In rounds, a rank of some consecutive ones, with all its stages, and a micro-batch stands for the batches of all ranks.
    """

    first: int  # the number of the first of these stages, from 0
    num_stages: int
    num_blocks: int  # of the model's repeated blocks; in rounds, stages of a rank
    num_elements: int  # of parameters, of one tensor-parallel rank
    num_open: int  # forwards whose backward has not run, at the most
    micro_batch_seconds: float  # of forward and backward, with sends
    compute_seconds: float  # of those, without tensor-parallel collectives
    collective_seconds: float
    send_seconds: float
    update_seconds: (
        float  # once in a step: the update, and what of reductions and gathers is not part of every micro-batch
    )
    num_flops: int  # of a micro-batch, with what is recomputed
    peaks: tuple[tuple[Tier, int], ...]  # promised bytes of each tier

    def peak(self, tier: Tier) -> int:
        """Return the promised bytes of a tier."""
        return dict(self.peaks)[tier]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """A step of several micro-batches on one or more stages, each of which has the ranks of its plan."""

    schedule: PipelineSchedule
    num_micro_batches: int  # of each data-parallel rank; in rounds, one of each rank
    num_tokens: int  # of a micro-batch
    stages: tuple[StagePlan, ...]
    parts: tuple[tuple[StepPart, float], ...]  # of the step of the slowest stage, with their seconds, which sum to it
    tokens_per_second: float  # of all ranks together
    flops_per_second: float  # of each rank, in the mean, with what is recomputed

    @property
    def num_stages(self) -> int:
        """Return the number of all stages."""
        return sum(stage.num_stages for stage in self.stages)

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step."""
        return sum(seconds for _, seconds in self.parts)

    @property
    def slowest(self) -> StagePlan:
        """Return the stage whose micro-batches take the longest."""
        return max(self.stages, key=lambda stage: stage.micro_batch_seconds)

    def seconds_of(self, part: StepPart) -> float:
        """Return the seconds of a part of the step."""
        return dict(self.parts)[part]

    @property
    def bound(self) -> StepPart:
        """Return the part that takes the longest."""
        return max(self.parts, key=lambda part: part[1])[0]


def plan_pipeline(
    stages: tuple[StagePlan, ...], *, num_micro_batches: int, num_tokens: int, num_data_ranks: int
) -> PipelinePlan:
    """Return the step of so many micro-batches of each data-parallel rank, on stages that are given by kind, in order."""
    slowest = max(stages, key=lambda stage: stage.micro_batch_seconds)
    once_through = sum(stage.num_stages * stage.micro_batch_seconds for stage in stages)
    in_micro_batch = {
        StepPart.COMPUTE: slowest.compute_seconds,
        StepPart.COLLECTIVES: slowest.collective_seconds,
        StepPart.SENDS: slowest.send_seconds,
    }
    in_micro_batch[StepPart.WAITS] = max(0.0, slowest.micro_batch_seconds - sum(in_micro_batch.values()))
    seconds = {part: num_micro_batches * each for part, each in in_micro_batch.items()}
    seconds[StepPart.BUBBLE] = once_through - slowest.micro_batch_seconds
    seconds[StepPart.UPDATE] = max(stage.update_seconds for stage in stages)
    step = sum(seconds.values())
    num_flops = num_micro_batches * sum(stage.num_stages * stage.num_flops for stage in stages)
    return PipelinePlan(
        schedule=PipelineSchedule.ONE_F_ONE_B,
        num_micro_batches=num_micro_batches,
        num_tokens=num_tokens,
        stages=stages,
        parts=tuple((part, seconds[part]) for part in StepPart),
        tokens_per_second=num_data_ranks * num_micro_batches * num_tokens / step,
        flops_per_second=num_flops / sum(stage.num_stages for stage in stages) / step,
    )
