"""Hybrid sharding: a mesh of two dimensions, whose replicas divide everything among their ranks, as FSDP2's HSDP."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import zinf_compile
from tests.distributed.test_checkpoints import load_only, resume, train_and_save, values_in_one_process
from tests.distributed.test_errors import SOON, train_until
from tests.distributed.test_loops import (
    check_what_is_seen,
    clip_on_disk,
    look_alone,
    look_around,
    save_with_torch,
    scale,
    scale_rows,
)
from tests.distributed.workloads import (
    KIB,
    Loop,
    batch_of,
    build_gpt,
    of_rank,
    optimize,
    placements,
    train_alone,
    train_on_ranks,
)
from tests.support.rank_pool import Raised, RankPool
from tests.support.traces import assert_same
from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.ir.hardware import DEVICE_LINKS
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.slices import Slice
from zinf_compile.passes.planner.simulator.simulate import simulate
from zinf_compile.runtime.ranks import reductions
from zinf_compile.runtime.ranks.agreement import count_devices
from zinf_compile.runtime.ranks.ranks import Ranks
from zinf_compile.runtime.ranks.reductions import Reductions

PLACEMENTS = ["nvme", pytest.param("resident", marks=pytest.mark.long)]
SHAPES = [(7, 3), (1, 5), (4,), (64, 9)]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return the options of two replicas of two ranks, by placement."""
    return {name: {**given, "mesh": (2, 2)} for name, given in placements(str(tmp_path)).items()}


@pytest.fixture
def eager(options: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the same without capturing, which takes four ranks many seconds."""
    return {name: {**given, "capture": False} for name, given in options.items()}


def piece_of(shape: Sequence[int], rank: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def keep(kept: list[Tensor], shard: Tensor) -> None:
    """Keep a reduced gradient, whose memory is overwritten."""
    kept.append(shard.clone())


def reduce(mesh: list[Any], dtype: torch.dtype, is_ordered: bool) -> list[Any]:
    """Return this rank's place in a mesh, and its gradients: in one piece and in many, alone and several at once."""
    ranks, whole = Ranks(DeviceMesh("cpu", mesh)), reductions.REDUCED_NBYTES
    ours = Reductions(ranks, is_ordered=is_ordered, divide_by=1)
    results = []
    for nbytes in (whole, 64):
        reductions.REDUCED_NBYTES = nbytes  # type: ignore[misc]
        pieces = [(Slice.of_whole("w", shape), piece_of(shape, ranks.mesh_rank, dtype)) for shape in SHAPES]
        alone = [ours.reduced(whole_slice, piece) for whole_slice, piece in pieces]
        together: list[Tensor] = []
        for whole_slice, piece in pieces:
            ours.start(whole_slice, piece, partial(keep, together))
        ours.finish()
        results += [alone, [shard.view_as(each) for shard, each in zip(together, alone, strict=True)]]
    reductions.REDUCED_NBYTES = whole
    (largest,) = ranks.largest("the largest rank", dist.get_rank())
    assert largest == 3
    assert ranks.exchange("ranks", ranks.mesh_rank) == [0, 1, 2, 3]
    return [ranks.size, ranks.rank, ranks.mesh_rank, results]


def count_waits() -> list[int]:
    """Return how many waits there were when each of some gradients was started, whose buffers hold four of them."""
    ranks = Ranks(DeviceMesh("cpu", [0, 1]))
    ours = Reductions(ranks, is_ordered=True, divide_by=1)
    ours.reduced(Slice.of_whole("large", (64, 64)), torch.ones(64, 64))
    waited, counts, wait = [], [], ranks.wait
    ranks.wait = lambda collective, **by: (waited.append(collective), wait(collective, **by))  # type: ignore[method-assign,assign,func-returns-value]
    for number in range(6):
        ours.start(Slice.of_whole("small", (16, 64)), torch.full((16, 64), float(number)), lambda shard: None)
        counts.append(len(waited))
    ours.finish()
    return [*counts, len(waited)]


def test_as_many_reductions_are_in_flight_as_buffers_hold(two: RankPool) -> None:
    assert two.run(count_waits) == [[0, 0, 0, 0, 4, 4, 6]] * 2


@pytest.mark.parametrize("mesh", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], [[0, 1, 2, 3]]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_in_the_order_of_the_mesh(mesh: list[Any], dtype: torch.dtype, four: RankPool) -> None:
    flat = [rank for row in mesh for rank in row]
    for is_ordered in (True, False):
        for global_rank, (size, rank, mesh_rank, results) in enumerate(four.run(reduce, mesh, dtype, is_ordered)):
            assert (size, flat[mesh_rank]) == (len(mesh[0]), global_rank)
            for shape, *reduced in zip(SHAPES, *results, strict=True):
                total = piece_of(shape, 0, dtype)
                for other in range(1, 4):
                    total.add_(piece_of(shape, other, dtype))
                rows = total[Slice.of_whole("w", shape).among(size).of_rank(rank).start :]
                for ours in reduced:
                    if is_ordered:
                        assert torch.equal(ours, rows[: len(ours)])
                    else:
                        torch.testing.assert_close(ours, rows[: len(ours)], rtol=0.02, atol=0.05)


@pytest.mark.parametrize("placement", ["resident", pytest.param("nvme", marks=pytest.mark.long)])
def test_two_replicas_of_two(placement: str, four: RankPool, options: dict[str, dict[str, Any]]) -> None:
    loop = Loop(num_steps=2, num_accumulated=2)
    plain = train_alone(loop, 4)
    for rank, ours in enumerate(four.run(train_on_ranks, loop, options[placement])):
        assert_same(ours, of_rank(plain, rank, 4))


def plan_on_ranks(options: Mapping[str, Any]) -> Plan:
    """Return the plan of a rank, after one backward."""
    model = optimize(build_gpt(), options)
    model(**batch_of(0, dist.get_rank())).backward()
    (view,) = zinf_compile.report(model).plans
    zinf_compile.close(model)
    return view.plan


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "reduce"), [((2, 2), "ordered"), ((4, 1), "fast")])
def test_a_plan_counts_the_seconds_between_replicas(
    mesh: tuple[int, int], reduce: str, four: RankPool, options: Mapping[str, Any]
) -> None:
    plan, *others = four.run(plan_on_ranks, {**options["nvme"], "mesh": mesh, "reduce": reduce})
    assert others == [plan] * 3
    assert (plan.num_replicas, plan.num_ranks, plan.hardware.num_nodes) == (*mesh, 1)
    assert plan.is_reduced_in_order == (reduce == "ordered")
    assert not any("replica" in note for note in plan.notes)
    alone = replace(plan, num_replicas=1)
    assert simulate(plan).step_seconds > simulate(alone).step_seconds
    passed = Counter(event.name for event in simulate(plan).events if event.lane == DEVICE_LINKS)
    passed.subtract(event.name for event in simulate(alone).events if event.lane == DEVICE_LINKS)
    assert +passed == Counter(sink.label for sink in plan.sinks)  # each gradient once more


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "num_devices"),
    [
        ("aaaa", 2, 4),
        ("aaaa", 1, 4),
        ("aabb", 2, 2),
        ("aabb", 4, 2),
        ("aaaabbbb", 2, 4),
        ("aaabbb", 2, 1),  # the second replica is on both: as if each rank had a node
        ("aaabb", 5, 1),
        ("abab", 2, 1),
    ],
)
def test_ranks_of_a_node_are_counted_as_plans_can_have_them(nodes: str, num_ranks: int, num_devices: int) -> None:
    assert count_devices(nodes, num_ranks) == num_devices
    num_replicas = len(nodes) // num_ranks
    hardware = replace(load_hardware("dgx2"), devices_per_node=num_devices).with_world(num_ranks, num_replicas)
    assert hardware.num_nodes == len(nodes) // num_devices


