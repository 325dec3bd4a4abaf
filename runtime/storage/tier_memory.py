"""The memory behind the tiers device and host: all of it RAM on a CPU, else the device's own and pinned host memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Placement
from zinf_compile.runtime.device.device import Device
from zinf_compile.runtime.storage.engine import ALIGN
from zinf_compile.runtime.storage.host_memory import Allocate, HostMemory, PageableMemory, PinnedMemory

_SLOTS = 6  # of a parameter, at most: two copies, a gradient, and what most optimizers keep


class TierMemory:
    """Where tensors of one store are made."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._host: HostMemory = PageableMemory() if device.memory.unified else PinnedMemory(device)

    @property
    def torch_device(self) -> torch.device:
        """Return the device that computes, as torch names it."""
        return self.device.torch_device

    @property
    def allocate(self) -> Allocate:
        """Return what makes host memory for staging."""
        return self._host.allocate

    @property
    def refusal(self) -> str | None:
        """Return why host memory is not pinned, though a device would be faster with it; None if nothing was refused."""
        return self._host.refusal

    def announce(self, placements: Sequence[Placement], staging_nbytes: int) -> None:
        """Pin what homes on the host and staging will take, in one piece, for a device that copies from it."""
        if placements:
            in_homes = sum(placement.nbytes_on(Tier.HOST) for placement in placements)
            self._host.announce(in_homes + staging_nbytes + _SLOTS * ALIGN * len(placements))

    def is_behind_link(self, tier: Tier) -> bool:
        """Return whether what is at home on a tier is reached only by copies on the device's streams."""
        return self.device.memory.is_behind_link(tier)

    def reads_in_place(self, tier: Tier) -> bool:
        """Return whether compute reads homes on a tier where they are; an integrated device does so in pinned memory."""
        is_pinned = self.device.memory.integrated and self._host.refusal is None
        return tier is Tier.DEVICE or (tier is Tier.HOST and is_pinned)

    def new_home(self, shape: torch.Size, dtype: torch.dtype, tier: Tier) -> Tensor:
        """Return zeros on device or host.

        They are touched now, so that what a home costs is seen when it is made and not in the middle of a step.
        """
        if tier is not Tier.DEVICE:
            return self._host.new_zeros(shape, dtype)
        with self.device.selected():
            return self.device.allocate(shape, dtype).zero_()

    def new_value(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory that compute reads and writes, with undefined content."""
        return self.device.allocate(shape, dtype)

    def close(self) -> None:
        """Unpin host memory, whose content stays."""
        self._host.close()
