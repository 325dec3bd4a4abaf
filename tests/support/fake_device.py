"""A fake device on the CPU with its own memory and streams. It receives exactly the calls that a GPU would.

Compute ops run when they are enqueued. Copies run later, on one thread per stream, after a delay drawn from a seeded
generator. Accesses that ``link.py`` does not order give wrong results, or are found by ``races.py``, where each stream is
an actor.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

import torch
from torch import Tensor

from zinf_compile.ir.hardware import MemorySpace
from zinf_compile.runtime.device.allocations import DeviceAllocations
from zinf_compile.runtime.device.cpu import CPU
from zinf_compile.runtime.device.device import AllocatedBlock, CollectiveStreams, CopyStreams, Device, Event, MemoryUse

_MOST_SECONDS = 2e-4  # the longest delay of a copy
_GIVE_UP_SECONDS = 20.0


class FakeEvent:
    """A point in the order of a stream."""

    def __init__(self, stream: "FakeStream") -> None:
        self.stream = stream
        self.done = threading.Event()
        self.seconds = 0.0

    def happen(self) -> None:
        """Mark the event as done."""
        self.seconds = time.perf_counter()
        self.done.set()

    def has_happened(self) -> bool:
        """Return whether the stream has reached the event."""
        return self.done.is_set()

    def seconds_until(self, later: "FakeEvent") -> float:
        """Return the seconds between two events that are done."""
        assert self.done.is_set()
        assert later.done.is_set()
        return later.seconds - self.seconds

    def wait(self) -> None:
        """Block until the stream has reached the event."""
        if not self.done.wait(_GIVE_UP_SECONDS):
            raise AssertionError(f"the {self.stream.name} stream did not reach an event: streams wait for each other")


class FakeStream:
    """Runs enqueued work on its own thread; a compute stream runs it at once."""

    synchronous = False  # the compute stream is timed by its events, too

    def __init__(self, name: str, *, seed: int, is_compute: bool, most_seconds: float = _MOST_SECONDS) -> None:
        self.name = name
        self._is_compute = is_compute
        self._most_seconds = most_seconds
        self._random = random.Random(seed)
        self._enqueued: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"fake-{name}", daemon=True)
        self.num_copied = self.num_waits = self.num_run = 0
        self._raised: BaseException | None = None
        if not is_compute:
            self._thread.start()

    def wait(self, event: Event) -> None:
        """Make later work wait for an event."""
        self.num_waits += 1
        self._enqueue(lambda: self._wait(event))

    def _wait(self, event: Event) -> None:
        event.wait()

    def record(self, *, timed: bool = False) -> FakeEvent:
        """Return an event after all work enqueued so far."""
        if self._raised is not None:
            raise self._raised
        event = FakeEvent(self)
        self._enqueue(lambda: self._reach(event))
        return event

    def _reach(self, event: FakeEvent) -> None:
        event.happen()

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Copy a flat tensor."""
        assert not self._is_compute
        assert source.shape == destination.shape
        assert source.dtype == destination.dtype
        self.num_copied += 1
        self._enqueue(lambda: self._copy(source, destination))

    def _copy(self, source: Tensor, destination: Tensor) -> None:
        time.sleep(self._random.random() * self._most_seconds)
        destination.data.copy_(source)  # as a GPU's copy engine, it changes no version

    @property
    def runs(self) -> bool:
        """Return whether work is run on it that enqueues more, such as collectives between ranks."""
        return self.name in ("gathers", "reductions", "replicas")

    def run(self, call: Callable[[], None]) -> None:
        """Call it on the stream's thread. What it raises is raised by the next ``record``."""
        assert self.runs
        self.num_run += 1
        self._enqueue(lambda: self._try(call))

    def _try(self, call: Callable[[], None]) -> None:
        time.sleep(self._random.random() * self._most_seconds)
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # it is raised later
            self._raised = error

    def _enqueue(self, act: Callable[[], None]) -> None:
        if self._is_compute:
            act()
            return
        with self._condition:
            self._enqueued.append(act)
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._enqueued or self._is_closed)
                if not self._enqueued:
                    return
                act = self._enqueued.popleft()
            act()
            del act

    def close(self) -> None:
        """End the thread after it has run everything."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()


class FakeDevice:
    """Implements ``Device``. Only its streams access its memory."""

    memory = MemorySpace(unified=False)
    identity = "fake"

    def __init__(
        self, *, seed: int = 0, nbytes: int = 2**40, pinning: str | None = None, most_seconds: float = _MOST_SECONDS
    ) -> None:
        """``pinning`` is the reason why it refuses to pin host memory; a copy is delayed by up to ``most_seconds``."""
        self.torch_device = torch.device("cpu")
        self.compute = FakeStream("compute", seed=seed, is_compute=True)
        self.update = FakeStream("update", seed=seed, is_compute=True)
        names = ("to-device", "to-host", "update-to-device", "update-to-host", "gathers", "reductions", "replicas")
        self._copying = [
            FakeStream(name, seed=seed + number, is_compute=False, most_seconds=most_seconds)
            for number, name in enumerate(names, 1)
        ]
        self.copies, self.update_copies = CopyStreams(*self._copying[:2]), CopyStreams(*self._copying[2:4])
        self.collectives = CollectiveStreams(*self._copying[4:])
        self.nbytes = nbytes
        self.pinning = pinning
        self.pinned: dict[int, int] = {}
        self.limits: list[int | None] = []

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory."""
        return torch.empty(tuple(shape), dtype=dtype)

    def allocate_block(self, nbytes: int) -> AllocatedBlock:
        """Return one allocation for many tensors."""
        return AllocatedBlock(self.allocate([nbytes], torch.uint8))

    def measure_use(self, *, budget: int) -> MemoryUse:
        """Return a meter that measures as on a GPU."""
        return DeviceAllocations(self, budget=budget)

    def selected(self) -> AbstractContextManager[object]:
        """Do nothing: all threads enqueue ops on the same stream."""
        return nullcontext()

    def updating(self) -> AbstractContextManager[object]:
        """Do nothing: the single update thread enqueues ops on its stream."""
        return nullcontext()

    def follow(self) -> None:
        """Change nothing."""

    def pin(self, address: int, nbytes: int) -> str | None:
        """Record what is pinned."""
        assert address % 4096 == 0
        assert nbytes % 4096 == 0
        if self.pinning is None:
            self.pinned[address] = nbytes
        return self.pinning

    def unpin(self, address: int) -> None:
        """Forget it."""
        del self.pinned[address]

    @property
    def allocated_nbytes(self) -> int:
        """Return 0: the CPU allocator keeps no count."""
        return 0

    @property
    def peak_allocated_nbytes(self) -> int:
        """Return nothing."""
        return 0

    @property
    def free_nbytes(self) -> int:
        """Return all there is."""
        return self.nbytes

    def forget_peak(self) -> None:
        """Change nothing."""

    def limit(self, nbytes: int | None) -> None:
        """Record the limit."""
        self.limits.append(nbytes)

    def give_back(self) -> None:
        """Change nothing."""

    def synchronize(self) -> None:
        """Block until the streams have run everything that was enqueued."""
        for stream in self._copying:
            stream.record().wait()

    def close(self) -> None:
        """End the streams."""
        for stream in self._copying:
            stream.close()


@contextmanager
def on_fake_device(device: FakeDevice | None = None) -> Iterator[FakeDevice]:
    """Make stores created inside with ``device="cuda"`` use a fake device."""
    device = device or FakeDevice()

    def make(name: str) -> Device:
        return CPU if name == "cpu" else device

    with (
        mock.patch("zinf_compile.runtime.store.store.make_device", make),
        mock.patch("zinf_compile.runtime.device.make_device.make_device", make),
    ):
        yield device
    device.close()
