"""The report: what the plans predicted beside what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from zinf_compile.plans import Plan
from zinf_compile.terms import Phase, Tier, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """One tier's budget, promised peak and measured peak, in bytes; ``capacity`` is None for all the disk has free."""

    tier: Tier
    capacity: int | None
    predicted_peak: int
    measured_peak: int

    @property
    def is_exceeded(self) -> bool:
        """Return whether more was measured than was promised."""
        return self.measured_peak > self.predicted_peak


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """One phase's predicted seconds beside the median of the measured ones: those of all graphs of a step together."""

    phase: Phase
    predicted_seconds: float
    measured_seconds: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A whole step's predicted seconds beside the median of those from one ``optimizer.step()`` to the next."""

    predicted_seconds: float
    measured_seconds: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteReport:
    """Bytes moved over a route so far."""

    route: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StallReport:
    """Seconds compute has waited for one transfer so far, over all its runs."""

    transfer: str
    seconds: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What ``zinf_compile.report`` returns; ``print(report)`` shows all of it."""

    model: str
    plans: tuple[Plan, ...]
    step_plans: tuple[Plan, ...]  # of them, those of the graphs that run in one step
    tiers: tuple[TierReport, ...]
    phases: tuple[PhaseReport, ...]
    step: StepReport | None  # None before the second step
    moved: tuple[RouteReport, ...]
    stalls: tuple[StallReport, ...]
    graph_breaks: tuple[str, ...]  # "file:line: reason"
    replanned: tuple[str, ...]  # why a graph was planned again, for larger inputs or by measured times, in words
    num_eager_gathers: int  # parameters read outside of captured graphs, where code ran eagerly

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.plans)} captured graph(s), {len(self.graph_breaks)} graph break(s)", ""]
        lines.append(f"{'tier':8}{'capacity':>12}{'predicted':>12}{'measured':>12}{'ratio':>8}")
        for tier in self.tiers:
            capacity = "-" if tier.capacity is None else format_bytes(tier.capacity)
            peaks = (format_bytes(tier.predicted_peak), format_bytes(tier.measured_peak))
            ratio = _format_ratio(tier.measured_peak, tier.predicted_peak)
            lines.append(f"{tier.tier:8}{capacity:>12}{peaks[0]:>12}{peaks[1]:>12}{ratio:>8}")
        for tier in self.tiers:
            if self.plans and tier.is_exceeded:
                lines.append(f"{tier.tier}: exceeded by {format_bytes(tier.measured_peak - tier.predicted_peak)}")
        if self.phases:
            lines += ["", f"{'phase':10}{'predicted':>11}{'measured':>11}{'ratio':>8}   runs"]
        lines += [_format_seconds(phase.phase, phase) for phase in self.phases]
        if self.step is not None:
            lines.append(_format_seconds("in all", self.step))
        if self.moved:
            lines += ["", "moved"]
        lines += [f"  {moved.route:18}{format_bytes(moved.nbytes):>12}" for moved in self.moved]
        if self.stalls:
            lines += ["", f"stalls, {sum(stall.seconds for stall in self.stalls):.3f} s in all; the longest"]
        lines += [f"  {stall.seconds:8.3f} s in {stall.count:4} waits  {stall.transfer}" for stall in self.stalls[:5]]
        if self.replanned:
            lines += ["", "planned again"]
        lines += [f"  {sentence}" for sentence in self.replanned]
        notes = dict.fromkeys(note for plan in self.plans for note in plan.notes)
        if notes:
            lines += ["", *notes]
        if self.graph_breaks:
            lines += ["", "graph breaks, where code runs eagerly"]
        lines += [f"  {where}" for where in self.graph_breaks]
        if self.num_eager_gathers:
            lines += [
                "",
                f"{self.num_eager_gathers} gathers ran eagerly, outside of captured graphs; where that is not wanted, "
                "TORCH_LOGS=graph_breaks tells what Dynamo could not capture",
            ]
        return "\n".join(lines)


def sum_runs(seconds: Sequence[float], num_graphs: int) -> tuple[float, ...]:
    """Return what ``num_graphs`` runs of a phase took together, one after another, from the last ones back."""
    ends = range(len(seconds), num_graphs - 1, -num_graphs)
    return tuple(sum(seconds[end - num_graphs : end]) for end in ends)


def _format_seconds(name: str, seconds: PhaseReport | StepReport) -> str:
    ratio = _format_ratio(seconds.measured_seconds, seconds.predicted_seconds)
    times = f"{seconds.predicted_seconds:10.3f}s{seconds.measured_seconds:10.3f}s"
    return f"{name:10}{times}{ratio:>8}   {seconds.count}"


def _format_ratio(measured: float, predicted: float) -> str:
    """Return measured over predicted; "-" where nothing was predicted."""
    return f"{measured / predicted:.2f}" if predicted else "-"
