"""Our own checkpoints of ranks that work in rounds: any ranks, or one process, continue from what any others have saved."""

import errno
import json
import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import zinf_compile
from tests.distributed.test_rounds import build_deep
from tests.distributed.workloads import KIB, batch_of, build_frozen, check_at_rest, full, optimize, placements
from tests.support.rank_pool import Raised, RankPool
from zinf_compile.runtime.params.remote import RemoteParameter

RESIDENT = {"compute": "aten", "reserve_memory": 0, "device_memory": 8192 * KIB, "host_memory": 8192 * KIB}
BUILDS: dict[str, Callable[[], nn.Module]] = {"deep": build_deep, "frozen": build_frozen}
NUM_STEPS = 2  # before a checkpoint
Values = dict[str, Tensor]


def adamw(model: nn.Module) -> AdamW:
    """Return an optimizer of two groups, which have parameters of every rank."""
    named = dict(model.named_parameters())
    decayed = [each for each in named.values() if each.dim() > 1]
    return AdamW(
        [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [each for each in named.values() if each.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


def make(build: str, options: Mapping[str, Any]) -> tuple[nn.Module, AdamW]:
    """Return a model on this rank, and its optimizer."""
    model = optimize(BUILDS[build](), options)
    return model, adamw(model)


def compute(model: nn.Module, number: int) -> float:
    """Run forward and backward of this rank's batch; return its loss."""
    loss: Tensor = model(**batch_of(number, dist.get_rank()))
    loss.backward()
    return loss.item()


def update(optimizer: Optimizer) -> None:
    """Update, and drop gradients."""
    optimizer.step()
    optimizer.zero_grad()


def values_of(model: nn.Module, optimizer: Optimizer) -> Values:
    """Return what this rank has of parameters, gradients and states: all of it, if it is alone or has rows."""
    mine = {name: each for name, each in model.named_parameters() if not isinstance(each, RemoteParameter)}
    values = {name: full(each) for name, each in mine.items()}
    values |= {f"gradient of {name}": full(each.grad) for name, each in mine.items() if each.grad is not None}
    for name, each in mine.items():
        values |= {f"{name}/{key}": full(value) for key, value in optimizer.state[each].items()}
    return values  # type: ignore[return-value]


def norm_of(model: nn.Module) -> Values:
    """Return the norm of pending gradients, on any rank."""
    if any(hasattr(each, "full_tensor") for each in model.parameters()):
        return {}  # of shards it is known to rounding
    return {"norm": torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)}


def go_on(model: nn.Module, optimizer: Optimizer) -> tuple[float, Values]:
    """Return the loss of the next batch, and what there is after the next update."""
    loss = compute(model, NUM_STEPS + 1)
    update(optimizer)
    return loss, values_of(model, optimizer)


Outcome = tuple[Values, float, Values, Tensor]  # when it was saved or loaded, the next loss, after it, a random number


def save(folder: str, build: str, options: Mapping[str, Any]) -> Outcome:
    """Train on each rank; save between two micro-batches, and go on."""
    model, optimizer = make(build, options)
    for number in range(NUM_STEPS):
        compute(model, number)
        update(optimizer)
    compute(model, NUM_STEPS)
    torch.manual_seed(100 + dist.get_rank())
    zinf_compile.save(folder, model, optimizer, extra={"step": NUM_STEPS})
    drawn, values = torch.rand(1), values_of(model, optimizer) | norm_of(model)
    loss, after = go_on(model, optimizer)
    check_at_rest(model)
    zinf_compile.close(model)
    return values, loss, after, drawn


def load(folder: str, build: str, options: Mapping[str, Any]) -> Outcome:
    """Load into a model that has trained something else, on each rank; go on."""
    model, optimizer = make(build, options)
    compute(model, 7)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    assert zinf_compile.load(folder, model, optimizer) == {"step": NUM_STEPS}
    drawn, values = torch.rand(1), values_of(model, optimizer) | norm_of(model)
    loss, after = go_on(model, optimizer)
    check_at_rest(model)
    zinf_compile.close(model)
    return values, loss, after, drawn


class Alone:
    """One process, with the same model in plain PyTorch: its batches are those of ranks, one after another."""

    def __init__(self, build: str, num_ranks: int) -> None:
        torch.set_num_threads(1)
        self.model, self.num_ranks = BUILDS[build](), num_ranks
        self.optimizer = adamw(self.model)

    def compute(self, number: int) -> list[float]:
        """Run forward and backward of all batches of a step; return their losses."""
        trained = [each for each in self.model.parameters() if each.requires_grad]
        before = [each.grad for each in trained]
        for each in trained:
            each.grad = None
        losses = []
        for rank in range(self.num_ranks):
            loss = self.model(**batch_of(number, rank))
            loss.backward()
            losses.append(loss.item())
        for each, kept in zip(trained, before, strict=True):
            if each.grad is not None:
                each.grad /= self.num_ranks
                each.grad = each.grad if kept is None else kept + each.grad
        return losses

    def save(self, folder: Path) -> Values:
        """Train, and save between two micro-batches."""
        for number in range(NUM_STEPS):
            self.compute(number)
            update(self.optimizer)
        self.compute(NUM_STEPS)
        zinf_compile.save(folder, self.model, self.optimizer, extra={"step": NUM_STEPS})
        return values_of(self.model, self.optimizer) | norm_of(self.model)

    def load(self, folder: Path) -> Values:
        """Load what anybody has saved."""
        assert zinf_compile.load(folder, self.model, self.optimizer) == {"step": NUM_STEPS}
        return values_of(self.model, self.optimizer) | norm_of(self.model)

    def go_on_from(self, number: int) -> list[float]:
        """Train a step; return the losses of the one that ``go_on`` computes."""
        self.compute(number)
        update(self.optimizer)
        return self.go_on()[0]

    def go_on(self) -> tuple[list[float], Values]:
        """Return the losses of the next step, and what there is after it."""
        losses = self.compute(NUM_STEPS + 1)
        update(self.optimizer)
        return losses, values_of(self.model, self.optimizer)


def joined(outcomes: list[Outcome], place: int) -> Values:
    """Return what all ranks have."""
    return {name: value for each in outcomes for name, value in each[place].items()}  # type: ignore[union-attr]


def assert_same(found: Values, expected: Values) -> None:
    """Compare bit by bit."""
    assert found.keys() == expected.keys()
    assert not [name for name, value in found.items() if not torch.equal(value, expected[name])]


def check(outcomes: list[Outcome], alone: Alone, folder: Path) -> None:
    """Compare what ranks have loaded with what one process does."""
    expected = alone.load(folder)
    assert_same(joined(outcomes, 0), expected)
    losses, after = alone.go_on()
    assert [each[1] for each in outcomes] == losses
    assert_same(joined(outcomes, 2), after)


WAYS = [
    pytest.param("deep", "resident"),
    pytest.param("frozen", "nvme", marks=pytest.mark.long),  # with a tied weight, which is frozen
    pytest.param("deep", "nvme", marks=pytest.mark.long),
]


def options_of(placement: str, folder: Path) -> dict[str, Any]:
    """Return options of a model in rounds."""
    of_placement = RESIDENT if placement == "resident" else placements(str(folder))[placement]
    return {**of_placement, "schedule": "rounds"}


@pytest.mark.parametrize(("build", "placement"), WAYS)
def test_what_ranks_save_in_rounds(build: str, placement: str, two: RankPool, three: RankPool, tmp_path: Path) -> None:
    options, folder = options_of(placement, tmp_path), tmp_path / "saved"
    saved = two.run(save, str(folder), build, options)
    assert not torch.equal(saved[0][3], saved[1][3])
    same = two.run(load, str(folder), build, options)
    for loaded, was in zip(same, saved, strict=True):
        assert_same(loaded[0], was[0])
        assert loaded[1] == was[1]
        assert_same(loaded[2], was[2])
        assert torch.equal(loaded[3], was[3])  # each rank draws its own random numbers again
    check(same, Alone(build, 2), folder)
    sharded = two.run(load, str(folder), build, {**options, "schedule": None})
    assert [each[1] for each in sharded] == [each[1] for each in saved]
    for each in sharded:
        assert_same(each[0] | {"norm": saved[0][0]["norm"]}, joined(saved, 0))
    check(three.run(load, str(folder), build, options), Alone(build, 3), folder)


@pytest.mark.parametrize(("build", "placement"), WAYS)
def test_what_one_process_saves(build: str, placement: str, two: RankPool, tmp_path: Path) -> None:
    options, folder = options_of(placement, tmp_path), tmp_path / "saved"
    Alone(build, 3).save(folder)
    check(two.run(load, str(folder), build, options), Alone(build, 2), folder)


@pytest.mark.long
@pytest.mark.parametrize(("build", "placement"), WAYS)
def test_what_ranks_with_rows_save(build: str, placement: str, two: RankPool, three: RankPool, tmp_path: Path) -> None:
    options, folder = options_of(placement, tmp_path), tmp_path / "saved"
    two.run(save, str(folder), build, {**options, "schedule": None})
    check(three.run(load, str(folder), build, options), Alone(build, 3), folder)


@pytest.mark.long
@pytest.mark.parametrize("build", BUILDS)
def test_the_files_are_those_of_one_process(build: str, two: RankPool, tmp_path: Path) -> None:
    by_ranks, by_one = tmp_path / "by ranks", tmp_path / "by one"
    two.run(save, str(by_ranks), build, options_of("resident", tmp_path))
    Alone(build, 2).save(by_one)
    found, expected = (json.loads((folder / "manifest.json").read_text()) for folder in (by_ranks, by_one))
    for each in (found, expected):
        del each["manifest_crc32"], each["objects_crc32"]  # of random states
    assert found == expected
    for name in ("model", "optimizer", "gradients"):
        files = [folder / "data-1" / f"{name}.safetensors" for folder in (by_ranks, by_one)]
        assert files[0].read_bytes() == files[1].read_bytes()


CODED = {"state_dtype": "int8", "compute_dtype": torch.bfloat16, "host_memory": "8MiB"}


def train_coded(folder: str, options: Mapping[str, Any], loads: bool) -> Outcome:
    """Train with state in codes, and compute in bfloat16; save, or load in the place of what was trained."""
    model, optimizer = make("frozen", {**options, **CODED})
    compute(model, 7 if loads else 0)
    update(optimizer)
    zinf_compile.load(folder, model, optimizer) if loads else zinf_compile.save(folder, model, optimizer)
    values = values_of(model, optimizer)
    loss, after = go_on(model, optimizer)
    zinf_compile.close(model)
    return values, loss, after, torch.zeros(())


@pytest.mark.long
def test_codes_and_narrow_copies(two: RankPool, tmp_path: Path) -> None:
    options, folder = options_of("nvme", tmp_path), str(tmp_path / "saved")
    saved = two.run(train_coded, folder, options, False)
    for loaded, was in zip(two.run(train_coded, folder, options, True), saved, strict=True):
        assert_same(loaded[0], was[0])
        assert loaded[1] == was[1]
        assert_same(loaded[2], was[2])
    assert '"int8' in (tmp_path / "saved" / "manifest.json").read_text()


# What goes wrong on one rank.


@contextmanager
def failing_writes() -> Any:
    """A block in which the disk is full for rank 1."""
    real = os.pwrite

    def write(descriptor: int, piece: memoryview, offset: int) -> int:
        if offset > 8192:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, piece, offset)

    with mock.patch("os.pwrite", write if dist.get_rank() == 1 else real):
        yield


def fail(folder: str, options: Mapping[str, Any]) -> tuple[list[str], bool, float]:
    """Return the errors of saves and loads that fail, whether nothing has changed, and the loss of the next step."""
    model, optimizer = make("deep", options)
    compute(model, 0)
    update(optimizer)
    zinf_compile.save(folder, model, optimizer, extra={"step": NUM_STEPS})
    values = values_of(model, optimizer)
    files = sorted(path.name for path in Path(folder).iterdir())
    errors, is_same = [], []

    def expect(call: Callable[[], object]) -> None:
        with pytest.raises(zinf_compile.ZinfError) as raised:
            call()
        errors.append(f"{raised.type.__name__}: {raised.value}")
        dist.barrier()  # rank 0 removes what it has begun
        is_same.append(sorted(path.name for path in Path(folder).iterdir()) == files)
        now = values_of(model, optimizer)
        is_same.extend(torch.equal(now[name], value) for name, value in values.items())
        dist.barrier()

    with failing_writes():
        expect(lambda: zinf_compile.save(folder, model, optimizer))
    bad = {"step": object()} if dist.get_rank() == 1 else {"step": 0}
    expect(lambda: zinf_compile.save(folder, model, optimizer, extra=bad))
    if dist.get_rank() == 1:
        slashed = optimizer.state[next(each for each in model.parameters() if not each.is_meta)]
        slashed["a/b"] = torch.zeros(1)
    expect(lambda: zinf_compile.save(folder, model, optimizer))
    if dist.get_rank() == 1:
        del slashed["a/b"]
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    expect(lambda: zinf_compile.load(folder, model, other))
    other = AdamW(model.parameters(), lr=0.1)
    expect(lambda: zinf_compile.load(folder, model, other))
    (file,) = Path(folder).glob("data-*/optimizer.safetensors")
    if dist.get_rank() == 0:
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    dist.barrier()
    expect(lambda: zinf_compile.load(folder, model, optimizer))
    zinf_compile.save(folder, model, optimizer, extra={"step": NUM_STEPS})
    assert zinf_compile.load(folder, model, optimizer) == {"step": NUM_STEPS}
    loss, _ = go_on(model, optimizer)
    zinf_compile.close(model)
    return errors, all(is_same), loss


def test_what_fails_on_one_rank_fails_on_all_and_changes_nothing(two: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    results = two.run(fail, str(folder), options_of("resident", tmp_path), seconds=60.0)
    (first, first_is_same, first_loss), (second, second_is_same, second_loss) = results
    assert first_is_same
    assert second_is_same
    full_disk, no_extra, slash, *of_first_and_second, damaged = zip(first, second, strict=True)
    assert full_disk[0].startswith("RankError: writing a checkpoint failed on rank 1; rank 1: StoreError: ")
    assert full_disk[1].startswith("StoreError: ")
    assert "No space left on device" in full_disk[1]
    assert no_extra[0].startswith("RankError: collecting a checkpoint failed on rank 1; rank 1: ConfigError: extra")
    assert slash[0].startswith("RankError: collecting a checkpoint failed on rank 1; rank 1: UnsupportedError: ")
    for one, another in of_first_and_second:
        assert one == another
        assert one.startswith("ConfigError: the checkpoint in ")
    assert any("CheckpointError: " in each and "is damaged" in each for each in damaged)
    assert [first_loss, second_loss] == Alone("deep", 2).go_on_from(0)


def build_other() -> nn.Module:
    """Return a model of which the last block, which one rank has, is another one."""
    model = build_deep()
    model.deep.blocks[4].up = nn.Linear(24, 80)  # type: ignore
    model.deep.blocks[4].down = nn.Linear(80, 24)  # type: ignore
    return model


def load_other(folder: str, options: Mapping[str, Any]) -> str:
    """Return the error of a checkpoint of another model."""
    model = optimize(build_other(), options)
    with pytest.raises(zinf_compile.ZinfError) as raised:
        zinf_compile.load(folder, model, adamw(model))
    zinf_compile.close(model)
    return f"{raised.type.__name__}: {raised.value}"


@pytest.mark.long
def test_a_checkpoint_of_another_model_is_refused_on_every_rank(two: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    Alone("deep", 2).save(folder)
    of_first, of_second = two.run(load_other, str(folder), options_of("resident", tmp_path))
    assert of_first.startswith("ConfigError: the checkpoint in ")
    assert "'deep.blocks.4.up.weight' is (73, 24) float32 in the checkpoint, (80, 24) float32 here" in of_first
    assert of_second.startswith(
        "RankError: checking a checkpoint failed on rank 0; rank 0: ConfigError: the checkpoint"
    )


def stop(folder: str, options: Mapping[str, Any]) -> None:
    """Save, while the process of rank 1 dies."""
    model, optimizer = make("deep", options)
    compute(model, 0)
    update(optimizer)
    if dist.get_rank() == 1:
        with mock.patch("os.pwrite", side_effect=lambda *given: os._exit(1)):
            zinf_compile.save(folder, model, optimizer)
    zinf_compile.save(folder, model, optimizer)


@pytest.mark.long
def test_a_rank_that_dies_in_a_save_leaves_no_checkpoint(two: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    first, _ = two.outcomes(stop, str(folder), options_of("resident", tmp_path))
    assert isinstance(first, Raised)
    assert first.kind == "RankError"
    assert not (folder / "manifest.json").exists()


def export(folder: str, build: str, options: Mapping[str, Any]) -> str:
    """Export what was trained, after an export that failed on rank 1; return the error of that."""
    model, optimizer = make(build, options)
    compute(model, 0)
    update(optimizer)
    with failing_writes(), pytest.raises(zinf_compile.ZinfError) as raised:
        zinf_compile.export(model, f"{folder}/failed")
    zinf_compile.export(model, f"{folder}/one")
    zinf_compile.export(model, f"{folder}/many", dtype=torch.bfloat16, max_shard_size="20KB")
    zinf_compile.save(f"{folder}/saved", model)
    zinf_compile.close(model)
    return f"{raised.type.__name__}: {raised.value}"


@pytest.mark.parametrize("build", ["frozen", pytest.param("deep", marks=pytest.mark.long)])
def test_an_export_is_that_of_one_process(build: str, two: RankPool, tmp_path: Path) -> None:
    first, second = two.run(export, str(tmp_path), build, options_of("resident", tmp_path))
    assert first.startswith("RankError: writing an export failed on rank 1; rank 1: StoreError: ")
    assert "No space left on device" in second
    assert not (tmp_path / "failed").exists()
    model = BUILDS[build]()
    zinf_compile.load(tmp_path / "saved", model)
    zinf_compile.export(model, tmp_path / "expected one")
    zinf_compile.export(model, tmp_path / "expected many", dtype=torch.bfloat16, max_shard_size="20KB")
    for kind in ("one", "many"):
        found, expected = (
            {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
            for folder in (kind, f"expected {kind}")
        )
        assert found == expected
    assert len(found) > 3
