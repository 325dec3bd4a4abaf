"""The report as text: predicted and measured values, and exceeded budgets."""

from tests.support.hand_made_plans import make_report
from zinf_compile.inspect.reports import sum_runs
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


def test_its_repr_is_a_line(small_plan: Plan) -> None:
    assert repr(make_report(small_plan, measured_peak=3072)) == (
        "<Report of Net: 1 graphs, 0.900 s a step, device 3.0 KiB of 4.0 KiB promised, nvme 0 B of 0 B promised; "
        "print it to see all>"
    )


def test_the_runs_of_several_graphs_in_a_step_are_one() -> None:
    assert sum_runs((9.0, 1.0, 2.0, 3.0, 4.0), 2) == (7.0, 3.0)
    assert sum_runs((1.0,), 2) == ()
