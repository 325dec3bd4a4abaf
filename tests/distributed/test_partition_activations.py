"""Activations that tensor-parallel ranks have alike, and of which each offloads and keeps a part: ZeRO-R's Pa."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import zinf_compile
from tests.distributed.test_tensor_parallel import mesh_of
from tests.distributed.workloads import KIB, check_at_rest, full, optimize, record_full
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace, assert_same
from zinf_compile.ir.errors import RankError
from zinf_compile.ir.glossary import ActivationPolicy

WIDTH, VOCABULARY, BLOCKS = 64, 128, 4
# Activations do not fit with the largest block's weights, and leave.
TIGHT = {"device_memory": 1200 * KIB, "host_memory": 16 * 1024 * KIB, "reserve_memory": 0}


class Block(nn.Module):
    """A pre-norm MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for a batch."""
        output: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return output


class Decoder(nn.Module):
    """A language model without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of a batch."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def build(mesh: DeviceMesh, how: str) -> nn.Module:
    """Return a model that ranks have divided: over the sequence between blocks, or not."""
    torch.manual_seed(0)
    if how == "sequence":
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "layers.*.norm": SequenceParallel(),
            "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
            "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    else:
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    return parallelize_module(Decoder(), mesh, plan)


def train(model: nn.Module, replica: int = 0, *, length: int = 32) -> Trace:
    """Return the full numbers of some steps, with an evaluation after each."""
    optimizer, trace = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), Trace()
    for step in range(3):
        tokens = torch.randint(0, VOCABULARY, (8, length), generator=torch.Generator().manual_seed(10 * step + replica))
        loss = model(tokens)
        loss.backward()
        trace.losses.append(loss.detach().clone())
        trace.gradients.append({name: full(each.grad) for name, each in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            trace.losses.append(model(tokens))
        record_full(trace, model, optimizer)
    return trace


def divide(how: str, options: Mapping[str, Any]) -> tuple[Trace, Trace, Any]:
    """Return the numbers of two ranks with a store each and in plain PyTorch, and what the plan moves."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = train(build(mesh, how))
    model = optimize(build(mesh, how), options)
    ours = train(model)
    plan = zinf_compile.report(model).plans[0]
    check_at_rest(model)
    zinf_compile.close(model)
    parts = [value for value in plan.swaps if value.value.endswith("_part")]
    note = any("saves a part" in each for each in plan.notes)
    return ours, plain, (plan.activations.policy, {each.value: each.nbytes for each in plan.swaps}, len(parts), note)


def offloading(tmp_path: Path, **options: Any) -> dict[str, Any]:
    """Return options under which activations leave the device."""
    return {**TIGHT, "nvme": tmp_path, "compute": "aten", "recompute": False, **options}


@pytest.mark.parametrize(("how", "partition"), [("sequence", None), ("layers", True)])
def test_parts_leave_and_are_gathered(how: str, partition: bool | None, two: RankPool, tmp_path: Path) -> None:
    options = offloading(tmp_path)
    whole = two.run(divide, how, {**options, "partition_activations": False})
    parts = two.run(divide, how, {**options, "partition_activations": partition})
    for (ours, plain, (policy, moved, _, noted)), (_, _, (_, moved_whole, _, noted_whole)) in zip(
        parts, whole, strict=True
    ):
        assert_same(ours, plain)
        assert policy is ActivationPolicy.SAVE
        assert noted
        assert not noted_whole
        assert sum(moved.values()) < 0.8 * sum(moved_whole.values())


def test_half_of_each_block_input_leaves(two: RankPool, tmp_path: Path) -> None:
    """With blocks recomputed, all that leaves is what blocks read, which all ranks have: half of it leaves each."""
    options = offloading(tmp_path, recompute=True, device_memory=1000 * KIB)
    whole = two.run(divide, "layers", {**options, "partition_activations": False})
    parts = two.run(divide, "layers", {**options, "partition_activations": True})
    for (ours, plain, (policy, moved, num_parts, _)), (_, _, (_, moved_whole, *_)) in zip(parts, whole, strict=True):
        assert_same(ours, plain)
        assert policy is ActivationPolicy.RECOMPUTE_BLOCKS
        assert moved_whole
        assert 2 * sum(moved.values()) <= sum(moved_whole.values())
        assert num_parts == len(moved)


def divide_unevenly(options: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor], bool, list[str]]:
    """Return the gradients of layers with parts of 501 and 500 columns, in a store and in plain PyTorch, and what moves."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = [each for _ in range(3) for each in (nn.Linear(64, 1001), nn.Tanh(), nn.Linear(1001, 64))]
        plan = {str(3 * number): ColwiseParallel(output_layouts=Replicate()) for number in range(3)}
        return parallelize_module(nn.Sequential(*layers), mesh, plan)

    plain, model = build(), optimize(build(), options)
    for each in (plain, model):
        for step in range(2):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
            (each(x) - x).square().mean().backward()
    plan = zinf_compile.report(model).plans[0]
    gradients = [[full(parameter.grad) for parameter in each.parameters()] for each in (model, plain)]
    check_at_rest(model)
    zinf_compile.close(model)
    noted = any("saves a part" in note for note in plan.notes)
    return gradients[0], gradients[1], noted, [each.value for each in plan.swaps]


def test_unequal_parts_give_equal_activations(two: RankPool, tmp_path: Path) -> None:
    for ours, plain, noted, moved in two.run(divide_unevenly, offloading(tmp_path, device_memory=1800 * KIB)):
        assert all(map(torch.equal, ours, plain))
        assert noted
        assert moved


def test_what_stays_is_whole(two: RankPool, tmp_path: Path) -> None:
    options = offloading(tmp_path, partition_activations=True, device_memory=8 * 1024 * KIB)
    for ours, plain, (_, moved, _, noted) in two.run(divide, "layers", options):
        assert_same(ours, plain)
        assert not moved
        assert not noted


def divide_replicas(options: Mapping[str, Any]) -> tuple[Trace, Trace, bool]:
    """Return the numbers of four ranks, two by two, in two runs, and whether they divide activations."""
    replicas, tensor, replica = mesh_of((2,))
    traces = []
    for _ in range(2):
        model = optimize(build(tensor, "layers"), {**options, "mesh": replicas})
        traces.append(train(model, replica))
        plan = zinf_compile.report(model).plans[0]
        noted = any("saves a part" in note for note in plan.notes)
        check_at_rest(model)
        zinf_compile.close(model)
    return traces[0], traces[1], noted


def test_replicas_of_ranks_that_divide(four: RankPool, tmp_path: Path) -> None:
    options = offloading(tmp_path, partition_activations=True, recompute=True, device_memory=1100 * KIB)
    whole = four.run(divide_replicas, {**options, "partition_activations": False})
    parts = four.run(divide_replicas, options)
    for (first, again, noted), (first_whole, _, noted_whole) in zip(parts, whole, strict=True):
        assert_same(first, again)
        assert_same(first, first_whole)
        assert noted
        assert not noted_whole


def accumulate(options: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor], bool]:
    """Return gradients of two forwards that are open at once, the second backward first, in a store and in plain PyTorch."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain, model = build(mesh, "layers"), optimize(build(mesh, "layers"), options)
    for each in (plain, model):
        for _ in range(2):
            tokens = [torch.arange(8 * 32).view(8, 32) % VOCABULARY, torch.arange(8 * 32).view(8, 32) % 7]
            losses = [each(one) for one in tokens]
            losses[1].backward(retain_graph=True)
            losses[0].backward()
            losses[1].backward()
            del losses
    noted = any("saves a part" in note for note in zinf_compile.report(model).plans[0].notes)
    gradients = [[full(parameter.grad) for parameter in each.parameters()] for each in (model, plain)]
    zinf_compile.close(model)
    return gradients[0], gradients[1], noted


def test_open_forwards_and_backwards_that_run_again(two: RankPool, tmp_path: Path) -> None:
    for ours, plain, noted in two.run(
        accumulate, offloading(tmp_path, partition_activations=True, device_memory=1550 * KIB)
    ):
        assert noted
        assert all(map(torch.equal, ours, plain))


def test_compiled_blocks_agree_to_rounding(two: RankPool, tmp_path: Path) -> None:
    options = offloading(tmp_path, compute="inductor", partition_activations=True, device_memory=1400 * KIB)
    for ours, plain, (*_, noted) in two.run(divide, "layers", options):
        assert noted
        for mine, theirs in zip(ours.losses, plain.losses, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def differ(options: Mapping[str, Any], what: str) -> str:
    """Return what a rank raises when inputs, or parameters that are not distributed, differ."""
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.distributed.get_rank()
    model = build(mesh, "layers")
    if what == "parameters":
        with torch.no_grad():
            model.get_parameter("layers.1.norm.bias")[0] += rank
    try:
        model = optimize(model, options)
        model(torch.full((8, 32), rank))
    except RankError as error:
        return str(error)
    finally:
        if what == "inputs":
            zinf_compile.close(model)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "inputs",
            "inputs of Decoder graph 0 differ: 'input .*partition_activations=True is for tensor-parallel ranks with",
        ),
        ("parameters", "first values differ: 'layers.1.norm.bias' is .* on rank 0 and .* on rank 1"),
    ],
)
def test_what_is_trusted_to_be_the_same_is_checked(what: str, message: str, two: RankPool, tmp_path: Path) -> None:
    for raised in two.run(differ, offloading(tmp_path, partition_activations=True), what):
        assert re.search(message, raised), raised
