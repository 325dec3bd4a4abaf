"""A fake device on the CPU with its own memory and streams. It receives exactly the calls that a GPU would.

Copies run later, on one thread per stream, after a delay drawn from a seeded generator, and so do the ops of graphs and of
updates (``late_compute.py``). Backward runs on a thread of its own, as autograd does it for a GPU. Accesses that ``link.py``
does not order give wrong results, or are found by ``races.py``, where each stream is an actor.
"""

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.late_compute import DeviceMemory, Enqueue, LateCompute, below_autograd, current_stream
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.hardware import MemorySpace
from zinf_compile.runtime.device.allocations import DeviceAllocations
from zinf_compile.runtime.device.cpu import CPU
from zinf_compile.runtime.device.device import (
    AllocatedBlock,
    CollectiveStreams,
    CopyStreams,
    Device,
    Event,
    MemoryUse,
    Pair,
    alias_bytes,
)
from zinf_compile.runtime.execute.executor import Executor
from zinf_compile.runtime.params.home import HomeTensor
from zinf_compile.runtime.storage import state_codes
from zinf_compile.runtime.store.store import Store

_MOST_SECONDS = 2e-4  # the longest delay of a copy
_GIVE_UP_SECONDS = 120.0
_find_library = state_codes._library_on


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
    """Runs enqueued work on its own thread."""

    synchronous = False  # the compute stream is timed by its events, too

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        memory: DeviceMemory,
        computes: bool = False,
        most_seconds: float = _MOST_SECONDS,
    ) -> None:
        self.name = name
        self._memory = memory
        self._computes = computes
        self._most_seconds = most_seconds
        self._random = random.Random(seed)
        self._enqueued: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"fake-{name}", daemon=True)
        self.num_copied = self.num_waits = self.num_run = 0
        self._raised: BaseException | None = None
        self._is_heard = False

    def wait(self, event: FakeEvent) -> None:
        """Make later work wait for an event. Ops that the caller runs by itself are such work.

        What runs on a stream makes tensors that the caller takes next, so it has to have run.
        """
        self.num_waits += 1
        if self._computes and (current_stream() is None or event.stream.runs):
            self._wait(event)
        else:
            self.enqueue(lambda: self._wait(event))

    def _wait(self, event: Event) -> None:
        event.wait()

    def record(self, *, timed: bool = False) -> FakeEvent:
        """Return an event after all work enqueued so far."""
        self._tell()
        event = FakeEvent(self)
        self.enqueue(lambda: self._reach(event))
        return event

    def _reach(self, event: FakeEvent) -> None:
        event.happen()

    def copy_all(self, pairs: Iterable[Pair]) -> None:
        """Copy flat tensors. As on a GPU, the stream does not keep those on the device alive."""
        for source, destination in pairs:
            self._copy(source, destination)

    def _copy(self, source: Tensor, destination: Tensor) -> None:
        assert not self._computes
        assert source.shape == destination.shape
        assert source.dtype == destination.dtype
        self.num_copied += 1
        kept: list[object] = []  # on the host, or the user's
        ends = []
        for each in (source, destination):
            allocation = self._memory.find(each)
            if allocation is None or allocation.memory is None:
                kept.append(each)
            else:
                allocation.count_copy(1)
                ends.append(allocation)
        with torch._C.DisableTorchFunctionSubclass():
            addresses, nbytes = [each.data_ptr() for each in (destination, source)], source.numel() * source.itemsize

        def copy() -> None:
            time.sleep(self._random.random() * self._most_seconds)
            ctypes.memmove(*addresses, nbytes)
            kept.clear()
            for allocation in ends:
                allocation.count_copy(-1)

        self.enqueue(copy)

    @property
    def runs(self) -> bool:
        """Return whether work is run on it that enqueues more, such as collectives between ranks."""
        return self.name in ("gathers", "reductions", "replicas")

    def run(self, call: Callable[[], None]) -> None:
        """Call it on the stream's thread. What it raises is raised by the next ``record``."""
        assert self.runs or self.name == "to-device"  # where rows of int8 are decoded
        self.num_run += 1
        self.enqueue(lambda: self._late(call))

    def _late(self, call: Callable[[], None]) -> None:
        time.sleep(self._random.random() * self._most_seconds)
        call()

    def enqueue(self, work: Callable[[], None]) -> None:
        """Call it on the stream's thread."""
        with self._condition:
            self._enqueued.append(work)
            if self._thread.ident is None:
                self._thread.start()
            self._condition.notify()

    def drain(self) -> None:
        """Block until the stream has run everything; raise what it raised."""
        done = threading.Event()
        self.enqueue(done.set)
        if not done.wait(_GIVE_UP_SECONDS):
            raise AssertionError(f"the {self.name} stream did not end: streams wait for each other")
        self._tell()

    def _tell(self) -> None:
        if self._raised is not None:
            self._is_heard = True
            raise self._raised

    def _run(self) -> None:
        torch.set_num_threads(1)
        with below_autograd(are_excluded=self._computes):
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._enqueued or self._is_closed)
                    if not self._enqueued:
                        return
                    work = self._enqueued.popleft()
                try:
                    work()
                except BaseException as error:  # noqa: BLE001  # it is raised later
                    self._raised = error
                del work

    def close(self) -> None:
        """End the thread after it has run everything; raise what it raised, if nobody has heard of it."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(_GIVE_UP_SECONDS)
            if self._thread.is_alive():
                raise AssertionError(f"the {self.name} stream did not end: streams wait for each other")
        if not self._is_heard:
            self._tell()


class AutogradThread:
    """Runs backward on a thread, as autograd does for a GPU. Its caller waits, and hears of Ctrl-C when it has ended."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fake-autograd")

    def run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call torch's engine; return what it returns."""
        is_inner = threading.current_thread().name.startswith("fake-autograd")
        # Modes, as of a trace, and transforms of torch.func are the calling thread's.
        if is_inner or torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
            return original(*args, **kwargs)
        mode = torch.is_grad_enabled()

        def call() -> Any:
            with torch.set_grad_enabled(mode):
                return original(*args, **kwargs)

        future, interrupt = self._pool.submit(call), None
        while not future.done():
            try:
                futures.wait([future])
            except BaseException as error:  # noqa: BLE001  # raised below
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return future.result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


