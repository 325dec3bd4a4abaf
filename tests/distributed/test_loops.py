"""What people do around a training loop, on ranks: inspect, clip, scale, initialise, evaluate, checkpoint with torch."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

import zinf_compile
from tests.distributed.workloads import (
    KIB,
    Loop,
    TinyGPT,
    batch_of,
    build_gpt,
    full,
    of_rank,
    optimize,
    placements,
    train_alone,
    train_on_ranks,
    train_step,
)
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace, assert_same
from zinf_compile.driver import session
from zinf_compile.ir.hardware import Hardware
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.ranks.agreement import agree_on_hardware

PLACEMENTS = ["nvme", pytest.param("resident", marks=pytest.mark.long)]


def look_around(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank sees of its parameters, gradients and states."""
    model = optimize(build_gpt(), options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**batch_of(0, dist.get_rank())).backward()
    weight = model.blocks[0].up.weight
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    seen: dict[str, Any] = {
        "class": [type(weight).__mro__[1].__name__, isinstance(weight, torch.nn.Parameter)],
        "shape": tuple(weight.shape),
        "rows": weight.to_local().shape[0],
        "norm": norm.full_tensor().item(),
        "clipped": torch.stack([full(each.grad).norm() for each in model.parameters()]).norm().item(),
        "printed": repr(weight)[:100],
    }
    optimizer.step()
    with torch.no_grad():
        weight.mul_(2)
    seen["written"] = torch.equal(full(weight), full(model.state_dict()["blocks.0.up.weight"]))
    seen["loss"] = model(**batch_of(1, 0)).item()
    with zinf_compile.full_parameters(model):
        whole = model.blocks[0].up.weight
        seen["whole"] = [tuple(whole.shape), torch.equal(whole.detach(), full(weight))]
        with torch.no_grad():
            whole.div_(2)
    seen["halved"] = model(**batch_of(1, 0)).item()
    model.eval()
    with torch.no_grad():
        seen["evaluated"] = model(**batch_of(1, 0)).item()
    zinf_compile.close(model)
    return seen


def look_alone(num_ranks: int = 2) -> dict[str, float]:
    """Return the same of one process."""
    torch.set_num_threads(1)
    model = build_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for rank in range(num_ranks):
        (model(**batch_of(0, rank)) / num_ranks).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    optimizer.step()
    halved = model(**batch_of(1, 0)).item()
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2)
    return {"norm": norm, "loss": model(**batch_of(1, 0)).item(), "halved": halved}


def check_what_is_seen(seen: Mapping[str, Any], alone: Mapping[str, float], *, rows: int) -> None:
    """Compare what ``look_around`` saw on a rank with one process; ``rows`` are those of the rank."""
    assert seen["shape"] == (181, 60)
    assert seen["rows"] == rows
    assert seen["written"]
    assert seen["whole"] == [(181, 60), True]
    assert math.isclose(seen["norm"], alone["norm"], rel_tol=1e-5)
    assert math.isclose(seen["clipped"], 0.1, rel_tol=1e-3)
    assert math.isclose(seen["loss"], alone["loss"], rel_tol=1e-5)
    assert math.isclose(seen["halved"], alone["halved"], rel_tol=1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_a_rank_sees(placement: str, two: RankPool, tmp_path: Path) -> None:
    alone = look_alone()
    for rank, seen in enumerate(two.run(look_around, placements(str(tmp_path))[placement])):
        check_what_is_seen(seen, alone, rows=(91, 90)[rank])
        assert seen["class"][1]
        assert seen["printed"].startswith("Parameter containing:\nDTensor(")
        assert math.isclose(seen["evaluated"], alone["halved"], rel_tol=1e-5)


def clip_on_disk(options: Mapping[str, Any]) -> list[Any]:
    """Return the tiers of gradients, their norms as they are found, and after clipping to 0.1, with the true ones."""
    torch.manual_seed(0)
    model = optimize(TinyGPT(width=160), {**options, "capture": False, "device_memory": 6000 * KIB})
    seen: list[Any] = []
    for order in (2.0, math.inf, 1.0):
        for step in range(2):  # norms that were asked for before are noted on the way home
            model(**batch_of(step, dist.get_rank())).backward()
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients, order)
            true = torch.cat([full(each).view(-1) for each in gradients]).norm(order)
            seen.append([norm.full_tensor().item(), true.item()])
            if (order, step) == (2.0, 1):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                seen.append([torch.cat([full(each).view(-1) for each in gradients]).norm().item(), 0.1])
            for parameter in model.parameters():
                parameter.grad = None
    tiers = {record.gradient.slot.tier for each in model.parameters() if (record := record_of(each)) is not None}
    zinf_compile.close(model)
    return [sorted(map(str, tiers)), seen]


def test_norms_of_gradients_on_disk_are_those_of_all_ranks(two: RankPool, tmp_path: Path) -> None:
    for tiers, seen in two.run(clip_on_disk, placements(str(tmp_path))["nvme"]):
        assert tiers == ["host", "nvme"]
        assert all(math.isclose(found, true, rel_tol=1e-4) for found, true in seen), seen


