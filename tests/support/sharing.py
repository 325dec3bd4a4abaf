"""Which tests share captures and plans with others: ``ZINF_SHARE`` is ``all`` of them, or ``most``, all but every third."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from tests.support.shared_plans import shared_plans
from tests.support.shared_traces import SharedTraces

_traces = SharedTraces()  # of this process
_is_on = False


def shares(test: str) -> bool:
    """Return whether a test shares, by its name."""
    return os.environ.get("ZINF_SHARE", "all") == "all" or zlib.crc32(test.encode()) % 3 > 0


def is_sharing() -> bool:
    """Return whether the code that runs now shares."""
    return _is_on


def num_kept() -> int:
    """Return how many graphs are kept in this process."""
    return _traces.num_traced + _traces.num_split


@contextmanager
def sharing(is_on: bool) -> Iterator[None]:
    """Share captures and plans inside the block, if ``is_on``."""
    global _is_on  # of this process
    before, _is_on = _is_on, is_on
    try:
        with _traces.sharing() if is_on else nullcontext(), shared_plans() if is_on else nullcontext():
            yield
    finally:
        _is_on = before
