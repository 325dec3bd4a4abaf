"""Question: what does one optimizer step cost, and where does its time go?

``kernel``: the compiled AdamW over one chunk in RAM, beside torch's own: its fused kernel on float32 gradients, and what
the streamed step does where there is no compiled kernel (widen the gradient, update, round to the compute copy). Both
sides run in turn on memory of their own; a line gives the median over rounds, and the best.

    python -m benchmarks.optimizer_step --only kernel

prints one JSON line per case. Rates are 10^9 parameters per second.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zinf_compile.runtime.fused_adamw import find_kernel
from zinf_compile.runtime.shadow import shadow_step

Answer = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How all questions are measured."""

    threads: tuple[int, ...]
    rounds: int
    elements: int


def measure_kernel(settings: Settings) -> Iterator[Answer]:
    """Yield one answer per number of threads, flavour of AdamW and pair of dtypes."""
    for threads in settings.threads:
        torch.set_num_threads(threads)
        for fused in (True, False):
            for narrow in (torch.bfloat16, None):
                case = {
                    "question": "kernel",
                    "elements": settings.elements,
                    "threads": threads,
                    "adamw": "fused" if fused else "default",
                    "gradient": str(narrow or torch.float32).removeprefix("torch."),
                    "compute_copy": narrow is not None,
                }
                rates = _compare(_make_sides(settings.elements, threads, fused=fused, narrow=narrow), settings)
                yield {**case, **rates, "ratio": rates["compiled"] / rates["torch"]}


def _make_sides(size: int, threads: int, *, fused: bool, narrow: torch.dtype | None) -> dict[str, Callable[[], Any]]:
    """Return one update of a chunk by the compiled kernel and by torch, each on memory of its own."""
    optimizer = torch.optim.AdamW([torch.zeros(1)], fused=fused)
    (group,) = optimizer.param_groups
    gradient = torch.randn(size).to(narrow or torch.float32)
    kernel = find_kernel(
        optimizer, group, master_dtype=torch.float32, gradient_dtype=gradient.dtype, compute_dtype=narrow
    )
    if kernel is None:
        sys.exit("there is no compiled kernel here; the log says why")

    def make_memory() -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
        moments = {key: torch.zeros(size) for key in ("exp_avg", "exp_avg_sq")}
        return torch.randn(size), None if narrow is None else torch.empty(size, dtype=narrow), moments

    master, compute, state = make_memory()
    plain, plain_compute, plain_state = make_memory()
    plain_state["step"] = torch.zeros(())

    def run_compiled() -> None:
        nonlocal state
        state = kernel.update(group, state, master, gradient, compute, num_threads=threads)

    def run_torch() -> None:
        shadow_step(optimizer, group, plain.detach(), gradient.to(plain.dtype), plain_state)
        if plain_compute is not None:
            plain_compute.copy_(plain)

    return {"compiled": run_compiled, "torch": run_torch}


def _compare(sides: dict[str, Callable[[], Any]], settings: Settings) -> dict[str, float]:
    """Return the rate of each side: median over rounds in which they take turns, and the best."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_index in range(settings.rounds + 2):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if round_index >= 2:  # the first ones touch the memory
                seconds[name].append(time.perf_counter() - start)
    rate = settings.elements / 1e9
    return {name: rate / statistics.median(taken) for name, taken in seconds.items()} | {
        f"{name}_best": rate / min(taken) for name, taken in seconds.items()
    }


QUESTIONS: dict[str, Callable[[Settings], Iterator[Answer]]] = {"kernel": measure_kernel}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(QUESTIONS), help="one question instead of all")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--elements", type=int, default=2**20, help="of the chunk")
    args = parser.parse_args()
    settings = Settings(threads=tuple(args.threads), rounds=args.rounds, elements=args.elements)
    command = " ".join(["python -m benchmarks.optimizer_step", *sys.argv[1:]])
    for name in QUESTIONS if args.only is None else (args.only,):
        for answer in QUESTIONS[name](settings):
            print(json.dumps({"command": command, **answer}), flush=True)


if __name__ == "__main__":
    main()
