"""A recording: the measured timeline of an optimized model, to compare with the predictions of its plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zinf_compile.inspect.chrome_trace import measured_trace, save_trace
from zinf_compile.inspect.reports import StallReport
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.timeline import Event
from zinf_compile.passes.planner.simulator.several_graphs import share_updates


@dataclass(kw_only=True)
class Recording:
    """What happened inside ``with zinf_compile.record(model)``. Empty until the end of the block.

    ``events`` occupied lanes: compute, the update thread, and the routes, on which several may overlap. A compute
    interval is labelled with the transfer it last waited for. ``stalls`` are the waits on the compute lane. Both are
    sorted by start, in seconds; the first event starts at 0.
    """

    model: str
    plans: tuple[Plan, ...] = ()  # of the graphs that run in one step
    events: Sequence[Event] = ()
    stalls: Sequence[Event] = ()

    def longest_stalls(self) -> tuple[StallReport, ...]:
        """Return the total seconds that compute waited for each transfer, the longest first."""
        seconds: dict[str, list[float]] = {}
        for stall in self.stalls:
            seconds.setdefault(stall.name, []).append(stall.seconds)
        reports = [StallReport(transfer=name, seconds=sum(each), count=len(each)) for name, each in seconds.items()]
        return tuple(sorted(reports, key=lambda report: -report.seconds))

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write a Chrome trace with the prediction and, below it, the measurement: open it in ui.perfetto.dev.

        Raises ConfigError if the path cannot be written.
        """
        save_trace(measured_trace(self.model, self.events, self.stalls, share_updates(self.plans)), path)
