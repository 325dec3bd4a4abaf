"""The memory behind the tiers device and host: all of it RAM on a CPU, else the device's own and pinned host memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zinf_compile.plans import Placement
from zinf_compile.runtime.device import CPU, StreamDevice
from zinf_compile.runtime.host_memory import Allocate, PinnedMemory, map_memory
from zinf_compile.runtime.nvme.engine import ALIGN
from zinf_compile.terms import Tier

_SLOTS = 6  # of a parameter, at most: two copies, a gradient, and what most optimizers keep


class TierMemory:
    """Where tensors of one store are made."""

    def __init__(self, device: StreamDevice | None) -> None:
        """``device`` is one with memory of its own; None for the CPU."""
        self.device = device
        self._pinned = None if device is None else PinnedMemory(device)

    @property
    def torch_device(self) -> torch.device:
        """Return the device that computes, as torch names it."""
        return CPU if self.device is None else self.device.torch_device

    @property
    def allocate(self) -> Allocate:
        """Return what makes host memory for staging."""
        return map_memory if self._pinned is None else self._pinned.take

    @property
    def refusal(self) -> str | None:
        """Return why host memory is not pinned, though a device would be faster with it; None if nothing was refused."""
        return None if self._pinned is None else self._pinned.refusal

    def announce(self, placements: Sequence[Placement], staging_nbytes: int) -> None:
        """Pin what homes on the host and staging will take, in one piece."""
        if self._pinned is not None and placements:
            in_homes = sum(placement.nbytes_on(Tier.HOST) for placement in placements)
            self._pinned.announce(in_homes + staging_nbytes + _SLOTS * ALIGN * len(placements))

    def is_on_device(self, tier: Tier) -> bool:
        """Return whether what is at home on a tier is reached by the device's streams only."""
        return tier is Tier.DEVICE and self.device is not None

    def new_home(self, shape: torch.Size, dtype: torch.dtype, tier: Tier) -> Tensor:
        """Return zeros on device or host.

        They are touched now, so that what a home costs is seen when it is made and not in the middle of a step.
        """
        if self.device is not None and tier is Tier.DEVICE:
            with self.device.selected():
                return self.device.allocate(shape, dtype).zero_()
        if self._pinned is None or shape.numel() == 0:
            return torch.empty(shape, dtype=dtype).zero_()
        memory = memoryview(self._pinned.take(shape.numel() * dtype.itemsize)).cast("B")
        return torch.frombuffer(memory, dtype=dtype, count=shape.numel()).view(shape).zero_()

    def new_value(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory that compute reads and writes, with undefined content."""
        return torch.empty(shape, dtype=dtype) if self.device is None else self.device.allocate(shape, dtype)

    def close(self) -> None:
        """Unpin host memory, whose content stays."""
        if self._pinned is not None:
            self._pinned.close()
