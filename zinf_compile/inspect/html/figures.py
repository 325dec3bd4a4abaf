"""Settings shared by all charts: fonts, margins, the time axis. plotly is imported only when a page is made."""

import base64
import gzip
import html
import json
from functools import cache
from typing import Any, TypeAlias

from zinf_compile.ir.glossary import printable
from zinf_compile.ir.timeline import Timeline

Figure: TypeAlias = Any  # plotly.graph_objects.Figure; plotly has no annotations

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "displayModeBar": False,
}
_GRID = "rgba(128,128,128,0.25)"  # visible on light and dark pages
_AXIS = {"zeroline": False, "gridcolor": _GRID, "ticks": "outside", "ticklen": 5, "tickcolor": "rgba(0,0,0,0)"}
_NAMED_SHARE = 0.25  # share of the step; on a phone the name of a shorter phase does not fit


def plot_text(text: str) -> str:
    """Return text escaped for plotly, so that nothing in it is taken as markup."""
    return html.escape(printable(text), quote=False)


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


def figure_html(figure: Figure, name: str) -> str:
    """Return a chart as HTML: a placeholder, and the data that the page's script draws in it."""
    drawing = json.dumps({**json.loads(figure.to_json()), "config": _CONFIG}).replace("<", "\\u003c")
    place = f'<div id="{name}" style="width:100%;height:{figure.layout.height}px"></div>'
    return f'{place}<script type="application/json" data-chart="{name}">{drawing}</script>'


@cache
def library_html() -> str:
    """Return plotly.js compressed (gzip in base64) for the page's script to unpack; uncompressed it has 5 MB."""
    from plotly.offline import get_plotlyjs

    packed = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    return f'<script type="text/plain" id="plotly">{packed}</script>'
