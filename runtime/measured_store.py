"""What a store holds of each tier, measured while its graphs run."""

from collections.abc import Iterator
from contextlib import contextmanager

from zinf_compile.runtime.activations import Activations
from zinf_compile.runtime.arena import Arena
from zinf_compile.runtime.device import StreamDevice
from zinf_compile.runtime.device_allocations import DeviceAllocations
from zinf_compile.runtime.device_updates import DeviceUpdates
from zinf_compile.runtime.meter import Meter
from zinf_compile.runtime.open_forwards import OpenForwards
from zinf_compile.runtime.ram import DeviceRam
from zinf_compile.runtime.staging import StagingPool
from zinf_compile.runtime.updates import UpdateQueue
from zinf_compile.terms import Tier


class MeasuredStore:
    """The part of a store that looks at its memory; all that it looks at, the store makes."""

    device: StreamDevice | None
    device_updates: DeviceUpdates | None
    arena: Arena
    staging: StagingPool
    activations: Activations
    open_forwards: OpenForwards
    updates: UpdateQueue
    meter: Meter
    ram: DeviceRam | DeviceAllocations  # that looks at the device tier

    def __init__(self) -> None:
        self._host_peak_before = 0  # under plans that were followed earlier
        self._homes_nbytes = {Tier.DEVICE: 0, Tier.HOST: 0, Tier.NVME: 0}

    def count_home(self, tier: Tier, nbytes: int) -> None:
        """Count bytes that have got a home on a tier; negative, that have left it."""
        self._homes_nbytes[tier] += nbytes

    def nbytes_on(self, tier: Tier) -> int:
        """Return the bytes all slots keep on a tier."""
        return self._homes_nbytes[tier]

    @property
    def host_peak_nbytes(self) -> int:
        """Return the most bytes that homes, staging and activations took of the host tier, under any plan."""
        held = self.nbytes_on(Tier.HOST) + self.staging.peak_nbytes + self.activations.peak_host_nbytes
        return max(self._host_peak_before, held)

    def begin_again(self) -> None:
        """From now on another plan is followed: seconds, and what it holds beside homes, are measured anew."""
        self._host_peak_before = self.host_peak_nbytes
        with self.staging.at_rest():
            self.ram.begin_again()
        self.staging.forget_peak()
        self.activations.forget_peak()
        self.meter.forget_phases()

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Make plans inside, between runs, that are not the device tier's memory. Waits for updates, which take some too."""
        self.updates.wait()
        with self.staging.at_rest(), self.ram.apart():  # nobody samples meanwhile
            yield

    def begin_memory(self) -> None:
        """Take what this process holds beside our homes as not ours, once. Called before every run of a graph."""
        with self.staging.at_rest():
            self.ram.begin(self.nbytes_on(Tier.DEVICE) + self._beside_homes_nbytes() + self._host_nbytes())

    def sample_memory(self) -> None:
        """Look at what the process holds now; what is neither explained nor on the host tier is the device's."""
        with self.staging.at_rest():
            self.ram.sample(self._host_nbytes())

    def settle_memory(self, *, again: bool = False) -> None:
        """Take what this process holds beside our homes and the arena as not ours. Called beside a step: no graph runs."""
        if again and self.ram.may_settle_again:
            self.updates.wait()  # the first in the background leave something behind too: at the second step it shows
        with self.staging.at_rest():
            on_device = self.nbytes_on(Tier.DEVICE) + self.arena.nbytes + self.open_forwards.nbytes_beside()
            self.ram.settle(on_device + self._host_nbytes(), again=again)

    def _beside_homes_nbytes(self) -> int:
        """Return what else of a device with memory of its own is ours between runs; 0 of a CPU, where it shows by itself."""
        if self.device is None or self.device_updates is None:
            return 0
        return self.arena.nbytes + self.device_updates.nbytes + self.open_forwards.nbytes_beside()

    def _host_nbytes(self) -> int:
        if self.device is not None:  # whose allocator counts none of that
            return 0
        return self.nbytes_on(Tier.HOST) + self.staging.held_nbytes + self.activations.host_nbytes
