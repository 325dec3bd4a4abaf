"""Our checkpoint folders in torch.distributed.checkpoint: FSDP2, tensor-parallel and plain models read and write them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

import zinf_compile
from tests.distributed.workloads import KIB, optimize, placements, values_of
from tests.support.rank_pool import RankPool

Values = dict[str, Tensor]


class MLP(nn.Module):
    """Layers that are divided by rows, and by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(24, 98), nn.Linear(98, 24), nn.Linear(24, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for a batch."""
        output: Tensor = self.last(self.down(torch.tanh(self.up(x))))
        return output


def make(kind: str, options: Mapping[str, Any], seed: int) -> tuple[nn.Module, AdamW]:
    """Return a model of a kind, with values of a seed, and its optimizer, which has no state yet."""
    torch.manual_seed(seed)
    model: nn.Module = MLP()
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    elif kind in ("tp", "zinf tp"):
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if kind == "zinf tp":
            model = optimize(model, {**options, "mesh": mesh["dp"]})
    elif kind == "zinf":
        model = optimize(model, options)
    return model, AdamW(model.parameters(), lr=1e-2, weight_decay=0.03)


def step(model: nn.Module, optimizer: AdamW, seed: int) -> float:
    """Train a step, on data that is the same on all ranks; return the loss."""
    loss = model(torch.randn(4, 24, generator=torch.Generator().manual_seed(seed))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def save(kind: str, options: Mapping[str, Any], folder: str, how: str) -> tuple[Values, float]:
    """Train, and save by ``zinf_compile.save``, or ``dcp.save``; return what was saved, and the loss after that."""
    model, optimizer = make(kind, options, 0)
    for seed in range(2):
        step(model, optimizer, seed)
    values = values_of(model, optimizer)
    if how == "save":
        zinf_compile.save(folder, model, optimizer, extra={"epoch": {"number": 3}, "ema": torch.ones(2)})
    else:
        weights, states = get_state_dict(model, optimizer)
        content = {"model": weights, "optim": states, "epoch": {"number": 3}, "ema": torch.ones(2)}
        writer = zinf_compile.CheckpointWriter(folder, optimizer)
        if how == "async":
            dcp.async_save(content, storage_writer=writer, process_group=torch.distributed.new_group()).result(60)
        else:
            dcp.save(content, storage_writer=writer, no_dist=not torch.distributed.is_initialized())
    after = step(model, optimizer, 7)
    if kind.startswith("zinf"):
        zinf_compile.close(model)
    return values, after


def load(kind: str, options: Mapping[str, Any], folder: str, how: str) -> tuple[Values, float]:
    """Load into a model with other values, and options; return what it has then, and the loss after that."""
    model, optimizer = make(kind, options, 1)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    if how == "load":
        extra = zinf_compile.load(folder, model, optimizer)
    else:
        weights, states = get_state_dict(model, optimizer)
        extra = {"epoch": {"number": 0}, "ema": torch.zeros(2)}
        content = {"model": weights, "optim": states, **extra}
        reader = zinf_compile.CheckpointReader(folder)
        dcp.load(content, storage_reader=reader, no_dist=not torch.distributed.is_initialized())
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=content["optim"])
        extra = {key: content[key] for key in extra}
    assert extra["epoch"] == {"number": 3}
    assert extra["ema"].tolist() == [1.0, 1.0]
    assert optimizer.param_groups[0]["weight_decay"] == 0.03
    values = values_of(model, optimizer)
    after = step(model, optimizer, 7)
    if kind.startswith("zinf"):
        zinf_compile.close(model)
    return values, after


def assert_same_values(saved: Values, loaded: Values) -> None:
    """Assert that both have the same tensors, bit for bit."""
    assert saved.keys() == loaded.keys()
    assert len(saved) == 4 * 5  # a value, two moments and a count of each parameter
    for name, value in saved.items():
        assert torch.equal(value, loaded[name]), name


def options_in(folder: Path) -> Mapping[str, Any]:
    """Return budgets that put everything on nvme."""
    return {**placements(str(folder))["nvme"], "device_memory": 64 * KIB, "host_memory": 544 * KIB}


@pytest.mark.parametrize("kind", ["fsdp2", "tp", "zinf tp", "zinf"])
def test_ranks_read_what_one_process_saved(kind: str, four: RankPool, tmp_path: Path) -> None:
    saved, _ = save("plain", {}, str(tmp_path / "checkpoint"), "save")
    for loaded, _ in four.run(load, kind, options_in(tmp_path), str(tmp_path / "checkpoint"), "dcp"):
        assert_same_values(saved, loaded)


@pytest.mark.parametrize("how", ["dcp", "async"])
@pytest.mark.parametrize("kind", ["fsdp2", "tp", "zinf tp", "zinf"])
def test_one_process_loads_what_ranks_wrote(kind: str, how: str, four: RankPool, tmp_path: Path) -> None:
    outcomes = four.run(save, kind, options_in(tmp_path), str(tmp_path / "checkpoint"), how)
    loaded, after = load("plain", {}, str(tmp_path / "checkpoint"), "load")
    for saved, going_on in outcomes:
        assert_same_values(saved, loaded)
        assert after == pytest.approx(going_on, rel=1e-6)
    out_of_core, _ = load("zinf", options_in(tmp_path), str(tmp_path / "checkpoint"), "load")
    assert_same_values(loaded, out_of_core)


def test_one_process_writes_and_reads(tmp_path: Path) -> None:
    saved, after = save("plain", {}, str(tmp_path / "checkpoint"), "dcp")
    again, _ = save("plain", {}, str(tmp_path / "checkpoint"), "dcp")  # replaces it
    loaded, going_on = load("plain", {}, str(tmp_path / "checkpoint"), "dcp")
    assert_same_values(saved, again)
    assert_same_values(saved, loaded)
    assert after == going_on
    assert len([*(tmp_path / "checkpoint").glob("data-*")]) == 1


def test_state_in_codes_is_decoded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 97))
    optimized = optimize(nn.Sequential(nn.Linear(64, 97)), {"state_dtype": "int8", "nvme": str(tmp_path)})
    optimizer, its = AdamW(optimized.parameters()), AdamW(model.parameters())
    optimized(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    zinf_compile.save(tmp_path / "checkpoint", optimized, optimizer)
    content = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, its)}
    dcp.load(content, storage_reader=zinf_compile.CheckpointReader(tmp_path / "checkpoint"), no_dist=True)
    manifest = json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())
    assert "int8" in {entry.get("code") for entry in manifest["tensors"]}
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(content["optim"]["state"]["0.weight"][key], optimizer.state[optimized[0].weight][key])
    zinf_compile.close(optimized)


class Tied(nn.Module):
    """A head that shares the embedding's weight, which a state dict has by both names."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.embed(tokens))
        return logits


def make_tied(seed: int, options: Mapping[str, Any] | None = None) -> tuple[nn.Module, AdamW]:
    """Return a model that has stepped once, and its optimizer."""
    model: nn.Module = Tied(seed)
    model = model if options is None else optimize(model, options)
    optimizer = AdamW(model.parameters())
    model(torch.arange(5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("how", ["dcp", "save"])
@pytest.mark.parametrize("is_ours", [False, True])
def test_tied_parameters_have_every_name(is_ours: bool, how: str, tmp_path: Path) -> None:
    options = options_in(tmp_path) if is_ours else None
    (model, optimizer), (other, its) = make_tied(0, options), make_tied(1)
    folder = tmp_path / "checkpoint"
    if how == "save":
        zinf_compile.save(folder, model, optimizer)
        weights, states = get_state_dict(other, its)
        content = {"model": weights, "optim": states}
        dcp.load(content, storage_reader=zinf_compile.CheckpointReader(folder), no_dist=True)
        set_state_dict(other, its, model_state_dict=weights, optim_state_dict=content["optim"])
    else:
        weights, states = get_state_dict(model, optimizer)
        writer = zinf_compile.CheckpointWriter(folder, optimizer)
        dcp.save({"model": weights, "optim": states}, storage_writer=writer, no_dist=True)
        zinf_compile.load(folder, other, its)
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.head.weight)
    for key, value in optimizer.state[model.embed.weight].items():
        assert torch.equal(its.state[other.embed.weight][key], value)
    if is_ours:
        zinf_compile.close(model)


class _Interrupting(DefaultSavePlanner):
    """Raises as Ctrl-C does, in the middle of writing."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return what is to be written, before one of the weights is reached."""
        if write_item.index.fqn.startswith("model.down"):
            raise KeyboardInterrupt
        return super().resolve_data(write_item)


def test_an_interrupted_save_leaves_the_folder_to_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    saved, _ = save("plain", {}, str(folder), "dcp")
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    model, optimizer = make("plain", {}, 1)
    weights, states = get_state_dict(model, optimizer)
    content = {"model": weights, "optim": states}
    writer = zinf_compile.CheckpointWriter(folder, optimizer)
    with pytest.raises(CheckpointException, match="KeyboardInterrupt"):
        dcp.save(content, storage_writer=writer, planner=_Interrupting(), no_dist=True)
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before
    loaded, _ = load("plain", {}, str(folder), "load")
    assert_same_values(saved, loaded)
    dcp.save(content, storage_writer=writer, no_dist=True)
    zinf_compile.save(folder, model, optimizer)


def load_alone(folder: str) -> str:
    """Return the error of ranks that load a damaged checkpoint each by itself."""
    model, _ = make("plain", {}, 0)
    with pytest.raises(CheckpointException) as error:
        dcp.load(
            {"model": get_model_state_dict(model)},
            storage_reader=zinf_compile.CheckpointReader(folder),
            no_dist=True,
        )
    return str(error.value)


def test_ranks_that_load_by_themselves_verify_everything(two: RankPool, tmp_path: Path) -> None:
    save("plain", {}, str(tmp_path / "checkpoint"), "save")
    (path,) = (tmp_path / "checkpoint").glob("data-*/model.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for text in two.run(load_alone, str(tmp_path / "checkpoint")):
        assert "is damaged: the checksum of " in text


def refuse(what: str, folder: str) -> str:
    """Return the error of a save or load that is refused."""
    model, optimizer = make("fsdp2", {}, 0)
    step(model, optimizer, 0)
    weights, states = get_state_dict(model, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    contents: dict[str, dict[str, Any]] = {
        "flattened": {"model": weights, "optim": get_optimizer_state_dict(model, optimizer, options=flat)},
        "no model": {"optim": states},
        "no form": dict(weights),
        "no optimizer": {"model": weights, "optim": states},
    }
    writer = zinf_compile.CheckpointWriter(folder, None if what == "no optimizer" else optimizer)
    reader = zinf_compile.CheckpointReader(folder)
    with pytest.raises(CheckpointException) as error:  # noqa: PT012
        if what in contents:
            dcp.save(contents[what], storage_writer=writer)
        else:
            dcp.load({"model": weights, "optim": states}, storage_reader=reader)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("flattened", "is not in a state dict of the form {'model': ..., 'optim': ...}"),
        ("no model", "the state dict has no tensor of a model"),
        ("no form", "the state dict has no tensor of a model"),
        ("no optimizer", "give it, CheckpointWriter(folder, optimizer)"),
        ("damaged", "is damaged: the checksum of "),
        ("missing", "there is no checkpoint in "),
    ],
)
def test_errors_leave_the_checkpoint_that_was_there(what: str, message: str, two: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    if what != "missing":
        save("plain", {}, str(folder), "save")
    if what == "damaged":
        (path,) = folder.glob("data-*/model.safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    for text in two.run(refuse, what, str(folder)):
        assert message in text
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before
