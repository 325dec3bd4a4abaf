"""The chart of lanes over the step: compute with its stalls, updates, and each route between tiers."""

from collections import defaultdict

from zinf_compile.inspect.html.figures import Figure, make_figure, plot_text
from zinf_compile.inspect.html.lane_bars import GAPS, Bar, Kind, LaneBars, collect_bars
from zinf_compile.inspect.html.palette import COMPUTE_COLOR, ROLE_COLORS, STALL_COLOR, role_name
from zinf_compile.inspect.text.text_layout import shorten
from zinf_compile.ir.glossary import format_bytes, format_seconds
from zinf_compile.ir.timeline import Timeline

_LANE_PIXELS = 58
_HOVER_COLUMNS = 40  # longer names do not fit on a phone


def draw_lanes(timeline: Timeline) -> tuple[Figure, LaneBars]:
    """Return the chart, and its bars."""
    import plotly.graph_objects as go

    shown = collect_bars(timeline)
    rows = {lane: len(shown.lanes) - index for index, lane in enumerate(shown.lanes)}
    figure = make_figure(timeline, height=70 + _LANE_PIXELS * len(rows))
    by_kind: dict[Kind, list[Bar]] = defaultdict(list)
    for bar in shown.bars:
        by_kind[bar.kind].append(bar)
    for kind, bars in sorted(by_kind.items(), key=lambda item: item[0].is_stall):  # stalls on top
        figure.add_trace(
            go.Bar(
                x=[bar.end_seconds - bar.start_seconds for bar in bars],
                base=[bar.start_seconds for bar in bars],
                y=[rows[bar.lane] for bar in bars],
                width=0.5,
                orientation="h",
                name=kind_name(kind),
                marker={"color": kind_color(kind), "line": {"width": 0}},
                hovertext=[_describe(bar) for bar in bars],
                hoverinfo="text",
            )
        )
    for lane, row in rows.items():  # above its bars, to use the full width on a phone
        figure.add_annotation(
            x=0, xref="paper", xanchor="left", y=row + 0.28, yanchor="bottom", text=plot_text(lane), showarrow=False
        )
    figure.update_yaxes(visible=False, range=[0.5, len(rows) + 0.85])
    figure.update_layout(barmode="overlay", bargap=0, hovermode="closest", margin={"l": 10})
    return figure, shown


def kind_name(kind: Kind) -> str:
    """Return the name of a colour in the legend."""
    if kind.is_stall:
        return "stall: compute waits"
    return role_name(kind.role) if kind.role else "compute"


def kind_color(kind: Kind) -> str:
    """Return the colour of a bar: its role's, or that of compute or of stalls."""
    if kind.is_stall:
        return STALL_COLOR
    return ROLE_COLORS[kind.role] if kind.role else COMPUTE_COLOR


def tell_merging(shown: LaneBars) -> str:
    """Return a note for below the chart on how events were merged into bars."""
    if shown.num_events == len(shown.bars):
        return f"All {shown.num_events:,} events of the step are drawn one by one."
    return (
        f"The {shown.num_events:,} events of the step are drawn as {len(shown.bars):,} bars: on a lane with very many, "
        f"neighbours of one block that lie no more than 1/{GAPS} of the step apart are one bar, or those of one kind. "
        "zinf show --trace writes all of them."
    )


def _describe(bar: Bar) -> str:
    names = [shorten(name, _HOVER_COLUMNS) for name in dict.fromkeys((bar.first, bar.last))]
    lines = [plot_text(" to ".join(names)) if bar.num_events == 1 else "<br>to ".join(map(plot_text, names))]
    if bar.num_events > 1:
        lines.append(f"{bar.num_events:,} events, busy {format_seconds(bar.busy_seconds)}")
    lines.append(f"{format_seconds(bar.start_seconds)} to {format_seconds(bar.end_seconds)}")
    lines.append(f"takes {format_seconds(bar.end_seconds - bar.start_seconds)}")
    if bar.nbytes:
        lines.append(format_bytes(bar.nbytes))
    return "<br>".join(lines)