class FakeDevice:
    """Implements ``Device``. Only its streams access its memory."""

    identity = "fake"
    libraries_nbytes = 0

    def __init__(
        self,
        *,
        seed: int = 0,
        nbytes: int = 2**40,
        pinning: str | None = None,
        most_seconds: float = _MOST_SECONDS,
        is_late: bool = True,
        name: str = "cuda",
        integrated: bool = False,
    ) -> None:
        """``pinning`` is the reason why it refuses to pin host memory; a copy is delayed by up to ``most_seconds``.

        Without ``is_late``, ops run when they are enqueued. An ``integrated`` device lies in the host's RAM: its ``nbytes``
        are also those of pinned memory, which its ops read in place.
        """
        self.memory = MemorySpace(unified=False, integrated=integrated)
        self._is_late, self.name = is_late, name
        self.torch_device = torch.device("cpu")
        self.own_memory = DeviceMemory(nbytes)
        self.compute = FakeStream("compute", seed=seed, memory=self.own_memory, computes=True)
        self.update = FakeStream("update", seed=seed, memory=self.own_memory, computes=True)
        names = ("to-device", "to-host", "update-to-device", "update-to-host", "gathers", "reductions", "replicas")
        self._copying = [
            FakeStream(name, seed=seed + number, memory=self.own_memory, most_seconds=most_seconds)
            for number, name in enumerate(names, 1)
        ]
        self.copies, self.update_copies = CopyStreams(*self._copying[:2]), CopyStreams(*self._copying[2:4])
        self.collectives = CollectiveStreams(*self._copying[4:])
        self.nbytes = nbytes
        self.pinning = pinning
        self.pinned: dict[int, int] = {}
        self.limits: list[int | None] = []

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory. CapacityError if there is too little."""
        with _disable_current_modes():  # that of ``updating`` would count it a second time
            memory = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        try:
            return self.own_memory.make(memory, self._pool())
        except torch.OutOfMemoryError as error:
            raise CapacityError(str(error)) from error

    def _pool(self) -> FakeStream:
        """Return the stream on which the calling thread enqueues ops."""
        return self.update if current_stream() is self.update else self.compute

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
        """A block whose ops run on the update stream."""
        return self._updating_late() if self._is_late else nullcontext()

    @contextmanager
    def _updating_late(self) -> Iterator[None]:
        # One stream takes the place of another: the mode of compute would enqueue what this one makes there.
        with _disable_current_modes(), LateCompute(self.update, self.own_memory, makes_here=True):
            yield

    def computing(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return a graph whose ops run on the compute stream. It ends when they have: user code runs by itself."""
        if not self._is_late:
            return run

        def late(inputs: list[Any]) -> Any:
            for each in inputs:
                if isinstance(each, Tensor) and not isinstance(each, HomeTensor) and not _is_token(each):
                    self.own_memory.add(each)
            try:
                with LateCompute(self.compute, self.own_memory):
                    return run(inputs)
            finally:
                self.compute.drain()

        return late

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

    def in_place(self, home: Tensor) -> Tensor:
        """Return pinned memory as a tensor of the device. What runs late reads what is there then."""
        assert self.memory.integrated
        alias = alias_bytes(home, 0, home.numel(), home.dtype).view(home.shape)
        if home.numel():
            first, end = alias.data_ptr(), alias.data_ptr() + alias.nbytes
            assert any(start <= first and end <= start + length for start, length in self.pinned.items())
            self.own_memory.add_in_place(alias)
        return alias

    @property
    def requested_nbytes(self) -> int:
        """Return the bytes of all tensors on the device, but for the user's."""
        with self.own_memory.counted() as allocator:
            return allocator.requested_nbytes

    @property
    def peak_requested_nbytes(self) -> int:
        """Return the most of them since the last ``forget_peak``."""
        with self.own_memory.counted() as allocator:
            return allocator.peak_requested_nbytes

    @property
    def allocated_nbytes(self) -> int:
        """Return the bytes of all of them, as the allocator rounds them up."""
        with self.own_memory.counted() as allocator:
            return allocator.allocated_nbytes

    @property
    def peak_reserved_nbytes(self) -> int:
        """Return the most that the allocator has taken since the last ``forget_peak``."""
        with self.own_memory.counted() as allocator:
            return allocator.peak_reserved_nbytes

    @property
    def free_nbytes(self) -> int:
        """Return what is left."""
        return self.nbytes - self.allocated_nbytes - (sum(self.pinned.values()) if self.memory.integrated else 0)

    def forget_peak(self) -> None:
        """Reset the peaks to what is there now."""
        with self.own_memory.counted() as allocator:
            allocator.forget_peaks()

    def limit(self, nbytes: int | None) -> None:
        """Record the limit, and keep to it."""
        self.limits.append(nbytes)
        with self.own_memory.counted() as allocator:
            allocator.set_limit(nbytes)

    def give_back(self) -> None:
        """Return what is reserved and not used."""
        with self.own_memory.counted() as allocator:
            allocator.give_back()

    def synchronize(self) -> None:
        """Block until the streams have run everything that was enqueued."""
        for stream in (self.compute, self.update, *self._copying):
            stream.record().wait()

    def close(self) -> None:
        """End the streams; raise what they raised, if nobody has heard of it."""
        with ExitStack() as stack:
            stack.callback(self.own_memory.close)
            for stream in (self.compute, self.update, *self._copying):
                stack.callback(stream.close)


