"""Measures how much of each tier a store uses while its graphs run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.device.device import Device, MemoryUse
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.observe.open_forwards import OpenForwards
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.process.ram import anonymous_rss, return_freed_memory
from zinf_compile.runtime.storage.arena import Arena
from zinf_compile.runtime.storage.staging import StagingPool
from zinf_compile.runtime.store.update_queue import UpdateQueue
from zinf_compile.runtime.transfer.activations import Activations
from zinf_compile.runtime.transfer.device_updates import DeviceUpdates


class HeldMemory:
    """The bytes that one store holds on each tier, and the bytes that the process holds besides."""

    def __init__(
        self,
        *,
        homes_nbytes: dict[Tier, int],
        host_memory: int,
        device: Device,
        device_updates: DeviceUpdates,
        arena: Arena,
        staging: StagingPool,
        activations: Activations,
        open_forwards: OpenForwards,
        updates: UpdateQueue,
        meter: Meter,
        ram: MemoryUse,
    ) -> None:
        """``homes_nbytes`` counts the bytes of homes by tier, for others to read; ``ram`` measures the device tier."""
        self._homes_nbytes = homes_nbytes
        self._host_memory = host_memory  # the budget
        self._device = device
        self._device_updates = device_updates
        self._arena = arena
        self._staging = staging
        self._activations = activations
        self._open_forwards = open_forwards
        self._updates = updates
        self._meter = meter
        self._ram = ram
        self._host_peak_before = 0  # under earlier plans
        self.process_before = 0  # anonymous memory of the process before the model was adopted, in bytes

    def count_home(self, tier: Tier, nbytes: int) -> None:
        """Add bytes of homes on a tier; negative if homes were freed."""
        self._homes_nbytes[tier] += nbytes

    def nbytes_on(self, tier: Tier) -> int:
        """Return the bytes of all slots on a tier."""
        return self._homes_nbytes[tier]

    @property
    def host_peak_nbytes(self) -> int:
        """Return the peak bytes of homes, staging and activations on the host tier, under any plan."""
        held = self.nbytes_on(Tier.HOST) + self._staging.peak_nbytes + self._activations.peak_host_nbytes
        return max(self._host_peak_before, held)

    @property
    def host_room_nbytes(self) -> int:
        """Return the bytes of the host budget that homes, staging at its largest, and activations leave."""
        taken = self.nbytes_on(Tier.HOST) + self._staging.capacity + self._activations.peak_host_nbytes
        return self._host_memory - taken

    @without_interrupts
    def begin_again(self) -> None:
        """Start measuring again, for another plan: seconds of phases, and memory besides homes."""
        self._host_peak_before = self.host_peak_nbytes
        with self._staging.at_rest():
            self._ram.begin_again()
        self._staging.forget_peak()
        self._activations.forget_peak()
        self._meter.forget_phases()

    @contextmanager
    def planning(self) -> Iterator[None]:
        """A block for planning between runs, whose memory does not count for the device tier. Waits for updates first."""
        self._updates.wait()
        with self._staging.at_rest(), self._ram.apart():  # no samples are taken meanwhile
            yield

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A block between runs that compiles kernels: see ``MemoryUse.compiling``. Waits for updates first."""
        self._updates.wait()
        with self._ram.compiling(self.nbytes_on(Tier.DEVICE) + self._beside_homes_nbytes()):
            yield

    @without_interrupts
    def begin_run(self) -> None:
        """Begin a graph run. At the first one, memory besides our homes is counted as not the model's."""
        with self._staging.at_rest():
            self._ram.begin(self.nbytes_on(Tier.DEVICE) + self._beside_homes_nbytes() + self._host_nbytes())

    @without_interrupts
    def sample(self) -> None:
        """Measure what the process holds now; memory of the model that is not on the host tier is the device tier's."""
        with self._staging.at_rest():
            self._ram.sample(self._host_nbytes())

    @without_interrupts
    def settle(self, *, again: bool = False) -> None:
        """Count what the process holds besides our homes and the arena as not the model's. Called while no graph runs."""
        if again and self._ram.may_settle_again:
            self._updates.wait()  # the first background updates leave memory behind too, which is visible at the second step
        with self._staging.at_rest():
            on_device = self.nbytes_on(Tier.DEVICE) + self._arena.nbytes + self._open_forwards.nbytes_beside()
            self._ram.settle(on_device + self._host_nbytes(), again=again)

    @property
    def num_steps(self) -> int:
        """Return how many steps have begun."""
        return self._meter.num_steps

    @property
    def process_peak(self) -> int | None:
        """Return the peak anonymous memory of the process beyond ``process_before``, in bytes; None if unknown."""
        peak = self._ram.process_peak
        return max(0, peak - self.process_before) if peak else None

    def note_process(self, *, is_adopted: bool) -> None:
        """Set ``process_before`` to the memory that the process holds besides homes, before or after a model is adopted.

        The smaller value counts. For a model that is in memory it is known only after its values have moved to the store.
        """
        with self._staging.at_rest():
            held = max(0, anonymous_rss() - self.nbytes_on(Tier.DEVICE) - self._host_nbytes())
        self.process_before = min(held, self.process_before or held) if is_adopted else held

    def reserve_needed(self) -> int:
        """Return the bytes that the process holds now besides the tiers and ``process_before``.

        Called while no graph runs. Waits for updates, and returns freed memory to the system.
        """
        self._updates.wait()
        gc.collect()
        return_freed_memory()
        with self._staging.at_rest():
            on_device = self.nbytes_on(Tier.DEVICE) + self._arena.nbytes + self._open_forwards.nbytes_beside()
            return max(0, anonymous_rss() - self.process_before - on_device - self._host_nbytes())

    def _beside_homes_nbytes(self) -> int:
        """Return the bytes besides homes that we hold between runs on a device with its own memory; 0 for a CPU."""
        if self._device.memory.unified:
            return 0
        return self._arena.nbytes + self._device_updates.nbytes + self._open_forwards.nbytes_beside()

    def _host_nbytes(self) -> int:
        if not self._device.memory.unified:  # the device's allocator does not count host memory
            return 0
        return self.nbytes_on(Tier.HOST) + self._staging.held_nbytes + self._activations.host_nbytes
