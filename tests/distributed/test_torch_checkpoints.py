"""torch.distributed.checkpoint of models and optimizers, also asynchronous: to and from FSDP2, DDP and one process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import zinf_compile
from tests.distributed.workloads import KIB, optimize, placements, values_of
from tests.support.rank_pool import RankPool

PLACEMENTS = ["nvme", "resident"]
Values = dict[str, Tensor]


def build() -> nn.Sequential:
    """Return a model whose rows neither two nor three ranks divide evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 97), nn.Tanh(), nn.Linear(97, 31))


def make(kind: str, options: Mapping[str, Any]) -> tuple[nn.Module, AdamW]:
    """Return a model of a kind and its optimizer, which has no state yet."""
    model: nn.Module = build()
    if kind == "zinf":
        model = optimize(model, options)
    elif kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model, AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: AdamW, seed: int) -> float:
    """Train a step, on data that is the same on all ranks; return the loss."""
    loss = model(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def save(kind: str, options: Mapping[str, Any], folder: str, is_async: bool = False) -> tuple[Values, float]:
    """Train two steps, save, and train a third: return what was saved, and the loss of that step."""
    model, optimizer = make(kind, options)
    for seed in range(2):
        step(model, optimizer, seed)
    values = values_of(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    if is_async:
        # In a group of its own: its thread and FSDP2 would otherwise exchange messages of the same one at the same time.
        saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
        loss = step(model, optimizer, 2)  # while it is written: what was there when it began is saved
        saving.result()
    else:
        dcp.save(state, checkpoint_id=folder)
        loss = step(model, optimizer, 2)
    if kind == "zinf":
        zinf_compile.close(model)
    return values, loss


def load(kind: str, options: Mapping[str, Any], folder: str) -> tuple[Values, float]:
    """Load what was saved; return it, and the loss of a step."""
    model, optimizer = make(kind, options)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    values, loss = values_of(model, optimizer), step(model, optimizer, 2)
    if kind == "zinf":
        zinf_compile.close(model)
    return values, loss


def assert_alike(saved: Sequence[tuple[Values, float]], loaded: Sequence[tuple[Values, float]]) -> None:
    """Fail unless every rank has loaded, bit by bit, what was saved, and went on as the ranks that saved it."""
    values, loss = saved[0]
    assert "0.weight/exp_avg_sq" in values
    assert all(value.any() for value in values.values())
    for found, next_loss in loaded:
        assert found.keys() == values.keys()
        assert all(torch.equal(found[name], value) for name, value in values.items())
        assert next_loss == loss


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "asynchronous"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_another_number_of_ranks_goes_on(
    placement: str, is_async: bool, two: RankPool, three: RankPool, tmp_path: Path
) -> None:
    options, folder = {**placements(str(tmp_path))[placement], "capture": False}, str(tmp_path / "saved")
    saved = two.run(save, "zinf", options, folder, is_async)
    assert_alike(saved, three.run(load, "zinf", options, folder))
    assert_alike(saved, two.run(load, "zinf", options, folder))


@pytest.mark.parametrize(
    "is_async", [False, pytest.param(True, marks=pytest.mark.long)], ids=["at once", "asynchronous"]
)
@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_models_of_torch_load_ours_and_ours_load_theirs(
    placement: str, kind: str, is_async: bool, two: RankPool, tmp_path: Path
) -> None:
    options = {**placements(str(tmp_path))[placement], "capture": False}
    folders = [str(tmp_path / name) for name in ("ours", "theirs")]
    ours = two.run(save, "zinf", options, folders[0], is_async)
    assert_alike(ours, two.run(load, kind, options, folders[0]))
    assert_alike(two.run(save, kind, options, folders[1], is_async), two.run(load, "zinf", options, folders[1]))


def test_a_captured_model_loads_and_goes_on(two: RankPool, tmp_path: Path) -> None:
    options = {**placements(str(tmp_path))["nvme"], "device_memory": 256 * KIB}
    saved = two.run(save, "zinf", options, str(tmp_path / "saved"), True)
    assert_alike(saved, two.run(load, "zinf", options, str(tmp_path / "saved")))


def test_a_file_of_torch_save_has_all_of_it(two: RankPool, tmp_path: Path) -> None:
    """``dcp_to_torch_save`` makes one of what ranks have saved; a plain model goes on from there."""
    options, file = {**placements(str(tmp_path))["nvme"], "capture": False}, tmp_path / "file.pt"
    saved = two.run(save, "zinf", options, str(tmp_path / "saved"))
    dcp_to_torch_save(str(tmp_path / "saved"), str(file))
    loaded = torch.load(file, weights_only=True)
    model, optimizer = make("plain", {})
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    torch.set_num_threads(1)
    assert_alike(saved, [(values_of(model, optimizer), step(model, optimizer, 2))])


def full_on_first(options: Mapping[str, Any]) -> tuple[list[str], Values]:
    """Return the names of the full state dict that torch gathers on a rank, and the values of it."""
    model, optimizer = make("zinf", options)
    step(model, optimizer, 0)
    values = values_of(model, optimizer)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = get_state_dict(model, optimizer, options=whole)
    for name, state in states.get("state", {}).items():
        weights |= {f"{name}/{key}": value for key, value in state.items()}
    zinf_compile.close(model)
    same = [name for name, value in weights.items() if type(value) is Tensor and torch.equal(value, values[name])]
    return same, values


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_full_state_dicts_are_on_the_first_rank(placement: str, two: RankPool, tmp_path: Path) -> None:
    options = {**placements(str(tmp_path))[placement], "capture": False}
    (first, values), (second, _) = two.run(full_on_first, options)
    assert sorted(first) == sorted(values)
    assert second == []


def write_to_state_dict(options: Mapping[str, Any]) -> list[float]:
    """Write to a tensor of a state dict, after forwards that have read its parameter; return the outputs that follow."""
    model, optimizer = make("zinf", options)
    step(model, optimizer, 0)
    weight, bias = (model.state_dict()[name] for name in ("2.weight", "2.bias"))
    found = []
    for value in (0.0, 1.0):
        model(torch.ones(1, 64))
        for each in (weight, bias):
            each.fill_(value)
        found.append(float(model(torch.ones(1, 64)).detach().min()))
    zinf_compile.close(model)
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_written_to_a_state_dict_is_computed_with(placement: str, two: RankPool, tmp_path: Path) -> None:
    """Of a rank whose rows are a view, too: its tensors have the version of the parameter."""
    for zeros, ones in two.run(write_to_state_dict, {**placements(str(tmp_path))[placement], "capture": False}):
        assert zeros == 0
        assert ones != 0
