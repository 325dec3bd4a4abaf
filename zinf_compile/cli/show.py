"""``zinf show plan.json``: print a saved plan, and write its predicted timeline as a Chrome trace."""

import argparse
import shutil
from pathlib import Path

from zinf_compile.plan_io import load_plan
from zinf_compile.printing import dump_plan
from zinf_compile.views.chrome_trace import save_chrome_trace

_NARROWEST, _WIDEST = 80, 140  # columns that the dump is readable in
_COLUMNS = 100  # of a pipe or a file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zinf show``."""
    parser.add_argument("plan", type=Path, help="a plan saved as JSON")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="OUT",
        help="also write the predicted timeline as a Chrome trace, for ui.perfetto.dev",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan and return 0; ConfigError or PlanFileError if a file cannot be read or written."""
    plan = load_plan(args.plan)
    columns = shutil.get_terminal_size(fallback=(_COLUMNS, 24)).columns
    print(dump_plan(plan, width=max(_NARROWEST, min(columns, _WIDEST))))
    if args.trace is not None:
        save_chrome_trace(plan, args.trace)
        print(f"\ntrace written to {args.trace}; open it in ui.perfetto.dev")
    return 0
