"""Rank 0 plans for all ranks, from a request that is the same on each: plans, refusals and failures are those of rank 0."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zinf_compile
from tests.distributed.test_tiles import build_wide, tokens_of
from tests.distributed.workloads import KIB, batch_of, build_frozen, build_gpt, optimize, placements
from tests.support.rank_pool import Died, Raised, RankPool
from zinf_compile.driver import planning
from zinf_compile.ir.errors import DeviceCapacityError, StoreError
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.search.planner import Request, Searches
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.ranks.agreement import check_record_alike
from zinf_compile.runtime.ranks.ranks import ALONE, Ranks
from zinf_compile.runtime.store.store import Store, store_of

SOON = 20.0  # seconds; gloo's own timeout is minutes


@pytest.fixture
def options(tmp_path: Path) -> Mapping[str, Any]:
    """Return budgets in which parameters are streamed."""
    return placements(str(tmp_path))["nvme"]


@contextmanager
def counted_plans() -> Iterator[list[str]]:
    """Note the name of each graph that this rank plans in the block."""
    make_plan, made = planning.make_plan, []

    def count(request: Request, searches: Searches | None = None) -> Plan:
        made.append(request.name)
        return make_plan(request, searches)

    with mock.patch.object(planning, "make_plan", count):
        yield made


def store_in(model: nn.Module) -> Store:
    """Return the store of an optimized model."""
    return store_of(next(record for each in model.parameters() if (record := record_of(each)) is not None))


def train_and_replan(options: Mapping[str, Any]) -> tuple[list[int], list[Plan]]:
    """Return how many plans this rank has made after each of four steps, and the plans that it has then.

    Before the second step a parameter is unfrozen. The third has longer sequences, and is captured for any length. The
    fourth has still longer ones, for which that graph is planned again.
    """
    model = optimize(build_frozen(), {**options, "compute": "inductor"})
    counts: list[int] = []
    with counted_plans() as made:
        for length in (5, 5, 7, 9):
            if len(counts) == 1:
                model.embed.weight.requires_grad_(True)
            tokens = torch.randint(51, (2, length))
            model(tokens=tokens, targets=tokens).backward()
            counts.append(len(made))
    report = zinf_compile.report(model)
    assert any("again for sequence=9" in sentence for sentence in report.replanned)
    zinf_compile.close(model)
    return counts, [planned.plan for planned in report.plans]


def check_made_on_first(outcomes: list[tuple[list[int], list[Plan]]]) -> None:
    """Check that each step was planned, on rank 0 alone, and that all have its plans."""
    (counts, plans), *others = outcomes
    assert 0 < counts[0] < counts[1] < counts[2] < counts[3]
    assert len(plans) == 3
    assert plans[0].num_ranks == len(outcomes)
    for none, same in others:
        assert none == [0, 0, 0, 0]
        assert same == plans


@pytest.mark.long
def test_rank_0_of_two_makes_all_plans(two: RankPool, options: Mapping[str, Any]) -> None:
    check_made_on_first(two.run(train_and_replan, options))


@pytest.mark.long
def test_rank_0_of_three_makes_all_plans(three: RankPool, options: Mapping[str, Any]) -> None:
    check_made_on_first(three.run(train_and_replan, options))


def search_for_tiles(options: Mapping[str, Any]) -> tuple[int, Plan]:
    """Return how many plans this rank has made for a model that fits in tiles only, and the plan."""
    model = optimize(build_wide(), options)
    with counted_plans() as made:
        model(tokens_of(dist.get_rank())).backward()
    (planned,) = zinf_compile.report(model).plans
    zinf_compile.close(model)
    return len(made), planned.plan


@pytest.mark.long
def test_the_search_for_tiles_plans_on_rank_0(two: RankPool, tmp_path: Path) -> None:
    budgets = {"device_memory": 1536 * KIB, "host_memory": 1024 * KIB, "reserve_memory": 0, "nvme": str(tmp_path)}
    (count, plan), (none, same) = two.run(search_for_tiles, {**budgets, "compute": "aten"})
    assert count > 2  # whole, and two choices of tiles at least
    assert none == 0
    assert same == plan
    assert any("in 13 tiles" in note for note in plan.notes)


def refuse(options: Mapping[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any], int]:
    """Return the error of a model that does not fit, and how many plans this rank has tried to make."""
    model = optimize(build_gpt(), options)
    with counted_plans() as made, pytest.raises(DeviceCapacityError) as caught:
        model(**batch_of(0, dist.get_rank()))
    error = caught.value
    zinf_compile.close(model)
    return type(error).__name__, error.args, vars(error), len(made)


@pytest.mark.long
def test_what_does_not_fit_is_refused_alike(three: RankPool, options: Mapping[str, Any]) -> None:
    """Errors have the class, text and numbers of rank 0."""
    budget = 100 * KIB
    (*first, count), *others = three.run(refuse, {**options, "device_memory": budget})
    kind, lines, numbers = first
    assert kind == "DeviceCapacityError"
    assert "TinyGPT graph 0 needs" in lines[0]
    assert numbers["needed_nbytes"] > budget
    assert 0 < numbers["activations_nbytes"] < numbers["needed_nbytes"]
    assert count > 0
    for *error, none in others:
        assert error == first
        assert none == 0


def look_for_largest(options: Mapping[str, Any]) -> tuple[str, int]:
    """Return the refusal of sequences that are too long, and how many plans this rank has made."""
    model = optimize(build_gpt(), {**options, "compute": "inductor"})
    with counted_plans() as made:
        for length in (5, 7):
            tokens = torch.randint(51, (2, length))
            model(tokens=tokens, targets=tokens).backward()
        tokens = torch.randint(51, (2, 900))
        with pytest.raises(zinf_compile.CapacityError) as caught:
            model(tokens=tokens, targets=tokens)
    zinf_compile.close(model)
    return str(caught.value), len(made)


@pytest.mark.long
def test_inputs_that_are_too_large_are_refused_alike(two: RankPool, options: Mapping[str, Any]) -> None:
    (message, count), (same, none) = two.run(look_for_largest, options)
    assert "this call has sequence=900, and TinyGPT graph 1 is planned for sequence=7" in message
    assert "the largest sequence that fits is" in message
    assert same == message
    assert count > none == 0


def forward_with_other_facts(options: Mapping[str, Any], rank: int) -> None:
    """Let a rank find one byte more in the last of the graph's values."""

    def at_sizes(facts: Any) -> Any:
        *others, last = facts.values
        return replace(facts, values=(*others, replace(last, nbytes=last.nbytes + 1)))

    model = optimize(build_gpt(), options)
    with mock.patch.object(planning, "at_sizes", at_sizes if dist.get_rank() == rank else planning.at_sizes):
        model(**batch_of(0, 0))


