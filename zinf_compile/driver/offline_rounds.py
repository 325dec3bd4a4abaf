"""Planning ranks that work in rounds ahead of the machine: each kind of rank by itself, then the step of all.

A rank is planned like one process that trains its stages alone, on the batches of all: its graph is the one that it would
run (``passes/transforms/prepare/work_in_rounds.py``). Only what others make it wait for is added here: each pass lasts as
long as the ranks need for their stages, one after another, with what each takes for a batch by its own plan.
"""

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Size
from torch.nn import Module

from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.config import Config
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Phase
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.pipeline import PipelinePlan, PipelineSchedule, StagePlan, StepPart
from zinf_compile.passes.capture.offline.trace import RankInRounds
from zinf_compile.passes.planner.cost.costs import ops_seconds, unfused
from zinf_compile.passes.planner.cost.op_kinds import is_message
from zinf_compile.passes.planner.schedule.rounds import Deal, pass_seconds
from zinf_compile.passes.planner.simulator.simulate import simulate


def check_world(world: int, hardware: Hardware, config: Config, refused: dict[str, bool]) -> None:
    """Raise ConfigError for what does not go with ``schedule="rounds"``; ``refused`` are arguments, and whether given."""
    given = {
        **refused,
        f"stage={config.stage}": config.stage != 3,
        "step_in_backward=True": config.step_in_backward,
        "tiles": bool(config.tiles),
        "exact_state": bool(config.exact_state),
        "exact_frozen": bool(config.exact_frozen),
    }
    for what, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"schedule='rounds' does not go with {what}; leave one of them out: without schedule the model is sharded "
                "(ZeRO stage 3)"
            )
    if type(world) is not int or not 1 < world <= hardware.devices_per_node:
        raise ConfigError(
            f"schedule='rounds' deals the stages of a model out to 2 or more devices of one node, and world={world!r} of "
            f"{hardware.name}, whose nodes have {hardware.devices_per_node}; give another world, or leave schedule out"
        )


class _Kind(NamedTuple):
    """What two ranks have alike whose plans are equal: shapes of the parameters of each stage, and its place."""

    stages: tuple[tuple[tuple[Size, bool], ...], ...]
    has_first: bool
    has_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """The plan of a rank, and its seconds."""

    view: PlanView
    stage: StagePlan  # of this rank alone
    forward_seconds: float
    backward_seconds: float


def plan_in_rounds(
    model: Module, deal: Deal, *, num_tokens: int, plan_rank: Callable[[RankInRounds], PlanView]
) -> PlanView:
    """Return the plan of the rank that takes the longest, with the step of all. CapacityError for one that does not fit."""
    num_ranks = deal.num_ranks
    by_kind: dict[_Kind, _Planned] = {}
    kinds = [_kind_of(rank, model, deal) for rank in range(num_ranks)]
    for rank, kind in enumerate(kinds):
        if kind not in by_kind:
            view = plan_rank(RankInRounds(owners=deal.owners, rank=rank, num_ranks=num_ranks))
            by_kind[kind] = _measure(view, rank, deal)
            gc.collect()  # cycles of the capture
    planned = [by_kind[kind] for kind in kinds]
    forward = pass_seconds(_stage_seconds([each.forward_seconds for each in planned], deal), num_ranks)
    # Backward is the mirror image: the longest way through it, from batch to batch and stage to stage, is the same.
    backward = pass_seconds(_stage_seconds([each.backward_seconds for each in planned], deal), num_ranks)
    slowest = max(range(num_ranks), key=lambda rank: planned[rank].stage.micro_batch_seconds)
    view, of_slowest = planned[slowest].view, planned[slowest].stage
    seconds = {
        StepPart.COMPUTE: of_slowest.compute_seconds,
        StepPart.COLLECTIVES: of_slowest.collective_seconds,
        StepPart.SENDS: of_slowest.send_seconds,
        StepPart.BUBBLE: max(0.0, forward + backward - of_slowest.micro_batch_seconds),
        StepPart.UPDATE: max(each.stage.update_seconds for each in planned),
    }
    in_passes = of_slowest.compute_seconds + of_slowest.send_seconds
    seconds[StepPart.WAITS] = max(0.0, of_slowest.micro_batch_seconds - in_passes)
    step = sum(seconds.values())
    stages = []
    for _, group in itertools.groupby(enumerate(kinds), key=lambda item: item[1]):
        alike = [rank for rank, _ in group]
        stages.append(replace(planned[alike[0]].stage, first=alike[0], num_stages=len(alike)))
    pipeline = PipelinePlan(
        schedule=PipelineSchedule.ROUNDS,
        num_micro_batches=num_ranks,
        num_tokens=num_tokens,
        stages=tuple(stages),
        parts=tuple((part, seconds[part]) for part in StepPart),
        tokens_per_second=num_ranks * num_tokens / step,
        flops_per_second=sum(each.stage.num_flops for each in planned) / num_ranks / step,
    )
    note = (
        f"It is of rank {slowest} of {num_ranks}, counted from 0, which has {of_slowest.num_blocks} of the "
        f"{len(deal.stages)} stages of the model and computes them for the batches of all ranks. It waits for others for "
        f"{seconds[StepPart.BUBBLE] / step:.0%} of the step."
    )
    return PlanView(replace(view.plan, pipeline=pipeline, notes=(*view.plan.notes, note)), view.request)


def _kind_of(rank: int, model: Module, deal: Deal) -> _Kind:
    parameters = dict(model.named_parameters())
    shapes = tuple(
        tuple((parameters[name].shape, parameters[name].requires_grad) for name in stage)
        for stage in deal.stages[rank :: deal.num_ranks]
    )
    return _Kind(shapes, has_first=rank == 0, has_last=(len(deal.stages) - 1) % deal.num_ranks == rank)


def _stage_seconds(of_ranks: list[float], deal: Deal) -> list[float]:
    """Return the seconds of each stage for a batch, from those of each rank for all: in proportion to its work."""
    work = [sum(deal.work[rank :: deal.num_ranks]) for rank in range(deal.num_ranks)]
    return [
        of_ranks[number % deal.num_ranks] * each / work[number % deal.num_ranks] / deal.num_ranks
        for number, each in enumerate(deal.work)
    ]


def _measure(view: PlanView, rank: int, deal: Deal) -> _Planned:
    plan, request = view.plan, view.request
    assert request is not None
    graph = next(graph for graph in request.candidates if graph.policy is plan.activations.policy)
    messages = sum(ops_seconds([op for op in graph.ops if is_message(op.op)], plan.hardware), 0.0)
    seconds = dict(simulate(plan).phase_seconds)
    forward, backward = seconds[Phase.FORWARD], seconds.get(Phase.BACKWARD, 0.0)
    stage = StagePlan(
        first=rank,
        num_stages=1,
        num_blocks=len(deal.stages[rank :: deal.num_ranks]),
        num_elements=sum(fact.num_elements for fact in request.parameters),
        num_open=deal.num_ranks,
        micro_batch_seconds=forward + backward,
        compute_seconds=sum(ops_seconds(graph.ops, plan.hardware)) - messages,
        collective_seconds=0.0,
        send_seconds=messages,
        update_seconds=seconds.get(Phase.STEP, 0.0),
        num_flops=sum(op.num_flops for op in unfused(graph)),
        peaks=tuple((tier.tier, tier.predicted_peak) for tier in plan.tiers),
    )
    return _Planned(view=view, stage=stage, forward_seconds=forward, backward_seconds=backward)
