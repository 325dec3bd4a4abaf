"""The chart of a tier's memory over the step: roles stacked, its budget as a line, its peak marked."""

from itertools import groupby

from zinf_compile.inspect.html.figures import Figure, make_figure
from zinf_compile.inspect.html.palette import BUDGET_COLOR, ROLE_COLORS, role_name
from zinf_compile.ir.glossary import Tier, format_bytes
from zinf_compile.ir.plan import TierPlan
from zinf_compile.ir.timeline import Timeline
from zinf_compile.passes.planner.simulator.memory import MemoryRole, RoleMemory, live_set, memory_by_role

NUM_MOMENTS = 2000  # points per chart; more would exceed its pixels, even when zoomed a little
_HEADROOM = 1.12  # above the highest line, for its label
_FARTHEST_BUDGET = 3.0  # times the peak; a budget above that would flatten the chart

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def draw_memory(timeline: Timeline, tier: TierPlan) -> Figure:
    """Return the chart of one tier."""
    import plotly.graph_objects as go

    points = thin_out(memory_by_role(timeline, tier.tier), timeline.step_seconds)
    top = max(tier.predicted_peak, 1)
    if is_budget_drawn(tier):
        top = max(top, tier.capacity or 0)
    unit, unit_name = next((size, name) for size, name in _UNITS if top >= size)
    figure = make_figure(timeline, height=280)
    seconds = [point.seconds for point in points]
    for index, role in enumerate(MemoryRole):
        sizes = [point.nbytes[index][1] for point in points]
        if any(sizes):
            figure.add_trace(
                go.Scatter(
                    x=[*seconds, timeline.step_seconds],
                    y=[size / unit for size in (*sizes, sizes[-1])],
                    customdata=[format_bytes(size) for size in (*sizes, sizes[-1])],
                    name=role_name(role),
                    mode="lines",
                    stackgroup="all",
                    line={"shape": "hv", "simplify": False, "width": 0, "color": ROLE_COLORS[role]},
                    fillcolor=ROLE_COLORS[role],
                    hovertemplate="%{customdata}",
                )
            )
    peak = live_set(timeline, tier.tier)
    is_late = peak.seconds > timeline.step_seconds / 2
    figure.add_trace(
        go.Scatter(
            x=[peak.seconds],
            y=[tier.predicted_peak / unit],
            mode="markers+text",
            name="peak",
            text=[f" peak {format_bytes(tier.predicted_peak)} "],
            textposition=f"top {'left' if is_late else 'right'}",
            marker={"symbol": "diamond", "size": 11, "color": "#ffffff", "line": {"color": "#000000", "width": 2}},
            hoverinfo="skip",
            cliponaxis=False,
        )
    )
    if is_budget_drawn(tier):
        figure.add_hline(y=(tier.capacity or 0) / unit, line={"color": BUDGET_COLOR, "width": 2, "dash": "dash"})
    figure.update_yaxes(range=[0, top / unit * _HEADROOM], ticksuffix=f" {unit_name}", nticks=5)
    figure.update_layout(hovermode="x unified", hoverlabel={"namelength": -1})
    return figure


def tell_budget(tier: TierPlan) -> str:
    """Return a tier's peak beside its budget: ``"peak 21.3 GiB of a budget of 24.0 GiB (89%)"``."""
    peak = format_bytes(tier.predicted_peak)
    if tier.capacity is None:
        return f"peak {peak}; as much as the disk has"
    share = f" ({tier.predicted_peak / tier.capacity:.0%})" if tier.capacity else ""
    return f"peak {peak} of a budget of {format_bytes(tier.capacity)}{share}"


def is_budget_drawn(tier: TierPlan) -> bool:
    """Return whether the chart shows the budget: there is one, and it is not so high that it would flatten the chart."""
    return tier.capacity is not None and tier.capacity <= _FARTHEST_BUDGET * max(tier.predicted_peak, 1)


def thin_out(points: tuple[RoleMemory, ...], step_seconds: float) -> list[RoleMemory]:
    """Return the point with the most memory of each moment, or of each fraction of the step if there are very many moments.

    So the peak is always included. Several ticks can be at one moment, while compute waits.
    """
    width = step_seconds / NUM_MOMENTS if len(points) > NUM_MOMENTS else 0.0
    return [
        max(held, key=lambda point: sum(nbytes for _, nbytes in point.nbytes))
        for _, held in groupby(points, key=lambda point: int(point.seconds / width) if width else point.seconds)
    ]


def shown_tiers(tiers: tuple[TierPlan, ...]) -> tuple[TierPlan, ...]:
    """Return the tiers that the plan uses, always including the device."""
    return tuple(tier for tier in tiers if tier.predicted_peak or tier.tier is Tier.DEVICE)
