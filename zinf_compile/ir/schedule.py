"""The schedule: in which order stages, micro-batches and phases run, which makes the ticks of a plan."""

from bisect import bisect_right
from dataclasses import dataclass
from operator import attrgetter

from zinf_compile.ir.glossary import Phase

_END = attrgetter("end")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRun:
    """One phase of one micro-batch on one stage, and its ticks [start, end)."""

    stage: int
    micro_batch: int
    phase: Phase
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The runs of a step, in order. The first begins at tick 0, each other where the previous one ends."""

    runs: tuple[PhaseRun, ...]

    @staticmethod
    def of_one_graph(num_forward_ticks: int, num_ticks: int) -> "Schedule":
        """Return the schedule of one micro-batch on one stage: forward, then backward if there are ticks for it."""
        forward = PhaseRun(stage=0, micro_batch=0, phase=Phase.FORWARD, start=0, end=num_forward_ticks)
        if num_ticks == num_forward_ticks:
            return Schedule(runs=(forward,))
        backward = PhaseRun(stage=0, micro_batch=0, phase=Phase.BACKWARD, start=num_forward_ticks, end=num_ticks)
        return Schedule(runs=(forward, backward))

    @property
    def num_ticks(self) -> int:
        """Return the ticks of all runs."""
        return self.runs[-1].end

    @property
    def is_training(self) -> bool:
        """Return whether any backward runs."""
        return any(run.phase is Phase.BACKWARD for run in self.runs)

    def phase_of(self, tick: int) -> Phase:
        """Return the phase a tick belongs to, in time logarithmic in the runs."""
        return self.runs[min(bisect_right(self.runs, tick, key=_END), len(self.runs) - 1)].phase

    def ticks(self, phase: Phase, *, stage: int = 0, micro_batch: int = 0) -> range:
        """Return the ticks of a phase of one micro-batch on one stage; none, behind the last tick, if it does not run."""
        for run in self.runs:
            if (run.phase, run.stage, run.micro_batch) == (phase, stage, micro_batch):
                return range(run.start, run.end)
        return range(self.num_ticks, self.num_ticks)
