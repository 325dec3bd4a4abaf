"""How a training run shows itself: a bar on a terminal, a line every few steps anywhere else."""

import resource
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import zinf_compile
from zinf_compile.ir.glossary import format_bytes

_FIRST_STEP = "first step: capturing and planning"
_NUM_STEPS = 10  # of which the speed is the median
_NUM_LINES = 20  # lines of a run that is not on a terminal: enough for a curve, few enough for a log


class StepResult(NamedTuple):
    """``step`` counts from 1; ``loss`` is in nats per token."""

    step: int
    loss: float
    seconds: float


class Speed:
    """Tokens per second: of the median of the last steps, since single ones differ by a lot, and the first captures."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)
        self._is_first = True

    def add(self, seconds: float) -> None:
        """Count a step; the first one counts as long as it is the only one."""
        if len(self._seconds) == 1 and self._is_first:
            self._seconds.clear()
            self._is_first = False
        self._seconds.append(seconds)

    def __str__(self) -> str:
        return f"{self._tokens / statistics.median(self._seconds):,.0f} tokens/s"


def show_progress(
    results: Iterable[StepResult], *, steps: int, tokens_per_step: int, model: nn.Module | None
) -> Iterator[StepResult]:
    """Pass the results on while showing them; ``model`` is the optimized one, None when plain."""
    speed = Speed(tokens_per_step)
    if not sys.stdout.isatty():
        every = max(1, steps // _NUM_LINES)
        if model is not None:
            print(_FIRST_STEP, flush=True)
        for index, result in enumerate(results):
            speed.add(result.seconds)
            if index == 0 or result.step == steps or result.step % every == 0:
                print(f"step {result.step:>4}/{steps}  {_describe(result, speed, model)}", flush=True)
            yield result
        return
    columns = (
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=steps, status=_FIRST_STEP if model else "")
        for result in results:
            speed.add(result.seconds)
            bar.update(task, completed=result.step, status=_describe(result, speed, model))
            yield result


def process_peak() -> int:
    """The most memory this process has had resident so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB


def _describe(result: StepResult, speed: Speed, model: nn.Module | None) -> str:
    if model is None:
        peaks = f"process {format_bytes(process_peak())}"
    else:
        tiers = zinf_compile.report(model).tiers
        peaks = ", ".join(f"{tier.tier.value} {format_bytes(tier.measured_peak)}" for tier in tiers)
    return f"loss {result.loss:.3f}  {speed}  peak: {peaks}"
