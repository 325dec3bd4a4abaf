"""The `zinf` command: imports only the chosen subcommand, so that `zinf --help` needs no torch."""

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from zinf_compile.ir.errors import ZinfError

_COMMANDS = {
    "train": "train a GPT or a transformers model on text within memory budgets, and show predicted beside measured",
    "plan": "say whether a model fits some hardware, how fast it would train there, and what lives where",
    "verify": "train a model within memory budgets and in memory, and say whether the numbers are the same",
    "show": "print a saved plan, and write views of it for a browser if asked to",
    "diff": "compare two saved plans",
    "doctor": "measure this machine, and report limits, missing features and their impact",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `zinf` with these arguments (default: the process's) and return its exit status.

    Our own errors are one sentence on stderr and status 2; Ctrl-C gives 130, a closed pipe 141.
    """
    try:
        try:
            return _dispatch(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here rather than at exit, where a closed pipe can no longer be handled
    except BrokenPipeError:
        # The reader has closed the pipe, as in `zinf show plan.json | head`. Python flushes stdout again at exit; as
        # the documentation of the signal module recommends, that goes to devnull.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the shell's 128 + SIGPIPE


def _dispatch(words: Sequence[str]) -> int:
    args = _make_parser(words).parse_args(words)
    args.words = words  # for ranks, which run the same command
    try:
        status: int = args.run(args)
    except ZinfError as error:
        print(f"zinf {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        reason = f"; {stop}" if str(stop) else ""
        print(f"zinf {args.command}: stopped{reason}", file=sys.stderr)
        return 130  # the shell's 128 + SIGINT
    return status


def _make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zinf", description="ZeRO-Infinity as a PyTorch compiler.")
    parser.add_argument("--version", action="version", version=f"zinf {importlib.metadata.version('zinf_compile')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            module = importlib.import_module(f"zinf_compile.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser
