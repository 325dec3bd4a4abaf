"""Question: how close does the planner come to the optimal plan, and how much better is it than simple baselines?

    python -m benchmarks.solver
    python -m benchmarks.solver --only baselines --models gpt-small llama

``exact``: small models, captured as by ``zinf_compile.plan``, within three budgets and with a synchronous step. The exact
solver (HiGHS, over all homes and issue ticks) gives a lower bound on the step time, and a plan if it can. ``over_bound``
is the simulated step of the planner's plan over that bound, 1 or more; ``over_exact`` is the same over the exact plan's
step, if there is one. The bound is the minimum over all candidates, with or without recomputation.

``baselines``: the models of ``accuracy_models.py`` within three budgets. ``over_baseline`` is the planner's step over that
of the best plan with all parameters on one tier, activations kept or recomputed. It must be at most 1, and is null if no
such plan fits the budget.

Both are simulated, for the preset in ``hardware``; nothing is run. Budgets: ``share`` times the least device memory with
which the planner finds a plan, and a quarter of the states on the host. One JSON line each, and a last one with medians.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import torch
from torch import nn

import zinf_compile
from benchmarks.accuracy_models import MODELS
from benchmarks.json_lines import command_line
from benchmarks.oracles.baselines import baseline_plans
from benchmarks.oracles.exact import plan_exactly
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.search.planner import Request, make_plan, minimum_device_memory
from zinf_compile.passes.planner.simulator.simulate import simulate

_HARDWARE = "laptop-16g"
_SHARES = (1.0, 1.5, 2.5)  # of the least device memory
_HOST_SHARE = 4  # the host budget is a fourth of the states
_LEAST_HOST = 2 * 2**20  # half of it for staging

Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Small:
    """A model on meta that is small enough for the exact solver, and its inputs."""

    model: nn.Module
    inputs: object


def _mlp(layers: int, width: int) -> Small:
    return Small(model=nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))), inputs=torch.empty(64, width))


def _gpt(layers: int) -> Small:
    from examples.gpt import GPT, GPTConfig

    tokens = torch.empty(2, 64, dtype=torch.int64)
    config = GPTConfig(vocab_size=512, layers=layers, hidden=256, heads=4, seq=64)
    return Small(model=GPT(config), inputs=(tokens, tokens))


SMALL: dict[str, Callable[[], Small]] = {
    "mlp-3": lambda: _mlp(3, 1024),
    "mlp-5": lambda: _mlp(5, 1024),
    "mlp-8": lambda: _mlp(8, 512),
    "gpt-1": lambda: _gpt(1),
    "gpt-2": lambda: _gpt(2),
}


def capture(model: nn.Module, inputs: object, **options: object) -> Request:
    """Return the planning request of a model on the hardware, with a host budget that is a share of its states."""
    request = zinf_compile.plan(model, inputs, hardware=_HARDWARE, **options).request
    assert isinstance(request, Request)
    states = sum(
        item.compute_nbytes + item.has_two_copies * item.master_nbytes + item.gradient_nbytes + item.state_nbytes
        for item in request.parameters
    )
    return replace(request, config=replace(request.config, host_memory=max(_LEAST_HOST, states // _HOST_SHARE)))


def within_budgets(request: Request) -> Iterator[tuple[Answer, Request]]:
    """Yield the request for each budget, with the fields of its line."""
    least = minimum_device_memory(request)
    for share in _SHARES:
        config = replace(request.config, device_memory=int(least * share))
        said = {"share": share, "device_memory": config.device_memory, "host_memory": config.host_memory}
        yield said, replace(request, config=config)


def compare_with_exact(name: str, *, seconds: float) -> Iterator[Answer]:
    """Yield a line for each budget of a small model; the solver gets ``seconds`` for each candidate."""
    with torch.device("meta"):
        small = SMALL[name]()
    for said, request in within_budgets(capture(small.model, small.inputs, overlap_step=False)):
        planned, took = _timed(lambda request=request: simulate(make_plan(request)).step_seconds)
        begun = time.perf_counter()
        with _stdout_on_stderr():
            found = [plan_exactly(request, graph, seconds=seconds) for graph in request.candidates]
        exact = [each for each in found if each is not None]
        bound = min(each.bound_seconds for each in exact)
        best = min((simulate(each.plan).step_seconds for each in exact if each.plan is not None), default=None)
        yield {
            "question": "exact",
            "model": name,
            "num_ticks": [graph.num_ticks for graph in request.candidates],
            "num_parameters": len(request.parameters),
            **said,
            "planned_seconds": planned,
            "bound_seconds": bound,
            "exact_seconds": best,
            "over_bound": planned / bound,
            "over_exact": None if best is None else planned / best,
            "is_optimal": all(each.is_optimal for each in exact),
            "planning_seconds": took,
            "solver_seconds": time.perf_counter() - begun,
        }


def compare_with_baselines(name: str) -> Iterator[Answer]:
    """Yield a line for each budget of a model."""
    entry = MODELS[name]
    with torch.device("meta"):
        workload = entry.build()
    options = {} if entry.compute_dtype is None else {"compute_dtype": entry.compute_dtype}
    for said, request in within_budgets(capture(workload.model, workload.batch, **options)):
        (plan, planned), took = _timed(lambda request=request: _with_seconds(make_plan(request)))
        baselines = [(simulate(each.plan).step_seconds, each) for each in baseline_plans(request)]
        best, baseline = min(baselines, key=lambda item: item[0], default=(None, None))
        yield {
            "question": "baselines",
            "model": name,
            **said,
            "planned_seconds": planned,
            "policy": plan.activations.policy,
            "num_baselines": len(baselines),
            "baseline_seconds": best,
            "baseline": None if baseline is None else f"{baseline.home}, {baseline.policy}",
            "over_baseline": None if best is None else planned / best,
            "planning_seconds": took,
        }


def summarize(lines: Iterable[Answer]) -> Answer:
    """Return medians and worst cases of the ratios."""
    lines = list(lines)
    summary: Answer = {"question": "summary"}
    for name in ("over_bound", "over_exact", "over_baseline"):
        ratios = [line[name] for line in lines if line.get(name) is not None]
        if ratios:
            summary |= {f"median_{name}": statistics.median(ratios), f"worst_{name}": max(ratios)}
    return summary


def _with_seconds(plan: Plan) -> tuple[Plan, float]:
    return plan, simulate(plan).step_seconds


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    return call(), time.perf_counter() - begun


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Keep standard output to JSON lines: HiGHS prints to the file descriptor, past ``sys.stdout``."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("exact", "baselines"), help="one question instead of both")
    parser.add_argument("--models", nargs="+", choices=[*SMALL, *MODELS], default=[*SMALL, *MODELS])
    parser.add_argument("--seconds", type=float, default=30.0, help="solver's limit for each candidate and budget")
    args = parser.parse_args()
    command = command_line("solver")
    lines: list[Answer] = []

    def note(line: Answer) -> None:
        lines.append(line)
        head = {"date": date.today().isoformat(), "command": command, "hardware": _HARDWARE}
        print(json.dumps({**head, **line}), flush=True)

    for name in args.models:
        if name in SMALL and args.only != "baselines":
            for line in compare_with_exact(name, seconds=args.seconds):
                note(line)
        if name in MODELS and args.only != "exact":
            for line in compare_with_baselines(name):
                note(line)
    note(summarize(lines))


if __name__ == "__main__":
    main()
