"""Runs the garbage collector less often while many long-lived objects are created: imports of torch, captures."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from zinf_compile.runtime.process.interrupts import without_interrupts

_THRESHOLD = (
    50_000  # objects between two collections of the young; with Python's own 700 they take a tenth of a capture
)
_lock = threading.Lock()
_open: set[object] = set()  # blocks, of all threads
_before = (0, 0, 0)


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Make the collector run less often in this block; the old setting is restored when the last of nested blocks ends.

    If it is switched off, or already runs less often, nothing changes.
    """
    block = object()
    try:
        _begin(block)
        yield
    finally:
        _end(block)


@without_interrupts
def _begin(block: object) -> None:
    global _before
    with _lock:
        if not _open:
            _before = gc.get_threshold()
            if 0 < _before[0] < _THRESHOLD:
                gc.set_threshold(_THRESHOLD, *_before[1:])
        _open.add(block)


@without_interrupts
def _end(block: object) -> None:
    with _lock:
        if block not in _open:  # an interrupt came before it was added
            return
        _open.remove(block)
        if not _open and gc.get_threshold()[0] == _THRESHOLD:  # nothing else has changed it meanwhile
            gc.set_threshold(*_before)
