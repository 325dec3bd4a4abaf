"""Models that ``parallelize_module`` has divided over one dimension of a mesh, optimized over another, and over none."""

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zinf_compile
from tests.distributed.workloads import KIB, check_at_rest, full, optimize, record_full
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace, assert_same
from zinf_compile.ir.errors import CapacityError, ConfigError, RankError, UnsupportedError
from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.runtime.execute.saved_tensors import GATHERED
from zinf_compile.runtime.params.records import record_of

WIDTH = 14  # 7 rows of a layer on each of two ranks, which two others divide unevenly
HIDDEN = 3002


class MLP(nn.Module):
    """Layers that are divided by columns and by rows, in turn; ``scaled`` by a parameter that stays plain."""

    def __init__(self, *, scaled: bool = False, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5)) if scaled else 1.5

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for a batch."""
        hidden = self.down(functional.gelu(self.up(x * self.scale)))
        output: Tensor = self.narrow(functional.gelu(self.widen(hidden)))
        return output


def build_mlp(seed: int = 0, *, scaled: bool = False, hidden: int = HIDDEN) -> MLP:
    """Return an MLP, the same on every rank."""
    torch.manual_seed(seed)
    return MLP(scaled=scaled, hidden=hidden)


def divide_mlp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide an MLP over the ranks of a mesh."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "widen": ColwiseParallel(), "narrow": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def loss_of(model: nn.Module, step: int, replica: int) -> Tensor:
    """Return the loss of the batch of a replica at a step."""
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + replica))
    return (model(x) - x).square().mean()


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW that does not take rounding of a gradient that is nearly zero for the sign of one."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def train(
    model: nn.Module,
    replicas: list[int],
    clip: float | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> Trace:
    """Return the full numbers of some steps, each over the batches of some replicas, averaged."""
    optimizer, trace = optimizer or make_adamw(model), Trace()
    for step in range(3):
        for replica in replicas:
            loss = loss_of(model, step, replica)
            loss.backward()
            trace.losses.append(loss.detach().clone())
        for parameter in model.parameters():
            if len(replicas) > 1 and parameter.grad is not None:
                parameter.grad.div_(len(replicas))
        if clip is not None:
            trace.losses.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        trace.gradients.append({name: full(each.grad) for name, each in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        record_full(trace, model, optimizer)
    return trace


def placements_of(model: nn.Module) -> dict[str, Any]:
    """Return the names of the mesh, and the placements of each parameter, and the tiers that they are on."""
    records = [record for each in model.parameters() if (record := record_of(each)) is not None]
    tiers = {slot.tier for record in records for slot in record.slots}
    return {
        **{name: (each.device_mesh.mesh_dim_names, each.placements) for name, each in model.named_parameters()},
        "tiers": {str(tier) for tier in tiers},
    }


def train_parts(options: Mapping[str, Any], clip: float | None) -> tuple[Trace, Trace, dict[str, Any]]:
    """Return what two ranks that divide an MLP get with a store each and in plain PyTorch, and how they see parameters."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = train(divide_mlp(build_mlp(), mesh), [0], clip)
    model = optimize(divide_mlp(build_mlp(), mesh), options)
    ours = train(model, [0], clip)
    seen = placements_of(model)
    check_at_rest(model)
    zinf_compile.close(model)
    return ours, plain, seen


def mesh_of(shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh, int]:
    """Return meshes of replicas, of a shape, and of the two ranks that divide each, and which replica this rank is in."""
    names = ("replicate", "dp", "tp")[-len(shape) - 1 :]
    mesh = init_device_mesh("cpu", (*shape, 2), mesh_dim_names=names)
    number = torch.arange(math.prod(shape)).view(shape)
    replicas = mesh[names[:-1]]
    return replicas, mesh["tp"], int(number[tuple(replicas.get_coordinate() or ())])


def train_replicas(options: Mapping[str, Any], shape: tuple[int, ...], clip: float | None) -> list[Any]:
    """Return what replicas of two such ranks get, and two ranks that accumulate the batches of all in plain PyTorch.

    Also how parameters are seen. A plain parameter is among them unless gradients are clipped, which torch does in one mesh.
    """
    of_data, of_parts, replica = mesh_of(shape)
    is_scaled, replicas = clip is None, [*range(math.prod(shape))]
    plain = train(divide_mlp(build_mlp(scaled=is_scaled), of_parts), replicas, clip)
    runs = []
    for _ in range(2):
        model = optimize(divide_mlp(build_mlp(scaled=is_scaled), of_parts), {**options, "mesh": of_data})
        runs.append(train(model, [replica], clip))
        seen = placements_of(model)
        check_at_rest(model)
        zinf_compile.close(model)
    assert_same(*runs)
    return [runs[0], plain, seen]


