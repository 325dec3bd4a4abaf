"""Frozen weights in rows of int8 on ranks: each encodes the rows it has, and training has the bits of one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zinf_compile
from tests.distributed.test_rounds import joined, train_in_rounds
from tests.distributed.workloads import (
    Loop,
    TinyGPT,
    batch_of,
    build_frozen,
    full,
    of_rank,
    optimize,
    placements,
    train_alone,
    train_on_ranks,
)
from tests.support.fake_device import on_fake_device
from tests.support.races import watching_races
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace, assert_same
from zinf_compile.ir.copies import LEAST_CODED, RowCode
from zinf_compile.ir.glossary import Tier
from zinf_compile.passes.analysis.parameters import find_linear_weights
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.storage.row_codes import round_to_rows

INT8 = {"frozen_dtype": "int8"}
ENCODED = {f"blocks.0.{layer}.weight" for layer in ("attend", "up", "down")}  # others are small, or trained


def as_rounded(weight: torch.Tensor) -> torch.Tensor:
    made = weight.detach().clone()
    round_to_rows(RowCode(columns=made.shape[1]), made.view(-1))
    return made


FROZEN = Loop(build=build_frozen)


def build_even() -> nn.Module:
    """Return a TinyGPT whose first block is frozen, and whose weights can be cut into tiles."""
    torch.manual_seed(0)
    model = TinyGPT(width=64)
    model.blocks[0].requires_grad_(False)
    return model


def build_rounded() -> nn.Module:
    """Return the model whose frozen weights were encoded and decoded."""
    return rounded(build_frozen())


def build_even_rounded() -> nn.Module:
    """Return the one with tiles, likewise."""
    return rounded(build_even())


def rounded(model: nn.Module) -> nn.Module:
    linear = find_linear_weights(model)
    encoded = {
        name: weight
        for name, weight in model.named_parameters()
        if weight in linear and not weight.requires_grad and weight.numel() >= LEAST_CODED
    }
    assert encoded.keys() >= ENCODED
    for weight in encoded.values():
        weight.data = as_rounded(weight)
    return model


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("placement", ["nvme", "resident"])
def test_training_is_that_of_rounded_weights(placement: str, capture: bool, two: RankPool, tmp_path: Path) -> None:
    plain = train_alone(Loop(build=build_rounded), 2)
    options = {**placements(str(tmp_path))[placement], **INT8, "capture": capture}
    for rank, trace in enumerate(two.run(train_on_ranks, FROZEN, options)):
        assert_same(trace, of_rank(plain, rank, 2))


@pytest.mark.long
@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 1}, {"tiles": {"blocks.0.attend.weight": 3}}])
def test_options_beside_it(options: Mapping[str, Any], two: RankPool, tmp_path: Path) -> None:
    """As without, but for how weights are stored."""
    homes = {**placements(str(tmp_path))["nvme" if "tiles" in options else "resident"], **options}
    exact = two.run(train_on_ranks, Loop(build=build_even_rounded), homes)
    for one, other in zip(two.run(train_on_ranks, Loop(build=build_even), {**homes, **INT8}), exact, strict=True):
        assert_same(one, other)


class Scored(nn.Module):
    """A frozen layer of fewer rows than ranks, as a head that scores sequences has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.score = nn.Embedding(51, 2500), nn.Linear(2500, 2)
        self.score.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.score(self.embed(tokens)).square().mean()
        return loss


def build_scored_rounded() -> nn.Module:
    model = Scored()
    model.score.weight.data = as_rounded(model.score.weight)
    return model


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_without_rows(device: str, three: RankPool, tmp_path: Path) -> None:
    plain = train_alone(Loop(build=build_scored_rounded, num_steps=2), 3)
    options = {**placements(str(tmp_path))["nvme"], **INT8, "device_memory": "4MiB", "host_memory": "4MiB"}
    loop = Loop(build=Scored, num_steps=2)
    traces = (
        three.run(train_on_ranks, loop, options)
        if device == "cpu"
        else [trace for trace, *_ in three.run(train_beside_a_device, options, loop)]
    )
    for rank, trace in enumerate(traces):
        assert_same(trace, of_rank(plain, rank, 3))


def train_beside_a_device(options: Mapping[str, Any], loop: Loop = FROZEN) -> tuple[Trace, list[str], int]:
    """Return the numbers of a rank with a fake device, races that were found, and how often rows were decoded there."""
    with on_fake_device() as device, watching_races() as races:
        races.device = device
        trace = train_on_ranks(loop, {**options, "device": "cuda"})
    return trace, races.found, races.num_accesses["what rows are decoded to"]


