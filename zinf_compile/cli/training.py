"""The loop of `zinf train`, in plain PyTorch: it does not know whether the model was optimized."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zinf_compile.cli.progress import StepResult
from zinf_compile.cli.text import Batch, Batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How many steps there are in all, and what one does on a rank; ``clip`` is the largest norm of all gradients."""

    steps: int
    accumulate: int
    clip: float | None


class Training:
    """All that training goes on from: model, optimizer, learning rate, place in the text, and how many steps are done."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, batches: Batches, schedule: Schedule) -> None:
        self.model, self.optimizer, self.batches, self.schedule = model, optimizer, batches, schedule
        self.rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_up_cosine(step, schedule.steps))
        self.step = 0

    def run(
        self,
        loss_of: Callable[[Batch], Tensor],
        save: Callable[[], None] | None = None,
        mean: Callable[[float], float] = float,
    ) -> Iterator[StepResult]:
        """Train to the last step, one result a step; ``save`` is called behind each. A step's loss is the mean over its
        micro-batches, and ``mean`` takes that over ranks."""
        accumulate, clip = self.schedule.accumulate, self.schedule.clip
        while self.step < self.schedule.steps:
            started = time.perf_counter()
            total = 0.0
            for _ in range(accumulate):
                loss = loss_of(next(self.batches)) / accumulate
                loss.backward()
                total += loss.item()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.rate.step()
            self.step += 1
            total = mean(total)
            seconds = time.perf_counter() - started
            if save is not None:
                save()
            yield StepResult(self.step, total, seconds)


def _warm_up_cosine(step: int, steps: int) -> float:
    warm_up = min(1.0, (step + 1) / max(1, steps // 10))
    return warm_up * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))  # ends at a tenth, as GPT-3's schedule
