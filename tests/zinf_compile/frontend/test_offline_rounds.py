"""Plans of ranks that work in rounds: what a rank keeps, moves, computes and waits for, against one process and formulas."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zinf_compile
from examples.gpt import GPT, GPTConfig
from zinf_compile.frontend import offline
from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.hardware.rates import with_rates
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.copies import Role
from zinf_compile.ir.errors import CapacityError, ConfigError, UnsupportedError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.pipeline import PipelinePlan, PipelineSchedule, StepPart
from zinf_compile.ir.plan_io import plan_from_json, plan_to_json
from zinf_compile.passes.capture.offline.trace import RankInRounds
from zinf_compile.passes.planner.cost.costs import unfused
from zinf_compile.passes.planner.cost.op_kinds import is_message
from zinf_compile.passes.planner.schedule.rounds import Deal
from zinf_compile.passes.planner.search.verify import verify_plan
from zinf_compile.passes.planner.simulator.simulate import simulate

HIDDEN, LAYERS, VOCABULARY, SEQUENCE, BATCH = 256, 4, 512, 64, 2
PASSED_NBYTES = 2 * BATCH * SEQUENCE * HIDDEN  # of the activations between blocks, in bfloat16


# Of these weights take most of the device.
WEIGHTS: dict[str, Any] = {"hidden": 512, "sequence": 8, "batch": 1, "update_on": "host", "tiles": False}


def plan_gpt(
    *, layers: int = LAYERS, batch: int = BATCH, hidden: int = HIDDEN, sequence: int = SEQUENCE, **options: Any
) -> PlanView:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=VOCABULARY, layers=layers, hidden=hidden, heads=4, seq=sequence))
        tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    given = {"hardware": "8xrtx4090", "compute_dtype": torch.bfloat16, "recompute": False, "compute": "aten", **options}
    return zinf_compile.plan(model, {"tokens": tokens, "targets": tokens}, **given)


@pytest.fixture
def every_rank(monkeypatch: pytest.MonkeyPatch) -> list[PlanView]:
    """Return the list to which the plan of each rank is added."""
    plans: list[PlanView] = []
    plan_in_rounds = offline.plan_in_rounds

    def plan_all(
        model: nn.Module, deal: Deal, *, num_tokens: int, plan_rank: Callable[[RankInRounds], PlanView]
    ) -> PlanView:
        ranks = range(deal.num_ranks)
        plans.extend(plan_rank(RankInRounds(owners=deal.owners, rank=rank, num_ranks=deal.num_ranks)) for rank in ranks)
        return plan_in_rounds(model, deal, num_tokens=num_tokens, plan_rank=plan_rank)

    monkeypatch.setattr(offline, "plan_in_rounds", plan_all)
    return plans


def pipeline_of(plan: PlanView) -> PipelinePlan:
    assert plan.pipeline is not None
    return plan.pipeline


def ops_of(plan: PlanView) -> list[Any]:
    assert plan.request is not None
    graph = next(graph for graph in plan.request.candidates if graph.policy is plan.activations.policy)
    return list(unfused(graph))


def gathered_nbytes(plan: PlanView) -> int:
    return sum(gather.moved_nbytes for gather in plan.gathers)


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_together_move_keep_and_compute_what_one_process_does(every_rank: list[PlanView]) -> None:
    """Each weight crosses to one device once per pass, for the batches of both."""
    one = plan_gpt(**{**WEIGHTS, "batch": 2}, layers=12, device_memory="20MiB")
    plan_gpt(**WEIGHTS, layers=12, device_memory="26MiB", world=2, schedule="rounds")
    assert len(every_rank) == 2
    for plan in every_rank:
        verify_plan(plan.plan)
        assert plan.num_ranks == 1
    names = [item.parameter for plan in every_rank for item in plan.placements]
    assert sorted(names) == sorted(item.parameter for item in one.placements)
    for role in (Role.MASTER, Role.GRADIENT, Role.STATE):
        kept = sum(item.nbytes_of(role) for plan in every_rank for item in plan.placements)
        assert kept == sum(item.nbytes_of(role) for item in one.placements)
    assert gathered_nbytes(one) > 1.8 * sum(item.compute_nbytes for item in one.placements)
    assert sum(map(gathered_nbytes, every_rank)) <= 1.05 * gathered_nbytes(one)
    assert sum(op.num_flops for plan in every_rank for op in ops_of(plan)) == sum(op.num_flops for op in ops_of(one))


def test_between_stages_each_batch_passes_once_in_each_direction(every_rank: list[PlanView]) -> None:
    plan = plan_gpt(world=2, schedule="rounds")
    messages = [op for each in every_rank for op in ops_of(each) if is_message(op.op)]
    num_stages = sum(stage.num_stages * stage.num_blocks for stage in pipeline_of(plan).stages)
    activations = [op for op in messages if op.nbytes_accessed == PASSED_NBYTES]
    assert len(activations) == 2 * (num_stages - 1) * 2  # each way, for two batches
    # The last stage sends each caller its loss, and receives the gradient of it.
    assert {op.nbytes_accessed for op in messages if op not in activations} <= {2, 4}
    (link,) = {plan.hardware.device_link_bytes_per_second}
    of_slowest = [op for op in ops_of(plan) if is_message(op.op)]
    assert pipeline_of(plan).seconds_of(StepPart.SENDS) == pytest.approx(
        sum(op.nbytes_accessed for op in of_slowest) / link, rel=1e-3
    )


def test_the_plan_is_of_the_slowest_rank_and_the_step_of_all() -> None:
    plan = plan_gpt(world=4, schedule="rounds")
    pipeline = pipeline_of(plan)
    assert (pipeline.schedule, pipeline.num_micro_batches) == (PipelineSchedule.ROUNDS, 4)
    assert (plan.plan.world_size, plan.num_ranks, plan.hardware.num_nodes) == (4, 1, 1)
    assert sum(stage.num_stages * stage.num_elements for stage in pipeline.stages) == (
        LAYERS * (12 * HIDDEN**2 + 2 * HIDDEN) + HIDDEN + 2 * VOCABULARY * HIDDEN
    )
    slowest = pipeline.slowest
    assert slowest.peaks == tuple((tier.tier, tier.predicted_peak) for tier in plan.tiers)
    step = simulate(plan.plan).step_seconds
    assert slowest.micro_batch_seconds + slowest.update_seconds == pytest.approx(step)
    assert pipeline.step_seconds >= step + pipeline.seconds_of(StepPart.BUBBLE) - 1e-12
    assert plan_from_json(plan_to_json(plan.plan)) == plan.plan
    assert "of the 5 stages" in plan.notes[-1]
    with pytest.raises(ConfigError, match="is of the stages of one rank, which does not answer for the whole step"):
        plan.what_to_buy()


def test_ranks_wait_until_the_first_batch_comes() -> None:
    """Equal stages, one of each rank: a pass of ``n`` batches takes ``2 n - 1`` times a stage."""
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))), torch.empty(4096, 4096)
    plan = zinf_compile.plan(
        model,
        x,
        loss=lambda y: y.sum(),
        hardware=with_rates(load_hardware("8xrtx4090"), device_link="1 PB/s"),
        compute_dtype=torch.bfloat16,
        compute="aten",
        optimizer=torch.optim.SGD,
        world=4,
        schedule="rounds",
    )
    pipeline = pipeline_of(plan)
    passes = pipeline.slowest.micro_batch_seconds + pipeline.seconds_of(StepPart.BUBBLE)
    mean = sum(stage.num_stages * stage.micro_batch_seconds for stage in pipeline.stages) / 4
    assert pipeline.slowest.micro_batch_seconds * 7 / 4 >= passes >= mean * 7 / 4 * 0.95


def test_with_free_links_rounds_are_not_faster_than_sharding() -> None:
    hardware = replace(
        with_rates(load_hardware("8xrtx4090"), device_link="1 PB/s"),
        device_link_lanes=(),
        routes=tuple(
            replace(route, bytes_per_second=1e15, latency_seconds=0.0) for route in load_hardware("8xrtx4090").routes
        ),
    )
    options = {"hardware": hardware, "layers": 8, "world": 2, "batch": 16}
    sharded = simulate(plan_gpt(**options).plan).step_seconds
    assert pipeline_of(plan_gpt(**options, schedule="rounds")).step_seconds >= 0.98 * sharded


def test_over_slow_links_rounds_are_faster_than_sharding() -> None:
    hardware = with_rates(load_hardware("8xrtx4090"), device_link="100 MB/s", host_to_device="100 MB/s")
    options = {**WEIGHTS, "hardware": hardware, "layers": 7, "world": 4, "device_memory": "40MiB"}
    sharded = simulate(plan_gpt(**options).plan).step_seconds
    assert pipeline_of(plan_gpt(**options, schedule="rounds")).step_seconds < sharded / 2


def test_inference_is_planned() -> None:
    pipeline = pipeline_of(plan_gpt(world=2, schedule="rounds", train=False))
    assert pipeline.seconds_of(StepPart.UPDATE) == 0
    assert pipeline.step_seconds > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": 4, "tp": 2}, r"does not go with tp=2; leave one of them out"),
        ({"world": 4, "pp": 2}, r"does not go with pp=2; leave one of them out"),
        ({"world": 4, "replicas": 2}, r"does not go with replicas=2; leave one of them out"),
        ({"world": 4, "accumulate": 8}, r"does not go with accumulate; leave one of them out"),
        ({"world": 4, "dynamic": True}, r"does not go with dynamic; leave one of them out"),
        ({"world": 4, "stage": 1}, r"does not go with stage=1; leave one of them out"),
        ({"world": 4, "step_in_backward": True}, r"does not go with step_in_backward=True; leave one of them out"),
        ({"world": 1}, r"to 2 or more devices of one node, and world=1 of 8xrtx4090"),
        ({"world": 32, "hardware": "dgx2"}, r"devices of one node, and world=32 of dgx2, whose nodes have 16"),
        ({"world": 8}, r"deals blocks of the model out to 8 ranks, and it has 5"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_gpt(schedule="rounds", **options)


def test_a_rank_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"needs .* on device, device_memory is 2.0 MiB"):
        plan_gpt(world=2, schedule="rounds", device_memory="2MiB", tiles=False)


class Writes(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return x.sum() * self.calls.sum()


def test_models_that_cannot_work_in_rounds_are_refused_as_at_run_time() -> None:
    with torch.device("meta"):
        model, x = Writes(), torch.empty(4, 8)
    with pytest.raises(UnsupportedError, match="writes in its forward to a buffer"):
        zinf_compile.plan(model, x, hardware="8xrtx4090", world=2, schedule="rounds")


def test_devices_without_peer_access_exchange_bytes_over_the_lanes_of_the_host() -> None:
    options = {**WEIGHTS, "world": 2, "device_memory": "16MiB"}
    shared = load_hardware("8xrtx4090")
    assert shared.links(2).lanes == ("pcie in", "pcie out")
    apart = replace(shared, device_link_lanes=())
    assert apart.links(2).lanes == ("device links",)
    seconds = [simulate(plan_gpt(hardware=hardware, **options).plan).step_seconds for hardware in (shared, apart)]
    assert seconds[0] > seconds[1]


def test_tiers_of_a_rank_hold_its_stages_alone() -> None:
    plan = plan_gpt(world=2, schedule="rounds", device_memory="24MiB", **WEIGHTS)
    elements = pipeline_of(plan).slowest.num_elements
    homes = sum(item.nbytes_on(tier) for item in plan.placements for tier in Tier)
    assert homes == sum(item.nbytes_of(role) for item in plan.placements for role in item.by_role)
    assert homes == 16 * elements  # as mixed-precision Adam has, ZeRO (arXiv 1910.02054), section 3
