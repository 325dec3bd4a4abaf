"""How long is the first step of each architecture by default? Those of tests/parity/test_by_default.py, cold and warm.

    python -m benchmarks.architectures
    python -m benchmarks.architectures --only llama gpt2 --json architectures.jsonl

Every architecture is tiny, and runs twice in fresh processes: cold, with empty caches of compiled code, and warm.
``seconds`` is from ``optimize`` to the end of the first step, without imports, and ``cpu_seconds`` the CPU time of the
process and its compilers meanwhile. ``segments`` is how many structures were compiled, ``fallbacks`` how many blocks were
not. ``load`` is the load average at the start. JSON lines go to standard
output, or to ``--json``: one per process, and a last one with the number of architectures and of those without fallbacks.
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

from benchmarks.first_minute import caches_in
from benchmarks.json_lines import JsonLines

_TIMEOUT_SECONDS = 900


def first_step(name: str) -> dict[str, Any]:
    """Train an architecture for one step with default options; return the seconds and what was compiled."""
    import torch

    import zinf_compile
    from tests.parity import test_by_default
    from tests.support.traces import plain_loss
    from zinf_compile.runtime.execute import segments

    torch.manual_seed(0)
    model, batches = getattr(test_by_default, name)()
    start, before = time.perf_counter(), sum(os.times()[:4])
    zinf_compile.optimize(model, device_memory="256MiB", host_memory="64MiB")
    optimizer = test_by_default.make_sgd(model)
    plain_loss(model, batches[0]).backward()
    optimizer.step()
    zinf_compile.synchronize(model)
    seconds, cpu_seconds = time.perf_counter() - start, sum(os.times()[:4]) - before
    report = zinf_compile.report(model)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "graphs": len(report.plans),
        "segments": len(segments._compiled),
        "fallbacks": len(report.fallbacks),
    }


def architectures() -> list[str]:
    """Return the names of the architectures that the tests train by default."""
    from tests.parity import test_by_default as by_default

    return [workload.__name__ for workload in (*by_default.FEW, *by_default.MORE, *by_default.COMPILED_ELSEWHERE)]


def run_process(name: str, folder: Path, threads: int) -> dict[str, Any]:
    """Return what ``first_step`` returns in a fresh process with its caches under ``folder``."""
    command = [sys.executable, "-m", "benchmarks.architectures", "--one", name]
    done = subprocess.run(
        command,
        env={**caches_in(folder, threads), "ZINF_QUIET": "1"},
        stdout=subprocess.PIPE,
        timeout=_TIMEOUT_SECONDS,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", nargs="+", help="these architectures only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines to a file, not to standard output")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--one", metavar="NAME", help="measure one in this process")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(first_step(args.one)))
        return
    lines, found = JsonLines("architectures", args.json), []
    for name in args.only or architectures():
        with tempfile.TemporaryDirectory() as folder:
            for caches in ("cold", "warm"):
                load = os.getloadavg()[0]
                took = run_process(name, Path(folder), args.threads)
                found.append((name, took["fallbacks"]))
                lines.note({"architecture": name, "caches": caches, "load": load, "threads": args.threads, **took})
    names = {name for name, _ in found}
    whole = names - {name for name, fallbacks in found if fallbacks}
    lines.note({"question": "summary", "architectures": len(names), "without_fallbacks": len(whole)})


if __name__ == "__main__":
    main()
