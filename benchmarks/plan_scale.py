"""Question: how long does planning the largest models take, how much memory, and what does the plan predict?

    python -m benchmarks.plan_scale
    python -m benchmarks.plan_scale --only 1T-16

The transformers of the ZeRO-Infinity paper (Fig. 2a: 1.01, 10.05 and 101.47 T parameters, sequences of 1024) are planned
for its DGX-2 nodes with float16 compute, each in a fresh process, as by ``zinf plan gpt --world N``. If a layer, or the
activation checkpoints, do not fit a device of 32 GiB, there is a line with ``refused``, and a second line with the plan
for hypothetical devices of the size that ``what_if`` recommends.

One JSON line each. ``seconds`` is the wall time and ``cpu_seconds`` the CPU time of building the model on meta and planning
it; targets are 60 s and 4 GiB of peak RSS. ``tflops_per_device`` is the FLOP of the graph, recomputation included, over the
simulated time; the paper measured 49 for 0.5 to 5 T and 34 for 20 T on 512 devices. ``smallest_num_nodes`` is the least
number of nodes on which the model fits.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

import zinf_compile
from benchmarks.json_lines import command_line
from benchmarks.out_of_core import read_status
from zinf_compile.cli.planned_models import Sizes, find_model
from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.hardware.rates import with_rates
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware
from zinf_compile.passes.planner.search.planner import Request, does_fit
from zinf_compile.passes.planner.simulator.simulate import simulate
from zinf_compile.passes.planner.simulator.summary import tell_bound

_ROOT = Path(__file__).resolve().parents[1]
_SEQUENCE = 1024
_MOST_NODES = 2**10

Answer = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a number of ranks, and the device memory to plan for if 32 GiB are not enough."""

    layers: int
    hidden: int
    heads: int
    batch: int
    num_ranks: int
    what_if: str


CASES = {
    "1T-16": Case(layers=128, hidden=25600, heads=256, batch=1, num_ranks=16, what_if="64 GiB"),
    "1T-16-batch4": Case(layers=128, hidden=25600, heads=256, batch=4, num_ranks=16, what_if="64 GiB"),
    "1T-512": Case(layers=128, hidden=25600, heads=256, batch=1, num_ranks=512, what_if="64 GiB"),
    "1T-512-batch4": Case(layers=128, hidden=25600, heads=256, batch=4, num_ranks=512, what_if="64 GiB"),
    "10T-512": Case(layers=195, hidden=65536, heads=512, batch=4, num_ranks=512, what_if="256 GiB"),
    "101T-1024": Case(layers=315, hidden=163840, heads=1024, batch=4, num_ranks=1024, what_if="2 TiB"),
}


def plan_case(case: Case, hardware: Hardware) -> Iterator[Answer]:
    """Yield the line of a case on some hardware, or a line that says why it was refused."""
    start = _Start(time.perf_counter(), time.process_time())
    sizes = Sizes(layers=case.layers, hidden=case.hidden, heads=case.heads, batch=case.batch, seq=_SEQUENCE)
    subject = find_model("gpt", sizes)
    try:
        plan = zinf_compile.plan(
            subject.model, subject.inputs, hardware=hardware, compute_dtype="float16", world=case.num_ranks
        )
    except CapacityError as error:
        yield {"refused": str(error), **_measured(start)}
        return
    measured = _measured(start)
    assert plan.request is not None
    step_seconds = simulate(plan.plan).step_seconds
    yield {
        **measured,
        "num_parameters": sum(parameter.numel() for parameter in subject.model.parameters()),
        "num_ticks": plan.num_ticks,
        "policy": plan.activations.policy,
        "device_peak": plan.tier(Tier.DEVICE).predicted_peak,
        "host_peak": plan.tier(Tier.HOST).predicted_peak,
        "nvme_peak": plan.tier(Tier.NVME).predicted_peak,
        "step_seconds": step_seconds,
        "phases": {str(phase): seconds for phase, seconds in simulate(plan.plan).phase_seconds},
        "tflops_per_device": _flops(plan) / step_seconds / 1e12,
        "bound_by": tell_bound(simulate(plan.plan)),
        "smallest_num_nodes": smallest_num_nodes(plan.request),
    }


class _Start(NamedTuple):
    seconds: float
    cpu_seconds: float


def _measured(start: _Start) -> Answer:
    return {
        "seconds": time.perf_counter() - start.seconds,
        "cpu_seconds": time.process_time() - start.cpu_seconds,
        "peak_rss": read_status("VmHWM"),
    }


def _flops(plan: zinf_compile.Plan) -> int:
    assert plan.request is not None
    graph = next(graph for graph in plan.request.candidates if graph.policy is plan.activations.policy)
    return sum(op.num_flops for op in graph.ops)


def smallest_num_nodes(request: Request) -> int:
    """Return the least number of nodes on which the request fits, all their devices being ranks."""
    low, high = 0, _MOST_NODES  # low is too few, high is enough
    while high - low > 1:
        middle = (low + high) // 2
        num_ranks = middle * request.hardware.devices_per_node
        asked = replace(request, num_ranks=num_ranks, hardware=request.hardware.with_world(num_ranks))
        low, high = (low, middle) if does_fit(asked) else (middle, high)
    return high


def run_in_child(name: str, *options: str) -> list[Answer]:
    """Return the lines of a case from a fresh process."""
    command = [sys.executable, "-m", "benchmarks.plan_scale", "--here", "--only", name, *options]
    printed = subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(CASES), help="one case instead of all")
    parser.add_argument("--here", action="store_true", help="run in this process and measure its peak")
    parser.add_argument("--what-if", metavar="SIZE", help="device memory to plan for")
    args = parser.parse_args()
    names = tuple(CASES) if args.only is None else (args.only,)
    if args.here:
        hardware = load_hardware("dgx2")
        if args.what_if is not None:
            hardware = with_rates(hardware, device_memory=args.what_if)
        for answer in plan_case(CASES[names[0]], hardware):
            print(json.dumps(answer), flush=True)
        return
    command = command_line("plan_scale")
    for name in names:
        case = CASES[name]
        lines = [({}, answer) for answer in run_in_child(name)]
        if any("refused" in answer for _, answer in lines):
            lines += [({"what_if": case.what_if}, answer) for answer in run_in_child(name, "--what-if", case.what_if)]
        for what_if, answer in lines:
            shape = {field: getattr(case, field) for field in ("layers", "hidden", "heads", "batch", "num_ranks")}
            head = {"date": date.today().isoformat(), "command": command, "case": name, "hardware": "dgx2", **shape}
            print(json.dumps({**head, **what_if, **answer}), flush=True)


if __name__ == "__main__":
    main()
