"""Does compiling take longer for a deeper model? Seconds to the first step of a GPT of 4, 16 and 64 layers.

    python -m benchmarks.compile_time
    python -m benchmarks.compile_time --layers 4 16 --hidden 128 --json compile_time.jsonl

Each depth is measured in its own process with an empty cache, so that everything is compiled. ``compile_seconds`` is the
time in Inductor, ``num_structures`` the number of segments that it compiled, and ``first_step_seconds`` the total with
capture, planning and the step itself. JSON lines go to standard output, or to ``--json``. The compile seconds should grow
by less than 10 % from the first depth to the last; the last line has the growth.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.json_lines import JsonLines

_ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_SECONDS = 1800


def measure(layers: int, hidden: int, threads: int) -> dict[str, Any]:
    """Run the first step of a GPT in this process, which should be fresh; return its timings."""
    import torch

    import zinf_compile
    from benchmarks.accuracy_models import load_gpt
    from zinf_compile.runtime.execute import segments

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    spent = 0.0
    compile_one = segments._compile

    def timed(segment: torch.fx.GraphModule) -> Any:
        nonlocal spent
        start = time.perf_counter()
        compiled = compile_one(segment)
        spent += time.perf_counter() - start
        return compiled

    segments._compile = timed
    gpt = load_gpt()
    model = gpt.GPT(gpt.GPTConfig(vocab_size=1024, layers=layers, hidden=hidden, heads=4, seq=64))
    zinf_compile.optimize(model, device_memory="4GiB", host_memory="4GiB", compute="inductor", recompute=False)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    start = time.perf_counter()
    model(tokens, tokens).backward()
    return {
        "question": "compile_time",
        "layers": layers,
        "hidden": hidden,
        "num_structures": len(segments._segments),
        "compile_seconds": spent,
        "first_step_seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines to a file, not to standard output")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(measure(args.child, args.hidden, args.threads)))
        return
    lines = JsonLines("compile_time", args.json)

    seconds = []
    for layers in args.layers:
        options = ["--child", str(layers), "--hidden", str(args.hidden), "--threads", str(args.threads)]
        with tempfile.TemporaryDirectory() as cache:
            ended = subprocess.run(
                [sys.executable, "-m", "benchmarks.compile_time", *options],
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
                stdout=subprocess.PIPE,
                text=True,
                cwd=_ROOT,
                timeout=_TIMEOUT_SECONDS,
                check=True,
            )
        line = json.loads(ended.stdout.strip().splitlines()[-1])
        seconds.append(line["compile_seconds"])
        lines.note(line)
    lines.note({"question": "summary", "compile_seconds": seconds, "growth": seconds[-1] / seconds[0] - 1})


if __name__ == "__main__":
    main()
