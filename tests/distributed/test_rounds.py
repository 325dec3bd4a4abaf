"""Ranks that work in rounds: each has stages of the model, and computes them for the batches of all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import zinf_compile
from tests.distributed.workloads import (
    Block,
    Loop,
    batch_of,
    build_frozen,
    check_at_rest,
    optimize,
    placements,
    train_alone,
)
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace, assert_same
from zinf_compile.frontend import offline
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.capture.offline.trace import RankInRounds
from zinf_compile.passes.planner.schedule.rounds import Deal
from zinf_compile.runtime.params.remote import RemoteParameter


class Deep(nn.Module):
    """Five blocks, a table that follows from no parameter, a buffer, and a value that all later stages read."""

    def __init__(self, *, width: int = 24, vocabulary: int = 51) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(5))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the logits."""
        places = torch.arange(tokens.shape[-1], device=tokens.device) / 10
        first = hidden = self.embed(tokens) + places.sin()[:, None]
        for block in self.blocks:
            hidden = block(hidden) * self.scale + first
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


class Loss(nn.Module):
    """A Deep that returns its loss only."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = Deep()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.deep(tokens, targets)[0]
        return loss


def build_deep() -> nn.Module:
    """Return a Loss, the same on every rank."""
    torch.manual_seed(0)
    return Loss()


LOOPS = {
    "ordinary": Loop(),
    "deep": Loop(build=build_deep),
    "clipped": Loop(build=build_deep, clip=0.5),
    "accumulated": Loop(num_steps=2, num_accumulated=2),
    "frozen": Loop(build=build_frozen),
    "momentum": Loop(optimizer="SGD", optimizer_options={"lr": 0.1, "momentum": 0.9}),
    "whole": Loop(optimizer="Adafactor", optimizer_options={"lr": 0.1}),
    "summed": Loop(divide_by=1),
}


def train_in_rounds(loop: Loop, options: Mapping[str, Any]) -> Trace:
    """Return the numbers of a rank: its losses, and gradients, parameters and states that it has. Called on each rank."""
    model = optimize(loop.build(), {**options, "schedule": "rounds"})
    optimizer = loop.make_optimizer(model)
    trace = Trace()
    for step in range(loop.num_steps):
        for micro in range(loop.num_accumulated):
            loss = model(**batch_of(step * loop.num_accumulated + micro, dist.get_rank()))
            loss.backward()
            trace.losses.append(loss.detach().clone())
        if loop.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        mine = {name: each for name, each in model.named_parameters() if not isinstance(each, RemoteParameter)}
        trace.gradients.append({name: None if each.grad is None else each.grad.clone() for name, each in mine.items()})
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            trace.parameters.append({name: each.clone() for name, each in mine.items()})
        trace.buffers.append({name: each.clone() for name, each in model.named_buffers() if dist.get_rank() == 0})
        states = optimizer.state_dict()["state"]
        trace.states.append(
            {f"{index} {key}": value.clone() for index, state in states.items() for key, value in state.items()}
        )
    check_at_rest(model)
    zinf_compile.close(model)
    return trace


def plan_at_run_time(options: Mapping[str, Any]) -> Plan:
    """Return the plan of a rank, once it has trained. Called on each rank."""
    model = optimize(build_deep(), {**options, "schedule": "rounds"})
    model(**batch_of(0, dist.get_rank())).backward()
    (plan,) = zinf_compile.report(model).plans
    zinf_compile.close(model)
    return plan.plan


def joined(traces: Sequence[Trace], plain: Trace) -> Trace:
    """Return the numbers of all ranks as those of one, which must have each number once."""
    whole = Trace(losses=[loss for losses in zip(*(trace.losses for trace in traces), strict=True) for loss in losses])
    for kind in ("gradients", "parameters", "buffers", "states"):
        for records in zip(*(getattr(trace, kind) for trace in traces), strict=True):
            assert sum(map(len, records)) == len({name for record in records for name in record})
            order = list(getattr(plain, kind)[0])
            both = {name: value for record in records for name, value in record.items()}
            getattr(whole, kind).append(dict(sorted(both.items(), key=lambda item: order.index(item[0]))))
    return whole


@pytest.mark.parametrize("placement", ["nvme", pytest.param("resident", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "loop",
    [
        *("ordinary", "clipped", "frozen"),
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ("deep", "accumulated", "momentum", "whole", "summed")
        ),
    ],
)
def test_two_ranks(loop: str, placement: str, two: RankPool, tmp_path: Path) -> None:
    options = dict(placements(str(tmp_path))[placement])
    if LOOPS[loop].divide_by is not None:
        options["gradient_divide_factor"] = LOOPS[loop].divide_by
    plain = train_alone(LOOPS[loop], 2)
    assert_same(joined(two.run(train_in_rounds, LOOPS[loop], options), plain), plain)


@pytest.mark.parametrize("loop", ["clipped", pytest.param("ordinary", marks=pytest.mark.long)])
def test_three_ranks(loop: str, three: RankPool, tmp_path: Path) -> None:
    plain = train_alone(LOOPS[loop], 3)
    given = placements(str(tmp_path))["nvme"]
    assert_same(joined(three.run(train_in_rounds, LOOPS[loop], given), plain), plain)


def count_read(options: Mapping[str, Any], schedule: str | None) -> tuple[int, int]:
    """Return the bytes that one step brings to this rank's device, and those of the weights that it brings. On each rank.

    Without a schedule in one process, on the batches of both ranks.
    """
    torch.manual_seed(0)
    model: nn.Module = Deep(width=128)
    model = optimize(model, {**options, **({} if schedule is None else {"schedule": schedule})})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    moved = []
    for step in range(3):
        batches = [batch_of(step, rank) for rank in range(2)]
        batch = {name: torch.cat([each[name] for each in batches]) for name in batches[0]}
        model(**(batch if schedule is None else batches[dist.get_rank()]))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        zinf_compile.synchronize(model)
        moved.append(sum(each.nbytes for each in zinf_compile.report(model).moved if each.route == "nvme -> device"))
    (plan,) = zinf_compile.report(model).plans
    weights = sum(placement.compute_nbytes for placement in plan.placements if placement.compute == "nvme")
    zinf_compile.close(model)
    return moved[2] - moved[1], weights


def test_each_weight_goes_to_one_device(two: RankPool, tmp_path: Path) -> None:
    options = {
        "compute": "aten",
        "reserve_memory": 0,
        "nvme": str(tmp_path),
        "host_memory": 520 * 2**10,
        "recompute": False,
        "remake_plan": False,
    }
    moved, weights = count_read({**options, "device_memory": 2200 * 2**10}, None)
    assert 1.05 * 2 * weights >= moved >= 2 * weights > 2**20  # forward and backward, in whole sectors
    in_rounds = two.run(count_read, {**options, "device_memory": 3300 * 2**10}, "rounds")
    moved, weights = (sum(of_ranks) for of_ranks in zip(*in_rounds, strict=True))
    assert 1.05 * 2 * weights >= moved >= 2 * weights > 2**20  # of both ranks together


def test_what_is_planned_ahead_of_the_machine_is_what_ranks_run(
    two: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = two.run(plan_at_run_time, placements(str(tmp_path))["nvme"])
    planned: list[Plan] = []

    def plan_all(
        model: nn.Module, deal: Deal, *, num_tokens: int, plan_rank: Callable[[RankInRounds], PlanView]
    ) -> PlanView:
        for rank in range(2):
            view = plan_rank(RankInRounds(owners=deal.owners, rank=rank, num_ranks=2))
            planned.append(view.plan)
        return view

    monkeypatch.setattr(offline, "plan_in_rounds", plan_all)
    hardware = replace(ran[0].hardware, devices_per_node=2, device_link_bytes_per_second=1e9, tiers=())
    budgets = {"device_memory": "64MiB", "host_memory": "64MiB", "compute": "aten"}
    zinf_compile.plan(build_deep(), batch_of(0, 0), hardware=hardware, world=2, schedule="rounds", **budgets)
    for rank in range(2):
        assert planned[rank].uses == ran[rank].uses
        assert planned[rank].schedule == ran[rank].schedule
        assert [sink.name for sink in planned[rank].sinks] == [sink.name for sink in ran[rank].sinks]
        assert planned[rank].activations.saved_nbytes == ran[rank].activations.saved_nbytes
