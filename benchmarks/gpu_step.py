"""How much slower is training on a GPU with parameters and optimizer states on the host than with all in device memory?

    python -m benchmarks.gpu_step
    python -m benchmarks.gpu_step --only 1.5B --tokens 16384 --json gpu.jsonl

For each GPT, in separate processes, one after the other:

    memory    all in device memory: torch.compile, bfloat16 autocast, fused AdamW, where it fits
    zinf      parameters and optimizer states on the host, with a quarter of the device memory that ``memory`` used
    late      as ``zinf``, with no update ahead of ``step()`` (``speculate=False``)
    fsdp2     FSDP2 on one rank with CPUOffloadPolicy, bfloat16 parameters in compute, fused AdamW

JSON lines go to standard output, or to ``--json``: one per run with the seconds of its steps and its device memory, and
one per model with the ratios. What a file has already is not measured again. The target for zinf over memory is at most
1.10. The first lines are rates of the machine: copies through the link that training uses over plain pinned copies
(target: at least 0.90), and the bandwidth of our kernels, which decode and encode optimizer state, over that of a copy
on the device.
``--device cpu`` runs all but the rates, as a dry run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.json_lines import JsonLines

_ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_SECONDS = 900
_WARM_UP_STEPS = 3
_VOCABULARY = 32_000
_CONTESTANTS = ("memory", "zinf", "late", "fsdp2")
_BYTES = 2**28  # of a copy whose rate is measured
_ELEMENTS = 2**26  # of the chunk on which a kernel is measured


@dataclass(frozen=True)
class Shape:
    """The shape of a GPT."""

    layers: int
    hidden: int
    sequence: int = 2048
    head_width: int = 128


SHAPES = {
    "tiny": Shape(layers=2, hidden=64, sequence=32, head_width=64),
    "0.4B": Shape(layers=24, hidden=1024, head_width=64),
    "1.5B": Shape(layers=48, hidden=1600, head_width=64),
    "1.6B": Shape(layers=12, hidden=3072),
    "7B": Shape(layers=32, hidden=4096),
    "13B": Shape(layers=40, hidden=5120),
}


def _build(shape: Shape) -> Any:
    import torch

    sys.path.insert(0, str(_ROOT / "examples"))
    from gpt import GPT, GPTConfig

    config = GPTConfig(
        vocab_size=_VOCABULARY,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.hidden // shape.head_width,
        seq=shape.sequence,
    )
    with torch.device("meta"):
        return GPT(config)


def _fill(model: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0.0, 0.02)


def _train(
    shape: Shape, tokens: int, device: str, rounds: int, loss_of: Callable[[Any], Any], optimizer: Any
) -> list[float]:
    """Return the seconds of some steps, after warm-up steps that compile."""
    import torch

    batch = max(1, tokens // shape.sequence)
    drawn = torch.randint(_VOCABULARY, (batch, shape.sequence + 1), device=device)
    seconds = []
    for _ in range(_WARM_UP_STEPS + rounds):
        start = time.perf_counter()
        loss = loss_of({"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # synchronises, as a loop that prints the loss does: the previous step has ended on the device
        seconds.append(time.perf_counter() - start)
    return seconds[_WARM_UP_STEPS:]


def _peak(device: str) -> int:
    import torch

    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def run_memory(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """Train with all in device memory."""
    import torch

    model = _build(shape).to_empty(device=args.device)
    _fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model)

    def loss_of(batch: Any) -> Any:
        with torch.autocast(args.device, dtype=torch.bfloat16):
            return compiled(**batch)

    seconds = _train(shape, args.tokens, args.device, args.rounds, loss_of, optimizer)
    return {"seconds": seconds, "device_nbytes": _peak(args.device)}


def run_zinf(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """Train with parameters and optimizer states on the host."""
    import torch

    import zinf_compile

    model = _build(shape)
    zinf_compile.optimize(
        model,
        init="reset",
        device=args.device,
        device_memory=args.device_memory,
        host_memory=args.host_memory,
        compute_dtype=torch.bfloat16,
        compute=args.compute,
        speculate=False if args.child == "late" else "auto",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    seconds = _train(shape, args.tokens, args.device, args.rounds, lambda batch: model(**batch), optimizer)
    report = zinf_compile.report(model)
    return {
        "seconds": seconds,
        "device_nbytes": _peak(args.device),
        "reserved_nbytes": torch.cuda.max_memory_reserved() if args.device == "cuda" else 0,
        "planned_device_nbytes": report.tiers[0].predicted_peak,
        "predicted_seconds": report.step.predicted_seconds if report.step else None,
        "stalls": [[stall.transfer, stall.seconds / max(1, stall.count)] for stall in report.stalls[:8]],
        "ahead": None if report.ahead is None else str(report.ahead),
        "moved": {route.route: route.nbytes for route in report.moved},
    }


def run_fsdp2(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """Train by FSDP2 on one rank, offloading to the CPU."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/ranks", rank=0, world_size=1)
        model = _build(shape)
        policy = {
            "offload_policy": CPUOffloadPolicy(pin_memory=args.device == "cuda"),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        }
        for block in model.blocks:
            fully_shard(block, **policy)
        fully_shard(model, **policy)
        model.to_empty(device="cpu")
        _fill(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        seconds = _train(shape, args.tokens, args.device, args.rounds, lambda batch: model(**batch), optimizer)
        result = {"seconds": seconds, "device_nbytes": _peak(args.device)}
        dist.destroy_process_group()
        return result


def measure_rates() -> list[dict[str, Any]]:
    """Return how fast copies over the link and kernels are, compared with plain copies on the same machine."""
    import torch

    from zinf_compile.ir.copies import Code
    from zinf_compile.runtime.device.cuda import CudaDevice
    from zinf_compile.runtime.storage.host_memory import PinnedMemory
    from zinf_compile.runtime.storage.state_codes import decode, encode
    from zinf_compile.runtime.transfer.link import Link

    def usual(call: Callable[[], object]) -> float:
        call()
        times = []
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    device = CudaDevice("cuda")
    link, memory = Link(device), PinnedMemory(device)
    here = torch.frombuffer(memoryview(memory.take(_BYTES)).cast("B"), dtype=torch.uint8)
    there, plain = (
        torch.empty(_BYTES, dtype=torch.uint8, device="cuda"),
        torch.empty(_BYTES, dtype=torch.uint8).pin_memory(),
    )
    ways = {
        "host -> device": (
            lambda: link.bring(here, there, behind=link.mark()).done.result(),
            lambda: there.copy_(plain, non_blocking=True),
        ),
        "device -> host": (
            lambda: link.take(there, here).done.result(),
            lambda: plain.copy_(there, non_blocking=True),
        ),
    }
    lines: list[dict[str, Any]] = []
    for name, (ours, theirs) in ways.items():
        rates = {"ours": _BYTES / usual(ours), "plain": _BYTES / usual(theirs)}
        lines.append({"question": "copies", "route": name, **rates, "ratio": rates["ours"] / rates["plain"]})
    link.close()
    memory.close()

    full = torch.ones(_ELEMENTS, device="cuda")
    other = torch.empty_like(full)
    copied = 2 * full.nbytes / usual(lambda: other.copy_(full))
    for code in Code:
        pages = torch.empty(code.nbytes(_ELEMENTS), dtype=torch.uint8, device="cuda")
        calls = {
            f"encode {code}": lambda code=code, pages=pages: encode(code, full, pages),
            f"decode {code}": lambda code=code, pages=pages: decode(code, pages, other),
        }
        for name, call in calls.items():
            rate = (full.nbytes + pages.nbytes) / usual(call)
            lines.append({"question": "kernels", "kernel": name, "ours": rate, "copy": copied, "ratio": rate / copied})
    return lines


def _describe() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"device": "cpu", "torch": torch.__version__}
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}


