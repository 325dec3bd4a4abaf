"""The report as text: predicted and measured values, and exceeded budgets."""

from dataclasses import replace

import pytest

from tests.support.hand_made_plans import make_report
from zinf_compile.inspect.reports import AllocatorReport, RankReport, sum_runs
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Plan


def test_every_number_has_its_ratio(small_plan: Plan) -> None:
    text = str(make_report(small_plan, measured_peak=3072))
    for row in (
        "device       8.0 KiB     4.0 KiB     3.0 KiB    0.75",
        "nvme               -         0 B         0 B       -",
        "forward        0.200s     0.300s    1.50   4",
        "in all         1.000s     0.900s    0.90   3",
    ):
        assert row in text
    assert "exceeded" not in text


def test_a_promise_that_was_not_kept_is_told(small_plan: Plan) -> None:
    assert "device: exceeded by 1.0 KiB" in str(make_report(small_plan, measured_peak=5120))


def test_what_an_allocator_reserves_is_beside_what_tensors_take(small_plan: Plan) -> None:
    report = make_report(small_plan)
    assert "allocator" not in str(report)
    allocator = AllocatorReport(limit=9216, measured_peak=5120)
    text = str(replace(report, allocator=allocator))
    assert "\nallocator: 5.0 KiB reserved at most for the device tier, of 9.0 KiB that its limit allows\n" in text
    assert "exceeded" not in text, "plans promise bytes of tensors"


def test_its_repr_is_a_line(small_plan: Plan) -> None:
    assert repr(make_report(small_plan, measured_peak=3072)) == (
        "<Report of Net: 1 graphs, 0.900 s a step, device 3.0 KiB of 4.0 KiB promised, nvme 0 B of 0 B promised; "
        "print it to see all>"
    )


def test_the_runs_of_several_graphs_in_a_step_are_one() -> None:
    assert sum_runs((9.0, 1.0, 2.0, 3.0, 4.0), 2) == (7.0, 3.0)
    assert sum_runs((1.0,), 2) == ()


def rank_of(number: int, waited: float | None) -> RankReport:
    """Return what a rank says that waits so long of a step of one second."""
    return RankReport(
        rank=number,
        node=f"node{number}",
        peaks=((Tier.DEVICE, 2**20), (Tier.HOST, 2**21)),
        nbytes_read=2**30,
        read_bytes_per_second=None if waited is None else 1.5e9,
        step_seconds=None if waited is None else 1.0,
        waited_seconds=waited,
        waited_seconds_in_all=3.0,
    )


@pytest.mark.parametrize(
    ("waits", "told"),
    [
        ((0.4, 0.1, 0.5), "slowest: rank 1, which waits 0.100 s of a step for other ranks; rank 2 waits 0.500 s"),
        (
            (0.4, 0.41),
            "slowest: rank 0, which waits 0.400 s of a step for other ranks; rank 1 waits 0.410 s: none of them",
        ),
        ((0.4,), "one of 3 ranks; report(model, all_ranks=True), called on every rank, tells of all"),
        ((None, None, None), "rank  node       device        host  disk reads       rate      step     waits"),
    ],
)
def test_the_rank_that_waits_least_is_the_slowest(waits: tuple[float | None, ...], told: str, small_plan: Plan) -> None:
    ranks = tuple(rank_of(number, waited) for number, waited in enumerate(waits))
    text = str(replace(make_report(small_plan), ranks=ranks, num_ranks=3))
    assert f"\n{told}" in text
    assert "   0  node0     1.0 MiB     2.0 MiB    1.00 GiB" in text
    assert ("slowest" in text) is (len(waits) > 1 and waits[0] is not None)


def test_a_process_that_trains_alone_has_no_ranks(small_plan: Plan) -> None:
    assert "rank" not in str(make_report(small_plan))
