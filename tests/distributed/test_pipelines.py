"""Stages of a pipeline of torch.distributed.pipelining, each optimized by itself: the bits are those of plain stages."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import zinf_compile
from tests.distributed.workloads import KIB, full, optimize
from tests.support.rank_pool import RankPool
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import TierPart
from zinf_compile.runtime.params.records import record_of

WIDTH, TOKENS, SAMPLES, STEPS = 64, 8, 8, 3
SCHEDULES = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)


class Block(nn.Module):
    """A block of a transformer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(number: int) -> nn.Sequential:
    """Return a stage, by its number in the pipeline."""
    torch.manual_seed(number)
    return nn.Sequential(Block(), Block())


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How some ranks train."""

    schedule: Any
    num_data: int = 1  # ranks that have the same stage
    micro_batches: int = 4
    options: Mapping[str, Any] | None = None  # None: plain stages

    @property
    def stages_per_rank(self) -> int:
        """Return how many stages a rank has."""
        return 2 if self.schedule is ScheduleInterleaved1F1B else 1


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of the last stage."""
    return nn.functional.mse_loss(output, target)


def train(pipeline: Pipeline) -> dict[str, Any]:
    """Train some steps on a rank; return its losses, its full parameters, and what is on which tier."""
    num_stages = dist.get_world_size() // pipeline.num_data
    mesh = init_device_mesh("cpu", (num_stages, pipeline.num_data), mesh_dim_names=("pp", "dp"))
    place = mesh.get_local_rank("pp")
    numbers = [place + num_stages * turn for turn in range(pipeline.stages_per_rank)]
    num_stages *= pipeline.stages_per_rank
    modules = [build(number) for number in numbers]
    if pipeline.options is not None:
        first, *others = modules
        budgets = {name: pipeline.stages_per_rank * pipeline.options[name] for name in ("device_memory", "host_memory")}
        first = optimize(first, {**pipeline.options, **budgets, "mesh": mesh["dp"]})
        modules = [first, *(zinf_compile.optimize(module, share=first) for module in others)]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in modules]
    stages = [
        PipelineStage(module, number, num_stages, torch.device("cpu"), group=mesh.get_group("pp"))
        for module, number in zip(modules, numbers, strict=True)
    ]
    given = stages if pipeline.stages_per_rank > 1 else stages[0]
    schedule = pipeline.schedule(given, n_microbatches=pipeline.micro_batches, loss_fn=loss_of)
    losses: list[Tensor] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp"))
        x, target = (torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator) for _ in range(2))
        inputs = (x,) if 0 in numbers else ()
        of_step: list[Tensor] = []
        if num_stages - 1 in numbers:
            schedule.step(*inputs, target=target, losses=of_step)
        else:
            schedule.step(*inputs)
        losses += of_step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = {
        "losses": [loss.item() for loss in losses],
        "parameters": [full(parameter) for module in modules for parameter in module.parameters()],
        "tiers": [tiers_of(module) for module in modules],
    }
    if pipeline.options is not None:
        plans = zinf_compile.report(modules[0]).plans  # of all models that share its budgets
        found["open"] = [plan.tier(Tier.DEVICE).nbytes_of(TierPart.OPEN) for plan in plans]
        for module in modules:
            zinf_compile.close(module)
    return found


def tiers_of(module: nn.Module) -> set[Tier]:
    """Return where the master copies and states of a stage are; nothing of a plain one."""
    records = [record for parameter in module.parameters() if (record := record_of(parameter)) is not None]
    return {slot.tier for record in records for slot in (record.copies.master, *record.copies.states.values())}


@pytest.fixture
def options(tmp_path: Path) -> Mapping[str, Any]:
    """Return budgets in which some of a stage, which is 258 KiB of weights and three times as much beside, is on disk."""
    return {
        "streams": True,
        "compute": "aten",
        "reserve_memory": 0,
        "nvme": str(tmp_path),
        "device_memory": 600 * KIB,
        "host_memory": 512 * KIB,
    }


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
def test_stages_train_as_plain_ones(schedule: Any, capture: bool, two: RankPool, options: Mapping[str, Any]) -> None:
    """Several forwards are open at once, each with activations of its own."""
    pipeline = Pipeline(schedule=schedule)
    plain = two.run(train, pipeline)
    ours = two.run(train, replace(pipeline, options={**options, "capture": capture}))
    assert len(plain[1]["losses"]) == STEPS * pipeline.micro_batches
    for found, expected in zip(ours, plain, strict=True):
        assert all(Tier.NVME in tiers for tiers in found["tiers"]), found["tiers"]
        assert found["losses"] == expected["losses"]
        assert len(found["open"]) == capture * pipeline.stages_per_rank
        assert all(nbytes > 0 for nbytes in found["open"]), "activations of other micro-batches are planned for"
        assert all(map(torch.equal, found["parameters"], expected["parameters"]))
        assert len(found["parameters"]) == 12 * pipeline.stages_per_rank


@pytest.mark.parametrize("capture", [pytest.param(True, marks=pytest.mark.long), False], ids=["captured", "eager"])
def test_stages_whose_ranks_share_them(capture: bool, four: RankPool, options: Mapping[str, Any]) -> None:
    """Two pipelines train with the bits of each other, and of another run; as one of plain stages to rounding.

    Each backward reduces its gradient, so that the gradients of micro-batches and of ranks are added in another order.
    """
    pipeline = Pipeline(schedule=Schedule1F1B, num_data=2, options={**options, "capture": capture})
    first, again = (four.run(train, pipeline) for _ in range(2))
    plain = four.run(train_plain_averaged)
    for rank in range(4):
        assert first[rank]["losses"] == again[rank]["losses"]
        assert all(map(torch.equal, first[rank]["parameters"], again[rank]["parameters"]))
        assert all(map(torch.equal, first[rank]["parameters"], first[rank ^ 1]["parameters"]))
        torch.testing.assert_close(first[rank]["losses"], plain[rank]["losses"], rtol=1e-5, atol=1e-6)
    assert first[2]["losses"] != first[3]["losses"], "each pipeline has a batch of its own"


def train_plain_averaged() -> dict[str, Any]:
    """Train plain stages, whose gradients are averaged over two ranks before each step."""
    step = torch.optim.AdamW.step
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")).get_group("dp")

    class Averaged(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= 2
            return step(self, closure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", Averaged)
        return train(Pipeline(schedule=Schedule1F1B, num_data=2))