@pytest.mark.parametrize(
    ("stage", "capture", "looks"),
    [
        (1, False, True),
        (2, False, True),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((1, True, False), (1, True, True), (2, True, True), (2, True, False))
        ),
    ],
)
@pytest.mark.parametrize("mesh", [(2, 2), *(pytest.param(mesh, marks=pytest.mark.long) for mesh in ((4, 1), (1, 4)))])
def test_stages_that_keep_more_on_every_rank(
    mesh: tuple[int, int], stage: int, capture: bool, looks: bool, four: RankPool, options: dict[str, dict[str, Any]]
) -> None:
    """Compute copies stay on the device although they would stream; in stage 1 a captured step has one reduction."""
    loop = Loop(num_steps=2, num_accumulated=2, looks_at_gradients=looks)
    plain = train_alone(loop, 4, reduces_once=stage == 1 and capture)
    if not looks:
        plain.gradients = []
    given = {**options["nvme"], "mesh": mesh, "stage": stage, "capture": capture, "device_memory": 1024 * KIB}
    for rank, ours in enumerate(four.run(train_on_ranks, loop, given)):
        assert_same(ours, of_rank(plain, rank, 4))


@pytest.mark.parametrize(
    ("mesh", "placement", "capture"),
    [
        pytest.param((4, 1), "nvme", True, marks=pytest.mark.long),
        ((4, 1), "resident", False),
        pytest.param((1, 4), "nvme", False, marks=pytest.mark.long),
        pytest.param((4, 1), "resident", True, marks=pytest.mark.long),
        pytest.param((1, 4), "nvme", True, marks=pytest.mark.long),
        pytest.param((1, 4), "resident", True, marks=pytest.mark.long),
    ],
)
def test_a_dimension_of_one(
    mesh: tuple[int, ...], placement: str, capture: bool, four: RankPool, options: dict[str, dict[str, Any]]
) -> None:
    loop = Loop(num_steps=2)
    plain = train_alone(loop, 4)
    given = {**options[placement], "mesh": mesh, "capture": capture}
    for rank, ours in enumerate(four.run(train_on_ranks, loop, given)):
        assert_same(ours, of_rank(plain, rank, 4))


