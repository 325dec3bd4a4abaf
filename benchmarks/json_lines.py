"""JSON lines that benchmarks print, each with the command that printed it."""

import json
import sys
from pathlib import Path
from typing import Any

# Paths of one machine, meaningless on another.
_PATHS = {"--nvme": "DIR", "--folder": "DIR", "--profile": "DIR", "--json": "FILE"}


def command_line(benchmark: str) -> str:
    """Return the command line of this process as ``python -m benchmarks.NAME ...``, with paths replaced by DIR and FILE."""
    given = sys.argv[1:]
    options = ["", *given]
    shown = [_PATHS.get(option, argument) for option, argument in zip(options, given, strict=False)]
    return " ".join([f"python -m benchmarks.{benchmark}", *shown])


class JsonLines:
    """Lines that go to standard output, or are appended to a file."""

    def __init__(self, benchmark: str, file: Path | None) -> None:
        self._command, self._file = command_line(benchmark), file

    def note(self, line: dict[str, Any]) -> None:
        """Write a line together with the command."""
        text = json.dumps({"command": self._command, **line})
        if self._file is None:
            print(text, flush=True)
            return
        with self._file.open("a") as file:
            file.write(text + "\n")
