"""``zinf show plan.json``: print a saved plan, and write views of it for a browser."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zinf_compile.inspect.chrome_trace import save_chrome_trace
from zinf_compile.inspect.html.page import save_html_page
from zinf_compile.inspect.memory_viz import save_memory_viz
from zinf_compile.inspect.printing import dump_plan
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.plan_io import load_plan

_NARROWEST, _WIDEST = 80, 140  # columns that the dump is readable in
_COLUMNS = 100  # of a pipe or a file


class _View(NamedTuple):
    option: str
    save: Callable[[Plan, Path], None]
    what: str
    how_to_open: str


_VIEWS = (
    _View("html", save_html_page, "a page about the plan, with charts, for any browser", "open it in a browser"),
    _View(
        "trace",
        save_chrome_trace,
        "the predicted timeline as a Chrome trace, for ui.perfetto.dev",
        "open it in ui.perfetto.dev",
    ),
    _View(
        "memory_viz",
        save_memory_viz,
        "the planned device memory as a memory snapshot of PyTorch's, for pytorch.org/memory_viz",
        "open it in pytorch.org/memory_viz",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zinf show``."""
    parser.add_argument("plan", type=Path, help="a plan saved as JSON")
    for view in _VIEWS:
        option = f"--{view.option.replace('_', '-')}"
        parser.add_argument(option, type=Path, metavar="OUT", help=f"also write {view.what}")


def run(args: argparse.Namespace) -> int:
    """Print the plan and return 0; ConfigError or PlanFileError if a file cannot be read or written."""
    plan = load_plan(args.plan)
    columns = shutil.get_terminal_size(fallback=(_COLUMNS, 24)).columns
    print(dump_plan(plan, width=max(_NARROWEST, min(columns, _WIDEST))))
    for view in _VIEWS:
        path = getattr(args, view.option)
        if path is not None:
            view.save(plan, path)
            print(f"\n{view.option.replace('_', ' ')} written to {path}; {view.how_to_open}")
    return 0
