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
from zinf_compile.errors import CapacityError
from zinf_compile.plan_io import plan_to_json
from zinf_compile.printing import dump_plan

_NARROWEST, _WIDEST = 80, 140  # columns that the dump is readable in
_COLUMNS = 100  # of a pipe or a file
_LEARNING_RATE = 1e-3  # of no consequence: nothing is updated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zinf plan``."""
    parser.add_argument(
        "model",
        help="gpt; hf:PATH with a config.json of transformers; or MODULE:FUNCTION, which returns a model and its inputs",
    )
    size = parser.add_argument_group("the model, where it is gpt or hf:")
    for name in ("layers", "hidden", "heads", "vocab"):
        size.add_argument(f"--{name}", type=int, metavar="N", help=f"{name} of the gpt")
    size.add_argument("--batch", type=int, metavar="N", help="sequences per step, of each rank (default: 1)")
    size.add_argument("--seq", type=int, metavar="N", help="tokens per sequence (default: 1024)")
    budget = parser.add_argument_group("where it runs")
    budget.add_argument(
        "--hardware", metavar="NAME", help="a preset, such as h200, or a file with a profile (default: this machine)"
    )
    budget.add_argument("--nvme", type=Path, metavar="DIR", help="of this machine, a folder on the disk to plan for")
    budget.add_argument(
        "--world", type=int, default=1, metavar="N", help="ranks, one a device, that share the model (default: 1)"
    )
    budget.add_argument("--device-memory", metavar="SIZE", help="default: that of one device of the hardware")
    budget.add_argument("--host-memory", metavar="SIZE", help="default: one device's share of the hardware's")
    budget.add_argument("--nvme-memory", metavar="SIZE", help="default: one device's share of the hardware's")
    budget.add_argument("--reserve-memory", metavar="SIZE", help="of the device, left to Python and the allocator")
    how = parser.add_argument_group("how it is trained")
    how.add_argument("--compute-dtype", metavar="DTYPE", help="default: the parameters' own")
    how.add_argument("--optimizer", default="adamw", metavar="NAME", help="a class of torch.optim (default: adamw)")
    how.add_argument("--inference", action="store_true", help="plan a forward alone")
    output = parser.add_argument_group("output")
    output.add_argument("--save", type=Path, metavar="FILE", help="also write the plan, for zinf show and zinf diff")
    output.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan and return 0; 1 if the model does not fit, with the smallest budget that works on stderr."""
    sizes = Sizes(**{name: getattr(args, name) for name in Sizes.__slots__})
    optimizer = find_optimizer(args.optimizer, _LEARNING_RATE)
    with _progress(f"building {args.model}"):
        subject = find_model(args.model, sizes)
    names = ("device_memory", "host_memory", "nvme_memory", "reserve_memory", "compute_dtype")
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
                **{name: getattr(args, name) for name in names},
            )
    except CapacityError as error:
        print(f"zinf plan: it does not fit: {error}", file=sys.stderr)
        return 1
    if args.save is not None:
        plan.save(args.save)
    if args.json:
        print(plan_to_json(plan), end="")
        return 0
    columns = shutil.get_terminal_size(fallback=(_COLUMNS, 24)).columns
    print(dump_plan(plan, width=max(_NARROWEST, min(columns, _WIDEST))))
    return 0


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Show on a terminal what takes time; nothing where stderr is a file or a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"{what} ..."):
        yield
