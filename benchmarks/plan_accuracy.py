"""How accurate are plans? Predicted against measured, for every model of ``accuracy_models.py`` within three budgets.

    python -m benchmarks.plan_accuracy --nvme DIR
    python -m benchmarks.plan_accuracy --nvme DIR --only llama --json llama.jsonl

Before each model the machine is measured as by ``zinf doctor``, in its own process, because the speed of a shared machine
changes within minutes. Then the model trains in a fresh process for each of three budgets: everything in memory; the
least feasible device memory with a host budget of a quarter of the states; and half-way in between. Some steps are timed.
In some more, a thread samples memory every millisecond the way ``zinf_compile.report`` does, and the peaks are compared.

JSON lines go to standard output, or to ``--json``: one for each model and budget, and a last one with medians. The table
on standard error shows measured over predicted: no peak may be over 1.00.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.accuracy_models import MODELS
from benchmarks.json_lines import JsonLines
from zinf_compile.ir.glossary import Phase, Tier

_ROOT = Path(__file__).resolve().parents[1]
_GIB = 2**30
_AMPLE = 8 * _GIB  # of device and host each: more than any model needs
_HOST_SHARE = 4  # the tight host budget is a quarter of the states
_WARM_UP_STEPS = 4  # capture, first touch of optimizer state, planning again
_WATCHED_STEPS = 2
_SAMPLE_SECONDS = 0.001
_TIMEOUT_SECONDS = 300
BUDGETS = ("memory", "tight", "between")  # the other two are derived from the first


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model within one set of budgets."""

    model: str
    budget: str
    device_memory: int
    host_memory: int
    nvme: str
    threads: int
    steps: int
    compute: str


def measure_machine(nvme: str, threads: int) -> None:
    """Measure this machine as ``zinf doctor`` does, and keep the profile even if the machine is busy."""
    import torch

    from zinf_compile.cli.doctor import diagnose
    from zinf_compile.runtime.calibration.measured import keep_measured

    torch.set_num_threads(threads)
    diagnosis = diagnose(Path(nvme), again=True)
    keep_measured(diagnosis.hardware, nvme)
    print(json.dumps({"question": "machine", "load": diagnosis.machine.load, **asdict(diagnosis.hardware)}))


@contextlib.contextmanager
def watched(sample: Callable[[], None]) -> Iterator[None]:
    """Sample memory from a background thread."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(_SAMPLE_SECONDS):
            sample()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure(case: Case) -> dict[str, Any]:
    """Train one model in this process, which should be fresh; return predictions and measurements."""
    import torch

    import zinf_compile
    from zinf_compile.passes.planner.simulator.several_graphs import share_updates
    from zinf_compile.passes.planner.simulator.simulate import simulate
    from zinf_compile.runtime.params.records import record_of

    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    entry = MODELS[case.model]
    workload = entry.build()
    model = workload.model
    zinf_compile.optimize(
        model,
        device_memory=case.device_memory,
        host_memory=case.host_memory,
        nvme=case.nvme,
        compute=case.compute,
        compute_dtype=entry.compute_dtype,
        remake_plan=False,  # the prediction must not be updated from the measurement
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        start = time.perf_counter()
        workload.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    begun = time.perf_counter()
    for _ in range(_WARM_UP_STEPS):
        step()
    warmed_up = time.perf_counter()
    before = num_phases(zinf_compile.report(model))
    seconds = [step() for _ in range(case.steps)]
    timed = zinf_compile.report(model)
    record = record_of(next(model.parameters()))
    assert record is not None
    with watched(record.store.held.sample):
        for _ in range(_WATCHED_STEPS):
            step()
        zinf_compile.synchronize(model)
    report = zinf_compile.report(model)
    assert report.step is not None
    plan = max(report.step_plans, key=lambda plan: plan.num_ticks)
    states = sum(
        item.compute_nbytes + item.master_nbytes + item.gradient_nbytes + item.optimizer_state_nbytes
        for item in plan.placements
    )
    return {
        "question": "case",
        **{name: value for name, value in asdict(case).items() if name != "nvme"},
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_bytes": states,
        "num_graphs": len(report.plans),
        "num_graph_breaks": len(report.graph_breaks),
        "policy": plan.activations.policy,
        "predicted_peaks": {tier.tier: tier.predicted_peak for tier in report.tiers},
        "measured_peaks": {tier.tier: tier.measured_peak for tier in report.tiers},
        "parts": {tier.tier: dict(tier.parts) for tier in plan.tiers},
        "predicted_step_seconds": report.step.predicted_seconds,
        "measured_step_seconds": statistics.median(seconds),
        "step_seconds": seconds,
        "phases": {
            phase.phase: [phase.predicted_seconds, phase.measured_seconds, phase.count - before.get(phase.phase, 0)]
            for phase in timed.phases
        },
        "predicted_stall_seconds": sum(
            simulate(each).stall_seconds for each in share_updates([each.plan for each in report.step_plans])
        ),
        "min_device_memory": max(
            each.what_if(host_memory=tight_host(states)).min_device_memory() for each in report.step_plans
        ),
        "warm_up_seconds": warmed_up - begun,
        "seconds": time.perf_counter() - begun,
    }


def num_phases(report: Any) -> dict[Phase, int]:
    return {phase.phase: phase.count for phase in report.phases}


def tight_host(state_nbytes: int) -> int:
    """Return the host budget that leaves most of a model's states to nvme."""
    return state_nbytes // _HOST_SHARE


