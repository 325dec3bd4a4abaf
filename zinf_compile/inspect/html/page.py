"""The page of a plan: ``plan.to_html(path)``. Everything on it comes from simulating the plan; nothing is fetched."""

import importlib.util
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from zinf_compile.inspect.html.figures import figure_html, library_html
from zinf_compile.inspect.html.lane_bars import Kind
from zinf_compile.inspect.html.lanes_chart import draw_lanes, kind_color, kind_name, tell_merging
from zinf_compile.inspect.html.memory_chart import NUM_MOMENTS, draw_memory, is_budget_drawn, shown_tiers, tell_budget
from zinf_compile.inspect.html.palette import ROLE_COLORS, role_name
from zinf_compile.inspect.html.sections import tell_bounds, tell_headline, tell_values
from zinf_compile.inspect.html.tables import Markup, escape, swatch
from zinf_compile.inspect.text.whole_file import write_whole
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.plan import Plan, TierPlan
from zinf_compile.ir.timeline import Timeline
from zinf_compile.passes.planner.simulator.memory import MemoryRole
from zinf_compile.passes.planner.simulator.simulate import simulate

# The page runs only its own scripts and loads nothing, whatever its content is.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def save_html_page(plan: Plan, path: str | Path) -> None:
    """Write the page; the file appears whole or not at all. ConfigError if it cannot be, or plotly is missing."""
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError("a plan's page is drawn by plotly, which is not installed; pip install 'plotly>=6'")
    write_whole(path, make_page(plan).encode(), what="page")


def make_page(plan: Plan) -> str:
    """Return the page as HTML: headline, memory, timeline, bounds, values, notes."""
    timeline = simulate(plan)
    is_training = plan.schedule.is_training
    dtype = plan.compute_dtype or "each parameter's own dtype"
    about = f"{'A training step' if is_training else 'A forward pass'} on {plan.hardware.name}, computed in {dtype}."
    title = escape(f"Plan of {plan.name}")
    sections = (
        ("Memory over the step", _tell_memory(timeline)),
        ("Timeline", _tell_lanes(timeline)),
        ("What bounds the step", tell_bounds(timeline)),
        ("The largest values", tell_values(timeline)),
        ("Notes", Markup("".join(f"<p>{escape(note)}</p>" for note in plan.notes))),
    )
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{title}</title>",
            f"<style>{_read('page.css')}</style></head><body><main>",
            f"<header><h1>{title}</h1><p>{escape(about)}</p></header>",
            tell_headline(timeline),
            *(f"<section><h2>{name}</h2>{content}</section>" for name, content in sections if content),
            f"</main>{library_html()}<script>{_read('page.js')}</script></body></html>\n",
        )
    )


def _tell_memory(timeline: Timeline) -> Markup:
    legend = _make_legend((color, role_name(role)) for role, color in ROLE_COLORS.items())
    charts = (
        f"<h3>{tier.tier}</h3><p>{escape(_tell_tier(tier))}</p>"
        f"{figure_html(draw_memory(timeline, tier), f'memory-{tier.tier}')}"
        for tier in shown_tiers(timeline.plan.tiers)
    )
    note = (
        "Reserve is what is planned for and idle. "
        f"Where bytes change more than {NUM_MOMENTS:,} times, the fullest moment of each 1/{NUM_MOMENTS} of the step is "
        "drawn."
    )
    return Markup(f"{legend}{''.join(charts)}<p><small>{note}</small></p>")


def _tell_tier(tier: TierPlan) -> str:
    is_above = tier.capacity is not None and not is_budget_drawn(tier)
    return f"{tell_budget(tier)}{'; the budget is far above the chart' if is_above else ''}"


def _tell_lanes(timeline: Timeline) -> Markup:
    figure, shown = draw_lanes(timeline)
    order = {kind: index for index, kind in enumerate([Kind(None), Kind(None, is_stall=True), *map(Kind, MemoryRole)])}
    kinds = sorted({bar.kind for bar in shown.bars}, key=order.__getitem__)
    legend = _make_legend((kind_color(kind), kind_name(kind)) for kind in kinds)
    start, views = 0.0, [("all", 0.0, timeline.step_seconds)]
    for phase, seconds in timeline.phase_seconds:
        if seconds:
            views.append((str(phase), start, start + seconds))
        start += seconds
    buttons = "".join(
        f'<button type="button" data-start="{start:.9g}" data-end="{end:.9g}">{name}</button>'
        for name, start, end in views
    )
    zoom = '<button type="button" data-zoom="0.5">zoom in</button><button type="button" data-zoom="2">zoom out</button>'
    chart = figure_html(figure, "lanes")
    note = escape(tell_merging(shown))
    return Markup(f'{legend}<p class="buttons" id="ranges">{buttons}{zoom}</p>{chart}<p><small>{note}</small></p>')


def _make_legend(items: Iterable[tuple[str, str]]) -> str:
    return f'<ul class="legend">{"".join(f"<li>{swatch(color, name)}</li>" for color, name in items)}</ul>'


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
