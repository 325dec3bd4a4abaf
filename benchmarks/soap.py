"""What does SOAP cost out of core, and what do its inverse roots cost when they are computed in the background?

    python -m benchmarks.soap --nvme DIR [--layers 14 --hidden 768] [--tokens 512] [--steps 14] [--every 4]

Trains the example GPT (about 100 million parameters, float32, op by op, one thread of compute) with the example SOAP, from
the same seed, each side in a fresh process, one after another:

``memory``    plain PyTorch in memory, bases brought up to date in the step (staleness 0)
``exact``     the same out of core, device and host budgets together an eighth of parameters, gradients and state
``memory+1``  plain PyTorch, with staleness 1: bases are computed in the background, and adopted one step later
``late``      the same out of core

Prints a JSON line for each, with the seconds of all steps and their medians: ``ordinary`` steps, steps in which work is due
(``due``), and the steps after these (``next``), which adopt what is late. The first two steps, which find the bases and plan
again, count for none. A last line has what was asked: ``equal_losses``, bit by bit, of both pairs; ``ordinary_ratio``,
seconds of an ordinary step out of core over one in memory (at most 1.15); ``late_ratio``, the longer of ``due`` and ``next``
over an ordinary step of the same side (at most 1.3), beside ``exact_ratio``, what ``due`` costs without staleness.
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

from benchmarks.json_lines import JsonLines
from benchmarks.out_of_core import disk_bytes, measure_disk

_ROOT = Path(__file__).resolve().parents[1]
_SIDES = {"memory": 0, "exact": 0, "memory+1": 1, "late": 1}  # and their staleness
_WARM_UP = 2  # steps


def train(side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one side; return its losses and seconds."""
    import torch

    import zinf_compile
    from examples.gpt import GPT, GPTConfig
    from examples.soap import SOAP

    torch.set_num_threads(1)
    hidden, rows = arguments.hidden, arguments.most_rows
    model = GPT(GPTConfig(arguments.vocabulary, arguments.layers, hidden, max(1, hidden // 64), arguments.tokens))
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    elements = sum(parameter.numel() for parameter in model.parameters())
    matrices = sum(2 * size**2 for shape in shapes if len(shape) == 2 for size in shape if size <= rows)
    states = 4 * (4 * elements + matrices)
    is_stored = side in ("exact", "late")
    if is_stored:
        budget = round(states / arguments.share)
        host = round(budget * arguments.host_share)
        zinf_compile.optimize(
            model,
            device_memory=f"{(budget - host) // 2**10}KiB",
            host_memory=f"{host // 2**10}KiB",
            nvme=arguments.nvme,
            compute="aten",
            reserve_memory=0,
        )
    optimizer = SOAP(model.parameters(), every=arguments.every, staleness=_SIDES[side], most_rows=rows)
    generator = torch.Generator().manual_seed(0)
    losses, seconds, moved = [], [], disk_bytes()
    for step in range(arguments.steps):
        batch = torch.randint(arguments.vocabulary, (1, arguments.tokens + 1), generator=generator)
        begin = time.perf_counter()
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item().hex())
        print(f"{side} step {step}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
        if step == _WARM_UP - 1:
            moved = disk_bytes()
    read, written = (now - before for now, before in zip(disk_bytes(), moved, strict=True))
    kinds: dict[str, list[float]] = {"ordinary": [], "due": [], "next": []}
    for step in range(_WARM_UP, arguments.steps):
        kinds[{0: "due", 1: "next"}.get(step % arguments.every, "ordinary")].append(seconds[step])
    result: dict[str, Any] = {
        "parameters": elements,
        "states_bytes": states,
        "losses": losses,
        "seconds": [round(each, 3) for each in seconds],
        **{f"{kind}_seconds": round(statistics.median(times), 3) for kind, times in kinds.items()},
        "disk_bytes_per_step": (read + written) // (arguments.steps - _WARM_UP),
    }
    if is_stored:
        tiers = zinf_compile.report(model).tiers
        result["tiers"] = {
            str(tier.tier): {"budget": tier.capacity, "predicted": tier.predicted_peak, "peak": tier.measured_peak}
            for tier in tiers
        }
        zinf_compile.close(model)
    return result


def main() -> None:
    """Train all sides, and compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nvme", default=".", help="folder on a local disk")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="of each step, one sequence")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument(
        "--every", type=int, default=4, help="steps from one refresh of the bases to the next, at least 3"
    )
    parser.add_argument("--most-rows", type=int, default=1024, help="longer dimensions have no matrix")
    parser.add_argument(
        "--share", type=float, default=8, help="parameters, gradients and optimizer state over both budgets"
    )
    parser.add_argument("--host-share", type=float, default=0.4, help="of both budgets")
    parser.add_argument("--only", nargs="+", choices=list(_SIDES), default=list(_SIDES))
    parser.add_argument("--child", choices=list(_SIDES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(train(arguments.child, arguments)))
        return
    lines = JsonLines("soap", None)
    rate = measure_disk(arguments.nvme)
    results: dict[str, dict[str, Any]] = {}
    for side in arguments.only:
        load = os.getloadavg()[0]
        command = [sys.executable, "-m", "benchmarks.soap", *sys.argv[1:], "--child", side]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        child = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        results[side] = result = json.loads(child.stdout.splitlines()[-1])
        lines.note({"question": side, "disk_bytes_per_second": round(rate), "load_average": round(load, 2), **result})
    if len(results) == len(_SIDES):
        memory, exact, memory_late, late = (results[side] for side in _SIDES)
        late_seconds = max(late["due_seconds"], late["next_seconds"])
        lines.note(
            {
                "question": "soap",
                "equal_losses": memory["losses"] == exact["losses"] and memory_late["losses"] == late["losses"],
                "ordinary_ratio": round(exact["ordinary_seconds"] / memory["ordinary_seconds"], 3),
                "late_ratio": round(late_seconds / late["ordinary_seconds"], 3),
                "exact_ratio": round(exact["due_seconds"] / exact["ordinary_seconds"], 3),
            }
        )


if __name__ == "__main__":
    main()
