"""A recording: what an optimized model did when, to be looked at beside what its plans predicted."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zinf_compile.plans import Plan
from zinf_compile.reports import StallReport
from zinf_compile.simulation.several_graphs import share_updates
from zinf_compile.simulation.timeline import Event
from zinf_compile.views.chrome_trace import measured_trace, save_trace


@dataclass(kw_only=True)
class Recording:
    """What happened inside of ``with zinf_compile.record(model)``. Empty until its end.

    ``events`` occupied lanes: compute, the thread that updates, and the routes, on which several may be at once. A piece of
    compute is named after the transfer that it waited for last. ``stalls`` are the waits, on the compute lane. Both are by
    their start, in seconds; the first is at 0.
    """

    model: str
    plans: tuple[Plan, ...] = ()  # of the graphs that run in one step
    events: Sequence[Event] = ()
    stalls: Sequence[Event] = ()

    def longest_stalls(self) -> tuple[StallReport, ...]:
        """Return the seconds that compute waited for each transfer, the longest first."""
        seconds: dict[str, list[float]] = {}
        for stall in self.stalls:
            seconds.setdefault(stall.name, []).append(stall.seconds)
        reports = [StallReport(transfer=name, seconds=sum(each), count=len(each)) for name, each in seconds.items()]
        return tuple(sorted(reports, key=lambda report: -report.seconds))

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write a Chrome trace of what the plans predict, and below it of what was measured: open it in ui.perfetto.dev.

        Raises ConfigError if the path cannot be written.
        """
        save_trace(measured_trace(self.model, self.events, self.stalls, share_updates(self.plans)), path)