@pytest.mark.parametrize(("rank", "others"), [(0, "ranks 1, 2"), (2, "rank 2")])
def test_requests_that_differ_are_named(rank: int, others: str, three: RankPool, options: Mapping[str, Any]) -> None:
    outcomes = three.outcomes(forward_with_other_facts, options, rank)
    assert [each.kind for each in outcomes] == ["RankError"] * 3, outcomes
    for each in outcomes:
        assert "requests for a plan of TinyGPT graph 0 differ: 'candidates[0].values[" in each.message
        assert "].nbytes' is " in each.message
        assert f" on {others}; every rank builds the same model" in each.message
        assert "calls it with the same shapes" in each.message


@dataclass(frozen=True)
class Record:
    """A record with a part that may be missing."""

    name: str
    numbers: tuple[int, ...] | None
    part: "Record | None" = None


RECORD = Record("a", (1, 2, 3), Record("b", (4, 5)))
DIFFERENT = {  # what the second rank has, and what is said of it
    "number": (
        replace(RECORD, part=replace(RECORD.part, numbers=(4, 6))),
        "'part.numbers[1]' is 5 on rank 0 and 6 on rank 1",
    ),
    "first of two": (replace(RECORD, name="c", part=None), "'name' is 'a' on rank 0 and 'c' on rank 1"),
    "missing": (replace(RECORD, numbers=None), "'numbers' is (1, 2, 3) on rank 0 and None on rank 1"),
    "longer": (replace(RECORD, numbers=(1, 2, 3, 4)), "'numbers' is (1, 2, 3) on rank 0 and (1, 2, 3, 4) on rank 1"),
    "inserted": (replace(RECORD, numbers=(1, 7, 2, 3)), "'numbers[1]' is 2 on rank 0 and 7 on rank 1"),
    "much longer": (
        replace(RECORD, numbers=(1, 2, 3, *range(99))),
        "'numbers' is (1, 2, 3) on rank 0 and 102 items on rank 1",
    ),
    "kind": (replace(RECORD, name=True), "'name' is 'a' on rank 0 and True on rank 1"),
}


def compare_records() -> dict[str, str]:
    """Return what is said of each pair of records."""
    ranks = Ranks(init_device_mesh("cpu", (2,)))
    check_record_alike(ranks, "records", RECORD)
    said = {}
    for name, (other, _) in DIFFERENT.items():
        with pytest.raises(zinf_compile.RankError) as caught:
            check_record_alike(ranks, "records", RECORD if ranks.rank == 0 else other)
        said[name] = str(caught.value)
    with pytest.raises(zinf_compile.RankError) as caught:
        check_record_alike(ranks, "records", replace(RECORD, name=200 * "a" + str(ranks.rank)))
    said["long text"] = str(caught.value)
    return said


