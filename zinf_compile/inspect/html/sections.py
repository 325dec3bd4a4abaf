"""The text sections of the page: the headline, what bounds the step, the table of values."""

from collections import defaultdict

from zinf_compile.inspect.html.memory_chart import shown_tiers, tell_budget
from zinf_compile.inspect.html.palette import ROLE_COLORS
from zinf_compile.inspect.html.tables import Cell, Markup, escape, join_lines, make_table, swatch
from zinf_compile.inspect.html.value_rows import MAX_ROWS, collect_rows
from zinf_compile.inspect.text.plan_names import NamePattern, name_pattern, summarize_names
from zinf_compile.ir.glossary import Tier, format_bytes, format_seconds
from zinf_compile.ir.plan import TierPlan
from zinf_compile.ir.timeline import Event, Timeline
from zinf_compile.passes.planner.simulator.critical_path import critical_path, share_path
from zinf_compile.passes.planner.simulator.summary import busy_lanes, measure_wear, tell_bound

_MAX_STALLS = 20  # the rest is summarised in one row


def tell_headline(timeline: Timeline) -> Markup:
    """Return the step's seconds, what bounds it, whether it fits, each tier's peak against its budget."""
    plan, step = timeline.plan, timeline.step_seconds
    phases = " + ".join(f"{phase} {format_seconds(seconds)}" for phase, seconds in timeline.phase_seconds)
    stalled = timeline.stall_seconds
    wear = measure_wear(timeline)
    facts = [
        ("A step takes" if len(timeline.phase_seconds) > 1 else "A forward takes", format_seconds(step), phases),
        ("Bound by", tell_bound(timeline).partition(",")[0], tell_bound(timeline).partition(", ")[2]),
        ("Stalls", f"{stalled / step:.0%}" if step else "none", f"compute waits {format_seconds(stalled)} of a step"),
        ("Fits", *_tell_fit(plan.tiers)),
    ]
    if wear.nbytes_per_step:
        written = f"per step, {format_bytes(wear.nbytes_per_day)} per day"
        facts.append(("SSD writes", format_bytes(wear.nbytes_per_step), written))
    cards = (
        f"<div><dt>{escape(name)}</dt><dd><strong>{escape(value)}</strong> {escape(detail)}</dd></div>"
        for name, value, detail in facts
    )
    gauges = (_make_gauge(tier) for tier in shown_tiers(plan.tiers))
    return Markup("\n".join(['<dl class="cards">', *cards, "</dl>", '<ul class="gauges">', *gauges, "</ul>"]))


def _tell_fit(tiers: tuple[TierPlan, ...]) -> tuple[str, str]:
    over = [tier for tier in tiers if tier.capacity is not None and tier.predicted_peak > tier.capacity]
    if not over:
        return "yes", "no tier's peak is above its budget"
    return "no", "; ".join(
        f"{tier.tier} is {format_bytes(tier.predicted_peak - (tier.capacity or 0))} over its budget" for tier in over
    )


def _make_gauge(tier: TierPlan) -> str:
    share = min(1.0, tier.predicted_peak / tier.capacity) if tier.capacity else 0.0
    is_over = tier.capacity is not None and tier.predicted_peak > tier.capacity
    parts = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in tier.parts if nbytes)
    bar = f'<span class="gauge{" over" if is_over else ""}"><span style="width:{share:.1%}"></span></span>'
    return (
        f"<li><b>{tier.tier}</b> {tell_budget(tier)}{bar if tier.capacity else ''}<small>{escape(parts)}</small></li>"
    )


