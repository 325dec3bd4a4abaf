"""Waiting: every wait of the runtime goes through this module, so that none lasts for ever without a message.

After 30 seconds the log says what is waited for, and again each time the wait has doubled. A wait raises if what it
waits for can no longer happen, as the caller determines, and raises on interrupts if the caller allows it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from zinf_compile.ir.errors import StoreError
from zinf_compile.ir.glossary import printable
from zinf_compile.runtime.process.compiling import yielding_turn
from zinf_compile.runtime.process.interrupts import check_interrupt

T = TypeVar("T")
Gone = Callable[[], str | None]  # returns why the awaited event cannot happen any more; None if it still can

SILENT_SECONDS = 30.0
_LOOK_SECONDS = 0.1  # between checks for an interrupt, if the wait may be left
_REST_SECONDS = 1.0  # between checks otherwise
_TURN_SECONDS = 0.01  # between attempts to get a turn
_log = logging.getLogger(__name__)


class _Patience:
    """One wait: the time until its next check, and the check itself."""

    def __init__(self, what: str, *, gone: Gone | None, may_leave: bool, timeout: float | None = None) -> None:
        self._what = what
        self._gone = gone
        self._may_leave = may_leave
        self._start = time.monotonic()
        self._timeout = timeout
        self._next_word = SILENT_SECONDS
        self._was_gone = False
        if may_leave:
            check_interrupt()

    @property
    def seconds(self) -> float:
        """Return how long to wait until the next check."""
        rest = _LOOK_SECONDS if self._may_leave else _REST_SECONDS
        return rest if self._timeout is None else max(0.0, min(rest, self._start + self._timeout - time.monotonic()))

    @property
    def is_over(self) -> bool:
        """Return whether the caller's timeout has passed."""
        return self._timeout is not None and time.monotonic() - self._start >= self._timeout

    def look(self) -> None:
        """Raise if waiting is pointless; log that it takes long."""
        if self._may_leave:
            check_interrupt()
        waited = time.monotonic() - self._start
        if waited >= self._next_word:
            _log.warning("%s: waiting for %.0f seconds now", printable(self._what), waited)
            self._next_word *= 2
        if waited >= _REST_SECONDS and self._gone is not None:
            why = self._gone()
            # Checked twice: the result may be arriving right now although the thread that brings it has already ended.
            if why is not None and self._was_gone:
                raise StoreError(f"{self._what} cannot be waited for any longer: {why}")
            self._was_gone = why is not None


def wait_until(
    condition: threading.Condition,
    is_true: Callable[[], Any],
    what: str,
    *,
    timeout: float | None = None,
    gone: Gone | None = None,
    may_leave: bool = False,
) -> bool:
    """Wait on a condition that the caller holds; return False if ``timeout`` seconds were not enough.

    With ``may_leave`` an interrupt may raise out of the wait.
    """
    if is_true():
        return True
    patience = _Patience(what, gone=gone, may_leave=may_leave, timeout=timeout)
    with yielding_turn():
        while not condition.wait_for(is_true, patience.seconds):
            if patience.is_over:
                return False
            patience.look()
    return True


def wait_future(
    future: "Future[Any]", what: str, *, gone: Gone | None = None, may_leave: bool = False
) -> BaseException | None:
    """Wait for a future; return its error, or None."""
    if not future.done():
        patience = _Patience(what, gone=gone, may_leave=may_leave)
        with yielding_turn():
            while True:
                try:
                    return future.exception(timeout=patience.seconds)
                except TimeoutError:
                    patience.look()
    return future.exception(timeout=0)


def future_result(future: "Future[T]", what: str) -> T:
    """Wait for a future; return its result, or raise its error."""
    wait_future(future, what)
    return future.result(timeout=0)


def join_thread(thread: threading.Thread, what: str) -> None:
    """Wait for a thread to end."""
    if not thread.is_alive():
        return
    patience = _Patience(what, gone=None, may_leave=False)
    with yielding_turn():
        while thread.is_alive():
            thread.join(timeout=patience.seconds)
            patience.look()


def end_pool(pool: ThreadPoolExecutor, what: str) -> None:
    """Shut a pool down, and wait for its calls, except when called by one of its own threads."""
    pool.shutdown(wait=False)
    for thread in list(pool._threads):
        if thread is not threading.current_thread():
            join_thread(thread, what)


def why_pool_is_gone(pool: ThreadPoolExecutor) -> str | None:
    """Return why calls of a pool will never run; None as long as it has a thread."""
    if any(thread.is_alive() for thread in list(pool._threads)):
        return None
    return "its threads have ended"


def wait_for_turn(try_begin: Callable[[], bool], what: str) -> None:
    """Call ``try_begin`` until it succeeds."""
    if try_begin():
        return
    patience = _Patience(what, gone=None, may_leave=False)
    while not try_begin():
        time.sleep(_TURN_SECONDS)
        patience.look()


def wait_for(is_done: Callable[[], bool], what: str, *, look: Callable[[], None]) -> None:
    """Call ``is_done``, which blocks for a moment, until it returns True. In between call ``look``, which may raise.

    An interrupt may raise out of the wait.
    """
    patience = None
    while not is_done():
        patience = patience or _Patience(what, gone=None, may_leave=True)
        patience.look()
        look()


def next_of(queue: "SimpleQueue[T]") -> T:
    """Return the next item of a thread's queue; an idle thread may wait for ever."""
    return queue.get(block=True)


@contextmanager
def holding(lock: Any, what: str) -> Iterator[None]:
    """Hold a lock in this block."""
    patience = None
    while not lock.acquire(timeout=_REST_SECONDS if patience is None else patience.seconds):
        patience = patience or _Patience(what, gone=None, may_leave=True)
        patience.look()
    try:
        yield
    finally:
        lock.release()
