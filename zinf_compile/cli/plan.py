"""`zinf plan`: whether a model fits some hardware, how fast it would train there, and what lives where."""

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

import zinf_compile
from zinf_compile.cli.optimizers import find_optimizer
from zinf_compile.cli.planned_models import Sizes, find_model
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.inspect.printing import dump_plan
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import format_seconds
from zinf_compile.ir.plan_io import plan_to_json
from zinf_compile.passes.planner.cost.costs import ops_seconds, unfused
from zinf_compile.passes.planner.memory.policies import compute_seconds

_NARROWEST, _WIDEST = 80, 140  # columns that the dump is readable in
_COLUMNS = 100  # of a pipe or a file
_LEARNING_RATE = 1e-3  # of no consequence: nothing is updated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zinf plan``."""
    parser.add_argument(
        "model",
        help="gpt; hf:PATH with a config.json of transformers; or MODULE:FUNCTION, which returns a model and its inputs",
    )
    size = parser.add_argument_group("model options (gpt and hf: only)")
    for name, what in (
        ("layers", "number of layers"),
        ("hidden", "hidden size"),
        ("heads", "number of attention heads"),
        ("vocab", "vocabulary size (default: 50257)"),
    ):
        size.add_argument(f"--{name}", type=int, metavar="N", help=f"{what}; gpt only")
    size.add_argument("--batch", type=int, metavar="N", help="sequences per step, of each rank (default: 1)")
    size.add_argument("--seq", type=int, metavar="N", help="tokens per sequence (default: 1024)")
    budget = parser.add_argument_group("where it runs")
    budget.add_argument(
        "--hardware", metavar="NAME", help="a preset, such as h200, or a file with a profile (default: this machine)"
    )
    budget.add_argument("--nvme", type=Path, metavar="DIR", help="of this machine, a folder on the disk to plan for")
    budget.add_argument(
        "--world", type=int, default=1, metavar="N", help="ranks, one a device, that train the model (default: 1)"
    )
    budget.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="groups of these ranks that keep the whole model each (default: 1)",
    )
    budget.add_argument("--device-memory", metavar="SIZE", help="default: that of one device of the hardware")
    budget.add_argument("--host-memory", metavar="SIZE", help="default: one device's share of the hardware's")
    budget.add_argument("--nvme-memory", metavar="SIZE", help="default: one device's share of the hardware's")
    budget.add_argument("--reserve-memory", metavar="SIZE", help="of the device, left to Python and the allocator")
    how = parser.add_argument_group("how it is trained")
    how.add_argument("--compute-dtype", metavar="DTYPE", help="default: the parameters' own")
    how.add_argument(
        "--compute",
        choices=("inductor", "aten"),
        help="how captured graphs run, as of optimize: each block compiled, or op by op (default: inductor)",
    )
    how.add_argument("--optimizer", default="adamw", metavar="NAME", help="a class of torch.optim (default: adamw)")
    how.add_argument("--inference", action="store_true", help="plan inference only")
    output = parser.add_argument_group("output")
    output.add_argument("--save", type=Path, metavar="FILE", help="also write the plan, for zinf show and zinf diff")
    output.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan and return 0; 1 if the model does not fit, with the smallest budget that works on stderr."""
    sizes = Sizes(**{name: getattr(args, name) for name in Sizes.__slots__})
    optimizer = find_optimizer(args.optimizer, _LEARNING_RATE)
    with _progress(f"building {args.model}"):
        subject = find_model(args.model, sizes)
    names = ("device_memory", "host_memory", "nvme_memory", "reserve_memory", "compute_dtype", "compute")
    try:
        with _progress(f"planning {type(subject.model).__name__}"):
            plan = zinf_compile.plan(
                subject.model,
                subject.inputs,
                hardware=args.hardware,
                nvme=args.nvme,
                optimizer=optimizer,
                train=not args.inference,
                world=args.world,
                replicas=args.replicas,
                **{name: getattr(args, name) for name in names},
            )
    except CapacityError as error:
        print(f"zinf plan: it does not fit: {error}", file=sys.stderr)
        return 1
    if args.save is not None:
        plan.save(args.save)
    if args.json:
        print(plan_to_json(plan.plan), end="")
        return 0
    columns = shutil.get_terminal_size(fallback=(_COLUMNS, 24)).columns
    print(dump_plan(plan.plan, width=max(_NARROWEST, min(columns, _WIDEST))))
    print(_describe_compute(plan))
    return 0


def _describe_compute(plan: PlanView) -> str:
    """Return which way to compute is planned, in words, and the seconds of forward and backward in it."""
    assert plan.request is not None
    graph = next(graph for graph in plan.request.candidates if graph.policy is plan.activations.policy)
    num_segments = sum(bool(op.inner) for op in graph.ops)
    op_by_op = format_seconds(sum(ops_seconds(unfused(graph), plan.hardware)))
    if not num_segments:
        return f"computes op by op, {op_by_op} a step"
    fused = format_seconds(compute_seconds(graph, plan.hardware))
    return f"computes in {num_segments} compiled segments, {fused} a step; op by op it would take {op_by_op}"


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Show on a terminal what takes time; nothing where stderr is a file or a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"{what} ..."):
        yield