def scale(options: Mapping[str, Any], bad_rank: int) -> tuple[float, bool]:
    """Take a step under GradScaler, with an infinite gradient on one rank; return the scale, and whether values changed."""
    model = optimize(build_gpt(), options)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = full(model.blocks[0].up.weight)
    loss = model(**batch_of(0, dist.get_rank()))
    scaler.scale(loss * math.inf if dist.get_rank() == bad_rank else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    after = full(model.blocks[0].up.weight)
    zinf_compile.close(model)
    return scaler.get_scale(), not torch.equal(before, after)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_infinite_gradient_of_one_rank_skips_the_step_of_all(placement: str, two: RankPool, tmp_path: Path) -> None:
    options = placements(str(tmp_path))[placement]
    assert two.run(scale, options, 1) == [(2.0, False)] * 2
    assert two.run(scale, options, -1) == [(4.0, True)] * 2


class RootOfRows(nn.Module):
    """Its gradient is infinite in the rows where ``batch`` is 1, and finite in all others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024, 16))

    def forward(self, batch: Tensor) -> Tensor:
        return (self.weight - batch).sqrt().sum()


def scale_rows(options: Mapping[str, Any], bad_row: int) -> tuple[float, bool]:
    """Take a step under GradScaler whose gradient is infinite in one row, which one rank keeps."""
    model = optimize(RootOfRows(), options)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = full(model.weight)
    scaler.scale(model((torch.arange(1024) == bad_row).float()[:, None])).backward()
    scaler.step(optimizer)
    scaler.update()
    after = full(model.weight)
    zinf_compile.close(model)
    return scaler.get_scale(), not torch.equal(before, after)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_infinity_in_the_rows_of_one_rank_skips_the_step_of_all(
    placement: str, two: RankPool, tmp_path: Path
) -> None:
    options = placements(str(tmp_path))[placement]
    for bad_row in (0, 1023):
        assert two.run(scale_rows, options, bad_row) == [(2.0, False)] * 2
    assert two.run(scale_rows, options, -1) == [(4.0, True)] * 2


def first_values(options: Mapping[str, Any], init: str) -> dict[str, Tensor]:
    """Return the first values of a model that was built on meta."""
    with torch.device("meta"):
        model = TinyGPT()
    torch.manual_seed(7)
    optimize(model, {**options, "init": init})
    values = {name: full(parameter) for name, parameter in model.named_parameters()}
    values["loss"] = model(**batch_of(0, 0)).detach()
    zinf_compile.close(model)
    return values


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("source", ["reset", "file"])
def test_a_model_on_meta_begins_with_the_values_of_one_process(
    source: str, placement: str, two: RankPool, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    plain = TinyGPT()
    file = str(tmp_path / "model.safetensors")
    save_file({name: each.detach() for name, each in plain.named_parameters()}, file)
    init = "reset" if source == "reset" else file
    if source == "reset":  # it draws for the tied head as well, as building did
        plain = TinyGPT.__new__(TinyGPT)
        torch.manual_seed(7)
        TinyGPT.__init__(plain)
    values = {name: each.detach() for name, each in plain.named_parameters()}
    for ours in two.run(first_values, placements(str(tmp_path))[placement], init):
        assert ours.pop("loss").isfinite()
        assert ours.keys() == values.keys()
        assert all(torch.equal(ours[name], value) for name, value in values.items())


def save_with_torch(options: Mapping[str, Any], folder: str) -> bool:
    """Save with torch.distributed.checkpoint, change the values, and load them again."""
    model = optimize(build_gpt(), options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**batch_of(0, dist.get_rank())).backward()
    optimizer.step()
    values = {name: full(parameter) for name, parameter in model.named_parameters()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    same = all(torch.equal(full(each), values[name]) for name, each in model.named_parameters())
    zinf_compile.close(model)
    return same


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_torchs_own_checkpoints(placement: str, two: RankPool, tmp_path: Path) -> None:
    assert two.run(save_with_torch, placements(str(tmp_path))[placement], str(tmp_path / "dcp")) == [True, True]


@pytest.mark.long
def test_compiled_segments_and_fast_reductions_agree_to_rounding(two: RankPool, tmp_path: Path) -> None:
    loop = Loop()
    plain = train_alone(loop, 2)
    options = {**placements(str(tmp_path))["nvme"], "compute": "inductor", "reduce": "fast", "device_memory": 900 * KIB}
    for rank, ours in enumerate(two.run(train_on_ranks, loop, options)):
        for mine, theirs in zip(ours.losses, of_rank(plain, rank, 2).losses, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def train_and_count_prefetches(loop: Loop, options: Mapping[str, Any]) -> tuple[Trace, int]:
    """Train; return also how many gathers the plan issues early, with links that take no time from compute."""

    def agree(*given: Any) -> Hardware:
        return replace(agree_on_hardware(*given), links_take_of_compute=0.0)

    with mock.patch.object(session, "agree_on_hardware", agree):
        model, trace = optimize(loop.build(), options), Trace()
        optimizer = loop.make_optimizer(model)
        for step in range(loop.num_steps):
            train_step(loop, model, optimizer, step, trace)
    (plan,) = zinf_compile.report(model).plans
    zinf_compile.close(model)
    return trace, sum(gather.issue < gather.need_by for gather in plan.gathers)


def test_gathers_ahead_of_compute_keep_the_bits(two: RankPool, tmp_path: Path) -> None:
    loop = Loop()
    plain = train_alone(loop, 2)
    options = {**placements(str(tmp_path))["nvme"], "prefetch_memory": 160 * KIB}
    for rank, (ours, num_ahead) in enumerate(two.run(train_and_count_prefetches, loop, options)):
        assert num_ahead > 0
        assert_same(ours, of_rank(plain, rank, 2))


@pytest.mark.long
def test_four_ranks(four: RankPool, tmp_path: Path) -> None:
    plain = train_alone(Loop(), 4)
    for rank, ours in enumerate(four.run(train_on_ranks, Loop(), placements(str(tmp_path))["nvme"])):
        assert_same(ours, of_rank(plain, rank, 4))
