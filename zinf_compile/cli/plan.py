"""`zinf plan`: whether a model fits some hardware, how fast it would train there, and what lives where."""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

import zinf_compile
from zinf_compile.cli.optimizers import find_optimizer
from zinf_compile.cli.planned_models import add_model_arguments, find_model, sizes_of
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.inspect.printing import dump_plan
from zinf_compile.inspect.purchases import NAMES, PER_GIB, check_prices
from zinf_compile.inspect.text.text_layout import make_table
from zinf_compile.ir.copies import Code
from zinf_compile.ir.errors import CapacityError, ConfigError
from zinf_compile.ir.glossary import format_seconds
from zinf_compile.ir.pipeline import PipelineSchedule
from zinf_compile.ir.plan_io import plan_to_json
from zinf_compile.passes.planner.cost.costs import ops_seconds, unfused
from zinf_compile.passes.planner.memory.policies import compute_seconds
from zinf_compile.passes.planner.simulator.simulate import simulate

_NARROWEST, _WIDEST = 80, 140  # columns that the dump is readable in
_COLUMNS = 100  # of a pipe or a file
_LEARNING_RATE = 1e-3  # of no consequence: nothing is updated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zinf plan``."""
    add_model_arguments(parser)
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
    budget.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="tensor-parallel ranks, in one node, that divide the weights of each layer (default: 1)",
    )
    budget.add_argument(
        "--pp",
        type=int,
        default=1,
        metavar="N",
        help="pipeline stages; what --tp and --pp leave of --world is data-parallel (default: 1)",
    )
    budget.add_argument(
        "--accumulate",
        type=int,
        metavar="N",
        help="micro-batches of a step, of all data-parallel ranks together (default: one of each for every stage)",
    )
    budget.add_argument(
        "--stage",
        type=int,
        choices=(1, 2, 3),
        default=3,
        help="of ZeRO, over the data-parallel ranks, as of optimize (default: 3)",
    )
    budget.add_argument(
        "--schedule",
        choices=("rounds",),
        help="ranks of one node have stages of the model and compute them for the batches of all, as of optimize; tells how "
        "ZeRO stage 3 compares (default: ZeRO)",
    )
    budget.add_argument(
        "--reduce",
        choices=("ordered", "fast"),
        default="ordered",
        help="how ranks add up gradients, as of optimize (default: ordered)",
    )
    budget.add_argument("--device-memory", metavar="SIZE", help="default: that of one device of the hardware")
    budget.add_argument("--host-memory", metavar="SIZE", help="default: one device's share of the hardware's")
    budget.add_argument("--nvme-memory", metavar="SIZE", help="default: one device's share of the hardware's")
    budget.add_argument(
        "--nvme-write-budget", metavar="SIZE/day", help="the most to write, as 2TB/day (default: no limit)"
    )
    budget.add_argument("--reserve-memory", metavar="SIZE", help="of the device, left to Python and the allocator")
    how = parser.add_argument_group("how it is trained")
    how.add_argument("--compute-dtype", metavar="DTYPE", help="default: the parameters' own")
    how.add_argument(
        "--state-dtype", choices=tuple(map(str, Code)), help="store optimizer state in fewer bits (default: exactly)"
    )
    how.add_argument(
        "--frozen-dtype",
        choices=("int8",),
        help="store frozen weights of linear layers in fewer bits (default: exactly)",
    )
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
    ask = parser.add_argument_group("questions")
    ask.add_argument(
        "--tokens-to-hide-disk",
        action="store_true",
        help="how many tokens a step needs until compute hardly waits for the disk; capturing takes longer",
    )
    ask.add_argument(
        "--what-to-buy", action="store_true", help="which of memory, disk, device and link would shorten the step"
    )
    ask.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME=PRICE",
        help=f"for --what-to-buy: {' and '.join(PER_GIB)} per GiB; {', '.join(NAMES[len(PER_GIB) :])} each",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan and return 0; 1 if the model does not fit, with the smallest budget that works on stderr."""
    prices = _read_prices(args)
    optimizer = find_optimizer(args.optimizer, _LEARNING_RATE)
    with _progress(f"building {args.model}"):
        subject = find_model(args.model, sizes_of(args))
    budgets = ("device_memory", "host_memory", "nvme_memory", "nvme_write_budget", "reserve_memory")
    names = (*budgets, "compute_dtype", "state_dtype", "frozen_dtype", "compute", "stage", "reduce")

    def plan_by(schedule: str | None) -> PlanView:
        with _progress(f"planning {type(subject.model).__name__}"):
            return zinf_compile.plan(
                subject.model,
                subject.inputs,
                hardware=args.hardware,
                nvme=args.nvme,
                optimizer=optimizer,
                train=not args.inference,
                dynamic=args.tokens_to_hide_disk,
                world=args.world,
                replicas=args.replicas,
                tp=args.tp,
                pp=args.pp,
                accumulate=args.accumulate,
                schedule=schedule,
                **{name: getattr(args, name) for name in names},
            )

    try:
        plan = plan_by(args.schedule)
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
    if args.schedule is not None:
        print(_compare_schedules(plan, lambda: plan_by(None)))
    if args.tokens_to_hide_disk:
        with _progress("planning other batches"):
            sentence = _describe_tokens(plan)
        print(sentence)
    if args.what_to_buy:
        with _progress("planning with what could be bought"):
            table = _list_purchases(plan, prices)
        print("\n".join(table))
    return 0


def _compare_schedules(plan: PlanView, plan_sharded: Callable[[], PlanView]) -> str:
    """Return how long a step in rounds takes, and one of ZeRO stage 3 on the same ranks."""
    assert plan.pipeline is not None
    in_rounds = plan.pipeline.step_seconds
    try:
        sharded = simulate(plan_sharded().plan).step_seconds
    except CapacityError as error:
        return f"in rounds a step takes {format_seconds(in_rounds)}; with ZeRO stage 3 it does not fit: {error}"
    which, times = ("rounds are", sharded / in_rounds) if in_rounds < sharded else ("stage 3 is", in_rounds / sharded)
    return (
        f"a step takes {format_seconds(in_rounds)} in rounds, and {format_seconds(sharded)} with ZeRO stage 3: {which} "
        f"{times:.2f} times as fast"
    )


def _read_prices(args: argparse.Namespace) -> dict[str, float]:
    """Return the prices given. ConfigError for one that is not NAME=NUMBER, or without anything to price."""
    if args.price and not args.what_to_buy:
        raise ConfigError("--price is for --what-to-buy; add it, or leave out the prices")
    if args.json and (args.what_to_buy or args.tokens_to_hide_disk):
        raise ConfigError("--json prints the plan alone; ask questions without it")
    prices = {}
    for given in args.price:
        name, _, price = given.partition("=")
        try:
            prices[name] = float(price)
        except ValueError as error:
            raise ConfigError(f"--price {given} is not NAME=PRICE, such as ram=4") from error
    check_prices(prices)
    return prices


def _describe_tokens(plan: PlanView) -> str:
    tokens = plan.tokens_to_hide_disk()
    if tokens is None:
        return (
            "even the largest batch that fits does not hide the disk; --what-to-buy says what would make a step shorter"
        )
    return f"with {tokens:,} tokens a step the disk is hidden behind compute"


def _list_purchases(plan: PlanView, prices: Mapping[str, float]) -> list[str]:
    """Return a table of what could be bought; with prices, also what they save per 1,000 of the money."""
    rows: list[Sequence[str]] = [("as it is", format_seconds(simulate(plan.plan).step_seconds), "", "", "")]
    for each in plan.what_to_buy(prices):
        saved = format_seconds(each.saved_seconds) if each.saved_seconds else "nothing"
        price = "" if each.price is None else f"{each.price:,.10g}"
        per = format_seconds(1000 * each.saved_per_price) if each.saved_per_price else ""
        rows.append((each.what, format_seconds(each.step_seconds), saved, price, per))
    header = ("bought for a rank", "step", "saved", "price", "saved per 1,000")
    columns = len(header) if prices else 3
    cut = [row[:columns] for row in rows]
    return make_table(header[:columns], cut, align="<>>>>"[:columns], width=_COLUMNS, flexible=0)


def _describe_compute(plan: PlanView) -> str:
    """Return which way to compute is planned, in words, and the seconds of forward and backward in it."""
    assert plan.request is not None
    graph = next(graph for graph in plan.request.candidates if graph.policy is plan.activations.policy)
    num_segments = sum(bool(op.inner) for op in graph.ops)
    op_by_op = format_seconds(sum(ops_seconds(unfused(graph), plan.hardware)))
    is_whole = plan.pipeline is None or plan.pipeline.schedule is PipelineSchedule.ROUNDS
    each = "step" if is_whole else "micro-batch"
    if not num_segments:
        return f"computes op by op, {op_by_op} a {each}"
    fused = format_seconds(compute_seconds(graph, plan.hardware))
    return f"computes in {num_segments} compiled segments, {fused} a {each}; op by op it would take {op_by_op}"


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Show on a terminal what takes time; nothing where stderr is a file or a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"{what} ..."):
        yield
