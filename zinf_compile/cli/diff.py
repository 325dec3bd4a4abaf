"""``zinf diff A B``: print the differences of two saved plans. Exit status 0: equal, 1: different, like diff."""

import argparse
from pathlib import Path

from zinf_compile.inspect.plan_difference import dump_plan_difference
from zinf_compile.ir.plan_io import load_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zinf diff``."""
    parser.add_argument("before", type=Path, metavar="A", help="a plan saved as JSON")
    parser.add_argument("after", type=Path, metavar="B", help="the plan to compare it with")


def run(args: argparse.Namespace) -> int:
    """Print the differences; return 0 for equal plans and 1 for different ones. Errors are those of ``load_plan``."""
    before, after = load_plan(args.before), load_plan(args.after)
    print(dump_plan_difference(before, after))
    return 0 if before == after else 1
