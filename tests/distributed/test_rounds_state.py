"""What users see of a model whose ranks work in rounds: gradients, states, checkpoints; and what is refused by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zinf_compile
from tests.distributed.test_rounds import build_deep
from tests.distributed.workloads import KIB, batch_of, full, optimize
from tests.support.rank_pool import RankPool
from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.params.remote import RemoteParameter

OPTIONS = {"compute": "aten", "reserve_memory": 0, "device_memory": 8192 * KIB, "host_memory": 8192 * KIB}
Values = dict[str, Tensor]


def make(schedule: str | None = "rounds") -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a model on this rank, and its optimizer."""
    model = optimize(build_deep(), {**OPTIONS, "schedule": schedule})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Train a step; return the loss."""
    loss = model(**batch_of(number, dist.get_rank()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def mine_of(model: nn.Module) -> Values:
    """Return the values of the parameters that this rank has."""
    named = model.named_parameters()
    return {name: full(each) for name, each in named if not isinstance(each, RemoteParameter)}  # type: ignore[misc]


# What a training loop does with gradients: the same calls on every rank, and in one process.


def clip_in_lists(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Clip by one call for all gradients."""
    return [float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True))]


def clip_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Clip each element."""
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2)
    return []


def clip_blocks(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Clip blocks one by one, each of which is on one rank."""
    norms = [torch.nn.utils.clip_grad_norm_(block.parameters(), 0.1) for block in model.deep.blocks]  # type: ignore
    return [float(norm) for norm in norms]


def look_at_norms(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Look at norms of single gradients, change them, and look again."""
    found = []
    for name in ("deep.embed.weight", "deep.blocks.1.up.weight", "deep.head.weight"):
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        found.append(float(gradient.norm()))
        gradient.mul_(0.5)
        found += [float(torch.linalg.norm(gradient)), float(gradient.norm(p=float("inf")))]
    return found


def keep_zeros(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Write zeros to gradients, and add another batch to them."""
    optimizer.zero_grad(set_to_none=False)
    return [float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))]


ACTIONS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], list[float]]] = {
    each.__name__: each for each in (clip_in_lists, clip_values, clip_blocks, look_at_norms, keep_zeros)
}