def options_in(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return budgets that put parameters on each tier."""
    common = {"compute": "aten", "reserve_memory": 0, "nvme": str(folder), "host_memory": 512 * KIB}
    return {
        "nvme": {**common, "streams": True, "device_memory": 560 * KIB},
        "resident": {**common, "device_memory": 4096 * KIB, "host_memory": 4096 * KIB},
        "eager": {**common, "streams": True, "device_memory": 256 * KIB, "capture": False},
    }


def assert_close(ours: Trace, plain: Trace) -> None:
    """Assert that losses, gradients and parameters of two runs agree to 1e-6."""
    torch.testing.assert_close(ours.losses, plain.losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.gradients, plain.gradients, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.parameters, plain.parameters, rtol=1e-6, atol=1e-6)


PLACEMENTS = ["nvme", "resident", "eager"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_each_rank_stores_its_part(placement: str, clip: float | None, two: RankPool, tmp_path: Path) -> None:
    for ours, plain, seen in two.run(train_parts, options_in(tmp_path)[placement], clip):
        assert_same(ours, plain)
        assert seen["up.weight"] == (("tp",), (Shard(0),))
        assert seen["down.weight"] == (("tp",), (Shard(1),))
        assert seen["down.bias"] == (("tp",), (Replicate(),))
        assert ("nvme" in seen["tiers"]) == (placement != "resident")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_replicas_of_parts_divide_them(placement: str, four: RankPool, tmp_path: Path) -> None:
    alone = train(build_mlp(scaled=True), [0, 1])
    outcomes = four.run(train_replicas, options_in(tmp_path)[placement], (2,), None)
    for rank, (ours, plain, seen) in enumerate(outcomes):
        assert_same(ours, replace(plain, losses=plain.losses[rank // 2 :: 2]))
        assert_close(ours, replace(alone, losses=alone.losses[rank // 2 :: 2]))
        assert seen["up.weight"] == (("dp", "tp"), (_StridedShard(0, split_factor=2), Shard(0)))
        assert seen["down.weight"] == (("dp", "tp"), (Shard(0), Shard(1)))
        assert seen["down.bias"] == (("dp", "tp"), (Shard(0), Replicate()))
        assert seen["scale"] == (("dp",), (Shard(0),))
        assert ("nvme" in seen["tiers"]) == (placement != "resident")


def test_replicas_of_parts_in_a_mesh_of_three_dimensions(four: RankPool, tmp_path: Path) -> None:
    for rank, (ours, plain, seen) in enumerate(four.run(train_replicas, options_in(tmp_path)["nvme"], (2, 1), None)):
        assert_same(ours, replace(plain, losses=plain.losses[rank // 2 :: 2]))
        assert seen["down.weight"] == (("replicate", "dp", "tp"), (Replicate(), Shard(0), Shard(1)))


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 2}])
def test_stages_that_keep_more_on_every_rank(options: Mapping[str, Any], four: RankPool, tmp_path: Path) -> None:
    given = {**options_in(tmp_path)["resident"], **options}
    for rank, (ours, plain, _) in enumerate(four.run(train_replicas, given, (2,), None)):
        assert_same(ours, replace(plain, losses=plain.losses[rank // 2 :: 2]))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_norms_are_those_of_both_dimensions(placement: str, four: RankPool, tmp_path: Path) -> None:
    alone = train(build_mlp(), [0, 1], clip=0.1)
    losses = [loss for step in range(3) for loss in alone.losses[3 * step : 3 * step + 3]]
    for rank, (ours, _, _) in enumerate(four.run(train_replicas, options_in(tmp_path)[placement], (2,), 0.1)):
        of_rank = [loss for number, loss in enumerate(losses) if number % 3 in (rank // 2, 2)]
        assert_close(ours, replace(alone, losses=of_rank))


def train_few_rows(options: Mapping[str, Any]) -> tuple[Trace, Trace]:
    """Return what replicas get where some ranks have no row of a part, and one weight is frozen."""
    of_data, of_parts, replica = mesh_of((2,))

    def build() -> nn.Module:
        model = build_mlp(hidden=2)
        model.widen.requires_grad_(False)
        return divide_mlp(model, of_parts)

    plain = train(build(), [0, 1])
    model = optimize(build(), {**options, "mesh": of_data})
    ours = train(model, [replica])
    check_at_rest(model)
    zinf_compile.close(model)
    return ours, plain


def test_frozen_parts_and_parts_of_fewer_rows_than_replicas(four: RankPool, tmp_path: Path) -> None:
    for rank, (ours, plain) in enumerate(four.run(train_few_rows, options_in(tmp_path)["nvme"])):
        assert_same(ours, replace(plain, losses=plain.losses[rank // 2 :: 2]))


def scale(options: Mapping[str, Any], bad_rank: int) -> tuple[float, bool]:
    """Return the scale, and whether parameters changed, after a step with an infinite gradient on one rank, or on none."""
    of_data, of_parts, replica = mesh_of((2,))
    model = optimize(divide_mlp(build_mlp(), of_parts), {**options, "mesh": of_data})
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = full(model.up.weight)
    scaler.scale(loss_of(model, 0, replica)).backward()
    if torch.distributed.get_rank() == bad_rank:
        with torch.no_grad():
            model.down.weight.grad.to_local().view(-1)[3] = math.inf
    scaler.step(optimizer)
    scaler.update()
    changed = not torch.equal(full(model.up.weight), before)
    zinf_compile.close(model)
    return scaler.get_scale(), changed


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_infinity_in_one_part_skips_the_step_of_all(placement: str, four: RankPool, tmp_path: Path) -> None:
    options = options_in(tmp_path)[placement]
    assert four.run(scale, options, 3) == [(2.0, False)] * 4
    assert four.run(scale, options, -1) == [(4.0, True)] * 4


def save_and_load(options: Mapping[str, Any], folder: str) -> list[bool]:
    """Return whether a checkpoint of torch has the values, for the same ranks and for a plain model over two of them."""
    of_data, of_parts, replica = mesh_of((2,))
    model = optimize(divide_mlp(build_mlp(), of_parts), {**options, "mesh": of_data})
    train(model, [replica])
    saved = {name: full(value) for name, value in model.state_dict().items()}
    torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=folder)
    other = optimize(divide_mlp(build_mlp(1), of_parts), {**options, "mesh": of_data})
    equal = []
    for each in (other, divide_mlp(build_mlp(2), of_parts)):
        state = each.state_dict()
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)
        each.load_state_dict(state)
        equal.append(all(torch.equal(full(value), saved[name]) for name, value in each.state_dict().items()))
    equal.append(torch.equal(loss_of(other, 9, replica), loss_of(model, 9, replica)))
    for each in (model, other):
        zinf_compile.close(each)
    return equal


def test_torchs_own_checkpoints_have_all_parts(four: RankPool, tmp_path: Path) -> None:
    options = options_in(tmp_path)["nvme"]
    assert four.run(save_and_load, options, str(tmp_path / "checkpoint")) == [[True, True, True]] * 4


def resume(options: Mapping[str, Any]) -> tuple[Trace, Trace]:
    """Return the numbers of steps after the state dicts of model and optimizer went into new ones, and without that."""
    of_data, of_parts, replica = mesh_of((2,))
    model = optimize(divide_mlp(build_mlp(), of_parts), {**options, "mesh": of_data})
    optimizer = make_adamw(model)
    traces = []
    train(model, [replica], optimizer=optimizer)
    other = optimize(divide_mlp(build_mlp(1), of_parts), {**options, "mesh": of_data})
    again = make_adamw(other)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((model, optimizer), (other, again)):
        traces.append(train(each, [replica], optimizer=its))
        zinf_compile.close(each)
    return traces[0], traces[1]


def test_state_dicts_go_into_a_new_model(four: RankPool, tmp_path: Path) -> None:
    for straight, resumed in four.run(resume, options_in(tmp_path)["nvme"]):
        assert_same(resumed, straight)


class Decoder(nn.Module):
    """A transformer whose norms, dropout and sums are divided by sequence, and whose loss is by classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(22, 12), nn.Linear(12, 22, bias=False)
        self.attend, self.feed, self.norm = Attention(), Feed(), nn.LayerNorm(12)
        self.first, self.second = nn.LayerNorm(12), nn.LayerNorm(12)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.embed(tokens)
        hidden = hidden + self.attend(self.first(hidden))
        hidden = hidden + self.feed(self.second(hidden))
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Attention(nn.Module):
    """Causal attention of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.project = (nn.Linear(12, 12) for _ in range(3))
        self.key = nn.Linear(12, 12, bias=False)  # the gradient of a bias would be nothing but rounding

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what attention adds to the hidden states."""
        heads = [each(hidden).unflatten(-1, (-1, 3)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        projected: Tensor = self.project(attended.transpose(1, 2).flatten(2))
        return projected


class Feed(nn.Module):
    """An MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 26), nn.Linear(26, 12)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what it adds to the hidden states."""
        added: Tensor = self.down(functional.gelu(self.up(hidden)))
        return added


def build_decoder() -> Decoder:
    """Return a Decoder, the same on every rank."""
    torch.manual_seed(0)
    return Decoder()


def divide_decoder(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide a Decoder over the ranks of a mesh."""
    by_sequence = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **dict.fromkeys(("first", "second", "norm"), SequenceParallel()),
        "attend": PrepareModuleInput(**by_sequence),
        **dict.fromkeys(("attend.query", "attend.key", "attend.value", "feed.up"), ColwiseParallel()),
        **dict.fromkeys(("attend.project", "feed.down"), RowwiseParallel(output_layouts=Shard(1))),
        "feed": PrepareModuleInput(**by_sequence),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(model, mesh, plan)


def read(model: nn.Module, replicas: list[int], *, divided: bool, clip: float | None = 0.5) -> Trace:
    """Return the numbers of a Decoder that reads the batches of some replicas; ``divided`` by classes in the loss."""
    trace, optimizer = Trace(), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for replica in replicas:
            generator = torch.Generator().manual_seed(10 * step + replica)
            tokens = torch.randint(0, 22, (2, 9), generator=generator)
            with loss_parallel() if divided else nullcontext():
                logits = model(tokens[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / len(replicas) if len(replicas) > 1 else loss).backward()
            trace.losses.append(full(loss))
        if clip is not None:
            trace.losses.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        trace.gradients.append({name: full(each.grad) for name, each in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        trace.parameters.append({name: full(each) for name, each in model.named_parameters()})
    return trace


def read_on_ranks(options: Mapping[str, Any]) -> tuple[Trace, int]:
    """Return the numbers of a replica of two ranks that divide a Decoder, and how often parameters were gathered."""
    of_data, of_parts, replica = mesh_of((2,))
    model = optimize(divide_decoder(build_decoder(), of_parts), {**options, "mesh": of_data})
    trace = read(model, [replica], divided=True)
    check_at_rest(model)
    gathers = zinf_compile.report(model).num_eager_gathers
    zinf_compile.close(model)
    return trace, gathers


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sequence_and_loss_parallel(placement: str, four: RankPool, tmp_path: Path) -> None:
    alone = read(build_decoder(), [0, 1], divided=False)
    for rank, (ours, gathers) in enumerate(four.run(read_on_ranks, options_in(tmp_path)[placement])):
        of_rank = [loss for number, loss in enumerate(alone.losses) if number % 3 in (rank // 2, 2)]
        assert_close(ours, replace(alone, losses=of_rank))
        assert gathers == (2 * len(alone.parameters[0]) if placement == "eager" else 0)  # in each forward


def read_parts(options: Mapping[str, Any]) -> tuple[Trace, Trace, zinf_compile.Report]:
    """Return the numbers of two ranks that divide a Decoder, with a store each and in plain PyTorch, and the report.

    Nothing is clipped: plain PyTorch scales what each rank has of the gradient of a norm, and adds these up when asked.
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = read(divide_decoder(build_decoder(), mesh), [0], divided=True, clip=None)
    model = optimize(divide_decoder(build_decoder(), mesh), options)
    ours = read(model, [0], divided=True, clip=None)
    check_at_rest(model)
    report = zinf_compile.report(model)
    zinf_compile.close(model)
    return ours, plain, report


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sequence_and_loss_parallel_have_the_bits_of_plain_ranks(placement: str, two: RankPool, tmp_path: Path) -> None:
    for ours, plain, report in two.run(read_parts, options_in(tmp_path)[placement]):
        assert_same(ours, plain)
        assert len(report.plans) == (placement != "eager")
        assert not report.graph_breaks


class WithLoss(nn.Module):
    """A Decoder that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = build_decoder()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from those before it."""
        logits = self.decoder(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def lose(options: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor], int]:
    """Return losses and gradients of batches of two lengths, in a store and plain, and how many graphs were planned."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), []
    plain, model = WithLoss(), WithLoss()
    for each in (plain, model):
        divide_decoder(each.decoder, mesh)
    model = optimize(model, options)
    for each in (plain, model):
        numbers = []
        for length in (9, 7):
            tokens = torch.randint(0, 22, (2, length), generator=torch.Generator().manual_seed(length))
            with loss_parallel():
                loss = each(tokens)
                loss.backward()
            numbers += [full(loss), *(full(parameter.grad) for parameter in each.parameters())]
            each.zero_grad()
        found.append(numbers)
    num_graphs = len(zinf_compile.report(model).plans)
    zinf_compile.close(model)
    return found[1], found[0], num_graphs


def test_losses_by_classes_in_the_graph(two: RankPool, tmp_path: Path) -> None:
    for ours, plain, num_graphs in two.run(lose, options_in(tmp_path)["nvme"]):
        assert all(map(torch.equal, ours, plain))
        assert num_graphs == 2


class Stack(nn.Module):
    """Blocks, which may be checkpointed by the user."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks, self.checkpoints = nn.ModuleList(Feed() for _ in range(3)), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for a batch."""
        for block in self.blocks:
            normed = functional.layer_norm(x, (12,))
            x = x + (checkpoint(block, normed, use_reentrant=False) if self.checkpoints else block(normed))
        return x


def divide_stack(mesh: DeviceMesh, *, checkpoints: bool = False) -> nn.Module:
    """Return a Stack, divided over the ranks of a mesh."""
    torch.manual_seed(0)
    plan: dict[str, Any] = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(Stack(checkpoints=checkpoints), mesh, plan)


def stack_up(options: Mapping[str, Any], checkpoints: bool, count: int) -> tuple[Trace, Trace, Any]:
    """Return the numbers of a Stack with micro-batches and an evaluation, in a store and plain, and its policy."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = divide_stack(mesh, checkpoints=checkpoints)
    model = optimize(divide_stack(mesh, checkpoints=checkpoints), options)
    traces = []
    for each in (plain, model):
        optimizer, trace = torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3), Trace()
        for step in range(3):
            for micro in range(count):
                x = torch.randn(40, 12, generator=torch.Generator().manual_seed(10 * step + micro))
                loss = each(x).square().mean()
                loss.backward()
                trace.losses.append(loss.detach().clone())
            with torch.no_grad():
                trace.losses.append(each(x[:1].repeat(40, 1)).sum())
            trace.gradients.append({name: full(one.grad) for name, one in each.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            record_full(trace, each, optimizer)
        traces.append(trace)
    check_at_rest(model)
    (plan, *_) = zinf_compile.report(model).plans
    zinf_compile.close(model)
    return traces[1], traces[0], plan.activations.policy


@pytest.mark.parametrize(("options", "checkpoints"), [({"recompute": True}, False), ({}, True), ({"stage": 3}, False)])
def test_blocks_that_are_recomputed(
    options: Mapping[str, Any], checkpoints: bool, two: RankPool, tmp_path: Path
) -> None:
    for ours, plain, policy in two.run(stack_up, {**options_in(tmp_path)["nvme"], **options}, checkpoints, 2):
        assert_same(ours, plain)
        assert (policy is ActivationPolicy.RECOMPUTE_BLOCKS) == ("recompute" in options)


class Broken(nn.Module):
    """An MLP behind dropout, whose graph breaks between both."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = build_mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for a batch."""
        x = functional.dropout(x, 0.5)
        torch._dynamo.graph_break()
        output: Tensor = self.mlp(x)
        return output


def train_broken(options: Mapping[str, Any]) -> tuple[Trace, Trace, zinf_compile.Report]:
    """Return the numbers of a model whose graph breaks, in a store and in plain PyTorch, and the report."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain, model = (Broken() for _ in range(2))
    for each in (plain, model):
        divide_mlp(each.mlp, mesh)
    model = optimize(model, options)
    traces = []
    for each in (plain, model):
        torch.manual_seed(5)
        traces.append(train(each, [0]))
    report = zinf_compile.report(model)
    zinf_compile.close(model)
    return traces[1], traces[0], report


def test_a_model_whose_graph_breaks_runs_eagerly(two: RankPool, tmp_path: Path) -> None:
    for ours, plain, report in two.run(train_broken, options_in(tmp_path)["nvme"]):
        assert_same(ours, plain)
        (reason,) = report.fallbacks
        assert re.match(
            r"Broken runs eagerly, gathering as it goes: it has DTensors, and its graph breaks at \S+\.py:\d+: ", reason
        )
        assert not report.plans
        assert report.num_eager_gathers == 3 * 7


def train_unevenly(options: Mapping[str, Any]) -> tuple[Trace, Trace]:
    """Return what replicas get whose ranks have unequal parts, and budgets, so that their plans differ."""
    of_data, of_parts, replica = mesh_of((2,))

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 3001), nn.Tanh(), nn.Linear(3001, WIDTH))
        return parallelize_module(model, of_parts, {"0": ColwiseParallel(output_layouts=Replicate())})

    plain = train(build(), [0, 1])
    mine = {**options, "device_memory": options["device_memory"] + 4096 * torch.distributed.get_rank()}
    model = optimize(build(), {**mine, "mesh": of_data})
    ours = train(model, [replica])
    assert len(zinf_compile.report(model).plans) == 1
    check_at_rest(model)
    zinf_compile.close(model)
    return ours, plain


def test_unequal_parts_and_budgets(four: RankPool, tmp_path: Path) -> None:
    for rank, (ours, plain) in enumerate(
        four.run(train_unevenly, {**options_in(tmp_path)["nvme"], "device_memory": 1280 * KIB})
    ):
        assert_same(ours, replace(plain, losses=plain.losses[rank // 2 :: 2]))


def train_compiled(options: Mapping[str, Any]) -> tuple[Trace, Trace, zinf_compile.Report]:
    """Return what ranks that divide a Decoder get in compiled segments, and in plain PyTorch, and the report."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = read(divide_decoder(build_decoder(), mesh), [0], divided=True, clip=None)
    runs = []
    for _ in range(2):
        model = optimize(divide_decoder(build_decoder(), mesh), options)
        runs.append(read(model, [0], divided=True, clip=None))
        report = zinf_compile.report(model)
        zinf_compile.close(model)
    assert_same(*runs)
    return runs[0], plain, report


def test_compiled_segments_agree_to_rounding(two: RankPool, tmp_path: Path) -> None:
    for ours, plain, report in two.run(train_compiled, {**options_in(tmp_path)["resident"], "compute": "inductor"}):
        torch.testing.assert_close(ours.losses, plain.losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.gradients, plain.gradients, rtol=1e-5, atol=1e-6)
        assert not report.fallbacks


def differ(how: str, options: Mapping[str, Any]) -> str:
    """Return the error of this rank where two that divide a model do something else, or have other memory."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    is_second = mesh.get_local_rank() == 1
    model = divide_mlp(build_mlp(hidden=HIDDEN + (3000 if how == "sizes" and is_second else 0)), mesh)
    if how == "options":
        options = {**options, "recompute": is_second}
    if how == "folder" and is_second:
        options = {**options, "nvme": f"{options['nvme']}/missing"}
    try:
        model = optimize(model, options)
        if how == "calls" and is_second:
            with torch.no_grad():
                model(torch.ones(1, WIDTH))
        loss_of(model, 0, 0).backward()
        if how == "steps":
            loss, optimizer = loss_of(model, 1, 0), make_adamw(model)
            if is_second:
                optimizer.step()
            loss.backward()
    except (CapacityError, ConfigError, RankError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("how", "messages"),
    [
        ("options", ["RankError: options differ: 'recompute' is False on rank 0 and True on rank 1"] * 2),
        ("folder", ["RankError: reading options failed on rank 1; rank 1: ConfigError: nvme=", "ConfigError: nvme="]),
        ("calls", ["RankError: captured graphs differ: 'backward of MLP graph 0' is 2 collectives ("] * 2),
        (
            "sizes",
            ["CapacityError: planning failed on rank 1; rank 1: DeviceCapacityError: MLP", "DeviceCapacityError: MLP"],
        ),
    ],
)
def test_ranks_that_differ_are_named(how: str, messages: list[str], two: RankPool, tmp_path: Path) -> None:
    for error, message in zip(two.run(differ, how, options_in(tmp_path)["nvme"]), messages, strict=True):
        assert error.startswith(message), error


def scale_gradients(options: Mapping[str, Any], shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return gradients before and after they are halved, and what ranks have of them, as looks other than ops see them."""
    of_data, of_parts, replica = mesh_of(shape)
    model = optimize(divide_mlp(build_mlp(), of_parts), {**options, "mesh": of_data if shape else None})
    loss_of(model, 0, replica).backward()
    found = []
    for parameter in model.parameters():
        before = full(parameter.grad)
        parameter.grad.mul_(0.5)
        found.append((before, full(parameter.grad)))
        parameter.grad.mul_(0.5)
        local = parameter.grad.to_local().clone()
        parameter.grad.mul_(2.0)
        found[-1] += (local, parameter.grad.redistribute(placements=parameter.placements).to_local().clone())
    zinf_compile.close(model)
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_looks_at_a_gradient_see_what_was_deferred(placement: str, two: RankPool, tmp_path: Path) -> None:
    for gradients in two.run(scale_gradients, options_in(tmp_path)[placement], ()):
        for before, after, local, last in gradients:
            assert torch.equal(after, before / 2)
            assert torch.equal(last, 2 * local)


def refuse(what: str) -> tuple[str, bool]:
    """Return the error of a use that is refused, and whether the model still computes what it did before."""
    of_data, of_parts, replica = mesh_of((2,))
    model = divide_mlp(build_mlp(scaled=True), of_parts)
    before = loss_of(model, 0, replica)
    options: dict[str, Any] = {
        "no mesh": {"mesh": None},
        "both dimensions": {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))},
        "the same dimension": {"mesh": of_parts},
        "another mesh": {"mesh": DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("dp", "tp"))["dp"]},
        "no names": {"mesh": DeviceMesh.from_group(of_data.get_group(), "cpu")},
        "init": {"init": "reset"},
        "micro_batches": {"micro_batches": 2},
        "tiles": {"tiles": {"up.weight": 2}},
        "state_dtype": {"state_dtype": "int8"},
        "frozen_dtype": {"frozen_dtype": "int8"},
    }
    with pytest.raises((ConfigError, UnsupportedError)) as error:
        zinf_compile.optimize(model, **{"mesh": of_data, **options[what]})
    return str(error.value), torch.equal(loss_of(model, 0, replica), before)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no mesh", r"'up.weight' is a DTensor over 2 of 4 ranks; say which .*mesh=mesh\['dp'\]"),
        (
            "both dimensions",
            r"ranks \d, \d are both in the mesh that is given, \[\[0, 1\], \[2, 3\]\], and in that of 'up.w",
        ),
        (
            "the same dimension",
            r"are both in the mesh that is given, .*, which divides it among them; give the dimension",
        ),
        ("another mesh", r"and that of 'up.weight', .*, are not dimensions of one mesh; make one"),
        ("no names", r"and that of 'up.weight', .*, are not dimensions of one mesh; make one"),
        ("init", r"'up.weight' is a DTensor; give it its values before optimize\(\)"),
        (
            "micro_batches",
            r"micro_batches cuts a captured graph, and that of a model with DTensors, such as 'up.weight', cannot be",
        ),
        ("tiles", r"tiles cuts a captured graph"),
        (
            "state_dtype",
            r"state_dtype='int8' encodes the state of whole rows, and a rank has parts of those of a DTensor",
        ),
        ("frozen_dtype", r"frozen_dtype='int8' encodes whole rows, and a rank has parts of those of a DTensor"),
    ],
)
def test_meshes_and_options_that_are_refused(what: str, message: str, four: RankPool) -> None:
    for error, is_unchanged in four.run(refuse, what):
        assert re.search(message, error), error
        assert is_unchanged


