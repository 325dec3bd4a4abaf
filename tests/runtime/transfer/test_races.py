"""Concurrent operations of the runtime never touch the same bytes unordered. Injected races are found."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support.races import Races, watching_races
from tests.support.small_training import train
from zinf_compile.runtime.optim import optimizer
from zinf_compile.runtime.optim.step_jobs import Job, JobCollector
from zinf_compile.runtime.optim.updates_ahead import Begun, UpdatesAhead
from zinf_compile.runtime.storage.staging import StagingBuffer, StagingPool
from zinf_compile.runtime.transfer import in_flight
from zinf_compile.runtime.transfer import tensor_io as values
from zinf_compile.runtime.transfer.transfers import Transfers

KIB, MIB = 2**10, 2**20


def options_of(seed: int) -> dict[str, object]:
    """Return the sizes of a model and the options to train it with, from tight budgets to those that hold half of it."""
    draw = random.Random(seed)
    width, depth = draw.choice([192, 224, 256]), draw.randint(2, 4)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    weights = depth * 4 * width**2 * dtype.itemsize  # in the compute dtype
    options: dict[str, object] = {
        "width": width,
        "depth": depth,
        "device_memory": int(draw.uniform(0.3, 0.7) * weights + 512 * KIB),
        "host_memory": int(draw.uniform(0.7, 4) * MIB),
        "prefetch_memory": draw.choice([None, 0, 256 * 2**10]),
        "compute_dtype": dtype,
        "recompute": draw.choice([None, True]),
    }
    step = draw.choice(["overlapped", "synchronous", "in_backward"])
    if step == "synchronous":
        options["overlap_step"] = False
    if step == "in_backward":
        options["step_in_backward"] = True
    if draw.random() < 0.5:
        options["tile_memory"] = 64 * 2**10
    return options


# Those that always run differ in recompute, tiles, prefetching, and in when the step runs. Seed 6 has bfloat16.
SEEDS = [seed if seed in (2, 4) else pytest.param(seed, marks=pytest.mark.long) for seed in range(8)]


def test_updates_ahead_of_the_step_have_no_race(tmp_path: Path) -> None:
    taken = []
    commit = UpdatesAhead.commit

    def count(self: UpdatesAhead, claimed: Sequence[Begun], jobs: JobCollector) -> list[Job]:
        taken.append(len(claimed))
        return commit(self, claimed, jobs)

    with watching_races() as races, mock.patch.object(UpdatesAhead, "commit", count):
        train(224, 3, nvme=tmp_path, device_memory=1600 * KIB, host_memory=MIB, speculate=True)
    assert races.found == []
    assert sum(taken) > 0
    assert races.num_accesses["what staging still holds"] > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_no_run_has_a_race(tmp_path: Path, seed: int) -> None:
    with watching_races() as races:
        train(nvme=tmp_path, **options_of(seed))
    assert races.found == []
    touched = {what.partition(" of ")[0] for what in races.num_accesses}
    assert {"the read", "the write"} <= touched
    assert any(what.startswith("the update") for what in touched)
    assert "compute" in touched


def test_what_is_written_over_in_part_is_remembered() -> None:
    races = Races()
    races.begin()
    races.touch("file", 0, 4096, "the first", write=True)
    behind = races.fork()
    races.begin(behind)
    races.touch("file", 0, 100, "who comes behind it", write=True)
    assert races.found == []
    races.begin()
    races.touch("file", 2000, 100, "who knows of nobody", write=False)
    (race,) = races.found
    assert race == "who knows of nobody and the first both touch file bytes [2000, 2100), and nothing orders them"


def races_with(folder: Path, **changed: object) -> Races:
    with watching_races() as races:
        train(
            **{
                "nvme": folder,
                "width": 128,
                "depth": 3,
                "device_memory": 900 * KIB,
                "host_memory": 700 * KIB,
                **changed,
            }
        )
    return races


def test_a_gather_that_does_not_wait_for_an_update_is_found(tmp_path: Path) -> None:
    issue = Transfers.issue

    def at_once(self: Transfers, *args: object, after: Sequence[object], start: Callable[..., None]) -> int:
        return issue(self, *args, after=[], start=start)

    with mock.patch.object(Transfers, "issue", at_once):
        found = races_with(tmp_path).found
    assert any("file bytes" in race and "the write of" in race and "the read of" in race for race in found)


def test_staging_that_is_returned_too_early_is_found(tmp_path: Path) -> None:
    def call_at_once(waited: Sequence[Future[None]], call: Callable[[BaseException | None], object]) -> None:
        for future in waited:
            while future._state != "FINISHED":  # the bytes have arrived, but nothing orders the accesses
                pass
        call(None)

    def return_at_once(
        staging: StagingPool, lease: StagingBuffer, waited: Sequence[Future[None]], *, holds: object | None = None
    ) -> None:
        call_at_once(waited, lambda _: staging.return_(lease))

    with (
        mock.patch.object(optimizer, "call_when_done", call_at_once),
        mock.patch.object(values, "return_when_done", return_at_once),
    ):
        found = races_with(tmp_path).found
    assert any("memory bytes" in race and "the write of" in race for race in found)


def test_compute_that_does_not_wait_for_a_transfer_is_found(tmp_path: Path) -> None:
    def wait(self: in_flight.InFlight) -> None:
        while not all(future._state == "FINISHED" for future in (self.started, *self.futures)):
            pass

    with (
        mock.patch.object(in_flight.InFlight, "wait", wait),
        mock.patch.object(in_flight.InFlight, "is_ready", property(lambda _: False)),
    ):
        found = races_with(tmp_path).found
    assert any(race.startswith("compute and the read of") for race in found)