def act_alone(action: str, num_ranks: int) -> tuple[list[list[float]], Values]:
    """Return what plain PyTorch gives in one process that accumulates the batches of ranks."""
    torch.set_num_threads(1)
    model = build_deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for number in range(3):
        for rank in range(num_ranks):
            model(**batch_of(number, rank)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= num_ranks
        found.append(ACTIONS[action](model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
    return found, mine_of(model)


def act(action: str) -> tuple[list[list[float]], Values]:
    """Return what a rank gets."""
    model, optimizer = make()
    found = []
    for number in range(3):
        model(**batch_of(number, dist.get_rank())).backward()
        found.append(ACTIONS[action](model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
    values = mine_of(model)
    zinf_compile.close(model)
    return found, values


@pytest.mark.parametrize("action", ACTIONS)
def test_gradients(action: str, two: RankPool) -> None:
    expected, values = act_alone(action, 2)
    results = two.run(act, action)
    assert all(found == expected for found, _ in results)
    loaded = {name: value for _, mine in results for name, value in mine.items()}
    assert loaded.keys() == values.keys()
    assert all(torch.equal(value, values[name]) for name, value in loaded.items())


def train_scaled() -> tuple[list[float], list[bool]]:
    """Train with a GradScaler, with an infinite loss on rank 1 in one step; return scales, and whether values changed."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]
    scales, changed = [], []
    for number in range(3):
        before = mine_of(model)
        loss = model(**batch_of(number, dist.get_rank()))
        scaler.scale(loss * float("inf") if (number, dist.get_rank()) == (1, 1) else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        changed.append(any(not torch.equal(value, before[name]) for name, value in mine_of(model).items()))
    zinf_compile.close(model)
    return scales, changed


def test_an_infinite_loss_of_one_rank_skips_the_step_of_all(two: RankPool) -> None:
    assert two.run(train_scaled) == [([1024.0, 512.0, 512.0], [True, False, True])] * 2


def save(folder: str, schedule: str | None, ours: bool) -> tuple[Values, float]:
    """Train two steps, save, and train a third: return what was saved, and the loss of that step."""
    model, optimizer = make(schedule)
    for number in range(2):
        step(model, optimizer, number)
    weights, states = get_state_dict(model, optimizer)
    writer = zinf_compile.CheckpointWriter(folder, optimizer) if ours else None
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder, storage_writer=writer)
    values = values_of(model, optimizer)
    loss = step(model, optimizer, 2)
    zinf_compile.close(model)
    return values, loss


def load(folder: str, schedule: str | None, ours: bool) -> tuple[Values, float]:
    """Load what was saved; return it, and the loss of a step."""
    model, optimizer = make(schedule)
    weights, states = get_state_dict(model, optimizer)
    reader = zinf_compile.CheckpointReader(folder) if ours else None
    dcp.load({"model": weights, "optim": states}, checkpoint_id=folder, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    values = values_of(model, optimizer)
    loss = step(model, optimizer, 2)
    zinf_compile.close(model)
    return values, loss


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Values:
    """Return the values of the parameters and states that this rank has: all of them if it is sharded."""
    values = mine_of(model)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            values[f"{name}/{key}"] = full(value)  # type: ignore[assignment]
    return values


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "ours"])
@pytest.mark.parametrize(("saved_by", "loaded_by"), [("rounds", "rounds"), ("rounds", None), (None, "rounds")], ids=str)
def test_torch_checkpoints(
    saved_by: str | None, loaded_by: str | None, ours: bool, two: RankPool, three: RankPool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    saved = two.run(save, folder, saved_by, ours)
    values = {name: value for mine, _ in saved for name, value in mine.items()}
    assert "deep.blocks.3.up.weight/exp_avg_sq" in values
    for pool in (two, three):
        loaded = pool.run(load, folder, loaded_by, ours)
        found = {name: value for mine, _ in loaded for name, value in mine.items()}
        assert found.keys() == values.keys()
        assert all(torch.equal(value, values[name]) for name, value in found.items())
        assert [loss for _, loss in loaded[:2]] == [loss for _, loss in saved]


def look_at_state() -> dict[str, Any]:
    """Return what a rank sees of its model, and the errors of what is refused."""
    model, optimizer = make()
    step(model, optimizer, 0)
    whole = build_deep()
    other = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    whole(**batch_of(0, 0)).backward()
    other.step()
    seen: dict[str, Any] = {
        "keys": sorted(model.state_dict()),
        "numel": sum(parameter.numel() for parameter in model.parameters()),
        "shown": str(next(each for each in model.parameters() if isinstance(each, RemoteParameter))),
    }
    model.load_state_dict(whole.state_dict())
    optimizer.load_state_dict(other.state_dict())
    seen["loaded"] = all(torch.equal(value, whole.state_dict()[name]) for name, value in mine_of(model).items())
    step(model, optimizer, 1)
    states = optimizer.state_dict()["state"]
    named = zip(dict(model.named_parameters()), states.values(), strict=True)
    seen["steps"] = {name: float(state["step"]) for name, state in named if state}
    refused: Mapping[str, Callable[[], object]] = {
        "full_parameters": lambda: zinf_compile.full_parameters(model).__enter__(),
        "share": lambda: zinf_compile.optimize(build_deep(), share=model),
        "value": lambda: model.deep.embed.weight.grad.abs(),  # type: ignore
    }
    model(**batch_of(1, dist.get_rank())).backward()
    for name, call in refused.items():
        try:
            call()
            seen[name] = ""
        except UnsupportedError as error:
            seen[name] = str(error)
    optimizer.step()
    zinf_compile.close(model)
    return seen


def test_state_and_refusals(two: RankPool) -> None:
    first, second = two.run(look_at_state)
    plain = build_deep()
    parameters = dict(plain.named_parameters())
    assert set(first["keys"]) & set(second["keys"]) == {"deep.scale"}
    assert set(first["keys"]) | set(second["keys"]) == set(plain.state_dict())
    assert set(first["steps"]) | set(second["steps"]) == set(parameters)
    assert not set(first["steps"]) & set(second["steps"])
    for seen in (first, second):
        assert seen["numel"] == sum(parameter.numel() for parameter in parameters.values())
        assert seen["loaded"]
        assert set(seen["steps"].values()) == {2.0}
        assert "zinf_compile.save" in seen["full_parameters"]
        assert "cannot share its budgets" in seen["share"]
    assert first["shown"].startswith("RemoteParameter('deep.blocks.1.")
    assert "is on rank 0" in second["value"]
    assert not first["value"]


def build_partly_frozen() -> nn.Module:
    """Return a model of which two blocks, one of each of two ranks, are frozen."""
    model = build_deep()
    for block in model.deep.blocks[:2]:  # type: ignore
        block.requires_grad_(False)
    return model


def unfreeze_alone(num_ranks: int) -> tuple[list[float], Values]:
    """Train in plain PyTorch on the batches of ranks; unfreeze the first block, and freeze the last one."""
    torch.set_num_threads(1)
    model = build_partly_frozen()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(4):
        if number == 2:
            change_trained(model)
        for rank in range(num_ranks):
            loss = model(**batch_of(number, rank))
            loss.backward()
            losses.append(float(loss.detach()))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= num_ranks
        optimizer.step()
        optimizer.zero_grad()
    return losses, mine_of(model)


def change_trained(model: nn.Module) -> None:
    """Unfreeze the first block, and freeze the last one."""
    model.deep.blocks[0].requires_grad_(True)  # type: ignore
    model.deep.blocks[-1].requires_grad_(False)  # type: ignore


def unfreeze() -> tuple[list[float], Values]:
    """Do the same on a rank."""
    model = optimize(build_partly_frozen(), {**OPTIONS, "schedule": "rounds"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(4):
        if number == 2:
            change_trained(model)
        losses.append(step(model, optimizer, number))
    values = mine_of(model)
    zinf_compile.close(model)
    return losses, values


def test_freezing_and_unfreezing(two: RankPool) -> None:
    expected, values = unfreeze_alone(2)
    results = two.run(unfreeze)
    assert [loss for losses in zip(*(losses for losses, _ in results), strict=True) for loss in losses] == expected
    found = {name: value for _, mine in results for name, value in mine.items()}
    assert found.keys() == values.keys()
    assert all(torch.equal(value, values[name]) for name, value in found.items())


CHOICES: dict[str, Mapping[str, Any]] = {
    "none": {},
    "tiles of a parameter of one rank": {"tiles": {"deep.head.weight": 3}},
    "tile_memory": {"tile_memory": "64KiB"},
    "micro_batches": {"micro_batches": 2},
    "recompute": {"recompute": True},
    "speculate": {"speculate": True},
    "codes": {"state_dtype": "int8", "exact_state": ["*head*"]},
    "verified": {"verify_store": True, "device_memory": 1024 * KIB, "host_memory": 1024 * KIB, "streams": True},
}


def train_with(options: Mapping[str, Any]) -> list[float]:
    """Train with options; return the losses."""
    model = optimize(build_deep(), {**OPTIONS, "schedule": "rounds", **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step(model, optimizer, number) for number in range(3)]
    zinf_compile.close(model)
    return losses


def test_options(two: RankPool, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"of_{rank}").mkdir()
    folder = {"nvme": f"{tmp_path}/of_{{local_rank}}"}
    given = {name: {**options, **(folder if name == "verified" else {})} for name, options in CHOICES.items()}
    found = {name: two.run(train_with, options) for name, options in given.items()}
    for name, losses in found.items():
        assert losses == [pytest.approx(each, rel=1e-3) for each in found["none"]], name
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def build_uneven() -> nn.Module:
    """Return a model of which the first rank of two has 6 KiB, and the second one 290 KiB."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 740))


def refuse() -> list[str]:
    """Return the errors of budgets that are too small on rank 1, unknown names, and an optimizer that was made before."""
    small = {**OPTIONS, "schedule": "rounds", "device_memory": 64 * KIB, "host_memory": 300 * KIB}
    errors = []
    for build, options in (
        (build_uneven, small),
        (build_deep, {**OPTIONS, "schedule": "rounds", "tiles": {"deep.heads.weight": 2}}),
        (build_deep, {**OPTIONS, "schedule": "rounds", "step_in_backward": True}),
    ):
        try:
            zinf_compile.close(optimize(build(), options))
            errors.append("")
        except zinf_compile.ZinfError as error:
            errors.append(f"{type(error).__name__}: {error}")
    model = build_deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = optimize(model, {**OPTIONS, "schedule": "rounds"})
    try:
        step(model, optimizer, 0)
    except UnsupportedError as error:
        errors.append(str(error))
    zinf_compile.close(model)
    return errors


def test_what_one_rank_refuses_is_refused_on_all(two: RankPool) -> None:
    (of_first, *first), (of_second, *second) = two.run(refuse)
    assert of_first.startswith("RankError: placing parameters failed on rank 1; rank 1: CapacityError")
    assert of_second.startswith("CapacityError: ")
    assert first == second
    unknown, in_backward, before = first
    assert "did you mean 'deep.head.weight'?" in unknown
    assert "does not go with step_in_backward=True" in in_backward
    assert "AdamW was made before zinf_compile.optimize(model)" in before
