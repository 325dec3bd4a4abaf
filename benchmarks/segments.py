"""Is compute in segments as fast as op by op? Both train the same model in one process, alternating every few steps.

    python -m benchmarks.segments
    python -m benchmarks.segments --only llama --json segments.jsonl

The models are those of ``accuracy_models.py``, all in memory. Each model has a fresh process, whose first steps, which
compile, are not timed. JSON lines go to standard output, or to ``--json``: one for each model with the seconds of its
steps, and a last one with the median of the ratios, segments over ops. The target is at most 1.0.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.accuracy_models import MODELS
from benchmarks.json_lines import JsonLines

_ROOT = Path(__file__).resolve().parents[1]
_AMPLE = "8GiB"  # of device and host each: more than any model needs
_WARM_UP_STEPS = 2
_TIMEOUT_SECONDS = 900


def measure(name: str, threads: int, rounds: int) -> dict[str, Any]:
    """Train one model both ways in this process, which should be fresh; return the seconds of the steps."""
    import torch

    import zinf_compile

    torch.set_num_threads(threads)
    entry = MODELS[name]
    steps, warm_up = {}, {}
    for compute in ("aten", "inductor"):
        torch.manual_seed(0)
        workload = entry.build()
        zinf_compile.optimize(
            workload.model,
            device_memory=_AMPLE,
            host_memory=_AMPLE,
            compute=compute,
            compute_dtype=entry.compute_dtype,
            recompute=False,
        )
        optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-4, fused=True)

        def step(workload: Any = workload, optimizer: torch.optim.Optimizer = optimizer) -> float:
            optimizer.zero_grad()
            start = time.perf_counter()
            workload.loss().backward()
            return time.perf_counter() - start

        steps[compute] = step
        warm_up[compute] = sum(step() for _ in range(_WARM_UP_STEPS))
    seconds: dict[str, list[float]] = {compute: [] for compute in steps}
    for _ in range(rounds):
        for compute, each in steps.items():
            seconds[compute].append(each())
    ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds["inductor"], seconds["aten"], strict=True))
    return {
        "question": "segments",
        "model": name,
        "threads": threads,
        "warm_up_seconds": warm_up,
        "seconds": seconds,
        "ratio": ratio,
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines to a file, not to standard output")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each")
    parser.add_argument("--child", choices=sorted(MODELS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.threads, args.rounds)))
        return
    lines = JsonLines("segments", args.json)

    ratios = []
    options = ["--threads", str(args.threads), "--rounds", str(args.rounds)]
    for name in args.only:
        child = [sys.executable, "-m", "benchmarks.segments", "--child", name, *options]
        ended = subprocess.run(child, capture_output=True, text=True, cwd=_ROOT, timeout=_TIMEOUT_SECONDS, check=False)
        if ended.returncode:
            lines.note({"question": "failed", "model": name, "error": ended.stderr.strip().splitlines()[-8:]})
            continue
        line = json.loads(ended.stdout.strip().splitlines()[-1])
        ratios.append(line["ratio"])
        print(f"{name}: {line['ratio']:.3f}", file=sys.stderr)
        lines.note(line)
    lines.note({"question": "summary", "num_models": len(ratios), "median_ratio": statistics.median(ratios)})


if __name__ == "__main__":
    main()
