"""Plans of tensor-parallel ranks and pipeline stages: what a rank keeps, computes and exchanges, against closed formulas."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zinf_compile
from benchmarks.oracles.closed_forms import MODEL_STATE_NBYTES, TransformerShape, at_shape
from benchmarks.oracles.published_runs import DEVICES_PER_NODE, MT_NLG, published_flops
from benchmarks.published_steps import plan_step
from examples.gpt import GPT, GPTConfig
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.copies import Role
from zinf_compile.ir.errors import CapacityError, ConfigError
from zinf_compile.ir.facts import GraphFacts
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.pipeline import StepPart
from zinf_compile.ir.plan import TierPart
from zinf_compile.ir.plan_io import plan_from_json, plan_to_json
from zinf_compile.passes.planner.cost.costs import ops_seconds, unfused
from zinf_compile.passes.planner.search.verify import verify_plan
from zinf_compile.passes.planner.simulator.simulate import simulate

HIDDEN, LAYERS, VOCABULARY, SEQUENCE, BATCH = 256, 4, 512, 64, 2
BLOCK = 12 * HIDDEN**2  # elements of its matrices
PASSED_NBYTES = 2 * BATCH * SEQUENCE * HIDDEN  # of the activations between blocks, in bfloat16


def plan_gpt(*, layers: int = LAYERS, **options: Any) -> PlanView:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=VOCABULARY, layers=layers, hidden=HIDDEN, heads=4, seq=SEQUENCE))
        tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    options = {"hardware": "dgx2", "compute_dtype": torch.bfloat16, "recompute": False, "compute": "aten", **options}
    return zinf_compile.plan(model, {"tokens": tokens, "targets": tokens}, **options)


def graph_of(plan: PlanView) -> GraphFacts:
    assert plan.request is not None
    return next(graph for graph in plan.request.candidates if graph.policy is plan.activations.policy)


def num_flops(plan: PlanView) -> int:
    return sum(op.num_flops for op in unfused(graph_of(plan)))


@pytest.mark.parametrize(("tp", "world"), [(2, 2), (4, 4), (4, 16)])
def test_a_rank_keeps_its_part_of_the_states(tp: int, world: int) -> None:
    """16 bytes a parameter, as mixed-precision Adam has (ZeRO, arXiv 1910.02054, section 3), over all dimensions."""
    layers = 16
    plan = plan_gpt(layers=layers, tp=tp, world=world, update_on="host", device_memory="10MiB")
    norms = (2 * layers + 1) * HIDDEN
    matrices = (layers * BLOCK + 2 * VOCABULARY * HIDDEN) // tp
    data = world // tp
    assert plan.pipeline is not None
    assert plan.pipeline.stages[0].num_elements == matrices + norms
    roles = (Role.MASTER, Role.GRADIENT, Role.STATE)
    kept = sum(item.nbytes_of(role) for item in plan.placements for role in roles)
    assert kept == (4 + 2 + 8) * (matrices + norms) // data
    streamed = [item for item in plan.placements if item.compute is not Tier.DEVICE]
    assert streamed
    for item in streamed:
        elements = item.by_role[Role.MASTER][0].slice.num_elements
        assert sum(item.nbytes_on(tier) for tier in Tier) == 16 * elements
    verify_plan(plan.plan)


def test_stages_divide_the_blocks_and_what_is_around_them() -> None:
    plan = plan_gpt(layers=5, tp=2, pp=3, world=12)
    assert plan.pipeline is not None
    stages = plan.pipeline.stages
    table = VOCABULARY * HIDDEN // 2
    blocks = [BLOCK // 2 + 2 * HIDDEN] * 5
    assert [(stage.first, stage.num_stages, stage.num_blocks) for stage in stages] == [(0, 1, 2), (1, 1, 2), (2, 1, 1)]
    assert [stage.num_elements for stage in stages] == [
        sum(blocks[:2]) + table,
        sum(blocks[2:4]),
        blocks[4] + HIDDEN + table,
    ]
    assert [stage.num_open for stage in stages] == [3, 2, 1]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 2), (1, 4)])
def test_all_ranks_together_compute_what_one_would(tp: int, pp: int) -> None:
    pipeline = plan_gpt(tp=tp, pp=pp, world=tp * pp).pipeline
    assert pipeline is not None
    together = tp * sum(stage.num_stages * stage.num_flops for stage in pipeline.stages)
    assert together == num_flops(plan_gpt())


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_exchange_two_all_reduces_a_block_and_direction(tp: int) -> None:
    """Megatron, arXiv 1909.08053, section 3: in a ring each sends 2 (t - 1) / t of the activations between blocks."""
    plan = plan_gpt(tp=tp, pp=2, world=2 * tp, partition_activations=False)
    exchanges = [op for op in graph_of(plan).ops if op.op == "zinf.all_reduce.default"]
    around = 1  # behind the embedding of the first stage, or in the backward of the head
    assert len(exchanges) == 4 * (LAYERS // 2) + around
    assert {op.nbytes_accessed for op in exchanges} == {2 * PASSED_NBYTES * (tp - 1) // tp}
    assert plan.pipeline is not None
    seconds = len(exchanges) * 2 * PASSED_NBYTES * (tp - 1) / tp / plan.hardware.device_link_bytes_per_second
    assert plan.pipeline.slowest.collective_seconds == pytest.approx(seconds)


def test_ranks_divide_activations_if_some_leave_the_device() -> None:
    """ZeRO-R's Pa: a rank saves a quarter of the input of each block, and gathers the rest over device links."""
    options = {"layers": 8, "tp": 4, "world": 4, "recompute": True, "reserve_memory": 0}
    whole = plan_gpt(**options, device_memory="3MiB", partition_activations=False)
    divided = plan_gpt(**options, device_memory="3MiB", partition_activations=True)
    roomy = plan_gpt(**options, device_memory="4MiB", partition_activations=True)
    assert {swap.nbytes for swap in whole.swaps} == {PASSED_NBYTES}
    assert not roomy.swaps
    noted = [any("saves a part of activations" in note for note in plan.notes) for plan in (whole, divided, roomy)]
    assert noted == [False, True, False]
    parts = [value for value in graph_of(divided).values if "_part" in value.name]
    assert {value.nbytes for value in parts} == {PASSED_NBYTES // 4}
    assert all(value.saved for value in parts)
    assert len(parts) >= options["layers"]
    gathers = [op for op in graph_of(divided).ops if op.op == "_c10d_functional.all_gather_into_tensor.default"]
    assert len(gathers) == len(parts)
    hardware = divided.hardware
    for op, seconds in zip(gathers, ops_seconds(gathers, hardware), strict=True):
        assert seconds >= op.nbytes_accessed / hardware.device_link_bytes_per_second
    verify_plan(divided.plan)


class Columns(nn.Module):
    """Layers whose activations each rank has others of, between columns and rows of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        for _ in range(12):
            x = (x @ x.transpose(1, 2)).softmax(-1) @ x
        return self.down(x)


@pytest.mark.parametrize("partition", [None, True])
def test_ranks_divide_nothing_that_they_have_others_of(partition: bool | None) -> None:
    """Then the plan is the one without, though activations leave the device."""

    def plan(partition: bool | None) -> PlanView:
        with torch.device("meta"):
            model, x = Columns(), torch.zeros(64, 64, 64)
        return zinf_compile.plan(
            model,
            {"x": x},
            loss=lambda y: y.float().mean(),
            hardware="dgx2",
            compute="aten",
            recompute=False,
            world=2,
            tp=2,
            tp_plan={"up": "colwise", "down": "rowwise"},
            device_memory="9MiB",
            reserve_memory=0,
            partition_activations=partition,
        )

    whole, other = plan(partition=False), plan(partition=partition)
    assert whole.swaps
    assert other.plan == whole.plan


def test_open_forwards_hold_their_activations_and_inputs() -> None:
    plans = {count: plan_gpt(pp=2, world=2, accumulate=count) for count in (1, 4)}
    peaks = {count: [stage.peak(Tier.DEVICE) for stage in plan.pipeline.stages] for count, plan in plans.items()}  # type: ignore[union-attr]
    assert peaks[4][0] > peaks[1][0]  # two forwards open, and not one
    assert peaks[4][1] == peaks[1][1]  # the last stage has one
    plan = plan_gpt(layers=6, pp=3, world=3, accumulate=8)
    assert plan.pipeline is not None
    middle = plan.pipeline.stages[1]
    view = plan_gpt(layers=6, pp=3, world=3, accumulate=1)
    assert view.pipeline is not None
    alone = view.pipeline.stages[1]
    saved = (middle.peak(Tier.DEVICE) - alone.peak(Tier.DEVICE)) - PASSED_NBYTES  # one more forward, and its input
    assert saved > 2 * 10 * PASSED_NBYTES  # of two blocks: their attention and MLP


def test_the_plan_is_of_one_micro_batch_and_the_step_of_all() -> None:
    plan = plan_gpt(tp=2, pp=2, world=32, accumulate=64)
    pipeline = plan.pipeline
    assert pipeline is not None
    assert (plan.num_ranks, plan.num_tensor_ranks, pipeline.num_stages, plan.plan.world_size) == (8, 2, 2, 32)
    assert (plan.hardware.num_nodes, pipeline.num_micro_batches, pipeline.num_tokens) == (2, 8, BATCH * SEQUENCE)
    slowest = pipeline.slowest
    # Both stages are in one node of their own, so sends share the links between nodes with the other ranks of it.
    sends = 2 * PASSED_NBYTES / (plan.hardware.node_link_bytes_per_second / 16)
    assert slowest.send_seconds == pytest.approx(sends)
    assert slowest.micro_batch_seconds + slowest.update_seconds == pytest.approx(
        simulate(plan.plan).step_seconds + sends
    )
    assert pipeline.step_seconds == pytest.approx(
        7 * slowest.micro_batch_seconds
        + sum(stage.micro_batch_seconds for stage in pipeline.stages)
        + max(stage.update_seconds for stage in pipeline.stages)
    )
    assert "stage 1 of 2" in plan.notes[-1] or "stage 0 of 2" in plan.notes[-1]
    assert plan_from_json(plan_to_json(plan.plan)) == plan.plan
    with pytest.raises(ConfigError, match="is of one micro-batch of one stage"):
        plan.what_to_buy()


def test_stage_1_reduces_gradients_once_a_step_and_stage_2_for_each_micro_batch() -> None:
    pipelines = [plan_gpt(world=16, accumulate=64, stage=stage).pipeline for stage in (1, 2)]
    first, second = pipelines
    assert first is not None
    assert second is not None
    assert first.num_micro_batches == 4
    assert first.seconds_of(StepPart.WAITS) < second.seconds_of(StepPart.WAITS)
    assert first.step_seconds < second.step_seconds


def test_more_of_each_dimension_shortens_a_step_of_the_same_batch() -> None:
    def step(**mesh: int) -> float:
        pipeline = plan_gpt(accumulate=64, **mesh).pipeline
        assert pipeline is not None
        return pipeline.step_seconds

    assert step(world=1) > step(world=2, pp=2) > step(world=4, pp=4)
    assert step(world=2, pp=2) > step(world=16, pp=2, stage=1)


def test_accumulated_micro_batches_add_up_on_one_rank() -> None:
    one, many = (plan_gpt(accumulate=count) for count in (2, 8))
    assert one.pipeline is not None
    assert many.pipeline is not None
    assert many.placements == one.placements
    more = 6 * one.pipeline.slowest.micro_batch_seconds
    assert many.pipeline.step_seconds == pytest.approx(one.pipeline.step_seconds + more)
    assert plan_gpt(accumulate=1).pipeline is None


def test_few_micro_batches_are_noted() -> None:
    notes = plan_gpt(pp=4, world=4, accumulate=2).notes
    assert re.search(
        r"2 micro-batches do not fill 4 stages: the bubble is \d+% of the step; accumulate more\.", notes[-1]
    )
    assert not any("do not fill" in note for note in plan_gpt(pp=4, world=4).notes)


def test_inference_is_a_pipeline_of_forwards() -> None:
    plan = plan_gpt(tp=2, pp=2, world=4, train=False, recompute=None)
    assert plan.pipeline is not None
    assert not plan.schedule.is_training
    assert plan.pipeline.slowest.send_seconds == pytest.approx(
        PASSED_NBYTES / plan.hardware.device_link_bytes_per_second
    )
    assert [op.op for op in graph_of(plan).ops].count("zinf.all_reduce.default") in (4, 5)
    assert all(op.op != "zinf.enter_columns.default" for op in graph_of(plan).ops)
    assert plan.tier(Tier.DEVICE).nbytes_of(TierPart.OPEN) in (0, PASSED_NBYTES)  # its input


def test_a_stage_that_does_not_fit_is_named() -> None:
    with pytest.raises(CapacityError, match=r"GPT stage 0 graph 0 needs .* on device, device_memory is 64.0 KiB"):
        plan_gpt(pp=2, world=2, device_memory="64KiB", tiles=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tp": 2, "pp": 2, "world": 6},
            "a world of 6 ranks is not divided by tp=2 times pp=2, which is 4; the rest of",
        ),
        ({"tp": 0}, "tp=0 is no count; give a whole number, 1 or more"),
        ({"pp": 2.0, "world": 4}, "pp=2.0 is no count"),
        (
            {"tp": 3, "world": 3},
            "3 tensor-parallel ranks do not share a node of dgx2 evenly, which has 16 devices; all",
        ),
        (
            {"tp": 8, "world": 8},
            "8 tensor-parallel ranks do not divide the 4 heads of blocks.0.attention.out, whose weight",
        ),
        ({"tp": 32, "world": 32}, "32 tensor-parallel ranks do not share a node of dgx2 evenly, which has 16 devices"),
        (
            {"pp": 8, "world": 8},
            "8 pipeline stages need at least as many identical blocks, and GPT has 4 alike, in blocks",
        ),
        (
            {"world": 16, "accumulate": 8},
            "8 micro-batches are not shared out evenly among 16 data-parallel ranks; give",
        ),
        ({"pp": 2, "world": 2, "tiles": {"head.weight": 2}}, "tiles cannot be given with tp, pp or accumulate"),
        ({"pp": 2, "world": 2, "dynamic": True}, "dynamic cannot be given with tp, pp or accumulate"),
        (
            {"tp": 2, "world": 4, "state_dtype": "int8"},
            "state_dtype encodes whole rows, and with tp=2 a rank has parts of",
        ),
        (
            {"tp": 2, "world": 2, "frozen_dtype": "int8"},
            "frozen_dtype encodes whole rows, and with tp=2 a rank has parts",
        ),
        ({"pp": 2, "world": 4, "replicas": 4}, "2 ranks do not make 4 replicas of equally many ranks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_mesh_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_gpt(**options)


def test_replicas_divide_the_data_parallel_ranks() -> None:
    plan = plan_gpt(tp=4, world=64, replicas=4)
    assert (plan.num_ranks, plan.num_replicas, plan.num_tensor_ranks) == (4, 4, 4)
    assert "  of one of 64 ranks on 4 nodes: 1 stages x 16 data-parallel x 4 tensor-parallel\n" in str(plan)
    assert simulate(plan.plan).step_seconds > simulate(replace(plan.plan, num_replicas=1)).step_seconds


def test_a_model_says_by_names_what_is_divided() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(4)))
        x = torch.empty(8, 64)
    plan = zinf_compile.plan(
        model, x, hardware="dgx2", world=8, tp=2, pp=2, tp_plan={"*.up": "colwise", "*.down": "rowwise"}
    )
    assert plan.pipeline is not None
    assert [stage.num_elements for stage in plan.pipeline.stages] == [2 * (2 * 64 * 128 + 128 + 64)] * 2
    assert plan.pipeline.num_tokens == 8


@pytest.mark.slow
def test_published_steps_are_predicted_and_fall_in_the_same_way() -> None:
    """Rates are a preset's, and are not fitted: docs/benchmarks.md says how far off they are."""
    plans = [plan_step(MT_NLG, step).pipeline for step in MT_NLG.steps]
    ratios, rates = [], []
    for pipeline, step in zip(plans, MT_NLG.steps, strict=True):
        assert pipeline is not None
        ratios.append(pipeline.step_seconds / step.step_seconds)
        num_gpus = step.num_nodes * DEVICES_PER_NODE
        rates.append(published_flops(MT_NLG) / pipeline.step_seconds / num_gpus)
        # Their memory has to hold it: 40 or 80 GB, whichever of both A100 it was.
        assert all(stage.peak(Tier.DEVICE) < 40e9 for stage in pipeline.stages)
        assert pipeline.bound is StepPart.COMPUTE
        assert published_flops(MT_NLG) / step.step_seconds / num_gpus == pytest.approx(step.flops_per_second, rel=0.01)
    assert all(0.8 < ratio < 1 for ratio in ratios)
    assert rates == sorted(rates, reverse=True)  # with the same batch on more nodes, the bubble is a larger part
    assert [len(plan.stages) for plan in plans if plan is not None] == [3, 3, 3]


@pytest.mark.long
@pytest.mark.slow
def test_a_trillion_parameters_keep_what_the_paper_says() -> None:
    """Its table counts 20 bytes a parameter (Fig. 2a); a plan keeps no fp32 gradient, so four bytes less."""
    shape = TransformerShape(layers=128, hidden=25_600, heads=256, batch=1, sequence=1024)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=1024, layers=128, hidden=25_600, heads=256, seq=1024))
        tokens = torch.zeros(1, 1024, dtype=torch.int64)
    options = {"hardware": "dgx2", "compute_dtype": torch.float16, "world": 512, "tp": 4, "pp": 1}
    plan = zinf_compile.plan(model, {"tokens": tokens, "targets": tokens}, **options)
    kept = 512 * sum(item.nbytes_on(tier) for item in plan.placements for tier in Tier)
    resident = sum(item.compute_nbytes for item in plan.placements if item.compute is Tier.DEVICE)
    table = at_shape(MODEL_STATE_NBYTES, shape) * 16 / 20
    assert kept - 512 * resident * 127 / 128 == pytest.approx(table, rel=0.001)
