"""Measures, by torch's allocator, how much device memory a model uses, and keeps it within its budget."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import format_bytes

_ROUNDED = 8  # 1/8 of what tensors take may be lost to rounding and fragmentation: each stream has a pool of its own
# And segments of 2 and 20 MiB of each stream, workspaces of cuBLAS (32 MiB for each thread that launches products),
# and what Triton flushes the cache with while it times configurations (as large as the L2, up to 126 MB).
_SEGMENTS_NBYTES = 2**28
_log = logging.getLogger(__name__)


def with_slack(nbytes: int) -> int:
    """Return how much device memory torch's allocator may take for tensors of ``nbytes``."""
    return nbytes + nbytes // _ROUNDED + _SEGMENTS_NBYTES


def largest_budget(free_nbytes: int) -> int:
    """Return the largest budget that fits in so much free device memory with its slack; 0 if none does."""
    return max(0, (free_nbytes - _SEGMENTS_NBYTES) * _ROUNDED // (_ROUNDED + 1))


class CountingDevice(Protocol):
    """A device whose memory torch's allocator counts and limits."""

    torch_device: torch.device

    @property
    def requested_nbytes(self) -> int:
        """Return the bytes of all tensors of this process on the device."""

    @property
    def peak_requested_nbytes(self) -> int:
        """Return the most bytes of tensors since the last ``forget_peak``."""

    @property
    def allocated_nbytes(self) -> int:
        """Return the bytes of all tensors, each with what the allocator rounds it up to."""

    @property
    def peak_reserved_nbytes(self) -> int:
        """Return the most that the allocator has taken from the device since the last ``forget_peak``."""

    @property
    def free_nbytes(self) -> int:
        """Return the bytes that this process may still allocate."""

    def forget_peak(self) -> None:
        """Reset the peaks to what is requested and reserved now."""

    def limit(self, nbytes: int | None) -> None:
        """Make torch refuse to hold more than ``nbytes`` for this process from now on; None removes the limit."""

    def give_back(self) -> None:
        """Return memory that torch's allocator caches to the system."""


class DeviceAllocations:
    """The peak of what tensors have taken on a device since the first graph ran, and of what torch's allocator has.

    Plans promise the bytes of tensors, as they are requested. What the allocator adds depends on its segments and on the
    order of all allocations: 512 bytes each, up to 1 MiB of each large one where segments are not expandable, and what
    lies unused between them. Plans leave that to the slack, and the limit is on what it takes from the device in all.

    On a CPU, ``DeviceRam`` estimates the peak from the memory of the process.
    """

    may_settle_again = False  # the plan's workspace has what libraries keep permanently
    process_peak = 0  # host memory of the process is not measured

    def __init__(self, device: CountingDevice, *, budget: int) -> None:
        self._device = device
        self._before: int | None = None  # bytes of tensors that are not the model's
        self._others = 0  # the same as allocated, when a graph began to run last
        self._peak = self._reserved_peak = 0
        self.budget = budget
        self.promised = budget
        self.least_promised = 0

    @property
    def peak(self) -> int:
        """Return the peak bytes of the device tier, under any plan."""
        if self._before is None:
            return self._peak
        return max(self._peak, self._device.peak_requested_nbytes - self._before)

    @property
    def reserved_peak(self) -> int:
        """Return the most that the allocator has taken from the device besides what is not the model's; 0 before a run."""
        if self._before is None:
            return 0
        return max(self._reserved_peak, self._device.peak_reserved_nbytes - self._others)

    @property
    def reserved_limit(self) -> int:
        """Return the most that it may take."""
        return with_slack(self.budget)

    def _keep_peaks(self) -> None:
        self._peak, self._reserved_peak = self.peak, self.reserved_peak

    def begin_again(self, *, after_capture: bool = False) -> None:
        """Start measuring again, after plans changed or one was added."""
        self._keep_peaks()
        self._device.forget_peak()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A block for planning and measuring between runs, whose memory does not count."""
        self._keep_peaks()
        yield
        self._device.forget_peak()

    @contextmanager
    def compiling(self, homes_nbytes: int) -> Iterator[None]:
        """A block that compiles kernels. The log says what timing them took, if the budget has no room for it.

        With ``max_autotune`` Inductor times kernels of a product on tensors of full size, and products whose sizes it may
        pad also without. They are freed, and given back, before any graph of ours runs, so no plan counts them.
        """
        self._keep_peaks()
        self._device.forget_peak()
        before = self._device.requested_nbytes
        try:
            yield
        finally:
            taken = self._device.peak_requested_nbytes - before
            self._device.forget_peak()
            self._device.give_back()
        if taken and homes_nbytes + taken > self.budget:
            _log.warning(
                "compiling took %s of %s for kernels that Inductor timed on tensors of full size, beside %s of the model: "
                "together more than the %s that device_memory leaves to it. Where that is too much, turn off "
                "torch._inductor.config.max_autotune and shape_padding",
                format_bytes(taken),
                self._device.torch_device,
                format_bytes(homes_nbytes),
                format_bytes(self.budget),
            )

    def promise(self, nbytes: int, workspace_nbytes: int = 0) -> None:
        """Set the limit that the plans promise for the device tier."""
        self.promised = max(nbytes, self.least_promised)

    def promise_at_least(self, nbytes: int) -> None:
        """Raise the limit to at least ``nbytes``, for memory that plans do not know."""
        self.least_promised = max(self.least_promised, nbytes)
        self.promised = max(self.promised, nbytes)

    def begin(self, homes_nbytes: int) -> None:
        """Begin a graph run. At the first one, what is allocated beyond ``homes_nbytes`` is not the model's.

        Until the run ends, torch's allocator refuses to exceed the budget, its slack, and what is not the model's now.
        CapacityError if less is free than the plan needs with its slack.
        """
        self._others = max(0, self._device.allocated_nbytes - homes_nbytes)
        if self._before is None:
            self._check_free(homes_nbytes)
            self._before = max(0, self._device.requested_nbytes - homes_nbytes)
            self._device.forget_peak()
        self._device.limit(self._others + self.reserved_limit)

    def _check_free(self, homes_nbytes: int) -> None:
        free = self._device.free_nbytes
        if with_slack(self.promised) - homes_nbytes <= free:
            return
        needed, slack = max(0, self.promised - homes_nbytes), with_slack(self.promised) - self.promised
        fitting = largest_budget(free + homes_nbytes) // 2**20
        lower = f", or lower device_memory to {fitting}MiB" if fitting else ""
        raise CapacityError(
            f"the plan needs {format_bytes(needed)} more of {self._device.torch_device}, and torch's allocator up to "
            f"{format_bytes(slack)} beside it for what it rounds up and cannot reuse, but {format_bytes(free)} are free; "
            f"end what else takes memory of the device{lower}"
        )

    def end(self) -> None:
        """End a graph run, and remove the limit on allocations."""
        self._device.limit(None)
        self._keep_peaks()

    def settle(self, ours_nbytes: int, *, again: bool = False) -> None:
        """Do nothing: the allocator counts tensors only, not other memory of the process."""

    def sample(self, host_nbytes: int) -> None:
        """Do nothing: the allocator records every peak itself, and reading it takes longer than issuing a transfer."""
