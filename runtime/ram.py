"""How much RAM the device tier really takes on a CPU, and keeping the system's allocator from hoarding it."""

import ctypes
import functools
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class DeviceRam:
    """The peak of the anonymous memory that is neither the host tier's nor something else's than the model's.

    What was there before the first graph ran is not ours: Python, torch, captured graphs. Nor is what the first step has
    made for good: the kernels that libraries keep for every shape they have met, half a MiB each, and threads' stacks. It is
    so for the first step behind every later capture, which leaves its graphs.

    glibc keeps freed memory for later, and under the aligned allocations of tensors its heap comes to hold several times
    what is live. Whenever a sample is over what is promised, it is told to give that back. Samples are taken between
    kernels: what these take for themselves meanwhile must still fit, so it is told that much earlier, and when all that is
    held is over the budget; but not if it hardly holds more than when it was told last.
    """

    def __init__(self, *, budget: int) -> None:
        self._latest = 0  # since a run of a graph last began or ended
        self._peak = 0  # before that, under the plans that are followed now
        self._peak_before = 0  # under those before
        self.budget = budget
        self.promised = budget
        self.least_promised = 0
        self._workspace = 0
        self._least_held = 0  # since memory was given back last
        self._before: int | None = None  # what was held before the first graph ran
        self._made = 0  # by the first step, and by later captures, beside that
        self._times_settled = 0
        self._has_captured = False  # since a graph ran last

    @property
    def may_settle_again(self) -> bool:
        """Return whether ``settle`` has something to do ``again``."""
        return self._times_settled == 1

    @property
    def peak(self) -> int:
        """Return the most bytes that were the device tier's, under any plan."""
        return max(self._peak_before, self._peak, self._latest)

    def begin_again(self, *, after_capture: bool = False) -> None:
        """Measure anew, now that plans have changed or one was added; what that has left behind is settled after a step.

        What was seen since a graph ran last does not count: capturing and planning have held it, beside updates.
        """
        self._latest = 0
        self._has_captured |= after_capture
        if self._times_settled > 0:
            self._peak_before, self._peak, self._times_settled = self.peak, 0, 0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Make plans inside, between runs: what is seen meanwhile does not count, and what is left behind is not ours.

        Nothing else of ours may come or go meanwhile, and nobody may sample.
        """
        return_freed_memory()
        held = anonymous_rss()
        yield
        gc.collect()
        return_freed_memory()
        self._latest = 0
        if self._times_settled > 0:
            self._made += max(0, anonymous_rss() - held)

    def promise(self, nbytes: int, workspace_nbytes: int = 0) -> None:
        """Stay within so many bytes from now on, of which so much is for kernels: what the plans say of the device tier."""
        self.promised = max(nbytes, self.least_promised)
        self._workspace = workspace_nbytes

    def promise_at_least(self, nbytes: int) -> None:
        """Promise so many bytes whatever plans say: of something that they do not know."""
        self.least_promised = max(self.least_promised, nbytes)
        self.promised = max(self.promised, nbytes)

    def begin(self, homes_nbytes: int) -> None:
        """Begin a run of a graph. What the first one finds, beside ``homes_nbytes`` of ours, is not ours."""
        self.end()
        if self._has_captured:  # which leaves cycles of nodes and fake tensors behind
            gc.collect()
            return_freed_memory()
            self._has_captured = False
        if self._before is None:
            self._before = anonymous_rss() - homes_nbytes

    def end(self) -> None:
        """End a run of a graph: what was seen until now was seen under plans that were followed."""
        self._peak, self._latest = max(self._peak, self._latest), 0

    def settle(self, ours_nbytes: int, *, again: bool = False) -> None:
        """Take what is held now, beside ``ours_nbytes``, as not ours either. Only the first call under a plan counts.

        And the first one ``again`` behind it: when updates are done that were at work in the background at that time.
        """
        if self._before is None or self._times_settled != int(again):
            return
        self._times_settled += 1
        self.end()
        return_freed_memory()
        made_before = self._made
        self._made = max(made_before, anonymous_rss() - ours_nbytes - self._before)
        self._peak = max(0, self._peak - (self._made - made_before))

    def sample(self, host_nbytes: int) -> None:
        """Look at what is held now; all of ours beyond ``host_nbytes`` is the device tier's."""
        if self._before is None:
            return
        held = anonymous_rss() - self._before - host_nbytes
        self._least_held = min(self._least_held, held)
        ours = held - self._made
        is_near = held > self.budget or ours > self.promised - self._workspace
        has_grown = held > self._least_held + self._workspace // 2
        if ours > self.promised or (is_near and has_grown):
            return_freed_memory()
            held = self._least_held = anonymous_rss() - self._before - host_nbytes
        self._latest = max(self._latest, held - self._made)


def anonymous_rss() -> int:
    """Return the bytes of anonymous memory this process holds in RAM now.

    From statm, where it is resident minus shared pages; the RssAnon line of status says the same and takes 20 times longer.
    """
    descriptor = os.open(
        "/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC
    )  # not as a file object: it is read at every wait
    try:
        _, resident, shared, *_ = os.read(descriptor, 128).split()
    finally:
        os.close(descriptor)
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def return_freed_memory() -> None:
    """Give the memory of freed tensors back to the system: glibc would keep it for later allocations."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim; None where the C library has none."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return None
    return trim
