"""Planning a mesh with tensor and pipeline parallelism ahead of the machine: each kind of stage by itself, then the step.

A rank's part of a stage is a smaller model, and is planned like any other: over its data-parallel ranks, within the budgets.
What tensor-parallel ranks exchange are ops of its graph. Only what lies between stages is added here: the activations of
open forwards, sends, the bubble (``ir/pipeline.py``).
"""

import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import Module

from zinf_compile.driver.offline import Subject
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.hardware import Hardware, count_ranks_of_replica
from zinf_compile.ir.pipeline import StagePlan, StepPart, plan_pipeline
from zinf_compile.passes.analysis.repeats import Run
from zinf_compile.passes.capture.offline.runs import find_runs
from zinf_compile.passes.capture.offline.shards import (
    STAGE_INPUT,
    StageShape,
    copy_on_meta,
    count_tokens,
    cut_stages,
    divide_weights,
    find_pipeline,
    find_stage_input,
    keep_stage,
)
from zinf_compile.passes.planner.cost.costs import ops_seconds, unfused
from zinf_compile.passes.planner.cost.op_kinds import is_collective
from zinf_compile.passes.planner.simulator.simulate import simulate, simulate_micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The dimensions of a world of ranks: stages, replicas, ranks that divide states, and tensor-parallel ranks."""

    num_ranks: int
    num_replicas: int
    num_tensor_ranks: int
    num_stages: int
    num_micro_batches: int  # of each data-parallel rank, in a step

    @property
    def is_of_data(self) -> bool:
        """Return whether ranks are data-parallel only, and a step is one micro-batch."""
        return self.num_tensor_ranks == self.num_stages == self.num_micro_batches == 1

    def place_on(self, hardware: Hardware) -> Hardware:
        """Return the hardware with the nodes that it fills. ConfigError if it does not fit."""
        return hardware.with_mesh(
            self.num_ranks,
            self.num_replicas,
            num_tensor_ranks=self.num_tensor_ranks,
            num_stages=self.num_stages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank of a stage computes: a smaller model, and what open forwards hold beside one call of it."""

    subject: Subject
    num_open: int  # other forwards, which hold what this one saves
    open_nbytes: int  # inputs and results of stages that a rank holds


