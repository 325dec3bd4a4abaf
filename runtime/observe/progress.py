"""Progress lines on standard error while a first call is captured, planned and compiled.

``ZINF_QUIET=1``, or a level above INFO for the logger "zinf_compile", silences them. Where an application's logging
shows INFO, they are records of the logger "zinf_compile.runtime.observe.progress" instead, for its handlers.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from zinf_compile.ir.glossary import printable

_log = logging.getLogger(__name__)
_begun = threading.local()  # ``since``: when the outermost ``timed`` of a thread began


def say(text: str) -> None:
    """Print a progress line; inside a ``timed`` block with the seconds since the outermost one began."""
    since = getattr(_begun, "since", None)
    _show(text if since is None else f"{text} ({time.perf_counter() - since:.1f} s)")


@contextmanager
def timed(begin: str | None, end: str) -> Iterator[None]:
    """Print ``begin``, if given, and then ``end`` with the seconds that the block took, unless it raises.

    Lines printed inside the outermost block show the seconds since its begin.
    """
    outer, start = getattr(_begun, "since", None), time.perf_counter()
    if begin is not None:
        say(begin)
    if outer is None:
        _begun.since = start
    try:
        yield
    finally:
        _begun.since = outer
    _show(f"{end} in {time.perf_counter() - start:.1f} s")


def _show(text: str) -> None:
    line = printable(text)
    if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
        _log.info("%s", line)
    elif sys.stderr is not None and not _is_silenced():
        with suppress(OSError, ValueError):  # the reader has closed the pipe; that must not fail the run
            print(f"zinf: {line}", file=sys.stderr, flush=True)


def _is_silenced() -> bool:
    """Return whether progress is silenced. A logger whose level was never set does not silence it."""
    levels = [logging.getLogger(name).level for name in ("zinf_compile", __name__)]
    is_off = logging.root.manager.disable >= logging.INFO or max(levels) > logging.INFO
    return is_off or os.environ.get("ZINF_QUIET", "") not in ("", "0")
