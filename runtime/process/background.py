"""Background threads run torch ops single-threaded, without an OpenMP team each; those that compute are here.

libgomp lets the threads of a team spin between ops only while all teams together have at most as many threads as there
are processors. With one more team, every op of compute has to wake its threads first: 0.1 ms per op on 2 cores, a third
of a step.
"""

import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from zinf_compile.runtime.process.forking import leave_when_forked
from zinf_compile.runtime.process.interrupts import without_interrupts

T = TypeVar("T")


def run_alone() -> None:
    """Make torch's ops on the calling thread single-threaded from now on. Other threads are not affected."""
    torch.get_num_threads()  # a thread's first call sets its number to the process's, so it must come first
    set_num_threads = _omp_set_num_threads()
    if set_num_threads is not None:
        set_num_threads(1)


@functools.cache
def _omp_set_num_threads() -> Callable[[int], object] | None:
    """Return OpenMP's function for the calling thread alone (``torch.set_num_threads`` is for all); None without OpenMP."""
    try:
        function: Callable[[int], object] = ctypes.CDLL(None).omp_set_num_threads
    except AttributeError:
        return None
    return function


class BackgroundCalls:
    """Runs functions that compute, in the order given, on threads that exist only while there is something to run.

    There are as many threads as processors that torch leaves free at the time, at least one. Each runs torch ops
    single-threaded, so results do not depend on how many there are. When the process exits, what runs is finished, and
    what waits is cancelled; a forked child has neither.
    """

    def __init__(self) -> None:
        self.leave_to_parent()
        leave_when_forked(self)

    def leave_to_parent(self) -> None:
        """See Forkable.leave_to_parent."""
        self._lock = threading.Lock()  # guards what follows
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._num_threads = 0

    @without_interrupts
    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Enqueue a call; returns at once. Cancelling its future before it begins leaves it out."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((call, future))
            if self._num_threads < max(1, len(os.sched_getaffinity(0)) - torch.get_num_threads()):
                self._num_threads += 1
                threading.Thread(target=self._run, name="zinf-background").start()
        return future

    def _run(self) -> None:
        run_alone()
        while (item := self._next()) is not None:
            call, future = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001  # whoever waits for the future raises it
                    future.set_exception(error)
            del item, call, future  # they refer to tensors

    def _next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        with self._lock:
            if not threading.main_thread().is_alive():  # the process exits, and waits for this thread
                for _, future in self._waiting:
                    future.cancel()
                self._waiting.clear()
            if self._waiting:
                return self._waiting.popleft()
            self._num_threads -= 1
            return None


@functools.cache
def background_calls() -> BackgroundCalls:
    """Return those of the process."""
    return BackgroundCalls()
