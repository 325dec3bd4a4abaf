"""The step on the stages of a model as text: what a rank of each does, and how the step's seconds divide."""

from zinf_compile.inspect.text.text_layout import make_table
from zinf_compile.ir.glossary import Tier, format_bytes, format_seconds
from zinf_compile.ir.pipeline import PipelinePlan, PipelineSchedule, StagePlan

_MEGA, _GIGA, _TERA = 1e6, 1e9, 1e12


def dump_pipeline(pipeline: PipelinePlan, width: int) -> list[str]:
    """Return a table of the stages, one of the parts of the step, and what it comes to."""
    header = ("stage", "blocks", "params", "open", "batch", "update", *(str(tier) for tier in Tier))
    batches = f"{pipeline.num_micro_batches:,} micro-batches"
    if pipeline.schedule is PipelineSchedule.ROUNDS:
        header = ("rank", "stages", "params", "open", "passes", *header[5:])
        batches = f"{pipeline.num_micro_batches:,} batches in rounds"
    lines = make_table(
        header, [_row(stage) for stage in pipeline.stages], align="<" + ">" * (len(header) - 1), width=width, flexible=0
    )
    step, slowest = pipeline.step_seconds, pipeline.slowest
    parts = [
        (str(part), format_seconds(seconds), f"{seconds / step:.0%}") for part, seconds in pipeline.parts if seconds
    ]
    title = f"step of {format_seconds(step)}, {batches}, on {header[0]} {slowest.first}"
    return [
        *lines,
        *make_table((title, "time", "share"), parts, align="<>>", width=width, flexible=0),
        f"  {pipeline.tokens_per_second:,.0f} tokens/s of all ranks",
        f"  {pipeline.flops_per_second / _TERA:,.4g} TFLOP/s of each, with what is recomputed",
        f"  bound by {pipeline.bound}",
    ]


def _row(stage: StagePlan) -> tuple[str, ...]:
    last = stage.first + stage.num_stages - 1
    return (
        str(stage.first) if stage.num_stages == 1 else f"{stage.first} to {last}",
        str(stage.num_blocks),
        _format_count(stage.num_elements),
        str(stage.num_open),
        format_seconds(stage.micro_batch_seconds),
        format_seconds(stage.update_seconds),
        *(format_bytes(stage.peak(tier)) for tier in Tier),
    )


def _format_count(number: int) -> str:
    """Return a number of parameters in at most 8 characters, as "12.3 M"; a trillion has 9."""
    return f"{number / _MEGA:.1f} M" if number < _GIGA else f"{number / _GIGA:,.1f} B"
