"""The report: what the plans predicted beside what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.glossary import Phase, Tier, format_bytes, printable

_NOTICEABLE = 0.05  # of a step: ranks whose waits differ by less are about equally fast


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """A tier's budget, predicted peak and measured peak, in bytes; ``capacity`` None means all free space of the disk."""

    tier: Tier
    capacity: int | None
    predicted_peak: int
    measured_peak: int

    @property
    def is_exceeded(self) -> bool:
        """Return whether the measured peak is above the predicted one."""
        return self.measured_peak > self.predicted_peak


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """Predicted and median measured seconds of a phase, over all graphs of a step."""

    phase: Phase
    predicted_seconds: float
    measured_seconds: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Predicted and median measured seconds of a step, from one ``optimizer.step()`` to the next."""

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
    """Total seconds that compute has waited for one transfer so far."""

    transfer: str
    seconds: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadReport:
    """The updates that were planned ahead of ``step()``, so far: what became of them."""

    num_taken: int  # begun in backward, and taken by the step
    num_late: int  # not begun by the time of the step, which made them itself
    dropped: tuple[tuple[str, int], ...]  # begun, and made again by the step: why, and how many

    def __str__(self) -> str:
        why = "".join(f"; {count} dropped, since {reason}" for reason, count in self.dropped)
        return f"updates ahead of step(): {self.num_taken} taken, {self.num_late} not begun by then{why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """The anonymous memory of the process beyond what was held before ``optimize``, in bytes."""

    budget: int  # device_memory and host_memory together
    reserved: int  # the part of it that is not for the model
    measured_peak: int

    def __str__(self) -> str:
        peak, budget, reserved = map(format_bytes, (self.measured_peak, self.budget, self.reserved))
        beyond = self.measured_peak - self.budget
        where = "within" if beyond <= 0 else f"{format_bytes(beyond)} beyond"
        return (
            f"process: {peak} above what was there before optimize, {where} both budgets, {budget}; {reserved} reserved"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorReport:
    """What torch's allocator takes of a GPU for the model's tensors, with what it rounds up and cannot reuse, in bytes."""

    limit: int  # the budget and its slack
    measured_peak: int

    def __str__(self) -> str:
        peak, limit = format_bytes(self.measured_peak), format_bytes(self.limit)
        return f"allocator: {peak} reserved at most for the device tier, of {limit} that its limit allows"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One of several ranks: measured peaks in bytes, reads of its disk so far, and medians over its steps."""

    rank: int
    node: str
    peaks: tuple[tuple[Tier, int], ...]
    nbytes_read: int
    read_bytes_per_second: float | None  # while it reads; None if it has read nothing
    step_seconds: float | None  # None before the second step
    waited_seconds: float | None  # of these, for the collectives and control messages of all ranks
    waited_seconds_in_all: float  # since optimize, with captures


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What ``zinf_compile.report`` returns; ``print(report)`` shows all of it, ``repr(report)`` one line."""

    model: str
    plans: tuple[PlanView, ...]
    step_plans: tuple[PlanView, ...]  # those of the graphs that run in one step
    tiers: tuple[TierReport, ...]
    process: ProcessReport | None = None  # None on a GPU, and before anything has run
    allocator: AllocatorReport | None = None  # None on a CPU, and before anything has run
    phases: tuple[PhaseReport, ...]
    step: StepReport | None  # None before the second step
    moved: tuple[RouteReport, ...]
    stalls: tuple[StallReport, ...]
    graph_breaks: tuple[str, ...]  # "file:line: reason"
    replanned: tuple[str, ...]  # why a graph was planned again: larger inputs, or measured times
    num_eager_gathers: int  # parameters gathered outside captured graphs, in eager code
    fallbacks: tuple[str, ...] = ()  # "graph, blocks: what does not run as compiled, and why"
    ahead: AheadReport | None = None  # None where no update begins ahead of step()
    ranks: tuple[RankReport, ...] = ()  # of several: this one, or with ``all_ranks`` each, in order
    num_ranks: int = 1
    in_place_nbytes: int = 0  # of frozen parameters that are read from the files of their weights
    weight_files: tuple[str, ...] = ()  # these files

    @property
    def slowest_rank(self) -> RankReport | None:
        """Return the rank that waits least for the others, since they wait for it; None if only one is known."""
        timed = [each for each in self.ranks if each.waited_seconds is not None]
        return min(timed, key=lambda each: each.waited_seconds or 0.0) if len(timed) > 1 else None

    def __repr__(self) -> str:
        peaks = ", ".join(
            f"{tier.tier} {format_bytes(tier.measured_peak)} of {format_bytes(tier.predicted_peak)} promised"
            for tier in self.tiers
        )
        steps = "no step measured" if self.step is None else f"{self.step.measured_seconds:.3f} s a step"
        return f"<Report of {printable(self.model)}: {len(self.plans)} graphs, {steps}, {peaks}; print it to see all>"

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
        if self.process is not None:
            lines.append(str(self.process))
        if self.allocator is not None:
            lines.append(str(self.allocator))
        if self.weight_files:
            names = ", ".join(self.weight_files[:2]) + (", ..." if len(self.weight_files) > 2 else "")
            lines.append(
                f"weights: {format_bytes(self.in_place_nbytes)} of frozen parameters are read from where they are, "
                f"{len(self.weight_files)} file(s): {names}"
            )
        lines += self._tell_ranks()
        if self.phases:
            lines += ["", f"{'phase':10}{'predicted':>11}{'measured':>11}{'ratio':>8}   runs"]
        lines += [_format_seconds(phase.phase, phase) for phase in self.phases]
        if self.step is not None:
            lines.append(_format_seconds("in all", self.step))
        if self.ahead is not None:
            lines += ["", str(self.ahead)]
        if self.moved:
            lines += ["", "moved"]
        lines += [f"  {moved.route:18}{format_bytes(moved.nbytes):>12}" for moved in self.moved]
        if self.stalls:
            lines += ["", f"stalls, {sum(stall.seconds for stall in self.stalls):.3f} s in all; the longest"]
        lines += [f"  {stall.seconds:8.3f} s in {stall.count:4} waits  {stall.transfer}" for stall in self.stalls[:5]]
        if self.replanned:
            lines += ["", "planned again"]
        lines += [f"  {sentence}" for sentence in self.replanned]
        if self.fallbacks:
            lines += ["", "not run as compiled"]
        lines += [f"  {sentence}" for sentence in self.fallbacks]
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
        return "\n".join(map(printable, lines))

    def _tell_ranks(self) -> list[str]:
        """Return a table of the ranks, and which one is the slowest; nothing for a process that trains alone."""
        if not self.ranks:
            return []
        tiers = [tier for tier, _ in self.ranks[0].peaks]
        width = max(4, *(len(each.node) for each in self.ranks))
        heads = "".join(f"{tier:>12}" for tier in tiers)
        lines = ["", f"{'rank':>4}  {'node':{width}}{heads}{'disk reads':>12}{'rate':>11}{'step':>10}{'waits':>10}"]
        for each in self.ranks:
            peaks = "".join(f"{format_bytes(nbytes):>12}" for _, nbytes in each.peaks)
            rate = "-" if each.read_bytes_per_second is None else f"{each.read_bytes_per_second / 1e9:.2f} GB/s"
            seconds = ("-" if value is None else f"{value:.3f}s" for value in (each.step_seconds, each.waited_seconds))
            times = "".join(f"{text:>10}" for text in seconds)
            lines.append(
                f"{each.rank:4}  {each.node:{width}}{peaks}{format_bytes(each.nbytes_read):>12}{rate:>11}{times}"
            )
        slowest = self.slowest_rank
        if slowest is not None:
            most = max(self.ranks, key=lambda each: each.waited_seconds or 0.0)
            least, longest, step = (
                seconds or 0.0 for seconds in (slowest.waited_seconds, most.waited_seconds, slowest.step_seconds)
            )
            remark = ": none of them is slow" if longest - least < _NOTICEABLE * step else ""
            lines.append(
                f"slowest: rank {slowest.rank}, which waits {least:.3f} s of a step for other ranks; "
                f"rank {most.rank} waits {longest:.3f} s{remark}"
            )
        elif len(self.ranks) < self.num_ranks:
            lines.append(
                f"one of {self.num_ranks} ranks; report(model, all_ranks=True), called on every rank, tells of all"
            )
        return lines


def sum_runs(seconds: Sequence[float], num_graphs: int) -> tuple[float, ...]:
    """Return the total of each ``num_graphs`` consecutive runs of a phase, counted back from the last."""
    ends = range(len(seconds), num_graphs - 1, -num_graphs)
    return tuple(sum(seconds[end - num_graphs : end]) for end in ends)


def _format_seconds(name: str, seconds: PhaseReport | StepReport) -> str:
    ratio = _format_ratio(seconds.measured_seconds, seconds.predicted_seconds)
    times = f"{seconds.predicted_seconds:10.3f}s{seconds.measured_seconds:10.3f}s"
    return f"{name:10}{times}{ratio:>8}   {seconds.count}"


def _format_ratio(measured: float, predicted: float) -> str:
    """Return measured over predicted; "-" where nothing was predicted."""
    return f"{measured / predicted:.2f}" if predicted else "-"