def test_fast_reductions_agree_to_rounding(four: RankPool, eager: dict[str, dict[str, Any]]) -> None:
    loop = Loop(num_steps=2)
    plain = train_alone(loop, 4)
    for rank, ours in enumerate(four.run(train_on_ranks, loop, {**eager["nvme"], "reduce": "fast"})):
        for mine, theirs in zip(ours.losses, of_rank(plain, rank, 4).losses, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_a_rank_sees(placement: str, four: RankPool, eager: dict[str, dict[str, Any]]) -> None:
    alone = look_alone(4)
    for rank, seen in enumerate(four.run(look_around, eager[placement])):
        check_what_is_seen(seen, alone, rows=(91, 90, 91, 90)[rank])


@pytest.mark.long
def test_norms_of_gradients_on_disk_are_those_of_all_ranks(four: RankPool, eager: dict[str, dict[str, Any]]) -> None:
    for tiers, seen in four.run(clip_on_disk, eager["nvme"]):
        assert tiers == ["host", "nvme"]
        assert all(math.isclose(found, true, rel_tol=1e-4) for found, true in seen), seen


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_infinite_gradient_skips_the_step_of_all(
    placement: str, four: RankPool, eager: dict[str, dict[str, Any]]
) -> None:
    assert four.run(scale, eager[placement], 3) == [(2.0, False)] * 4
    assert four.run(scale, eager[placement], -1) == [(4.0, True)] * 4
    assert four.run(scale_rows, eager[placement], 1023) == [(2.0, False)] * 4


@pytest.mark.long
def test_checkpoints_fit_one_process_and_other_meshes(
    four: RankPool, two: RankPool, eager: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    folder, again = tmp_path / "checkpoint", tmp_path / "of one process"
    losses, saved, numbers = zip(*four.run(train_and_save, eager["nvme"], str(folder)), strict=True)
    alone = values_in_one_process(folder)
    assert all(torch.equal(alone[name], value) for name, value in saved[0].items())
    on_two = two.run(load_only, {**eager["nvme"], "mesh": (2,)}, str(folder))
    assert all(torch.equal(on_two[1][name], value) for name, value in saved[0].items())
    resumed = four.run(resume, eager["resident"], str(folder))
    assert all(torch.equal(resumed[rank][2], numbers[rank]) for rank in range(4))  # each its own random numbers
    plain = train_alone(Loop(num_steps=4), 4)
    for rank, (later, values, _) in enumerate(resumed):
        assert [*losses[rank], *later] == plain.losses[rank::4]
        assert all(torch.equal(values[name], value) for name, value in plain.parameters[-1].items())
    save_in_one_process(folder, again)
    back = four.run(load_only, eager["nvme"], str(again))
    assert all(torch.equal(each[name], value) for each in back for name, value in saved[0].items())


def save_in_one_process(folder: Path, again: Path) -> None:
    """Load a checkpoint in one process, and save it again."""
    model = Loop().build()
    optimizer = Loop().make_optimizer(model)
    zinf_compile.load(folder, model, optimizer)
    zinf_compile.save(again, model, optimizer)


@pytest.mark.long
def test_torchs_own_checkpoints(four: RankPool, eager: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    assert four.run(save_with_torch, eager["nvme"], str(tmp_path / "dcp")) == [True] * 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("happens", "elsewhere"),
    [
        ("death", "another rank is gone"),  # rank 0 has no connection to rank 3 but that of control messages
        ("error", "rank 3: a forward broke off: IndexError: index out of range"),
        ("absence", "rank 3 had not come to a forward of TinyGPT graph 0"),
    ],
)
def test_what_happens_on_one_rank_ends_all(
    happens: str, elsewhere: str, four: RankPool, options: Mapping[str, Any]
) -> None:
    start = time.monotonic()
    given = {**options["nvme"], "overlap_step": False, "capture": happens != "death"}
    outcomes = four.outcomes(train_until, given, happens, 3, 1)
    assert time.monotonic() - start < SOON + 60
    for each in outcomes[:3]:
        assert isinstance(each, Raised), each
        assert each.kind == "RankError"
        assert elsewhere in each.message