def _child(contestant: str, name: str, args: argparse.Namespace, device_memory: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu_step", "--child", contestant, "--only", name]
    for option in ("tokens", "device", "rounds", "host_memory", "compute"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    command += ["--device-memory", device_memory]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=_ROOT, env=environment, timeout=_TIMEOUT_SECONDS, check=False
    )
    if ended.returncode:
        return {"failed": ended.stderr.strip().splitlines()[-4:]}
    result: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return result


def _read(file: Path | None) -> list[dict[str, Any]]:
    """Return the lines that earlier runs have left."""
    return [] if file is None or not file.exists() else [json.loads(line) for line in file.read_text().splitlines()]


def _compare(name: str, args: argparse.Namespace, lines: JsonLines, before: list[dict[str, Any]]) -> None:
    """Run each contestant that no earlier run has measured."""
    asked = {"question": "step", "model": name, "tokens": args.tokens}
    found: dict[str, dict[str, Any]] = {
        line["contestant"]: line for line in before if asked.items() <= line.items() and "seconds" in line
    }
    for contestant in args.contestants:
        if contestant in found:
            continue
        in_memory = found.get("memory", {}).get("device_nbytes", 0)
        device_memory = str(in_memory // 4) if in_memory else args.device_memory
        found[contestant] = _child(contestant, name, args, device_memory)
        lines.note({**asked, "contestant": contestant, "device_memory": device_memory, **found[contestant]})
    usual = {name: statistics.median(run["seconds"]) for name, run in found.items() if "seconds" in run}
    ratios = {
        f"zinf over {other}": usual["zinf"] / usual[other] for other in usual if "zinf" in usual and other != "zinf"
    }
    print(f"{name}: {usual} {ratios}", file=sys.stderr)
    lines.note({"question": "summary", "model": name, "tokens": args.tokens, "seconds": usual, **ratios})


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=sorted(SHAPES), default=["1.6B", "1.5B", "7B"])
    parser.add_argument("--contestants", nargs="+", choices=_CONTESTANTS, default=list(_CONTESTANTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines to a file, not to standard output")
    parser.add_argument("--tokens", type=int, default=16_384, help="per step; enough to hide transfers behind compute")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--device-memory", default="24GiB", help="of zinf, if memory was not run or did not fit")
    parser.add_argument("--host-memory", default="100GiB")
    parser.add_argument("--compute", choices=["aten", "inductor"], default="inductor")
    parser.add_argument("--child", choices=_CONTESTANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        runs = {"memory": run_memory, "zinf": run_zinf, "late": run_zinf, "fsdp2": run_fsdp2}
        print(json.dumps(runs[args.child](SHAPES[args.only[0]], args)))
        return
    lines = JsonLines("gpu_step", args.json)
    lines.note({"question": "machine", **_describe()})
    before = _read(args.json)
    if args.device == "cuda" and not any(line["question"] == "copies" for line in before):
        for line in measure_rates():
            lines.note(line)
    for name in args.only:
        _compare(name, args, lines, before)


if __name__ == "__main__":
    main()
