"""How much slower is training on a GPU with parameters and optimizer states on the host than with all in device memory?

    python -m benchmarks.gpu_step
    python -m benchmarks.gpu_step --only 1.6B --tokens 4096 --compute aten --json gpu.jsonl
    python -m benchmarks.gpu_step --only 1.6B --contestants zinf --profile traces --json gpu.jsonl

For each GPT, in separate processes, one after the other:

    memory    all in device memory: torch.compile, bfloat16 autocast, fused AdamW, where it fits
    zinf      parameters and optimizer states on the host, with a quarter of the device memory that ``memory`` used,
              or with ``--device-memory``
    late      as ``zinf``, with no update ahead of ``step()`` (``speculate=False``)
    fsdp2     FSDP2 on one rank with CPUOffloadPolicy, bfloat16 parameters in compute, fused AdamW

JSON lines go to standard output, or to ``--json``: one per run with the seconds of its steps and its device memory, and
one per model with the ratios. What a file has already is not measured again, nor what failed, took longer than
``--limit`` or was skipped, unless ``--again`` asks for it. The target for zinf over memory is at most
1.10. The first lines are rates of the machine: copies through the link that training uses over plain pinned copies
(target: at least 0.90), and the bandwidth of our kernels, which decode and encode optimizer state, over that of a copy
on the device.
``--profile`` adds two more steps: one under torch's profiler, and one of zinf under its recorder. Their Chrome traces go
to a folder, and the line has the seconds of copies and of kernels.
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
_SELF = [sys.executable, "-m", "benchmarks.gpu_step"]
_LIMIT_SECONDS = 400  # below the nine minutes of gpu.sh, so that a run which takes longer is noted
_WARM_UP_STEPS = 3
_CONTESTANTS = ("memory", "zinf", "late", "fsdp2")
_PROCESS = 4 * 2**30  # bytes of host memory beside the states: torch, CUDA and what the loop makes
_BYTES = 2**28  # of a copy whose rate is measured
_ELEMENTS = 2**26  # of the chunk on which a kernel is measured


@dataclass(frozen=True)
class Shape:
    """The shape of a GPT, and the tokens of each of its sequences."""

    layers: int
    hidden: int
    head_width: int = 128
    sequence: int = 2048
    vocabulary: int = 32_000

    @property
    def heads(self) -> int:
        """How many attention heads there are."""
        return self.hidden // self.head_width


SHAPES = {
    "tiny": Shape(layers=2, hidden=64, head_width=64, sequence=32),
    "0.4B": Shape(layers=24, hidden=1024, head_width=64),
    "1.6B": Shape(layers=12, hidden=3072),
}
# Those of ``benchmarks.predictions``, which has predicted what their steps take on one H200.
PREDICTED = {
    "1.5B": Shape(layers=48, hidden=1600, head_width=64, sequence=1024, vocabulary=50_257),
    "7B": Shape(layers=36, hidden=4096, sequence=1024, vocabulary=50_257),
    "13B": Shape(layers=40, hidden=5120, sequence=1024, vocabulary=50_257),
    "32B": Shape(layers=64, hidden=6400, sequence=1024, vocabulary=50_257),
}
SHAPES |= PREDICTED


def _build(shape: Shape) -> Any:
    import torch

    sys.path.insert(0, str(_ROOT / "examples"))
    from gpt import GPT, GPTConfig

    config = GPTConfig(
        vocab_size=shape.vocabulary,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
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
    shape: Shape, args: argparse.Namespace, loss_of: Callable[[Any], Any], optimizer: Any, recorded: Any = None
) -> dict[str, Any]:
    """Return the seconds of some steps, after warm-up steps, and what more steps under profilers have shown.

    ``first_seconds`` are those of the first of all, which captures and compiles. ``recorded`` is a model of ours, of which a
    step is recorded as well.
    """
    import torch

    batch = max(1, args.tokens // shape.sequence)
    drawn = torch.randint(shape.vocabulary, (batch, shape.sequence + 1), device=args.device)

    def step() -> float:
        start = time.perf_counter()
        loss = loss_of({"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # synchronises, as a loop that prints the loss does: the previous step has ended on the device
        return time.perf_counter() - start

    first, *others = (step() for _ in range(_WARM_UP_STEPS + args.rounds))
    result: dict[str, Any] = {"first_seconds": first, "seconds": others[_WARM_UP_STEPS - 1 :]}
    result["device_nbytes"] = _peak(args.device)
    return result if args.profile is None else {**result, "profile": _profile(step, args, recorded)}


def _profile(step: Callable[[], float], args: argparse.Namespace, recorded: Any) -> dict[str, Any]:
    """Run a step under torch's profiler, and one of ours under the recorder; return what lanes took, and write traces."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    import zinf_compile

    args.profile.mkdir(parents=True, exist_ok=True)
    name = f"{args.only[0]}-{args.tokens}-{args.compute}-{args.child}"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if args.device == "cuda" else [])]
    with profile(activities=activities) as profiled:
        taken = step()
        if args.device == "cuda":
            torch.cuda.synchronize()
    profiled.export_chrome_trace(str(args.profile / f"{name}-torch.json.gz"))
    lanes: dict[str, float] = {}
    for event in profiled.events():
        if event.device_type.name != "CPU" and not event.is_user_annotation:
            kind = " ".join(event.name.split()[:2]) if event.name.startswith(("Memcpy", "Memset")) else "kernels"
            lanes[kind] = lanes.get(kind, 0.0) + event.time_range.elapsed_us() / 1e6
    result: dict[str, Any] = {"step_seconds": taken, "device_seconds": lanes}
    if recorded is not None:
        with zinf_compile.record(recorded) as recording:
            result["recorded_step_seconds"] = step()
        recording.to_chrome_trace(args.profile / f"{name}-recorded.json")
        busy: dict[str, float] = {}
        for event in recording.events:
            busy[event.lane] = busy.get(event.lane, 0.0) + event.seconds
        result["recorded_seconds"] = busy
    return result


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

    return _train(shape, args, loss_of, optimizer)


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
    trained = _train(shape, args, lambda batch: model(**batch), optimizer, recorded=model)
    report = zinf_compile.report(model)
    return {
        **trained,
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
        result = _train(shape, args, lambda batch: model(**batch), optimizer)
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


def _lacking(contestant: str, name: str) -> str | None:
    """Return why this machine has too little memory for FSDP2, whose states are all on the host; None for others."""
    if contestant != "fsdp2":
        return None
    from zinf_compile.ir.config import free_memory

    parameters = [parameter.nbytes for parameter in _build(SHAPES[name]).parameters()]
    # Parameters and gradients are pinned, which torch rounds up to powers of two; AdamW's moments are not.
    needed = sum(2 * 2 ** (nbytes - 1).bit_length() + 2 * nbytes for nbytes in parameters) + _PROCESS
    free = free_memory()
    if needed <= free:
        return None
    return f"its states need {needed / 1e9:.0f} GB of host memory, and {free / 1e9:.0f} GB are free"


def _allocator() -> str:
    """Return how torch's allocator is configured: like zinf's, unless the user says otherwise."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def _child(contestant: str, name: str, args: argparse.Namespace, device_memory: str) -> dict[str, Any]:
    """Return what a process that trains has printed, or why there is nothing."""
    if (lacking := _lacking(contestant, name)) is not None:
        return {"skipped": lacking}
    command = [*_SELF, "--child", contestant, "--only", name]
    for option in ("tokens", "device", "rounds", "host_memory", "compute"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    command += ["--device-memory", device_memory]
    if args.profile is not None:
        command += ["--profile", str(args.profile.resolve())]
    result: dict[str, Any] = _call(command, args)
    return result


def _call(command: list[str], args: argparse.Namespace) -> Any:
    """Return the JSON in the last line that a process has printed, or how it failed."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": _allocator()}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, cwd=_ROOT, env=environment, timeout=args.limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": [f"it was stopped after {args.limit:g} seconds"], "limit_seconds": args.limit}
    if ended.returncode:
        return {"failed": ended.stderr.strip().splitlines()[-4:], "status": ended.returncode}
    return json.loads(ended.stdout.strip().splitlines()[-1])


