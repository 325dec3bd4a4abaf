"""The update queue: one background thread that runs the optimizer steps of a store, one after another."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from zinf_compile.runtime.background import run_alone


class UpdateQueue:
    """Runs what it is given on a thread of its own, in the order given. The thread starts with the first submission."""

    def __init__(self, *, begin_thread: Callable[[], None]) -> None:
        """``begin_thread`` is called on that thread, before all else."""

        def begin() -> None:
            run_alone()
            begin_thread()

        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zinf-update", initializer=begin)
        self._last: Future[None] | None = None
        self.may_allocate = True  # what plans count for it allows

    def submit(self, run: Callable[[], None]) -> None:
        """Start ``run``, which reports its errors itself, behind all that was submitted before; returns at once."""
        self._last = self._thread.submit(_without_autograd, run)

    @property
    def is_idle(self) -> bool:
        """Return whether waiting would not block."""
        return self._last is None or self._last.done()

    def wait(self) -> None:
        """Block until everything submitted has run, however it ended."""
        last, self._last = self._last, None
        if last is not None:
            last.exception()

    def close(self, *, wait: bool) -> None:
        """End the thread after what was submitted. Who may be called by that very thread must not wait for it."""
        self._thread.shutdown(wait=wait)


def _without_autograd(run: Callable[[], None]) -> None:
    with torch.no_grad():
        run()