def test_the_first_difference_of_records_is_named(two: RankPool) -> None:
    for said in two.run(compare_records):
        for name, (_, expected) in DIFFERENT.items():
            assert f"records differ: {expected};" in said[name]
        assert "records differ: 'the hash of name' is " in said["long text"]


def fail_while_planning(options: Mapping[str, Any], happens: str) -> float:
    """Let something happen on rank 0 while it plans; return the seconds until it ended there."""
    model = optimize(build_gpt(), options)
    start = time.monotonic()

    def make_plan(request: Request, _: Searches | None) -> Plan:
        if happens == "death":
            os._exit(3)
        if happens == "absence":
            time.sleep(6.0)
        raise KeyboardInterrupt if happens == "interrupt" else ValueError("no plan")

    check_alike = planning.check_record_alike

    def meet(ranks: Ranks, what: str, request: Request) -> None:
        check_alike(ranks, what, request)
        if happens == "absence":  # from here on, since captures take as long as the machine is busy
            ranks.timeout_seconds = 2.0

    with mock.patch.multiple(planning, make_plan=make_plan, check_record_alike=meet):
        try:
            model(**batch_of(0, 0))
        except StoreError:
            assert time.monotonic() - start < SOON + 60  # capturing takes most of it
            raise
    return 0.0


@pytest.mark.parametrize(
    ("happens", "on_it", "elsewhere"),
    [
        ("error", "no plan", "rank 0: planning TinyGPT graph 0: ValueError: no plan"),
        pytest.param("interrupt", "", "rank 0: planning TinyGPT graph 0: KeyboardInterrupt", marks=pytest.mark.long),
        pytest.param("death", None, "another rank is gone", marks=pytest.mark.long),
        pytest.param(
            *("absence", "no plan", "rank 0 had not come to the end of planning TinyGPT graph 0"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_happens_to_rank_0_while_it_plans_ends_all(
    happens: str, on_it: str | None, elsewhere: str, three: RankPool, options: Mapping[str, Any]
) -> None:
    first, *others = three.outcomes(fail_while_planning, options, happens)
    if on_it is None:
        assert isinstance(first, Died)
    else:
        assert isinstance(first, Raised)
        assert first.kind != "RankError"
        assert on_it in first.message
    for each in others:
        assert isinstance(each, Raised), each
        assert each.kind == "RankError"
        assert elsewhere in each.message
        assert "restart all ranks" in each.message


def receive_other_bytes(options: Mapping[str, Any]) -> None:
    """Let a byte of a plan change on its way to rank 1."""
    model = optimize(build_gpt(), options)
    ranks = store_in(model).ranks
    receive = ranks._receive_from_first

    def change(what: str, mine: bytes) -> bytes:
        received = receive(what, mine)
        return received if dist.get_rank() != 1 else received.replace(b"TinyGPT", b"TinyGPU", 1)

    with mock.patch.object(ranks, "_receive_from_first", change):
        model(**batch_of(0, 0))


@pytest.mark.long
def test_a_plan_that_changed_on_its_way_is_refused(three: RankPool, options: Mapping[str, Any]) -> None:
    outcomes = three.outcomes(receive_other_bytes, options)
    for each in outcomes:
        assert each.kind == "RankError", each
        assert "the result of planning TinyGPT graph 0 is not on rank 1 what rank 0 has sent" in each.message


def autocast_loss(model: nn.Module) -> Tensor:
    """Return a loss for which weights are cast."""
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(**batch_of(0, dist.get_rank()))
    return loss


def train_without_room(options: Mapping[str, Any], rank: int | None) -> tuple[list[str], tuple[str, ...], int]:
    """Return the parameters with narrower copies, the plan's notes, and the plans made, if the disk of a rank is full."""
    model = optimize(build_gpt(), options)

    def reserve_growth(*_: object) -> None:
        raise StoreError("the disk is full")

    if dist.get_rank() == rank:
        store_in(model).reserve_growth = reserve_growth  # type: ignore[method-assign]
    with counted_plans() as made:
        autocast_loss(model).backward()
    (planned,) = zinf_compile.report(model).plans
    zinf_compile.close(model)
    return [item.parameter for item in planned.plan.placements if item.is_narrowed], planned.plan.notes, len(made)


@pytest.mark.long
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_narrower_copies_need_room_on_every_rank(rank: int | None, two: RankPool, options: Mapping[str, Any]) -> None:
    larger = {**options, "host_memory": 600 * KIB}
    (narrowed, notes, count), (same, same_notes, none) = two.run(train_without_room, larger, rank)
    assert (same, same_notes) == (narrowed, notes)
    assert count > none == 0
    assert any("there is no room for" in note and "the disk is full" in note for note in notes) == (rank is not None)
    assert bool(narrowed) == (rank is None)


def test_one_process_plans_without_pickling() -> None:
    made: Callable[[], None] = lambda: None  # noqa: E731  # which cannot be pickled
    assert ALONE.do_on_first("planning", lambda: made) is made
