"""Collectives never touch bytes that compute or the disk touches at the same time. Injected races are found."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.workloads import KIB, TILES, Loop, build_gpt, build_small, placements, train_on_ranks
from tests.support.races import watching_races
from tests.support.rank_pool import RankPool
from zinf_compile.ir.config import Config
from zinf_compile.runtime.ranks.ranks import Collective, Ranks
from zinf_compile.runtime.storage.arena import Arena
from zinf_compile.runtime.transfer.in_flight import InFlight
from zinf_compile.runtime.transfer.transfers import Transfers


def train_watched(options: Mapping[str, Any], fault: str | None = None) -> tuple[list[str], list[str]]:
    """Return the races of a loop on this rank, and what was touched."""
    with watching_races() as races, ExitStack() as stack:
        if fault is not None:
            stack.enter_context(FAULTS[fault]())
        given = dict(options)
        # No more than an optimizer step takes: the rest of host memory would hold all shards.
        stack.enter_context(mock.patch.object(Config, "staging_memory", 256 * KIB))
        train_on_ranks(Loop(build=given.pop("model", build_gpt), num_steps=2), given)
    return races.found, [*races.num_accesses]


@contextmanager
def waits_that_order_nothing() -> Iterator[None]:
    """Let collectives end, but keep that from the detector, as if compute went on without a wait."""

    def wait(ranks: Ranks, collective: Collective, *, beside: bool = False) -> None:
        while not all(work.is_completed() for work in collective.works):
            pass

    with mock.patch.object(Ranks, "wait", wait):
        yield


@contextmanager
def launches_before_arrival() -> Iterator[None]:
    """The same for the reads of this rank's shards."""

    def wait(moving: InFlight) -> None:
        while not all(future._state == "FINISHED" for future in (moving.started, *moving.futures)):
            pass

    with mock.patch.object(InFlight, "wait", wait), mock.patch.object(InFlight, "is_ready", property(lambda _: False)):
        yield


@contextmanager
def one_place_for_all() -> Iterator[None]:
    """Gather everything to the beginning of the arena, at once: over values that compute reads a little longer."""
    issue, release = Transfers.issue_gather, Transfers.release
    read_on: list[int] = []

    def issue_and_launch(owner: Transfers, records: Any, dtypes: Any, offsets: Sequence[int], experts: Any) -> int:
        ticket = issue(owner, records, dtypes, [offset - offsets[0] for offset in offsets], experts)
        owner.launch_gather(ticket)
        while read_on:
            release(owner, read_on.pop())
        return ticket

    def take(arena: Arena, offset: int, nbytes: int) -> None:
        arena._taken[offset] = offset + nbytes

    with (
        mock.patch.object(Transfers, "issue_gather", issue_and_launch),
        mock.patch.object(Transfers, "release", lambda _, ticket: read_on.append(ticket)),
        mock.patch.object(Arena, "take", take),
        mock.patch.object(Arena, "give_back"),
        mock.patch.object(Arena, "check_integrity"),
    ):
        yield


FAULTS = {each.__name__: each for each in (waits_that_order_nothing, launches_before_arrival, one_place_for_all)}


@pytest.fixture
def options(tmp_path: Path) -> Mapping[str, Any]:
    """Return budgets in which some parameters are streamed."""
    return {**placements(str(tmp_path))["nvme"], "device_memory": 480 * KIB}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"reduce": "fast"}, marks=pytest.mark.long),
        pytest.param(
            {"model": build_small, "tiles": TILES, "device_memory": 360 * KIB, "host_memory": 300 * KIB},
            id="tiles",
            marks=pytest.mark.long,
        ),
        pytest.param({"step_in_backward": True, "device_memory": 640 * KIB}, marks=pytest.mark.long),
    ],
)
def test_no_run_has_a_race(two: RankPool, options: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    for found, touched in two.run(train_watched, {**options, **changes}):
        assert found == []
        kinds = {what.partition(" of ")[0] for what in touched if "calibration" not in what}
        assert {"the all-gather", "the reduction", "the read", "compute", "what fills the buffer"} <= kinds


@pytest.mark.parametrize(
    ("fault", "race"),
    [
        pytest.param("waits_that_order_nothing", "compute and the all-gather of", marks=pytest.mark.long),
        pytest.param(
            "waits_that_order_nothing", "what fills the buffer of .* and the reduction of", marks=pytest.mark.long
        ),
        pytest.param(
            "launches_before_arrival",
            "the all-gather of .* and (the read of|a copy's destination)",
            marks=pytest.mark.long,
        ),
        ("one_place_for_all", "compute and the all-gather of"),
    ],
)
def test_injected_races_are_found(two: RankPool, options: Mapping[str, Any], fault: str, race: str) -> None:
    for found, _ in two.run(train_watched, options, fault):
        assert any(re.match(race, each) for each in found), found[:9]
