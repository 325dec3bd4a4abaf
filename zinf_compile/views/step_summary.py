"""What a simulated step comes to, as text: what bounds it, its critical path, what it wears, what is live at the peak."""

from zinf_compile.simulation.critical_path import LaneShare, critical_path, share_path
from zinf_compile.simulation.memory import live_set
from zinf_compile.simulation.summary import measure_wear, tell_bound
from zinf_compile.simulation.timeline import Timeline
from zinf_compile.terms import Tier, format_bytes, format_seconds
from zinf_compile.views.text_layout import make_table

_NUM_LIVE = 5
_NUM_LANES = 3  # of the critical path


def dump_summary(timeline: Timeline) -> list[str]:
    """Return lines on what bounds the step, what delays what, and what it writes to nvme."""
    lines = [f"bound by     {tell_bound(timeline)}"]
    head = "critical"
    for share in share_path(critical_path(timeline))[:_NUM_LANES]:
        lines.append(f"{head:<13}{_tell_share(share)}")
        head = ""
    wear = measure_wear(timeline)
    if wear.nbytes_per_step:
        lines.append(
            f"wear         {format_bytes(wear.nbytes_per_step)} written to nvme in a step, "
            f"{format_bytes(wear.nbytes_per_day)} in a day of such steps"
        )
    return lines


def dump_live_set(timeline: Timeline, width: int) -> list[str]:
    """Return a table of the largest things on the device when most is there."""
    live = live_set(timeline, Tier.DEVICE)
    rows = [(item.name, str(item.role), format_bytes(item.nbytes)) for item in live.held[:_NUM_LIVE]]
    rest = live.held[_NUM_LIVE:]
    if rest:
        rows.append((f"{len(rest)} more", "", format_bytes(sum(item.nbytes for item in rest))))
    title = f"device at its peak of {format_bytes(live.nbytes)}, tick {live.tick}"
    return make_table((title, "role", "bytes"), rows, align="<<>", width=width, flexible=0)


def _tell_share(share: LaneShare) -> str:
    longest = ", ".join(f"{event.name} {format_seconds(event.seconds)}" for event in share.longest)
    return f"{format_seconds(share.seconds)} of {share.lane}: {longest}"
