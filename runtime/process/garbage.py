"""Runs the garbage collector less often while many long-lived objects are created: imports of torch, captures."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLD = (
    50_000  # objects between two collections of the young; with Python's own 700 they take a tenth of a capture
)
_lock = threading.Lock()
_open = 0  # blocks, of all threads
_before = (0, 0, 0)


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Make the collector run less often in this block; the old setting is restored when the last of nested blocks ends.

    If it is switched off, or already runs less often, nothing changes.
    """
    global _open, _before
    with _lock:
        if _open == 0:
            _before = gc.get_threshold()
            if 0 < _before[0] < _THRESHOLD:
                gc.set_threshold(_THRESHOLD, *_before[1:])
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if _open == 0 and gc.get_threshold()[0] == _THRESHOLD:  # nothing else has changed it meanwhile
                gc.set_threshold(*_before)
