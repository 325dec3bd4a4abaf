"""Runs the garbage collector less often while many long-lived objects are created: imports of torch, captures."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from zinf_compile.runtime.process.interrupts import without_interrupts

_THRESHOLD = (
    50_000  # objects between two collections of the young; with Python's own 700 they take a tenth of a capture
)
_lock = threading.Lock()
_before: tuple[int, int, int] | None = None  # the setting to restore; None: it was not changed


class _Block:
    """A block that is open, as long as its frame lives: an interrupt may keep it from saying that it ends."""

    __slots__ = ("__weakref__",)


_open: "weakref.WeakSet[_Block]" = weakref.WeakSet()  # of all threads


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Make the collector run less often in this block; the old setting is restored when the last of nested blocks ends.

    If it is switched off, or already runs less often, nothing changes.
    """
    block = _Block()
    try:
        _begin(block)
        yield
    finally:
        _end(block)


@without_interrupts
def _begin(block: _Block) -> None:
    global _before
    with _lock:
        _open.add(block)
        found = gc.get_threshold()
        if _before is None and 0 < found[0] < _THRESHOLD:
            _before = found
            gc.set_threshold(_THRESHOLD, *found[1:])


@without_interrupts
def _end(block: _Block) -> None:
    global _before
    with _lock:
        _open.discard(block)
        if not _open and _before is not None:
            if gc.get_threshold()[0] == _THRESHOLD:  # nothing else has changed it meanwhile
                gc.set_threshold(*_before)
            _before = None
