"""Measures how much RAM the device tier uses on a CPU, and keeps the system's allocator from hoarding it."""

import ctypes
import functools
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_FAR_MORE = 8  # an eighth of what is promised, above it


class DeviceRam:
    """The peak of the model's anonymous memory, without the host tier.

    Memory that was held before the first graph ran is not counted: Python, torch, captured graphs. Neither is what the
    first step leaves behind permanently: kernels that libraries cache for every shape, half a MiB each, and thread
    stacks. The same holds for the first step after every later capture.

    glibc keeps freed memory, and under the aligned allocations of tensors its heap grows to several times what is live.
    Whenever a sample exceeds what the plans promise, freed memory is returned to the system. Samples are taken between
    kernels, whose own temporary memory must fit too; so memory is returned that much earlier, and when everything held
    exceeds the budget, unless it has hardly grown since the last time. Nor is it returned again where the last time has
    left far more than the promise, since others hold it, as a second model of the process does: each time takes 2 ms,
    and every page that was free takes 2 us more when it is next used.
    """

    reserved_peak = reserved_limit = 0  # no allocator of ours takes the memory

    def __init__(self, *, budget: int) -> None:
        self._latest = 0  # highest sample since a graph run last began or ended
        self._peak = 0  # before that, under the current plans
        self._peak_before = 0  # under earlier plans
        self.budget = budget
        self.promised = budget
        self.least_promised = 0
        self._workspace = 0
        self._least_held = 0  # since memory was last returned to the system
        self._before: int | None = None  # held before the first graph ran
        self._made = 0  # left behind permanently by the first step and by later captures
        self._times_settled = 0  # under the current plans: twice at most
        self._has_captured = False  # since the last graph run
        self.process_peak = 0  # the largest anonymous memory of any sample

    @property
    def may_settle_again(self) -> bool:
        """Return whether ``settle(again=True)`` would do anything."""
        return self._times_settled == 1

    @property
    def peak(self) -> int:
        """Return the peak bytes of the device tier, under any plan."""
        return max(self._peak_before, self._peak, self._latest)

    def begin_again(self, *, after_capture: bool = False) -> None:
        """Start measuring again after plans changed or one was added; what planning left behind is settled after a step.

        Samples since the last graph run are dropped: they include memory of capturing and planning.
        """
        self._latest = 0
        self._has_captured |= after_capture
        if self._times_settled > 0:
            self._peak_before, self._peak, self._times_settled = self.peak, 0, 0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A block for planning between runs: samples in it do not count, and memory left behind is not the model's.

        Nothing else of the model may be allocated or freed in it, and no samples may be taken.
        """
        return_freed_memory()
        held = anonymous_rss()
        yield
        gc.collect()
        return_freed_memory()
        self._latest = 0
        if self._times_settled > 0:
            self._made += max(0, anonymous_rss() - held)

    def compiling(self, homes_nbytes: int) -> AbstractContextManager[None]:
        """A block that compiles kernels. What it leaves behind is the process's, like all that is left by a capture."""
        return nullcontext()

    def promise(self, nbytes: int, workspace_nbytes: int = 0) -> None:
        """Set the limit that the plans promise for the device tier, with the share of it that is workspace of kernels."""
        self.promised = max(nbytes, self.least_promised)
        self._workspace = workspace_nbytes

    def promise_at_least(self, nbytes: int) -> None:
        """Raise the limit to at least ``nbytes``, for memory that plans do not know."""
        self.least_promised = max(self.least_promised, nbytes)
        self.promised = max(self.promised, nbytes)

    def begin(self, homes_nbytes: int) -> None:
        """Begin a graph run. At the first one, everything beyond ``homes_nbytes`` is not the model's."""
        self.end()
        if self._has_captured:  # capturing leaves reference cycles of nodes and fake tensors behind
            gc.collect()
            return_freed_memory()
            self._has_captured = False
        if self._before is None:
            self._before = anonymous_rss() - homes_nbytes

    def end(self) -> None:
        """End a graph run: samples so far count for the current plans."""
        self._peak, self._latest = max(self._peak, self._latest), 0

    def settle(self, ours_nbytes: int, *, again: bool = False) -> None:
        """Count what is held now beyond ``ours_nbytes`` as not the model's. Only the first call under a plan has an effect.

        So has the first call with ``again`` after it, when updates that ran in the background at that time are
        finished.
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
        """Measure what is held now; the model's memory beyond ``host_nbytes`` belongs to the device tier."""
        if self._before is None:
            return
        process = anonymous_rss()
        held = process - self._before - host_nbytes
        self._least_held = min(self._least_held, held)
        ours = held - self._made
        excess, growth = ours - self.promised, held - self._least_held
        if excess > 0:
            far_more = self.promised // _FAR_MORE
            was_in_vain = self._least_held - self._made - self.promised > far_more
            is_useful = growth >= far_more or not was_in_vain
        else:
            is_useful = (held > self.budget or excess > -self._workspace) and growth > self._workspace // 2
        if is_useful:
            return_freed_memory()
            process = anonymous_rss()
            held = self._least_held = process - self._before - host_nbytes
        self.process_peak = max(self.process_peak, process)
        self._latest = max(self._latest, held - self._made)


def anonymous_rss() -> int:
    """Return the bytes of anonymous memory that this process holds in RAM now.

    Read from statm as resident minus shared pages; the RssAnon line of status says the same but takes 20 times longer.
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
    """Return the memory of freed tensors to the system; glibc would keep it for later allocations."""
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