def tell_bounds(timeline: Timeline) -> Markup:
    """Return tables of how busy each lane is, of the critical path, and of what compute waits for."""
    step = timeline.step_seconds or 1.0
    busy = make_table(
        ("lane", "busy", "of the step", "moves", "for"),
        (
            (
                Cell(lane.name),
                Cell(format_seconds(lane.seconds)),
                Cell(_make_bar(lane.seconds / step)),
                Cell(format_bytes(nbytes) if (nbytes := sum(use.nbytes for use in lane.uses)) else ""),
                Cell(", ".join(use.name for use in lane.uses if use.name != lane.name)),
            )
            for lane in busy_lanes(timeline)
        ),
    )
    path = make_table(
        ("lane", "seconds", "of the step", "longest there"),
        (
            (
                Cell(share.lane),
                Cell(format_seconds(share.seconds)),
                Cell(_make_bar(share.seconds / step)),
                Cell(", ".join(f"{event.name} {format_seconds(event.seconds)}" for event in share.longest)),
            )
            for share in share_path(critical_path(timeline))
        ),
    )
    note = (
        "The critical path is the chain of work of which each piece begins when the one before ends. Only what is on it"
    )
    return join_lines(
        (
            Markup(f"<p>{escape(f'The step is bound by {tell_bound(timeline)}.')}</p><h3>Lanes</h3>"),
            busy,
            Markup(f"<h3>Critical path</h3><p>{note} makes the step shorter when it gets faster.</p>"),
            path,
            Markup("<h3>Stalls</h3>"),
            _tell_stalls(timeline),
        )
    )


def _tell_stalls(timeline: Timeline) -> Markup:
    """Return the table of stalls, the longest first, identical blocks folded; a sentence if there are none."""
    alike: dict[tuple[NamePattern, str], list[Event]] = defaultdict(list)
    for phase, _ in timeline.phase_seconds:
        for stall in timeline.stalls_in(phase):
            alike[name_pattern(_awaited(stall)), str(phase)].append(stall)
    if not alike:
        return Markup("<p>Compute never waits for a transfer.</p>")
    stalls = sorted(
        ((sum(stall.seconds for stall in held), phase, held) for (_, phase), held in alike.items()),
        key=lambda item: -item[0],
    )
    rows = [
        _stall_row(summarize_names(map(_awaited, held)), phase, held, timeline)
        for _, phase, held in stalls[:_MAX_STALLS]
    ]
    rest = [stall for _, _, held in stalls[_MAX_STALLS:] for stall in held]
    if rest:
        rows.append(_stall_row(f"{len(stalls) - _MAX_STALLS:,} more", "", rest, timeline))
    return make_table(("compute waits for", "phase", "times", "at most", "in all", "of the step"), rows)


def _stall_row(name: str, phase: str, stalls: list[Event], timeline: Timeline) -> tuple[Cell, ...]:
    waited = sum(stall.seconds for stall in stalls)
    return (
        Cell(name),
        Cell(phase),
        Cell(f"{len(stalls):,}"),
        Cell(format_seconds(max(stall.seconds for stall in stalls))),
        Cell(format_seconds(waited)),
        Cell(_make_bar(waited / timeline.step_seconds)),
    )


def _awaited(stall: Event) -> str:
    return stall.name.removeprefix("stall: ")


def _make_bar(share: float) -> Markup:
    return Markup(f'<span class="share"><span style="width:{min(share, 1):.1%}"></span></span> {share:.1%}')


def tell_values(timeline: Timeline) -> Markup:
    """Return the table of the largest values, with its search field."""
    rows = collect_rows(timeline)
    table = make_table(
        ("value", "what", "bytes", "home", "when it moves", "why there"),
        (
            (
                Cell(row.name),
                Cell(swatch(ROLE_COLORS[row.role], row.what)),
                Cell(format_bytes(row.nbytes), row.nbytes),
                Cell(row.home, list(Tier).index(Tier(row.home))),
                Cell(row.moves),
                Cell(row.why),
            )
            for row in rows[:MAX_ROWS]
        ),
        name="values",
    )
    rest = rows[MAX_ROWS:]
    left_out = f" {len(rest):,} more of {format_bytes(sum(row.nbytes for row in rest))} are left out." if rest else ""
    return Markup(
        f'<p>{min(len(rows), MAX_ROWS):,} values, the largest first.{left_out} <span id="found" role="status"></span></p>'
        '<p><label>Search <input id="search" type="search" placeholder="layers.3 gradient nvme"></label></p>'
        f'{table}<p><button type="button" id="more" hidden>Show more</button></p>'
    )