def _read(file: Path | None) -> list[dict[str, Any]]:
    """Return the lines that earlier runs have left."""
    return [] if file is None or not file.exists() else [json.loads(line) for line in file.read_text().splitlines()]


def _question(contestant: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what tells a run from others: only ours depends on budgets and on how it computes."""
    asked = {
        "question": "step",
        "model": name,
        "tokens": args.tokens,
        "contestant": contestant,
        "allocator": _allocator(),
        "profiled": args.profile is not None and contestant in args.contestants,
    }
    is_ours = contestant in ("zinf", "late")
    return {**asked, "compute": args.compute, "budget": args.device_memory or "a quarter"} if is_ours else asked


def _compare(name: str, args: argparse.Namespace, lines: JsonLines, before: list[dict[str, Any]]) -> None:
    """Run each contestant that no earlier run has settled."""
    questions = {contestant: _question(contestant, name, args) for contestant in _CONTESTANTS}
    found = {
        contestant: line for contestant, asked in questions.items() for line in before if asked.items() <= line.items()
    }
    settled = {contestant for contestant, line in found.items() if "seconds" in line or not args.again}
    missing = [contestant for contestant in args.contestants if contestant not in settled]
    for contestant in missing:
        in_memory = found.get("memory", {}).get("device_nbytes", 0)
        device_memory = args.device_memory or (str(in_memory // 4) if in_memory else "24GiB")
        found[contestant] = _child(contestant, name, args, device_memory)
        lines.note({**questions[contestant], "device_memory": device_memory, **found[contestant]})
    usual = {each: statistics.median(run["seconds"]) for each, run in found.items() if "seconds" in run}
    ratios = {
        f"zinf over {other}": usual["zinf"] / usual[other] for other in usual if "zinf" in usual and other != "zinf"
    }
    print(f"{name}, {args.tokens} tokens: {usual} {ratios}", file=sys.stderr)
    if missing:
        summary = {**questions["zinf"], "question": "summary", "contestant": "all"}
        lines.note({**summary, "seconds": usual, **ratios})


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=sorted(SHAPES), default=["1.6B", "1.5B", "7B"])
    parser.add_argument("--contestants", nargs="+", choices=_CONTESTANTS, default=list(_CONTESTANTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines to a file, not to standard output")
    parser.add_argument("--tokens", type=int, default=16_384, help="per step; enough to hide transfers behind compute")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--device-memory", help="of zinf (default: a quarter of memory's, or 24GiB)")
    parser.add_argument("--host-memory", default="100GiB")
    parser.add_argument("--compute", choices=["aten", "inductor"], default="inductor")
    parser.add_argument("--limit", type=float, default=_LIMIT_SECONDS, metavar="SECONDS", help="of each run")
    parser.add_argument("--again", action="store_true", help="run what has failed or was skipped before once more")
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="profile a step of each, and write traces to a folder"
    )
    parser.add_argument("--child", choices=["rates", *_CONTESTANTS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "rates":
        print(json.dumps(measure_rates()))
        return
    if args.child:
        runs = {"memory": run_memory, "zinf": run_zinf, "late": run_zinf, "fsdp2": run_fsdp2}
        print(json.dumps(runs[args.child](SHAPES[args.only[0]], args)))
        return
    lines = JsonLines("gpu_step", args.json)
    before = _read(args.json)
    machine = {"question": "machine", **_describe()}
    if not any(machine.items() <= line.items() for line in before):
        lines.note(machine)
    settled = {"copies"} if args.again else {"copies", "rates"}
    if args.device == "cuda" and settled.isdisjoint(line["question"] for line in before):
        rates = _call([*_SELF, "--child", "rates"], args)
        for line in rates if isinstance(rates, list) else [{"question": "rates", **rates}]:
            lines.note(line)
    for name in args.only:
        _compare(name, args, lines, before)


if __name__ == "__main__":
    main()
