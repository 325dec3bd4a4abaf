"""Does the whole process stay within its budgets? Anonymous memory above imports, over device_memory plus host_memory.

    python -m benchmarks.process_memory --nvme DIR [--only 57M] [--json FILE]

Each model runs in a fresh process with all defaults, including ``compute="inductor"``: it is built on meta, optimized, and
trained for a few steps. Inductor's C++ compiler runs in its own process, whose memory is not counted.
``after_close`` is what is left above imports after the model is closed and dropped.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.json_lines import JsonLines
from benchmarks.out_of_core import PeakSampler, load_gpt, read_status

_ROOT = Path(__file__).resolve().parents[1]
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Case:
    """A GPT and its budgets in bytes."""

    layers: int
    hidden: int
    vocab: int
    tokens: int
    device_memory: int
    host_memory: int
    compute_dtype: str | None = None


_CASES = {
    "57M": Case(layers=8, hidden=768, vocab=1024, tokens=256, device_memory=208 * _MIB, host_memory=48 * _MIB),
    "119M": Case(layers=12, hidden=896, vocab=1024, tokens=256, device_memory=236 * _MIB, host_memory=32 * _MIB),
    "463M": Case(
        layers=12,
        hidden=1792,
        vocab=256,
        tokens=2048,
        device_memory=600_000_000,
        host_memory=400_000_000,
        compute_dtype="bfloat16",
    ),
}


def measure(case: Case, nvme: str, compute: str | None, steps: int) -> dict[str, object]:
    """Train in this process, which should be fresh; return its peaks."""
    import torch

    import zinf_compile
    from zinf_compile.runtime.process.ram import return_freed_memory

    gpt = load_gpt()
    heads, seq = case.hidden // 64, min(1024, case.tokens)
    optimize = zinf_compile.optimize  # loads the lazy imports
    before, resident_before = read_status("RssAnon"), read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with PeakSampler().running() as sampler:
        with torch.device("meta"):
            config = gpt.GPTConfig(vocab_size=case.vocab, layers=case.layers, hidden=case.hidden, heads=heads, seq=seq)
            model = gpt.GPT(config)
        options: dict[str, object] = {} if compute is None else {"compute": compute}
        if case.compute_dtype is not None:
            options["compute_dtype"] = getattr(torch, case.compute_dtype)
        optimize(
            model,
            init="reset",
            device_memory=case.device_memory,
            host_memory=case.host_memory,
            nvme=nvme,
            **options,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(0)
        peaks = []
        began = time.perf_counter()
        for step in range(steps):
            tokens = torch.randint(0, case.vocab, (case.tokens // seq, seq + 1), generator=generator)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                first_seconds = time.perf_counter() - began
            peaks.append(sampler.peak - before)
            sampler.peak = 0
        zinf_compile.synchronize(model)
    report = zinf_compile.report(model)
    assert report.process is not None
    budget = case.device_memory + case.host_memory
    result = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "compute": compute or "inductor, the default",
        "budgets": budget,
        "device_memory": case.device_memory,
        "host_memory": case.host_memory,
        "reserved": report.process.reserved,
        "peak_first_step": peaks[0],
        "peak_later_steps": max(peaks[1:]),
        "reported_peak": report.process.measured_peak,
        "ratio": round(max(peaks) / budget, 3),
        "ratio_later_steps": round(max(peaks[1:]) / budget, 3),
        "resident_with_files": read_status("VmHWM") - resident_before,
        "seconds_to_first_step": round(first_seconds, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "replanned": list(report.replanned),
    }
    zinf_compile.close(model)
    del model, optimizer, loss, report
    gc.collect()
    return_freed_memory()
    return {**result, "after_close": read_status("RssAnon") - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", required=True, help="folder on a local disk")
    parser.add_argument("--only", nargs="+", choices=_CASES, default=list(_CASES))
    parser.add_argument("--compute", choices=["aten", "inductor"], help="by default the default")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, help="file to append to")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(measure(_CASES[args.child], args.nvme, args.compute, args.steps)))
        return
    lines = JsonLines("process_memory", args.json)
    for name in args.only:
        command = [sys.executable, "-m", "benchmarks.process_memory", "--nvme", args.nvme, "--steps", str(args.steps)]
        command += ["--child", name, *(["--compute", args.compute] if args.compute else [])]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=_ROOT).stdout
        lines.note({"question": "process memory", "model": name, **json.loads(printed.strip().splitlines()[-1])})


if __name__ == "__main__":
    main()
