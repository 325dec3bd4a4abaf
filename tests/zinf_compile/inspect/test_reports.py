"""The report as text: predicted and measured values, and exceeded budgets."""

from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.inspect.reports import PhaseReport, Report, StepReport, TierReport, sum_runs
from zinf_compile.ir.glossary import Phase, Tier
from zinf_compile.ir.plan import Plan


def _report(plan: Plan, *, measured_peak: int) -> Report:
    return Report(
        model="Net",
        plans=(PlanView(plan),),
        step_plans=(PlanView(plan),),
        tiers=(
            TierReport(tier=Tier.DEVICE, capacity=8192, predicted_peak=4096, measured_peak=measured_peak),
            TierReport(tier=Tier.NVME, capacity=None, predicted_peak=0, measured_peak=0),
        ),
        phases=(PhaseReport(phase=Phase.FORWARD, predicted_seconds=0.2, measured_seconds=0.3, count=4),),
        step=StepReport(predicted_seconds=1.0, measured_seconds=0.9, count=3),
        moved=(),
        stalls=(),
        graph_breaks=(),
        replanned=(),
        num_eager_gathers=0,
    )


def test_every_number_has_its_ratio(small_plan: Plan) -> None:
    text = str(_report(small_plan, measured_peak=3072))
    for row in (
        "device       8.0 KiB     4.0 KiB     3.0 KiB    0.75",
        "nvme               -         0 B         0 B       -",
        "forward        0.200s     0.300s    1.50   4",
        "in all         1.000s     0.900s    0.90   3",
    ):
        assert row in text
    assert "exceeded" not in text


def test_a_promise_that_was_not_kept_is_told(small_plan: Plan) -> None:
    assert "device: exceeded by 1.0 KiB" in str(_report(small_plan, measured_peak=5120))


def test_its_repr_is_a_line(small_plan: Plan) -> None:
    assert repr(_report(small_plan, measured_peak=3072)) == (
        "<Report of Net: 1 graphs, 0.900 s a step, device 3.0 KiB of 4.0 KiB promised, nvme 0 B of 0 B promised; "
        "print it to see all>"
    )


def test_the_runs_of_several_graphs_in_a_step_are_one() -> None:
    assert sum_runs((9.0, 1.0, 2.0, 3.0, 4.0), 2) == (7.0, 3.0)
    assert sum_runs((1.0,), 2) == ()
