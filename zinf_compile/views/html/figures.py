"""What all charts of the page share: fonts, margins, the axis of seconds; plotly is imported when a page is made."""

import html
from typing import Any, TypeAlias

from zinf_compile.simulation.timeline import Timeline

Figure: TypeAlias = Any  # plotly.graph_objects.Figure; plotly has no annotations

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "displayModeBar": False,
}
_GRID = "rgba(128,128,128,0.25)"  # on a light page and on a dark one
_AXIS = {"zeroline": False, "gridcolor": _GRID, "ticks": "outside", "ticklen": 5, "tickcolor": "rgba(0,0,0,0)"}
_NAMED_SHARE = 0.25  # of the step; on a phone a shorter phase has no room for its name


def plot_text(text: str) -> str:
    """Return text that plotly draws as it is: what looks like its markup is none."""
    return html.escape(text, quote=False)


def make_figure(timeline: Timeline, *, height: int) -> Figure:
    """Return an empty chart over the seconds of the step, with a line where each phase begins."""
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.update_layout(
        height=height,
        margin={"l": 76, "r": 10, "t": 26, "b": 34},
        font={"family": _FONT, "size": 14},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        showlegend=False,
        hoverlabel={"font": {"family": _FONT, "size": 14, "color": "#ffffff"}, "bgcolor": "#1f2937"},
        xaxis={
            "range": [0, timeline.step_seconds],
            "tickformat": "~s",
            "ticksuffix": "s",
            "hoverformat": ".3~s",
            "nticks": 6,
            **_AXIS,
        },
        yaxis={"fixedrange": True, **_AXIS},
    )
    start = 0.0
    for phase, seconds in timeline.phase_seconds:
        if seconds > timeline.step_seconds * _NAMED_SHARE:
            figure.add_annotation(
                x=start,
                y=1,
                yref="paper",
                xanchor="left",
                yanchor="bottom",
                text=str(phase),
                showarrow=False,
                font={"size": 14},
            )
        if start:
            figure.add_vline(x=start, line={"color": "rgba(128,128,128,0.8)", "width": 1})
        start += seconds
    return figure


def figure_html(figure: Figure, name: str, *, with_library: bool) -> str:
    """Return a chart as HTML; the first one of a page brings plotly.js along."""
    text: str = figure.to_html(
        full_html=False,
        include_plotlyjs=with_library,
        config=_CONFIG,
        div_id=name,
        default_width="100%",
        default_height=f"{figure.layout.height}px",
    )
    return text
