"""The GPU of the tests of GPUs: a real one, or the tests' own, on which a mistake in a test is found without a real one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import pytest
import torch
from torch import Tensor, nn

from tests.support.fake_device import FakeDevice, on_fake_device

Moved = TypeVar("Moved", Tensor, nn.Module)


class Gpu(Protocol):
    """What tests ask of a GPU, which models are optimized for by ``device="cuda"``."""

    kind: str  # of its tensors, as torch names it
    steps: int  # to train for
    batch: int  # sequences of a step

    def put(self, what: Moved) -> Moved:
        """Return a tensor or a module on the GPU."""

    def forget_peak(self) -> int:
        """Return the bytes that tensors have requested and hold now; the peak begins with them."""

    @property
    def peak(self) -> int:
        """The most bytes that were requested at once since ``forget_peak``."""

    @property
    def limit(self) -> float:
        """What torch's allocator may take, as a fraction of the memory."""

    def must_be_real(self, why: str) -> None:
        """Skip the test, for a reason, on a GPU that is none."""


class RealGpu:
    """The current GPU of torch."""

    kind, steps, batch = "cuda", 4, 4

    def put(self, what: Moved) -> Moved:
        """See Gpu.put."""
        return what.cuda()

    def forget_peak(self) -> int:
        """See Gpu.forget_peak."""
        torch.cuda.reset_peak_memory_stats()
        return self._requested("current")

    @property
    def peak(self) -> int:
        """See Gpu.peak."""
        return self._requested("peak")

    def _requested(self, when: str) -> int:
        nbytes: int = torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]
        return nbytes

    @property
    def limit(self) -> float:
        """See Gpu.limit."""
        return torch.cuda.get_per_process_memory_fraction()

    def must_be_real(self, why: str) -> None:
        """Go on."""


class FakeGpu:
    """The tests' own, which computes slowly: each op runs twice, on one core."""

    kind, steps, batch = "cpu", 2, 1

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    @classmethod
    @contextmanager
    def made(cls) -> Iterator["FakeGpu"]:
        """A block in which models are optimized for it."""
        with on_fake_device() as device:
            yield cls(device)

    def put(self, what: Moved) -> Moved:
        """Return it: here are the inputs of the device, too."""
        return what

    def forget_peak(self) -> int:
        """See Gpu.forget_peak."""
        self._device.forget_peak()
        return self._device.requested_nbytes

    @property
    def peak(self) -> int:
        """See Gpu.peak."""
        return self._device.peak_requested_nbytes

    @property
    def limit(self) -> float:
        """See Gpu.limit."""
        with self._device.own_memory.counted() as allocator:
            return allocator.limit / self._device.nbytes

    def must_be_real(self, why: str) -> None:
        """See Gpu.must_be_real."""
        pytest.skip(f"it needs a real GPU: {why}")
