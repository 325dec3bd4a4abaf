"""`zinf verify`: whether a model trains within budgets as it does in memory with plain PyTorch."""

import argparse
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

import zinf_compile
from zinf_compile.cli.optimizers import find_optimizer, make_optimizer
from zinf_compile.cli.planned_models import add_model_arguments, find_model, sizes_of

_BUDGETS = ("device_memory", "host_memory", "nvme_memory", "reserve_memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zinf verify``."""
    add_model_arguments(parser)
    budget = parser.add_argument_group("budgets, as of optimize")
    budget.add_argument("--device-memory", metavar="SIZE", help="what compute may use at once, e.g. 128MiB")
    budget.add_argument("--host-memory", metavar="SIZE", help="RAM for states and transfers")
    budget.add_argument("--nvme-memory", metavar="SIZE", help="of the disk")
    budget.add_argument("--reserve-memory", metavar="SIZE", help="of --device-memory, left to Python; auto or 0")
    budget.add_argument("--nvme", type=Path, metavar="FOLDER", help="for the rest (default: a temporary folder here)")
    how = parser.add_argument_group("how it is trained")
    how.add_argument("--device", metavar="NAME", help="where compute runs, as cuda (default: cpu)")
    how.add_argument("--compute-dtype", metavar="DTYPE", help="default: the parameters' own")
    how.add_argument(
        "--compute",
        choices=("inductor", "aten"),
        default="inductor",
        help="how captured graphs run: each block compiled, or op by op (default: inductor)",
    )
    how.add_argument("--optimizer", default="adamw", metavar="NAME", help="a class of torch.optim (default: adamw)")
    how.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
    how.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps (default: 3)")


def run(args: argparse.Namespace) -> int:
    """Print the verdict; return 0 if all is right and within its budgets, else 1."""
    kind = find_optimizer(args.optimizer, args.lr)
    torch.manual_seed(0)  # the same values and inputs every time
    subject = find_model(args.model, sizes_of(args), device=args.device or "cpu")
    with ExitStack() as stack:
        nvme = args.nvme or stack.enter_context(tempfile.TemporaryDirectory(prefix=".zinf-", dir="."))
        options = {name: getattr(args, name) for name in (*_BUDGETS, "device", "compute_dtype", "compute")}
        verdict = zinf_compile.verify(
            subject.model,
            subject.inputs,
            optimizer=partial(make_optimizer, kind, lr=args.lr),
            steps=args.steps,
            nvme=nvme,
            **options,
        )
    print(verdict)
    return 0 if verdict.is_right and verdict.is_within_budgets else 1
