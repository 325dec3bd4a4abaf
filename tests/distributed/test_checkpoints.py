"""Checkpoints of ranks: any number of them, or one process, continues from what any other number has saved."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

import zinf_compile
from tests.distributed.workloads import Loop, check_at_rest, full, optimize, placements, train_step
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace
from zinf_compile.checkpoint import checkpoint_folder, save
from zinf_compile.checkpoint.on_ranks import Written, combine
from zinf_compile.ir.copies import LEAST_CODED

LOOP = Loop(num_steps=4)


@pytest.mark.parametrize("lengths", [[0], [5], [3, 0, 4], [1, 100_000, 7, 4096]])
def test_checksums_of_parts_are_joined(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator).numpy().tobytes() for n in lengths]
    assert combine([Written(crc32(part), len(part)) for part in parts]) == crc32(b"".join(parts))


def train(options: Mapping[str, Any], steps: range, *, load: str | None = None, save: str | None = None) -> list[Any]:
    """Train some steps of a loop on each rank; return the losses, full values and random numbers of this one."""
    torch.manual_seed(dist.get_rank())
    model = optimize(LOOP.build(), options)
    optimizer, trace = LOOP.make_optimizer(model), Trace()
    torch.manual_seed(100 + dist.get_rank())
    if load is not None:
        assert zinf_compile.load(load, model, optimizer) == {"step": steps.start}
    for step in steps:
        train_step(LOOP, model, optimizer, step, trace)
    if save is not None:
        zinf_compile.save(save, model, optimizer, extra={"step": steps.stop})
    values = {name: full(parameter) for name, parameter in model.named_parameters()}
    check_at_rest(model)
    zinf_compile.close(model)
    return [trace.losses, values, torch.rand(3)]


def values_in_one_process(folder: Path) -> dict[str, torch.Tensor]:
    """Return what a plain model has after loading a checkpoint."""
    model = LOOP.build()
    optimizer = LOOP.make_optimizer(model)
    zinf_compile.load(folder, model, optimizer)
    assert optimizer.state_dict()["state"][0]["exp_avg"].abs().sum() > 0
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize("placement", ["nvme", "resident"])
def test_a_run_that_is_resumed_on_as_many_ranks_goes_on_to_the_bit(
    placement: str, two: RankPool, tmp_path: Path
) -> None:
    options, folder = placements(str(tmp_path))[placement], str(tmp_path / "checkpoint")
    whole = two.run(train, options, range(4))
    first = two.run(train_and_save, options, folder)
    second = two.run(resume, options, folder)
    for rank in range(2):
        assert [*map(float, first[rank][0]), *map(float, second[rank][0])] == list(map(float, whole[rank][0]))
        assert all(torch.equal(second[rank][1][name], value) for name, value in whole[rank][1].items())
        assert torch.equal(second[rank][2], first[rank][2])  # each rank has its own random numbers again
    assert not torch.equal(first[0][2], first[1][2])


def train_and_save(options: Mapping[str, Any], folder: str) -> list[Any]:
    """Train the first half."""
    return train(options, range(2), save=folder)


def resume(options: Mapping[str, Any], folder: str) -> list[Any]:
    """Train the second half."""
    return train(options, range(2, 4), load=folder)


def load_only(options: Mapping[str, Any], folder: str) -> dict[str, torch.Tensor]:
    """Return the full values after loading."""
    model = optimize(LOOP.build(), options)
    optimizer = LOOP.make_optimizer(model)
    zinf_compile.load(folder, model, optimizer)
    loss = model(tokens=torch.zeros(1, 4, dtype=torch.int64), targets=torch.zeros(1, 4, dtype=torch.int64))
    values = {name: full(parameter) for name, parameter in model.named_parameters()} | {"loss": loss.detach()}
    zinf_compile.close(model)
    return values


def load_state(options: Mapping[str, Any], folder: str) -> dict[str, torch.Tensor]:
    """Return the full first moments after loading."""
    model = optimize(LOOP.build(), options)
    optimizer = LOOP.make_optimizer(model)
    zinf_compile.load(folder, model, optimizer)
    moments = {name: full(optimizer.state[each]["exp_avg"]) for name, each in model.named_parameters()}
    zinf_compile.close(model)
    return moments


@pytest.mark.long
@pytest.mark.parametrize("code", ["int8", "bfloat16"])
def test_ranks_decode_the_state_that_one_process_saved_in_codes(code: str, two: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    options = {"nvme": tmp_path, "device_memory": "64MiB", "host_memory": "64MiB", "compute": "aten"}
    model = zinf_compile.optimize(LOOP.build(), state_dtype=code, **options)
    optimizer = LOOP.make_optimizer(model)
    tokens = torch.arange(4).view(1, 4)
    model(tokens=tokens, targets=tokens.flip(1)).backward()
    optimizer.step()
    zinf_compile.save(folder, model, optimizer)
    moments = {name: optimizer.state[each]["exp_avg"].clone() for name, each in model.named_parameters()}
    assert any(value.numel() >= LEAST_CODED and value.abs().sum() > 0 for value in moments.values())
    zinf_compile.close(model)
    for found in two.run(load_state, placements(str(tmp_path))["nvme"], folder):
        assert all(torch.equal(found[name], value) for name, value in moments.items())


@pytest.mark.parametrize("placement", ["nvme", pytest.param("resident", marks=pytest.mark.long)])
@pytest.mark.long
def test_from_two_ranks_to_three_to_one_process_and_back(
    placement: str, two: RankPool, three: RankPool, tmp_path: Path
) -> None:
    options, folder = placements(str(tmp_path))[placement], tmp_path / "checkpoint"
    saved = two.run(train_and_save, options, str(folder))[0][1]
    alone = values_in_one_process(folder)
    assert all(torch.equal(alone[name], value) for name, value in saved.items())
    on_three = three.run(load_only, options, str(folder))
    assert all(torch.equal(on_three[2][name], value) for name, value in saved.items())
    model = LOOP.build()
    optimizer = LOOP.make_optimizer(model)
    zinf_compile.load(folder, model, optimizer)
    loss = model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)).detach()
    assert all(torch.equal(each["loss"], loss) for each in on_three)
    again = tmp_path / "of one process"
    zinf_compile.save(again, model, optimizer)
    back = two.run(load_only, options, str(again))
    assert all(torch.equal(back[1][name], value) for name, value in saved.items())


def load_at_once(options: Mapping[str, Any], folder: str) -> list[Any]:
    """Load what has been saved as soon as that returns, while rank 0 is slow to clean up; the same for a failed save."""
    model = optimize(LOOP.build(), options)
    found = []
    with mock.patch.object(save, "remove_leftovers", slow_to_remove):
        for extra in (1, 2, object()):
            if isinstance(extra, int):
                zinf_compile.save(folder, model, extra=extra)
            else:
                with mock.patch("os.pwrite", side_effect=OSError("full")), pytest.raises(zinf_compile.ZinfError):
                    zinf_compile.save(folder, model, extra=3)
            found.append(zinf_compile.load(folder, model))
    zinf_compile.close(model)
    return found


def slow_to_remove(*given: Any) -> None:
    """Remove what is left of a save, after a while."""
    time.sleep(0.5)
    checkpoint_folder.remove_leftovers(*given)


def test_a_checkpoint_can_be_loaded_as_soon_as_it_is_saved(two: RankPool, tmp_path: Path) -> None:
    options = {**placements(str(tmp_path))["resident"], "capture": False}
    assert two.run(load_at_once, options, str(tmp_path / "checkpoint"), seconds=60.0) == [[1, 2, 2]] * 2


def test_a_damaged_checkpoint_is_refused_by_every_rank(two: RankPool, tmp_path: Path) -> None:
    options, folder = {**placements(str(tmp_path))["nvme"], "capture": False}, tmp_path / "checkpoint"
    two.run(train_and_save, options, str(folder))
    (file,) = folder.glob("data-*/model.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    kinds = {(each.kind, "damaged" in each.message) for each in two.outcomes(resume, options, str(folder))}
    assert kinds == {("CheckpointError", True), ("RankError", True)}


def test_a_folder_that_cannot_be_written_is_refused_by_every_rank(two: RankPool, tmp_path: Path) -> None:
    options, file = {**placements(str(tmp_path))["nvme"], "capture": False}, tmp_path / "checkpoint"
    file.write_text("no folder")
    assert [each.kind for each in two.outcomes(train_and_save, options, str(file))] == ["ConfigError", "RankError"]
