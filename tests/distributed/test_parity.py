"""Bit by bit: N ranks give what one process gives that accumulates their batches in the order of ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zinf_compile
from tests.distributed.workloads import (
    KIB,
    Loop,
    batch_of,
    build_frozen,
    build_gpt,
    full,
    of_rank,
    optimize,
    placements,
    train_alone,
    train_on_ranks,
)
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace, assert_same
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.params import home_gradient
from zinf_compile.runtime.params.records import StoredParameter, record_of
from zinf_compile.runtime.store import store as store_module
from zinf_compile.runtime.store.store import Store, store_of

LOOPS = {
    "ordinary": Loop(),
    "accumulated": Loop(num_steps=2, num_accumulated=2),
    "frozen": Loop(build=build_frozen),
    "momentum": Loop(optimizer="SGD", optimizer_options={"lr": 0.1, "momentum": 0.9}),
    "summed": Loop(divide_by=1),
}


@pytest.mark.parametrize("placement", ["nvme", pytest.param("resident", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "loop",
    [
        *("ordinary", "frozen"),
        *(pytest.param(each, marks=pytest.mark.long) for each in ("accumulated", "momentum", "summed")),
    ],
)
def test_two_ranks(loop: str, placement: str, two: RankPool, tmp_path: Path) -> None:
    options = dict(placements(str(tmp_path))[placement])
    if LOOPS[loop].divide_by is not None:
        options["gradient_divide_factor"] = LOOPS[loop].divide_by
    plain = train_alone(LOOPS[loop], 2)
    for rank, ours in enumerate(two.run(train_on_ranks, LOOPS[loop], options)):
        assert_same(ours, of_rank(plain, rank, 2))


@pytest.mark.parametrize(
    "options",
    [
        {"capture": False},
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ({"step_in_backward": True}, {}, {"overlap_step": False})
        ),
    ],
)
def test_three_ranks_that_divide_nothing_evenly(options: dict[str, object], three: RankPool, tmp_path: Path) -> None:
    loop = Loop()
    plain = train_alone(loop, 3)
    given = placements(str(tmp_path))["nvme"] | options
    if "step_in_backward" in options:
        plain.gradients = []
    for rank, ours in enumerate(three.run(train_on_ranks, loop, given)):
        assert_same(ours, of_rank(plain, rank, 3))


@pytest.mark.parametrize(
    "loop", ["accumulated", *(pytest.param(loop, marks=pytest.mark.long) for loop in ("ordinary", "frozen"))]
)
@pytest.mark.parametrize(
    ("stage", "looks"),
    [(1, True), *(pytest.param(*each, marks=pytest.mark.long) for each in ((1, False), (2, True))), (2, False)],
)
def test_stages_that_keep_more_on_every_rank(stage: int, looks: bool, loop: str, two: RankPool, tmp_path: Path) -> None:
    """Compute copies stay on the device although they would stream; in stage 1 a step has one reduction."""
    trained = replace(LOOPS[loop], looks_at_gradients=looks)
    plain = train_alone(trained, 2, reduces_once=stage == 1)
    if not looks:
        plain.gradients = []
    options = placements(str(tmp_path))["nvme"] | {"device_memory": 1024 * KIB, "stage": stage}
    for rank, ours in enumerate(two.run(train_on_ranks, trained, options)):
        assert_same(ours, of_rank(plain, rank, 2))


def count_collectives(options: Mapping[str, Any]) -> tuple[dict[str, int], set[Tier], int]:
    """Return the bytes of each kind of collective in a step of two batches, the tiers of compute copies, and their bytes."""
    loop = Loop(num_steps=2, num_accumulated=2, looks_at_gradients=False)
    model = optimize(loop.build(), options)
    optimizer, counted = loop.make_optimizer(model), []
    meter = store_of(record_of(next(model.parameters()))).meter
    for step in range(loop.num_steps):
        for micro in range(loop.num_accumulated):
            model(**batch_of(step * loop.num_accumulated + micro, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        counted.append(dict(meter.collectives))
    tiers = {placed.compute for plan in zinf_compile.report(model).plans for placed in plan.placements}
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    zinf_compile.close(model)
    first, second = counted
    return {kind: second[kind] - first.get(kind, 0) for kind in second}, tiers, nbytes


@pytest.mark.long
def test_what_stages_exchange(two: RankPool, tmp_path: Path) -> None:
    streamed = placements(str(tmp_path))["nvme"]
    kept = {**streamed, "device_memory": 1024 * KIB}
    (third, tiers, nbytes), _ = two.run(count_collectives, streamed)
    assert tiers != {Tier.DEVICE}
    assert third["reduction"] == 2 * nbytes
    assert third["all-gather"] > 2 * nbytes  # most of it in each forward and each backward
    for stage, num_reductions in ((2, 2), (1, 1)):
        for exchanged, tiers, _ in two.run(count_collectives, {**kept, "stage": stage}):
            assert tiers == {Tier.DEVICE}
            assert exchanged["reduction"] == num_reductions * nbytes
            assert nbytes <= exchanged["all-gather"] < 1.1 * nbytes  # once, after the update; rows are padded


def gradients_alone(step: int) -> dict[str, Tensor]:
    """Return the gradients of the batches of two ranks in one process."""
    model = Loop().build()
    for rank in range(2):
        model(**batch_of(step, rank)).backward()
    return {name: parameter.grad / 2 for name, parameter in model.named_parameters()}


def drop_batches(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Drop the gradients of a batch with zero_grad, and those of another by closing; return gradients, and warnings."""
    model, warnings = optimize(Loop().build(), options), []
    model(**batch_of(0, dist.get_rank())).backward()
    held = model.blocks[0].up.weight.grad
    model.zero_grad()
    model(**batch_of(1, dist.get_rank())).backward()
    gradients = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
    gradients["held"] = full(held)
    model.zero_grad()
    model(**batch_of(2, dist.get_rank())).backward()
    with mock.patch.object(home_gradient._log, "warning", lambda text, *words: warnings.append(text % words)):
        zinf_compile.close(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    return gradients, warnings


def test_gradients_that_are_not_reduced_are_dropped_whole(two: RankPool, tmp_path: Path) -> None:
    options = placements(str(tmp_path))["nvme"] | {"device_memory": 1024 * KIB, "stage": 1}
    first, second = (gradients_alone(step) for step in (0, 1))
    for gradients, (warning,) in two.run(drop_batches, options):
        assert torch.equal(gradients.pop("held"), first["blocks.0.up.weight"])
        assert gradients.keys() == second.keys()
        assert all(torch.equal(gradients[name], each) for name, each in second.items())
        assert "had not been reduced over ranks when the model was closed" in warning


def train_and_watch_residents(loop: Loop, options: Mapping[str, Any]) -> tuple[Trace, list[str], int]:
    """Train; return also when updated rows of residents began to come and were waited for, one parameter at a time."""
    happened: list[str] = []
    start, finish = Store._start_spread, Store._finish_spread

    def note_start(store: Store, records: Sequence[StoredParameter]) -> None:
        happened.append("start")
        start(store, records)

    def note_finish(store: Store, spread: Any) -> None:
        happened.append("finish")
        finish(store, spread)

    with (
        mock.patch.multiple(Store, _start_spread=note_start, _finish_spread=note_finish),
        mock.patch.object(store_module, "SPREAD_NBYTES", 1),
    ):
        trace = train_on_ranks(loop, options)
    return trace, happened, len(list(loop.build().parameters()))


def test_updated_residents_come_beside_the_forward(two: RankPool, tmp_path: Path) -> None:
    """All of them begin to come before the first is waited for."""
    loop = Loop(num_steps=2, looks_at_gradients=False)
    plain = train_alone(loop, 2)
    plain.gradients = []
    options = placements(str(tmp_path))["resident"]
    for rank, (ours, happened, num_parameters) in enumerate(two.run(train_and_watch_residents, loop, options)):
        assert_same(ours, of_rank(plain, rank, 2))
        assert happened == ["start"] * num_parameters + ["finish"] * num_parameters


def break_off_and_train_on(options: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many gathers of residents are left by a forward that breaks off on all ranks, and how many there were."""
    model = optimize(build_gpt(), options)
    store = store_of(record_of(next(model.parameters())))
    optimizer = torch.optim.AdamW(model.parameters())
    model(**batch_of(0, dist.get_rank())).backward()
    optimizer.step()
    started: list[int] = []
    start = Store.refresh_stale

    def start_and_stop(store: Store) -> None:
        start(store)
        started.append(len(store._spreads))
        raise zinf_compile.CapacityError("the test")

    with mock.patch.object(Store, "refresh_stale", start_and_stop), pytest.raises(zinf_compile.CapacityError):
        model(**batch_of(1, dist.get_rank()))
    left = len(store._spreads)
    model(**batch_of(1, dist.get_rank())).backward()
    zinf_compile.close(model)
    return left, started[0]


def test_a_forward_that_breaks_off_leaves_no_gather_of_residents(two: RankPool, tmp_path: Path) -> None:
    for left, started in two.run(break_off_and_train_on, placements(str(tmp_path))["resident"]):
        assert started > 0
        assert left == 0
