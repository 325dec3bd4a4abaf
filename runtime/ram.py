"""How much RAM the device tier really takes on a CPU, and keeping the system's allocator from hoarding it."""

import ctypes
import functools
import gc
import mmap
from collections.abc import Callable
from pathlib import Path


class DeviceRam:
    """The peak of the anonymous memory that is neither the host tier's nor was there before the first graph ran.

    glibc keeps freed memory for later, and under the aligned allocations of tensors its heap comes to hold several times
    what is live. Whenever a sample is over the budget, it is told to give that back.
    """

    def __init__(self, *, budget: int) -> None:
        self.peak = 0
        self._budget = budget
        self._not_ours: int | None = None  # Python, torch and captured graphs

    def begin(self, homes_nbytes: int, *, after_capture: bool) -> None:
        """Take what is held now, beside ``homes_nbytes`` of ours, as not ours. Only the first call counts."""
        if self._not_ours is None:
            if after_capture:  # which leaves cycles of nodes and fake tensors behind
                gc.collect()
                return_freed_memory()
            self._not_ours = anonymous_rss() - homes_nbytes

    def sample(self, host_nbytes: int) -> None:
        """Look at what is held now; all of ours beyond ``host_nbytes`` is the device tier's."""
        if self._not_ours is None:
            return
        others = self._not_ours + host_nbytes
        held = anonymous_rss() - others
        if held > self._budget:
            return_freed_memory()
            held = anonymous_rss() - others
        self.peak = max(self.peak, held)


def anonymous_rss() -> int:
    """Return the bytes of anonymous memory this process holds in RAM now.

    From statm, where it is resident minus shared pages; the RssAnon line of status says the same and takes 20 times longer.
    """
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
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
