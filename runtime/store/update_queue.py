"""The update queue: one background thread that runs the optimizer steps of a store, one after another."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from zinf_compile.runtime.process.background import run_alone
from zinf_compile.runtime.process.waiting import end_pool, wait_future, why_pool_is_gone


class UpdateQueue:
    """Runs functions on a thread of its own, in the order given. The thread starts with the first submission."""

    def __init__(self, *, begin_thread: Callable[[], None]) -> None:
        """``begin_thread`` is called first on that thread."""

        def begin() -> None:
            run_alone()
            begin_thread()

        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zinf-update", initializer=begin)
        self._last: Future[None] | None = None
        self.may_allocate = True  # whether plans reserve memory for updates that allocate

    def submit(self, run: Callable[[], None]) -> None:
        """Enqueue ``run``, which handles its own errors; returns at once."""
        self._last = self._thread.submit(_without_autograd, run)

    @property
    def is_idle(self) -> bool:
        """Return whether waiting would not block."""
        return self._last is None or self._last.done()

    def wait(self, *, may_leave: bool = False) -> None:
        """Block until everything submitted has run or failed. With ``may_leave`` an interrupt may raise."""
        last = self._last
        if last is not None:
            wait_future(last, "the optimizer step in the background", gone=self.why_gone, may_leave=may_leave)
            self._last = None if self._last is last else self._last

    def why_gone(self) -> str | None:
        """Return why submitted functions will never run; None if they may still run."""
        return why_pool_is_gone(self._thread)

    def close(self, *, wait: bool) -> None:
        """End the thread after what was submitted. With ``wait``, block until then; not allowed on that thread itself."""
        if wait:
            end_pool(self._thread, "the optimizer step in the background")
        else:
            self._thread.shutdown(wait=False)


def _without_autograd(run: Callable[[], None]) -> None:
    with torch.no_grad():
        run()