class Writing(nn.Module):
    """Writes to a parameter in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = build_mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for a batch."""
        with torch.no_grad():
            self.mlp.up.weight.mul_(0.5)
        output: Tensor = self.mlp(x)
        return output


def write() -> str:
    """Return the error of a model that writes to a DTensor among its parameters."""
    model = Writing()
    divide_mlp(model.mlp, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    with pytest.raises(UnsupportedError) as error:
        zinf_compile.optimize(model)(torch.ones(5, WIDTH))
    return str(error.value)


def test_writes_to_parameters_are_refused(two: RankPool) -> None:
    for error in two.run(write):
        assert re.match(r"the model writes to one of its parameters in its own forward \(mul_", error), error


def refuse_placement(placement: Placement, shape: Sequence[int]) -> str:
    """Return the error for a parameter with a placement of which not every rank has values."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Module()
    local = torch.ones(shape[0] if mesh.get_local_rank() == 0 or placement.is_partial() else 0, *shape[1:])
    model.scale = nn.Parameter(
        DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=local.stride())
    )
    with pytest.raises(UnsupportedError) as error:
        zinf_compile.optimize(model)
    return str(error.value)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            Partial(),
            "'scale' is a DTensor with Partial.* over 'tp': with Partial.* its values cannot be gathered .*redistr",
        ),
        (Shard(0), r"'scale' is a DTensor of \(1,\) with Shard\(dim=0\) over 'tp', and some ranks have no element"),
    ],
)
def test_placements_that_are_refused(placement: Placement, message: str, two: RankPool) -> None:
    for error in two.run(refuse_placement, placement, [1]):
        assert re.search(message, error), error


def shard_fully() -> str:
    """Return the error for a model that FSDP2 has divided."""
    with pytest.raises(UnsupportedError) as error:
        zinf_compile.optimize(fully_shard(build_mlp(), mesh=init_device_mesh("cpu", (2,))))
    return str(error.value)


def test_fully_shard_is_refused(two: RankPool) -> None:
    for error in two.run(shard_fully):
        assert re.match(
            r"the model was given to fully_shard, .*; leave fully_shard out, and give its mesh to optimize", error
        ), error


def use_otherwise(folder: str) -> list[str]:
    """Return the errors for uses of a model that need whole parameters, and the report on how it runs."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = divide_mlp(build_mlp(), mesh)
    before = torch.optim.AdamW(model.parameters())
    model = zinf_compile.optimize(model)
    loss_of(model, 0, 0).backward()

    def summon() -> None:
        with zinf_compile.full_parameters(model):
            pass

    uses: list[Callable[[], object]] = [
        lambda: zinf_compile.save(folder, model),
        lambda: zinf_compile.export(model, folder),
        summon,
        torch.optim.Adafactor(model.parameters()).step,
        before.step,
    ]
    errors = []
    for use in uses:
        with pytest.raises(UnsupportedError) as error:
            use()
        errors.append(str(error.value))
    torch.optim.AdamW(model.parameters()).step()
    zinf_compile.close(model)
    return errors


def test_uses_that_need_whole_parameters_are_refused(two: RankPool, tmp_path: Path) -> None:
    named = r"each rank stores the local tensor of 'up.weight', a DTensor \(Shard\(dim=0\) over 'tp'\); use full_tensor"
    expected = [
        f"a checkpoint of zinf_compile needs whole parameters, and {named}",
        f"export needs whole parameters, and {named}",
        rf"full_parameters\(MLP\) needs whole parameters, and {named}",
        r"Adafactor does not update element by element, and of 'up.weight', a DTensor \(Shard.*only; use an optimizer",
        r"AdamW was made before zinf_compile.optimize\(model\)",
    ]
    for errors in two.run(use_otherwise, str(tmp_path / "folder")):
        for error, message in zip(errors, expected, strict=True):
            assert re.match(message, error), error


def hold(options: Mapping[str, Any]) -> tuple[int, bool]:
    """Return how many gathered values there are between forward and backward, and whether a step in between is refused."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = optimize(divide_mlp(build_mlp(), mesh), options)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, 0, 0).backward()
    loss = loss_of(model, 1, 0)
    held = sum(noted() is not None for noted, record in GATHERED._records.values() if record.name == "up.weight")
    optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"'.*' was modified by an optimizer step between its forward and its backward"
    ):
        loss.backward()
    zinf_compile.close(model)
    return held, True


def test_a_gathered_part_is_not_kept_for_backward(two: RankPool, tmp_path: Path) -> None:
    assert two.run(hold, options_in(tmp_path)["eager"]) == [(0, True)] * 2
