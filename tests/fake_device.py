"""A device with memory and streams of its own, on a CPU: what runs on it is bit for bit what a GPU would be told.

Ops of compute run when they are told. Copies run on a thread for each stream, later, by as long as a seeded generator says.
What ``link.py`` does not order comes out wrong, or is found by ``tests/races.py``, to which streams are actors of their own.
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

from zinf_compile.runtime.device import Event

_MOST_SECONDS = 2e-4  # of delay of a copy
_GIVE_UP_SECONDS = 20.0


class FakeEvent:
    """A point in the order of a stream."""

    def __init__(self, stream: "FakeStream") -> None:
        self.stream = stream
        self.done = threading.Event()
        self.seconds = 0.0

    def happen(self) -> None:
        """Be done now."""
        self.seconds = time.perf_counter()
        self.done.set()

    def seconds_until(self, later: "FakeEvent") -> float:
        """Return the seconds between two events that are done."""
        assert self.done.is_set()
        assert later.done.is_set()
        return later.seconds - self.seconds

    def wait(self) -> None:
        """Block until the stream has got there."""
        if not self.done.wait(_GIVE_UP_SECONDS):
            raise AssertionError(f"the {self.stream.name} stream did not come to an event: streams wait for each other")


class FakeStream:
    """Does what it is told on a thread of its own; or at once, if it is that of compute."""

    def __init__(self, name: str, *, seed: int, is_compute: bool, most_seconds: float = _MOST_SECONDS) -> None:
        self.name = name
        self._is_compute = is_compute
        self._most_seconds = most_seconds
        self._random = random.Random(seed)
        self._told: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"fake-{name}", daemon=True)
        self.num_copied = self.num_waits = 0
        if not is_compute:
            self._thread.start()

    def wait(self, event: Event) -> None:
        """Go on behind an event."""
        self.num_waits += 1
        self._tell(event.wait)

    def record(self, *, timed: bool = False) -> FakeEvent:
        """Return an event behind all that was told so far."""
        event = FakeEvent(self)
        self._tell(event.happen)
        return event

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Copy flat bytes."""
        assert not self._is_compute
        assert source.shape == destination.shape
        assert source.dtype == destination.dtype == torch.uint8
        self.num_copied += 1
        self._tell(lambda: self._copy(source, destination))

    def _copy(self, source: Tensor, destination: Tensor) -> None:
        time.sleep(self._random.random() * self._most_seconds)
        destination.copy_(source)

    def _tell(self, act: Callable[[], None]) -> None:
        if self._is_compute:
            act()
            return
        with self._condition:
            self._told.append(act)
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._told or self._is_closed)
                if not self._told:
                    return
                act = self._told.popleft()
            act()
            del act

    def close(self) -> None:
        """End the thread when it has done all."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()


class FakeDevice:
    """A device of the interface of ``StreamDevice``."""

    def __init__(
        self, *, seed: int = 0, nbytes: int = 2**40, pinning: str | None = None, most_seconds: float = _MOST_SECONDS
    ) -> None:
        """It has so many bytes; ``pinning`` is why it refuses to pin host memory; a copy takes up to so long."""
        self.torch_device = torch.device("cpu")
        self.compute = FakeStream("compute", seed=seed, is_compute=True)
        self.update = FakeStream("update", seed=seed, is_compute=True)
        self.to_device = FakeStream("to-device", seed=seed + 1, is_compute=False, most_seconds=most_seconds)
        self.to_host = FakeStream("to-host", seed=seed + 2, is_compute=False, most_seconds=most_seconds)
        self.nbytes = nbytes
        self.pinning = pinning
        self.pinned: dict[int, int] = {}
        self.limits: list[int | None] = []

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory."""
        return torch.empty(tuple(shape), dtype=dtype)

    def selected(self) -> AbstractContextManager[object]:
        """Change nothing: all threads tell ops to the same stream."""
        return nullcontext()

    def updating(self) -> AbstractContextManager[object]:
        """Change nothing: the one thread that updates tells ops to its stream."""
        return nullcontext()

    def follow(self) -> None:
        """Change nothing."""

    def pin(self, address: int, nbytes: int) -> str | None:
        """Note what is pinned."""
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
        """Return nothing: a CPU's allocator does not count."""
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
        """Note the limit."""
        self.limits.append(nbytes)

    def give_back(self) -> None:
        """Change nothing."""

    def synchronize(self) -> None:
        """Block until the streams have done what they were told."""
        for stream in (self.to_device, self.to_host):
            stream.record().wait()

    def close(self) -> None:
        """End the streams."""
        self.to_device.close()
        self.to_host.close()


@contextmanager
def on_fake_device(device: FakeDevice | None = None) -> Iterator[FakeDevice]:
    """Let stores that are made inside with ``device="cuda"`` compute on a fake."""
    device = device or FakeDevice()

    def make(name: str) -> FakeDevice | None:
        return None if name == "cpu" else device

    with (
        mock.patch("zinf_compile.runtime.store.make_device", make),
        mock.patch("zinf_compile.runtime.device.make_device", make),
    ):
        yield device
    device.close()
