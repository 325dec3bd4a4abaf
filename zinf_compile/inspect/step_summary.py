"""A summary of a simulated step as text: what bounds it, its critical path, SSD writes, what is live at the peak."""

from zinf_compile.inspect.text.text_layout import make_table
from zinf_compile.ir.glossary import Tier, format_bytes, format_seconds
from zinf_compile.ir.timeline import Timeline
from zinf_compile.passes.planner.simulator.critical_path import LaneShare, critical_path, share_path
from zinf_compile.passes.planner.simulator.memory import live_set
from zinf_compile.passes.planner.simulator.summary import measure_links, measure_wear, tell_bound

_NUM_LIVE = 5
_NUM_LANES = 3  # of the critical path


def dump_summary(timeline: Timeline) -> list[str]:
    """Return lines on what bounds the step, its critical path, the links between ranks, and its writes to nvme."""
    lines = [f"bound by     {tell_bound(timeline)}"]
    head = "critical"
    for share in share_path(critical_path(timeline))[:_NUM_LANES]:
        lines.append(f"{head:<13}{_tell_share(share)}")
        head = ""
    links = measure_links(timeline)
    if links.seconds:
        busy, exposed = map(format_seconds, (links.seconds, links.exposed_seconds))
        lines.append(f"links        busy {busy}, while compute waits for {exposed} of it")
    wear = measure_wear(timeline)
    if wear.nbytes_per_step:
        lines.append(
            f"SSD writes   {format_bytes(wear.nbytes_per_step)} per step, {format_bytes(wear.nbytes_per_day)} per day"
        )
    return lines


def dump_live_set(timeline: Timeline, width: int) -> list[str]:
    """Return a table of the largest values on the device at its peak."""
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
