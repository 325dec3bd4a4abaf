"""Tiles on several ranks: each is divided among all of them, and results are those of the same tiles in one process."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zinf_compile
from tests.distributed.workloads import (
    KIB,
    TILES,
    Loop,
    Small,
    batch_of,
    blocks_of,
    build_small,
    check_at_rest,
    full,
    of_rank,
    optimize,
    train_alone,
    train_step,
)
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace, assert_same
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.slices import Slice
from zinf_compile.ir.tiles import rows_of_rank
from zinf_compile.passes.planner.placement import homes
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.store.store import store_of

LOOP = Loop(build=build_small, num_steps=2)


@pytest.fixture
def options(tmp_path: Path) -> Mapping[str, Any]:
    """Return budgets in which everything streams from disk, in tiles."""
    homes = {"nvme": str(tmp_path), "device_memory": 360 * KIB, "host_memory": 512 * KIB, "reserve_memory": 0}
    return {**homes, "compute": "aten", "streams": True, "tiles": TILES}


def train(loop: Loop, options: Mapping[str, Any], save: str | None = None) -> tuple[Trace, Plan, Mapping[Tier, int]]:
    """Return the numbers of a loop on a rank, its plan, and what it has of the model on each tier."""
    model, trace = optimize(loop.build(), options), Trace()
    optimizer = loop.make_optimizer(model)
    for step in range(loop.num_steps):
        train_step(loop, model, optimizer, step, trace, looks_at_gradients=not options.get("step_in_backward"))
    if save is not None:
        zinf_compile.save(save, model, optimizer)
    check_at_rest(model)
    check_tile(model)
    (plan,) = zinf_compile.report(model).plans
    held = store_of(record_of(next(model.parameters()))).held
    nbytes = {tier: held.nbytes_on(tier) for tier in Tier}
    zinf_compile.close(model)
    return trace, plan, nbytes


def tiles_in(plan: Plan) -> list[str]:
    """Return the tiles whose gradients a plan sends home."""
    return [sink.name for sink in plan.sinks if ".tile_" in sink.name]


def check_plan_ahead(plans: Sequence[Plan], model: nn.Module, inputs: object, options: Mapping[str, Any]) -> None:
    """Check that planning a model ahead of its ranks gives the plan that they run, whose tiles have rows of each."""
    size, budgets = len(plans), {name: value for name, value in options.items() if name not in ("nvme", "streams")}
    hardware = plans[0].hardware
    ahead = zinf_compile.plan(model, inputs, hardware=hardware, nvme_memory="1GiB", world=size, **budgets).plan
    for plan in plans:
        assert plan.placements == ahead.placements
        assert plan.transfers == ahead.transfers
        assert plan.notes == ahead.notes
        assert [(tier.tier, tier.parts) for tier in plan.tiers] == [(tier.tier, tier.parts) for tier in ahead.tiers]
    by_parameter = defaultdict[str, list[Slice]](list)
    for item in ahead.placements:
        if item.tile_of is not None:
            assert {copy.slice for copy in item.copies} == {item.copies[0].slice}
            assert item.copies[0].slice.num_ranks == size
            by_parameter[item.tile_of].append(item.copies[0].slice)
    assert by_parameter
    for name, tiles in by_parameter.items():
        whole = Slice.of_whole(name, model.get_parameter(name).shape)
        rows = [rows_of_rank(tiles, number, rank, size) for rank in range(size) for number in range(len(tiles))]
        assert [row for part in rows for row in range(part.start, part.stop)] == list(range(whole.length))


def check_tile(model: nn.Module) -> None:
    """Check the value that a gather of a tile outside of a plan has."""
    record = record_of(model.up.weight)
    store = store_of(record)
    blocks = blocks_of(193, TILES["up.weight"], store.ranks.size)
    parts = full(model.up.weight).split([rows for of_rank in blocks for rows in of_rank])
    (tile,) = (each for each in store._tiles.values() if each.name == "up.weight.tile_1")
    assert torch.equal(store.gather_value(tile, torch.float32), torch.cat(parts[1 :: len(blocks[0])]))


def test_two_ranks(two: RankPool, options: Mapping[str, Any], tmp_path: Path) -> None:
    """The bits are those of one process, each rank has half of everything, and one process loads what they save."""
    plain, folder = train_alone(replace(LOOP, build=partial(build_small, 2)), 2), str(tmp_path / "checkpoint")
    whole = sum(parameter.numel() * parameter.element_size() for parameter in build_small().parameters())
    for rank, (ours, plan, nbytes) in enumerate(two.run(train, LOOP, options, folder)):
        assert_same(ours, of_rank(plain, rank, 2))
        assert len(tiles_in(plan)) == sum(TILES.values())
        assert nbytes[Tier.DEVICE] < 2 * KIB  # biases
        assert sum(nbytes.values()) < 1.02 * 4 * whole / 2  # parameters, gradients and states; rows are uneven
    alone = build_small()
    optimizer = LOOP.make_optimizer(alone)
    zinf_compile.load(folder, alone, optimizer)
    loaded = Trace()
    loaded.record_model(alone, optimizer)
    for found, trained in ((loaded.parameters[-1], plain.parameters[-1]), (loaded.states[-1], plain.states[-1])):
        assert found.keys() == trained.keys()
        assert all(torch.equal(found[name], value) for name, value in trained.items())


@pytest.mark.long
def test_three_ranks_and_a_tile_that_has_rows_for_two(three: RankPool, options: Mapping[str, Any]) -> None:
    loop = Loop(build=build_small, num_steps=1, num_accumulated=2)
    plain = train_alone(replace(loop, build=partial(build_small, 3)), 3)
    outcomes = three.run(train, loop, options)
    for rank, (ours, plan, _) in enumerate(outcomes):
        assert_same(ours, of_rank(plain, rank, 3))
        tiles = [tile for tile in tiles_in(plan) if "up.weight" in tile]
        assert tiles == [f"up.weight.tile_{number}" for number in (2, 1, 0)]
    with mock.patch.object(homes, "RESIDENT_THRESHOLD", 0):
        check_plan_ahead([plan for _, plan, _ in outcomes], build_small(), batch_of(0, 0), options)


@dataclass(frozen=True, kw_only=True)
class Resumed(Loop):
    """A loop that goes on from a checkpoint."""

    folder: str

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer, after loading it and the model."""
        optimizer = super().make_optimizer(model)
        zinf_compile.load(self.folder, model, optimizer)
        return optimizer


