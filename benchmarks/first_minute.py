"""How long does a first run take? Whole processes: README's example, and three steps of a small GPT, cold and warm.

    python -m benchmarks.first_minute
    python -m benchmarks.first_minute --rounds 5 --only readme --json first_minute.jsonl

Every round runs each program twice, in fresh processes with their own cache folders: cold, with empty caches, and then
warm. ``seconds`` is the wall time of the whole process, imports and exit included. ``cpu_seconds`` is the CPU time of the
process and its compilers, which depends less on other work on the machine. ``load`` is the load average at the start.
JSON lines go to standard output, or to ``--json``: one per process, and one per program with the medians. The target for
the example, on two otherwise idle cores: at most 20 s cold, 8 s warm.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.json_lines import JsonLines

_ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_SECONDS = 1800
_GPT = """
import torch
import zinf_compile
from benchmarks.accuracy_models import load_gpt

gpt = load_gpt()
model = gpt.GPT(gpt.GPTConfig(vocab_size=1024, layers=4, hidden=256, heads=4, seq=128))
zinf_compile.optimize(model, device_memory="64MiB", host_memory="64MiB", nvme=".")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for _ in range(3):
    tokens = torch.randint(1024, (2, 128))
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def readme_example() -> str:
    """Return the first Python block of README.md."""
    found = re.search(r"```python\n(.*?)```", (_ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def caches_in(folder: Path, threads: int) -> dict[str, str]:
    """Return the environment of a process whose caches are under ``folder``, and which computes with some threads."""
    caches = {"XDG_CACHE_HOME": "xdg", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TMPDIR": "tmp"}
    for name in caches.values():
        (folder / name).mkdir(exist_ok=True)
    env = {**os.environ, **{variable: str(folder / name) for variable, name in caches.items()}}
    return {**env, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(_ROOT)}


def run_once(program: str, folder: Path, threads: int) -> dict[str, float]:
    """Run a program in a fresh process with its caches under ``folder``; return its timings."""
    env = caches_in(folder, threads)
    load, start = os.getloadavg()[0], time.perf_counter()
    before = os.times()
    subprocess.run(
        [sys.executable, "-c", program],
        env=env,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        timeout=_TIMEOUT_SECONDS,
        check=True,
    )
    after = os.times()
    cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds, "load": load}


def main() -> None:
    """Measure, and print."""
    programs = {"readme": readme_example(), "gpt": _GPT}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=sorted(programs), default=list(programs))
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines to a file, not to standard output")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3, help="cold and warm processes of each program")
    args = parser.parse_args()
    lines = JsonLines("first_minute", args.json)

    taken: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(args.rounds):
        for name in args.only:
            with tempfile.TemporaryDirectory() as folder:
                for caches in ("cold", "warm"):
                    took = run_once(programs[name], Path(folder), args.threads)
                    taken.setdefault((name, caches), []).append(took)
                    line = {"question": "first_minute", "program": name, "caches": caches, "round": number, **took}
                    lines.note({**line, "threads": args.threads})
    for (name, caches), each in taken.items():
        medians = {key: statistics.median(took[key] for took in each) for key in ("seconds", "cpu_seconds", "load")}
        lines.note({"question": "summary", "program": name, "caches": caches, "rounds": args.rounds, **medians})


if __name__ == "__main__":
    main()