class _LateLibrary:
    """Compiled code that runs on a stream."""

    def __init__(self, library: Any, stream: Enqueue) -> None:
        self._library, self._stream = library, stream

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that enqueues the compiled one, which is given addresses."""
        function, enqueue = getattr(self._library, name), self._stream.enqueue
        return lambda *args: enqueue(lambda: function(*args))


def _find_late_library(where: torch.device) -> Any:
    """Return compiled code. Not what another device has patched: with one inside another, calls would be late twice."""
    library, stream = _find_library(where), current_stream()
    return library if library is None or stream is None else _LateLibrary(library, stream)


def _is_token(tensor: Tensor) -> bool:
    """Return whether a tensor may be a ticket of a transfer, which is the host's."""
    return tensor.numel() == 1 and tensor.dtype is torch.int64


@contextmanager
def on_fake_device(device: FakeDevice | None = None) -> Iterator[FakeDevice]:
    """Make stores created inside with ``device="cuda"`` use a fake device."""
    device = device or FakeDevice()

    def make(name: str) -> Device:
        if name != "cpu" and name != device.name:
            raise AssertionError(f"{name} is asked for, and the device is {device.name}")
        return CPU if name == "cpu" else device

    autograd, engine, init = AutogradThread(), torch.autograd.graph._engine_run_backward, Executor.__init__

    def make_executor(
        executor: Executor, store: Store, run: Callable[[list[Any]], Any], *args: Any, **kwargs: Any
    ) -> None:
        init(executor, store, device.computing(run) if store.device is device else run, *args, **kwargs)

    with (
        mock.patch("zinf_compile.runtime.store.store.make_device", make),
        mock.patch("zinf_compile.runtime.device.make_device.make_device", make),
        mock.patch.object(Executor, "__init__", make_executor),
        mock.patch.object(state_codes, "_library_on", _find_late_library),
        mock.patch.object(torch.autograd, "_engine_run_backward", partial(autograd.run, engine)),
    ):
        yield device
    autograd.close()
    device.close()