@pytest.mark.parametrize(
    "sizes", [pytest.param(sizes, marks=pytest.mark.long) for sizes in ((2, 3), (2, 1, 2), (1, 3), (3, 2))]
)
def test_checkpoints_of_other_numbers_of_ranks(
    sizes: Sequence[int], pool_of: Callable[[int], RankPool], options: Mapping[str, Any], tmp_path: Path
) -> None:
    """Each number of ranks goes on from what the one before has saved, in tiles of other rows, as one process does."""
    loop = Loop(build=build_small, num_steps=1)
    for size in sizes:
        folder, plain = str(tmp_path / str(size)), train_alone(replace(loop, build=partial(build_small, size)), size)
        for rank, (ours, plan, _) in enumerate(pool_of(size).run(train, loop, options, folder)):
            assert_same(ours, of_rank(plain, rank, size))
            assert tiles_in(plan)
        loop = Resumed(build=build_small, num_steps=1, folder=folder)


def train_around_torchs_checkpoints(
    options: Mapping[str, Any], save: str, load: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train a step, with values of torch.distributed.checkpoint if it is to load, and save what comes of it.

    Returns the values before and after the step.
    """
    model = optimize(build_small(), options)
    if load is not None:
        model(**batch_of(0, dist.get_rank())).backward()  # so that tiles are known
        model.zero_grad()
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=load)
        model.load_state_dict(state["model"])
    before = {name: full(parameter) for name, parameter in model.named_parameters()}
    optimizer = LOOP.make_optimizer(model)
    model(**batch_of(1, dist.get_rank())).backward()
    optimizer.step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=save)
    after = {name: full(parameter) for name, parameter in model.named_parameters()}
    check_tile(model)
    check_at_rest(model)
    zinf_compile.close(model)
    return before, after


def test_torchs_own_checkpoints(two: RankPool, three: RankPool, options: Mapping[str, Any], tmp_path: Path) -> None:
    """They fit other numbers of ranks, and what is loaded is what the next step computes with."""
    folders = [str(tmp_path / name) for name in ("two", "three")]
    saved = two.run(train_around_torchs_checkpoints, options, folders[0])[0][1]
    outcomes = three.run(train_around_torchs_checkpoints, options, folders[1], folders[0])
    plain = build_small(3)
    plain.load_state_dict(saved)
    optimizer = LOOP.make_optimizer(plain)
    for rank in range(3):
        plain(**batch_of(1, rank)).backward()
    for parameter in plain.parameters():
        parameter.grad /= 3
    optimizer.step()
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    for before, after in outcomes:
        assert all(torch.equal(before[name], value) for name, value in saved.items())
        assert all(torch.equal(after[name], value) for name, value in expected.items())
    assert not torch.equal(saved["up.weight"], expected["up.weight"])


class InTwoGraphs(Small):
    """A Small that is captured in two graphs, of which only the second one reads the head."""

    look: Callable[[], None]  # called between them

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        hidden = self.embed(tokens)
        hidden = hidden + self.down(nn.functional.gelu(self.up(hidden)))
        self.look()
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def train_in_two_graphs(loop: Loop, options: Mapping[str, Any]) -> tuple[Trace, list[Tier], list[list[str]]]:
    """Return the numbers of a rank, where the head is between the two graphs of each step, and what the plans place."""
    torch.manual_seed(0)
    model, trace, seen = optimize(InTwoGraphs(), options), Trace(), list[Tier]()
    optimizer, head = loop.make_optimizer(model), record_of(model.head.weight)
    model.look = torch.compiler.disable(lambda: seen.append(head.copies.compute.tier))
    for step in range(loop.num_steps):
        train_step(loop, model, optimizer, step, trace)
    check_at_rest(model)
    plans = zinf_compile.report(model).plans
    zinf_compile.close(model)
    return trace, seen, [[item.parameter for item in plan.placements] for plan in plans]


def test_tiles_of_what_an_earlier_graph_has_made_resident(two: RankPool, options: Mapping[str, Any]) -> None:
    """The head moves to where it can be read in tiles, and the first graph keeps its bits."""
    tiles = {"head.weight": 2}
    loop = Loop(num_steps=2)
    plain = train_alone(replace(loop, build=partial(build_small, 2, tiles)), 2)
    given = {**options, "streams": False, "device_memory": 600 * KIB, "tiles": tiles}
    for rank, (ours, seen, placed) in enumerate(two.run(train_in_two_graphs, loop, given)):
        assert_same(ours, of_rank(plain, rank, 2))
        assert seen == [Tier.DEVICE, Tier.HOST]
        assert ["head.weight" in names for names in placed] == [True, False]
        assert {"head.weight.tile_0", "head.weight.tile_1"} <= set(placed[1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("loop", "changes"),
    [
        (replace(LOOP, num_accumulated=2), {"host_memory": 2048 * KIB}),
        (LOOP, {"step_in_backward": True, "device_memory": 640 * KIB}),
        (replace(LOOP, optimizer="SGD", optimizer_options={"lr": 0.1, "momentum": 0.9}), {"overlap_step": False}),
        (replace(LOOP, optimizer="Adafactor", optimizer_options={"lr": 1e-2}), {"device_memory": 640 * KIB}),
    ],
)
def test_other_loops(loop: Loop, changes: dict[str, Any], two: RankPool, options: Mapping[str, Any]) -> None:
    plain = train_alone(replace(loop, build=partial(build_small, 2)), 2)
    if "step_in_backward" in changes:
        plain.gradients = []
    for rank, (ours, plan, _) in enumerate(two.run(train, loop, {**options, **changes})):
        assert_same(ours, of_rank(plain, rank, 2))
        assert len(tiles_in(plan)) == sum(TILES.values())


@pytest.mark.long
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
def test_replicas(shape: tuple[int, int], four: RankPool, options: Mapping[str, Any]) -> None:
    plain = train_alone(replace(LOOP, build=partial(build_small, shape[1])), 4)
    for rank, (ours, plan, _) in enumerate(four.run(train, LOOP, {**options, "mesh": shape})):
        assert_same(ours, of_rank(plain, rank, 4))
        assert len(tiles_in(plan)) == sum(TILES.values())


def gradients_with_hooks(options: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Return gradients that a hook has doubled, and what comes to a gradient that the user has set."""
    model = optimize(build_small(), options)
    handle = model.up.weight.register_hook(lambda grad: 2 * grad)
    found = []
    for _ in range(2):
        model(**batch_of(0, dist.get_rank())).backward()
        found.append({name: full(parameter.grad) for name, parameter in model.named_parameters()})
        handle.remove()
        model.zero_grad()
        model.up.weight.grad = torch.ones_like(model.up.weight)
    zinf_compile.close(model)
    return found


@pytest.mark.long
def test_gradients_that_a_hook_sees_and_that_the_user_sets(two: RankPool, options: Mapping[str, Any]) -> None:
    (plain,) = train_alone(replace(LOOP, num_steps=1, build=partial(build_small, 2)), 2).gradients
    for hooked, added in two.run(gradients_with_hooks, options):
        assert torch.equal(hooked.pop("up.weight"), 2 * plain["up.weight"])
        assert torch.equal(added.pop("up.weight"), 1 + plain["up.weight"])
        assert all(torch.equal(each, plain[name]) for found in (hooked, added) for name, each in found.items())


class Wide(nn.Module):
    """An embedding and a head that share a weight of 2 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4096, 64), nn.Linear(64, 4096, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.roll(1, 1).flatten())


def build_wide() -> nn.Module:
    """Return a Wide in float64, where reordered sums hardly differ."""
    torch.manual_seed(0)
    return Wide().double()


def tokens_of(rank: int) -> Tensor:
    return torch.randint(4096, (2, 8), generator=torch.Generator().manual_seed(rank))


def train_wide(options: Mapping[str, Any]) -> tuple[Tensor, Tensor, Plan, list[int]]:
    """Return the loss and weight of a step, its plan, and the device's peaks."""
    model = optimize(build_wide(), options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = model(tokens_of(dist.get_rank()))
    loss.backward()
    optimizer.step()
    weight = full(model.embed.weight)
    report = zinf_compile.report(model)
    (plan,) = report.plans
    device = next(tier for tier in report.tiers if tier.tier is Tier.DEVICE)
    zinf_compile.close(model)
    return loss.detach(), weight, plan, [device.measured_peak, device.predicted_peak]


@pytest.mark.long
@pytest.mark.parametrize("compute", ["aten", "inductor"])
def test_a_parameter_larger_than_the_device_trains(compute: str, two: RankPool, tmp_path: Path) -> None:
    """Both ranks choose the same tiles, which are also planned without them."""
    plain = build_wide()
    losses = [plain(tokens_of(rank)) for rank in range(2)]
    (sum(losses) / 2).backward()
    with torch.no_grad():
        expected = plain.embed.weight - plain.embed.weight.grad
    budgets = {"device_memory": 1536 * KIB, "host_memory": 1024 * KIB, "reserve_memory": 0, "nvme": str(tmp_path)}
    options = {**budgets, "compute": compute}
    outcomes = two.run(train_wide, options)
    check_plan_ahead([plan for _, _, plan, _ in outcomes], build_wide(), tokens_of(0), options)
    for rank, (loss, weight, plan, (measured, predicted)) in enumerate(outcomes):
        assert any("tiles of the rows of 2 ranks" in note for note in plan.notes)
        assert len(plan.placements) > 2
        assert measured <= predicted <= 1536 * KIB
        torch.testing.assert_close(loss, losses[rank].detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-14)