def test_devices_decode_what_each_rank_has(two: RankPool, tmp_path: Path) -> None:
    plain = train_alone(Loop(build=build_rounded), 2)
    options = {**placements(str(tmp_path))["nvme"], **INT8, "device_memory": "900KiB", "host_memory": "2MiB"}
    for rank, (trace, races, decoded) in enumerate(two.run(train_beside_a_device, options)):
        assert_same(trace, of_rank(plain, rank, 2))
        assert races == []
        assert decoded > 0


@pytest.mark.long
def test_replicas(four: RankPool, tmp_path: Path) -> None:
    options = {**placements(str(tmp_path))["nvme"], "mesh": (2, 2), "device_memory": "1MiB"}
    exact = four.run(train_on_ranks, Loop(build=build_rounded), options)
    for one, other in zip(four.run(train_on_ranks, FROZEN, {**options, **INT8}), exact, strict=True):
        assert_same(one, other)


def test_rounds(two: RankPool, tmp_path: Path) -> None:
    """Each rank encodes the frozen weights of its own stages."""
    plain = train_alone(Loop(build=build_rounded), 2)
    options = {**placements(str(tmp_path))["nvme"], **INT8, "device_memory": "2MiB"}
    assert_same(joined(two.run(train_in_rounds, FROZEN, options), plain), plain)


def look_and_write(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank sees of an encoded weight, that it writes, unfreezes and trains."""
    model, name = optimize(build_frozen(), options), "blocks.0.up.weight"
    weight, seen = model.get_parameter(name), {}
    record = record_of(weight)
    assert record is not None
    plain = build_rounded()
    first = plain.get_parameter(name).detach()
    seen["first"] = torch.equal(full(weight), first)
    with torch.no_grad():
        weight.mul_(1.1)
    seen["written"] = torch.equal(full(weight), second := as_rounded(first * 1.1))
    plain.get_parameter(name).data = second
    seen["loss"] = torch.equal(model(**batch_of(0, dist.get_rank())), plain(**batch_of(0, dist.get_rank())))
    seen["tier"] = record.copies.compute.tier
    weight.requires_grad_(True)
    seen["thawed"] = torch.equal(full(weight), second) and record.copies.compute.row_code is None
    model(**batch_of(1, dist.get_rank())).backward()
    seen["gradient"] = full(weight.grad) is not None
    zinf_compile.close(model)
    return seen


@pytest.mark.parametrize("placement", ["nvme", "resident"])
def test_what_users_see_and_write(placement: str, two: RankPool, tmp_path: Path) -> None:
    options = {**placements(str(tmp_path))[placement], **INT8, "device_memory": "2MiB", "capture": False}
    for seen in two.run(look_and_write, options):
        assert (seen.pop("tier") is Tier.DEVICE) == (placement == "resident")
        assert all(seen.values()), seen


def save(folder: str, options: Mapping[str, Any]) -> None:
    model = optimize(build_frozen(), options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**batch_of(0, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()
    zinf_compile.save(folder, model, optimizer)
    zinf_compile.close(model)


def load(folder: str, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return all values of a model that was loaded, of other ones."""
    model = optimize(build_frozen(seed=3), options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zinf_compile.load(folder, model, optimizer)
    values = {name: full(value.detach()) for name, value in model.named_parameters()}
    zinf_compile.close(model)
    return {name: value for name, value in values.items() if value is not None}


def test_a_checkpoint_loads_on_any_number_of_ranks(two: RankPool, three: RankPool, tmp_path: Path) -> None:
    """It has values, which are encoded to the same rows again."""
    options, folder = {**placements(str(tmp_path))["nvme"], **INT8}, str(tmp_path / "saved")
    two.run(save, folder, options)
    expected = two.run(load, folder, options)[0]
    for name in ENCODED:
        assert torch.equal(expected[name], build_rounded().get_parameter(name))
    for values in three.run(load, folder, options):
        assert all(torch.equal(values[name], value) for name, value in expected.items())
    alone = {name: value for name, value in options.items() if name != "streams"}
    for frozen_dtype in ("int8", None):
        given = {**alone, "frozen_dtype": frozen_dtype, "host_memory": "4MiB"}
        model = zinf_compile.optimize(build_frozen(seed=3), **given)
        zinf_compile.load(folder, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert all(torch.equal(model.get_parameter(name), value) for name, value in expected.items())
        zinf_compile.close(model)