def make_mesh(world: int, replicas: int, tp: int, pp: int, accumulate: int | None) -> Mesh:
    """Return the mesh of a world of ranks. ConfigError for numbers that do not divide it."""
    for name, number in (("tp", tp), ("pp", pp), ("accumulate", 1 if accumulate is None else accumulate)):
        if type(number) is not int or number < 1:
            raise ConfigError(f"{name}={number!r} is no count; give a whole number, 1 or more")
    if tp * pp == 1:
        num_ranks = count_ranks_of_replica(world, replicas)
    else:
        if type(world) is not int or world < 1 or world % (tp * pp):
            raise ConfigError(
                f"a world of {world!r} ranks is not divided by tp={tp} times pp={pp}, which is {tp * pp}; the rest of it is "
                f"data-parallel: give world={tp * pp} or a multiple of that"
            )
        num_ranks = count_ranks_of_replica(world // (tp * pp), replicas)
    num_data_ranks = num_ranks * replicas
    total = pp * num_data_ranks if accumulate is None else accumulate
    if total % num_data_ranks:
        raise ConfigError(
            f"{total} micro-batches are not shared out evenly among {num_data_ranks} data-parallel ranks; give accumulate="
            f"{-(-total // num_data_ranks) * num_data_ranks}"
        )
    return Mesh(
        num_ranks=num_ranks,
        num_replicas=replicas,
        num_tensor_ranks=tp,
        num_stages=pp,
        num_micro_batches=total // num_data_ranks,
    )


def plan_stages(
    subject: Subject,
    mesh: Mesh,
    tp_plan: Mapping[str, str] | None,
    hardware: Hardware,
    *,
    zero_stage: int,
    compute_dtype: str | None,
    plan_share: Callable[[Share], PlanView],
) -> PlanView:
    """Return the plan of the slowest stage, with the step of all. CapacityError for a stage that does not fit.

    ``plan_share`` plans what a rank of a stage computes.
    """
    model = copy_on_meta(subject.model)
    if mesh.num_stages == 1:
        run = max(find_runs(model, longer_than=0), key=lambda run: run.num_blocks, default=None)
    else:
        run = find_pipeline(model, mesh.num_stages)
    if mesh.num_tensor_ranks > 1:
        subject = replace(subject, parts=divide_weights(model, tp_plan, mesh.num_tensor_ranks))
    passed: Tensor | None = None
    stages: tuple[StageShape, ...] = (StageShape(number=0, num_blocks=1, num_open=1, is_first=True, is_last=True),)
    if run is not None:
        stages = cut_stages(model, run, mesh.num_stages, mesh.num_micro_batches)
    if mesh.num_stages > 1:
        assert run is not None
        passed = find_stage_input(model, run, subject.inputs, compute_dtype=compute_dtype, train=subject.train)
    sends = 0.0
    if passed is not None:
        of_stage = mesh.num_ranks * mesh.num_replicas * mesh.num_tensor_ranks
        links = hardware.replica_links(of_stage, mesh.num_stages)
        sends = (2 if subject.train else 1) * passed.nbytes / links.bytes_per_second
    planned: list[tuple[StagePlan, PlanView]] = []
    for stage in _kinds(stages):
        share = _share(subject, model, run, stages, stage, passed)
        plan = plan_share(share)
        of_kind = sum(_kind(each) == _kind(stage) for each in stages)
        planned.append((_measure(plan, stage, of_kind, sends=sends, is_reduced=zero_stage > 1), plan))
        gc.collect()  # cycles of the capture
    pipeline = plan_pipeline(
        tuple(stage for stage, _ in planned),
        num_micro_batches=mesh.num_micro_batches,
        num_tokens=count_tokens(subject.inputs),
        num_data_ranks=mesh.num_ranks * mesh.num_replicas,
    )
    slowest, view = next(each for each in planned if each[0] == pipeline.slowest)
    notes = [*view.plan.notes]
    if mesh.num_stages > 1:
        assert run is not None
        before = run.first + sum(each.num_blocks for each in stages[: slowest.first])
        notes.append(
            f"It is of stage {slowest.first} of {mesh.num_stages}, counted from 0: blocks {before} to "
            f"{before + slowest.num_blocks - 1} of {run.container or 'the model'} are numbered from {run.first} here."
        )
    if mesh.num_micro_batches < mesh.num_stages:
        share_of_bubble = pipeline.seconds_of(StepPart.BUBBLE) / pipeline.step_seconds
        notes.append(
            f"{mesh.num_micro_batches} micro-batches do not fill {mesh.num_stages} stages: the bubble is "
            f"{share_of_bubble:.0%} of the step; accumulate more."
        )
    return PlanView(replace(view.plan, pipeline=pipeline, notes=tuple(notes)), view.request)


def _kind(stage: StageShape) -> tuple[bool, bool, int]:
    return stage.is_first, stage.is_last, stage.num_blocks


def _kinds(stages: tuple[StageShape, ...]) -> list[StageShape]:
    """Return the first stage of each kind: of those with equal blocks it has the most forwards open."""
    kinds: dict[tuple[bool, bool, int], StageShape] = {}
    for stage in stages:
        kinds.setdefault(_kind(stage), stage)
    return list(kinds.values())


def _share(
    subject: Subject,
    model: Module,
    run: Run | None,
    stages: tuple[StageShape, ...],
    stage: StageShape,
    passed: Tensor | None,
) -> Share:
    """Return what a rank of a stage computes, of a model with its part of the weights."""
    if passed is None:
        return Share(subject=replace(subject, model=model), num_open=0, open_nbytes=0)
    assert run is not None
    of_stage = copy.deepcopy(model)
    keep_stage(of_stage, run, stages, stage)
    inputs = subject.inputs
    if not stage.is_first:
        inputs = replace(inputs, kwargs={**inputs.kwargs, STAGE_INPUT: passed})
    if not stage.is_last:
        inputs = replace(inputs, loss=None)
    # A rank holds the input of each open forward, and the gradient of a result comes in from the next stage.
    held = passed.nbytes * (0 if stage.is_first else stage.num_open if subject.train else 1)
    held += 0 if stage.is_last or not subject.train else passed.nbytes
    return Share(
        subject=replace(subject, model=of_stage, inputs=inputs, name=f"{subject.name} stage {stage.number}"),
        num_open=stage.num_open - 1 if subject.train else 0,
        open_nbytes=held,
    )


def _measure(view: PlanView, stage: StageShape, num_stages: int, *, sends: float, is_reduced: bool) -> StagePlan:
    """Return what a rank of a stage does in a step, by its plan."""
    plan, request = view.plan, view.request
    assert request is not None
    graph = next(graph for graph in request.candidates if graph.policy is plan.activations.policy)
    collectives = sum(ops_seconds([op for op in graph.ops if is_collective(op.op)], plan.hardware), 0.0)
    micro_batch = simulate_micro_batch(plan, is_reduced=is_reduced)
    return StagePlan(
        first=stage.number,
        num_stages=num_stages,
        num_blocks=stage.num_blocks,
        num_elements=sum(fact.num_elements for fact in request.parameters),  # whole, or in tiles
        num_open=stage.num_open,
        micro_batch_seconds=micro_batch + sends,
        compute_seconds=sum(ops_seconds(graph.ops, plan.hardware)) - collectives,
        collective_seconds=collectives,
        send_seconds=sends,
        update_seconds=max(0.0, simulate(plan).step_seconds - micro_batch),
        num_flops=sum(op.num_flops for op in unfused(graph)),
        peaks=tuple((tier.tier, tier.predicted_peak) for tier in plan.tiers),
    )