def budgets_of(ample: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the device and host budgets of the other two cases, from the results of the first."""
    least, host = ample["min_device_memory"], tight_host(ample["state_bytes"])
    full = {tier: ample["predicted_peaks"][tier] for tier in (Tier.DEVICE, Tier.HOST)}
    return {
        "tight": (least, host),
        "between": ((least + full[Tier.DEVICE]) // 2, (host + full[Tier.HOST]) // 2),
    }


def in_child(environment: dict[str, str], **options: Any) -> dict[str, Any]:
    """Return the result of a fresh process; for a case, its error message if it fails."""
    command = [sys.executable, "-m", "benchmarks.plan_accuracy", "--child", json.dumps(options)]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=_ROOT, env=environment, timeout=_TIMEOUT_SECONDS, check=False
    )
    if ended.returncode:
        return {"question": "failed", **options, "error": ended.stderr.strip().splitlines()[-12:]}
    answer: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return answer


def ratios(line: dict[str, Any]) -> dict[str, float]:
    """Return measured over predicted, for the peak of each used tier and for the step."""
    peaks = {
        tier: line["measured_peaks"][tier] / predicted
        for tier, predicted in line["predicted_peaks"].items()
        if predicted
    }
    return {**peaks, "step": line["measured_step_seconds"] / line["predicted_step_seconds"]}


def summarize(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over all cases, and the cases that exceeded their predicted peak."""
    cases = [line for line in lines if line["question"] == "case"]
    found = [ratios(line) for line in cases]
    return {
        "question": "summary",
        "num_cases": len(cases),
        "num_failed": sum(line["question"] == "failed" for line in lines),
        "exceeded": [
            [line["model"], line["budget"], tier, each[tier]]
            for line, each in zip(cases, found, strict=True)
            for tier in Tier
            if each.get(tier, 0.0) > 1
        ],
        "median_peak_error": {
            tier: statistics.median(1 - each[tier] for each in found if tier in each)
            for tier in Tier
            if any(tier in each for each in found)
        },
        "median_step_error": statistics.median(abs(1 / each["step"] - 1) for each in found) if found else None,
        "median_step_ratio": statistics.median(each["step"] for each in found) if found else None,
    }


def print_table(lines: list[dict[str, Any]], summary: dict[str, Any], console: Console) -> None:
    table = Table(title="measured over predicted")
    for column in ("model", "budget", "device MiB", *Tier, *Phase, "step s", "whole step"):
        table.add_column(column, justify="left" if column in ("model", "budget") else "right")
    for line in lines:
        if line["question"] == "failed":
            table.add_row(line["case"]["model"], line["case"]["budget"], "[bold red]failed[/]")
        if line["question"] != "case":
            continue
        found = ratios(line)
        phases = {name: measured / predicted for name, (predicted, measured, _) in line["phases"].items() if predicted}
        table.add_row(
            line["model"],
            line["budget"],
            f"{line['predicted_peaks'][Tier.DEVICE] / 2**20:,.0f}",
            *(_ratio(found.get(tier), is_bad=found.get(tier, 0.0) > 1) for tier in Tier),
            *(_ratio(phases.get(phase), is_bad=False) for phase in Phase),
            f"{line['measured_step_seconds']:.3f}",
            _ratio(found["step"], is_bad=abs(1 / found["step"] - 1) > 0.15),
        )
    console.print(table)
    console.print(json.dumps(summary, indent=1))


def _ratio(ratio: float | None, *, is_bad: bool) -> str:
    return "" if ratio is None else f"[bold red]{ratio:.2f}[/]" if is_bad else f"{ratio:.2f}"


def answer(options: dict[str, Any]) -> dict[str, Any] | None:
    if "case" in options:
        return measure(Case(**options["case"]))
    measure_machine(options["nvme"], options["threads"])
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", default=".", help="folder on a local disk")
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--budgets", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines to a file, not to standard output")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each")
    parser.add_argument("--compute", choices=["aten", "inductor"], default="aten", help="op by op, or compiled blocks")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        found = answer(json.loads(args.child))
        if found is not None:
            print(json.dumps(found))
        return
    nvme, console = str(Path(args.nvme).resolve()), Console(stderr=True, width=140)
    lines: list[dict[str, Any]] = []
    out = JsonLines("plan_accuracy", args.json)

    def note(line: dict[str, Any]) -> None:
        lines.append(line)
        out.note(line)

    with tempfile.TemporaryDirectory() as cache:  # do not overwrite this machine's cached profile
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        for name in args.only:
            note(in_child(environment, nvme=nvme, threads=args.threads))
            budgets = {"memory": (_AMPLE, _AMPLE)}
            for budget in BUDGETS:
                if budget not in args.budgets and budget != "memory":
                    continue
                if budget not in budgets:
                    continue  # the first case has failed, and is in the table
                device, host = budgets[budget]
                case = Case(
                    model=name,
                    budget=budget,
                    device_memory=device,
                    host_memory=host,
                    nvme=nvme,
                    threads=args.threads,
                    steps=args.steps,
                    compute=args.compute,
                )
                line = in_child(environment, case=asdict(case))
                note(line)
                if budget == "memory" and line["question"] == "case":
                    budgets |= budgets_of(line)
                console.print(f"{name}, {budget}: {line.get('error') or ratios(line)}", style="dim")
    summary = summarize(lines)
    note(summary)
    print_table(lines, summary, console)


if __name__ == "__main__":
    main()
