"""How much of its own memory a device holds for a model, by torch's allocator, and that it stays within its budget."""

from collections.abc import Iterator
from contextlib import contextmanager

from zinf_compile.errors import CapacityError
from zinf_compile.runtime.device import StreamDevice
from zinf_compile.terms import format_bytes

_ROUNDED = 16  # one part in so many is lost to rounding up: the allocator takes segments of 2 MiB and more
_SEGMENTS_NBYTES = 2**26  # and of small segments one for each kind


class DeviceAllocations:
    """The peak of what torch has allocated on a device beside what was there before the first graph ran.

    It has the interface of ``DeviceRam``, where the same is guessed from what the process holds.
    """

    may_settle_again = False  # what libraries keep for good is in the plan's workspace

    def __init__(self, device: StreamDevice, *, budget: int) -> None:
        self._device = device
        self._before: int | None = None
        self._peak = 0
        self.budget = budget
        self.promised = budget
        self.least_promised = 0

    @property
    def peak(self) -> int:
        """Return the most bytes that were the device tier's, under any plan."""
        if self._before is None:
            return self._peak
        return max(self._peak, self._device.peak_allocated_nbytes - self._before)

    def begin_again(self, *, after_capture: bool = False) -> None:
        """Measure anew, now that plans have changed or one was added."""
        self._peak = self.peak
        self._device.forget_peak()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Make plans inside, between runs: that takes nothing of the device."""
        yield

    def promise(self, nbytes: int, workspace_nbytes: int = 0) -> None:
        """Stay within so many bytes from now on: what the plans say of the device tier."""
        self.promised = max(nbytes, self.least_promised)

    def promise_at_least(self, nbytes: int) -> None:
        """Promise so many bytes whatever plans say: of something that they do not know."""
        self.least_promised = max(self.least_promised, nbytes)
        self.promised = max(self.promised, nbytes)

    def begin(self, homes_nbytes: int) -> None:
        """Begin a run of a graph. What the first one finds, beside ``homes_nbytes`` of ours, is not ours.

        Until it ends torch's allocator refuses what goes beyond the budget, beside what is not ours now. CapacityError if
        others have taken what the plan was made for.
        """
        others = max(0, self._device.allocated_nbytes - homes_nbytes)
        if self._before is None:
            self._check_free(self.promised - homes_nbytes)
            self._before = others
            self._device.forget_peak()
        self._device.limit(others + self.budget + self.budget // _ROUNDED + _SEGMENTS_NBYTES)

    def _check_free(self, needed: int) -> None:
        free = self._device.free_nbytes
        if needed > free:
            raise CapacityError(
                f"the plan takes {format_bytes(needed)} more of {self._device.torch_device}, where {format_bytes(free)} are "
                f"free: something else has taken device memory since device_memory={self.budget} was chosen; end it, or "
                f"lower device_memory to {(self.budget - (needed - free)) // 2**20}MiB"
            )

    def end(self) -> None:
        """End a run of a graph: others may allocate what they like again."""
        self._device.limit(None)
        self._peak = self.peak

    def settle(self, ours_nbytes: int, *, again: bool = False) -> None:
        """Do nothing: the allocator counts tensors, and nothing that processes keep beside them."""

    def sample(self, host_nbytes: int) -> None:
        """Do nothing: the allocator sees every peak, and asking it takes longer than a transfer's other calls together."""
