"""A stream of the CPU that runs its work on a thread of its own, beside what the caller does."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from zinf_compile.runtime.device.device import Event
from zinf_compile.runtime.process.waiting import end_pool, wait_future


@dataclass(slots=True, kw_only=True)
class ThreadEvent:
    """A point in the order of a thread's work."""

    name: str
    done: Future[None]

    def wait(self) -> None:
        """Block until the work before it is done. Raises what the last of that work raised."""
        error = wait_future(self.done, self.name, may_leave=True)
        if error is not None:
            raise error


def _nothing() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


@dataclass(slots=True, kw_only=True)
class ThreadStream:
    """Runs work in order on one thread, which the first work starts and ``close`` ends. It is never timed."""

    name: str
    synchronous: bool = False
    _last: Future[None] = field(default_factory=_nothing)
    _pool: ThreadPoolExecutor | None = None

    def wait(self, event: Event) -> None:
        """Make later work wait for an event."""
        self.run(event.wait)

    def record(self) -> ThreadEvent:
        """Return an event after all work so far."""
        return ThreadEvent(name=self.name, done=self._last)

    def run(self, call: Callable[[], None]) -> None:
        """Call it on the thread, behind the work so far."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"zinf-{self.name.replace(' ', '-')}")
        self._last = self._pool.submit(call)

    def close(self) -> None:
        """Wait for the work so far, and end the thread."""
        if self._pool is not None:
            end_pool(self._pool, self.name)
