"""An NVIDIA GPU as a device: six streams, events between them, and memory from torch's allocator.

Where several ranks train there are three streams more.

Code that depends on the order of streams and events is in ``link.py``, which tests run on a fake device, without a GPU.
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

import torch
from torch import Tensor

from zinf_compile.ir.config import free_memory
from zinf_compile.ir.errors import CapacityError, ConfigError
from zinf_compile.ir.glossary import format_bytes
from zinf_compile.ir.hardware import MemorySpace
from zinf_compile.runtime.device.allocations import DeviceAllocations
from zinf_compile.runtime.device.device import (
    AllocatedBlock,
    CollectiveStreams,
    CopyStreams,
    Event,
    MemoryUse,
    Pair,
    Stream,
    alias_bytes,
)

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # by which a user chooses
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister: for every context of the process, and for kernels
_THREADS = 2  # that launch products: forward's, and autograd's for backward
_BUFFERS = re.compile(r":(\d+):(\d+)")
_LARGE_WORKSPACES = (9, 10, 12)  # major compute capabilities for which torch takes 32 MiB: Hopper and Blackwell
_HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


class CudaEvent:
    """A point in the order of a CUDA stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        """Block the calling thread, and no other, until the stream has reached the event."""
        self.event.synchronize()

    def has_happened(self) -> bool:
        """Return whether the stream has reached the event. RuntimeError of CUDA if earlier work failed."""
        has_happened: bool = self.event.query()
        return has_happened

    def seconds_until(self, later: Event) -> float:
        """Return the seconds between two timed events, both of which have been waited for."""
        assert isinstance(later, CudaEvent)
        milliseconds: float = self.event.elapsed_time(later.event)
        return milliseconds / 1000


class CudaStream:
    """A CUDA stream of torch."""

    synchronous = False

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._gpu: int = stream.device.index

    def wait(self, event: Event) -> None:
        """Make later work on this stream wait for an event. Does not block."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def record(self, *, timed: bool = False) -> CudaEvent:
        """Return an event after all work enqueued so far; with ``timed`` it can be used to measure seconds."""
        # Blocking: a thread that waits for it sleeps, and leaves its core to the threads that launch ops and run updates.
        return CudaEvent(self.stream.record_event(torch.cuda.Event(enable_timing=timed, blocking=True)))

    def copy_all(self, pairs: Iterable[Pair]) -> None:
        """Enqueue copies of flat bytes. Asynchronous if host memory is pinned; else CUDA copies to its own buffer first."""
        # To ``data``, whose version is its own: what arrives in a parameter was not written by its user. Other threads read
        # that version meanwhile. The stream is chosen once, which takes as long as enqueueing a copy.
        with torch.cuda.device(self._gpu), torch.cuda.stream(self.stream), torch.no_grad():
            for source, destination in pairs:
                destination.data.copy_(source, non_blocking=True)

    def run(self, call: Callable[[], None]) -> None:
        """Enqueue what ``call`` enqueues on the current stream of torch."""
        with self.current():
            call()

    @contextmanager
    def current(self) -> Iterator[None]:
        """A block in which the calling thread enqueues ops on this stream, and its GPU is the current one."""
        # The GPU first: leaving the block of a stream would make a context on the thread's own GPU, if that is another.
        with torch.cuda.device(self._gpu), torch.cuda.stream(self.stream):
            yield


def _cublas_workspace_nbytes(major: int) -> int:
    """Return the bytes of a workspace of cuBLAS, as torch chooses them in CublasHandlePool.cpp."""
    if buffers := _BUFFERS.findall(os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")):  # KiB, and how many of them
        return sum(int(size) * int(count) for size, count in buffers) * 2**10
    return (8 * 4096 if major in _LARGE_WORKSPACES else 2 * 4096 + 8 * 16) * 2**10


def _reads_registered_memory(index: int) -> bool:
    """Return whether kernels of a GPU find registered host memory at the address that it has on the host."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, can = ctypes.c_int(), ctypes.c_int()
    driver.cuInit(0)
    failed = driver.cuDeviceGet(ctypes.byref(device), index)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(can), _HOST_POINTERS, device)
    return not failed and can.value == 1


class CudaDevice:
    """One GPU. ConfigError if torch finds no GPU with this index."""

    def __init__(self, name: str) -> None:
        if not torch.cuda.is_available():
            why = "torch here is built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
            raise ConfigError(
                f"device={name!r} asks for an NVIDIA GPU, but {why}; give device='cpu', or install torch for CUDA and check "
                "that `nvidia-smi` lists the GPU"
            )
        asked = torch.device(name)
        index = torch.cuda.current_device() if asked.index is None else asked.index
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device={name!r} does not exist: torch finds {torch.cuda.device_count()} GPUs, the last is "
                f"'cuda:{torch.cuda.device_count() - 1}'"
            )
        self.torch_device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.memory = MemorySpace(
            unified=False, integrated=bool(properties.is_integrated) and _reads_registered_memory(index)
        )
        if not any(variable in os.environ for variable in _ALLOCATOR_VARIABLES):
            # Streams have pools of their own, and what moves has many sizes: a run that held 148 MiB had reserved 236.
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        # Copies in each direction and updates have streams of their own, and run concurrently; link.py handles the hazards.
        self._copies = CopyStreams(self._new_stream(), self._new_stream())
        self._update_copies = CopyStreams(self._new_stream(), self._new_stream())
        self._update = self._new_stream()
        self._collectives: CollectiveStreams | None = None
        self._compute: CudaStream | None = None
        self._own_limit: float | None = None  # the user's fraction of the memory, while ours is set

    @property
    def compute(self) -> CudaStream:
        """The stream of the model's ops: the one that was current when ``follow`` was last called."""
        if self._compute is None:
            self.follow()
        assert self._compute is not None
        return self._compute

    def follow(self) -> None:
        """Use the caller's current stream as the compute stream. Called on the model's thread before it runs ops."""
        current = torch.cuda.current_stream(self.torch_device)
        if self._compute is not None:
            if self._compute.stream == current:
                return
            # Hazard: work enqueued on the previous stream may still write what ops on this one read, such as residents.
            current.wait_stream(self._compute.stream)
        self._compute = CudaStream(current)

    def _new_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self.torch_device))

    @property
    def copies(self) -> CopyStreams:
        """See Device.copies."""
        return self._copies

    @property
    def update_copies(self) -> CopyStreams:
        """See Device.update_copies."""
        return self._update_copies

    @property
    def identity(self) -> str:
        """The number that the GPU was made with."""
        return str(torch.cuda.get_device_properties(self.torch_device).uuid)

    @property
    def collectives(self) -> CollectiveStreams:
        """The streams of collectives between ranks, which a process that trains alone never creates."""
        if self._collectives is None:
            self._collectives = CollectiveStreams(self._new_stream(), self._new_stream(), self._new_stream())
        return self._collectives

    @property
    def update(self) -> Stream:
        """The stream of optimizer updates, beside the model's ops."""
        return self._update

    def updating(self) -> AbstractContextManager[object]:
        """A block in which the calling thread enqueues ops on the update stream."""
        return self._update.current()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return device memory from torch's allocator. CapacityError, with the free bytes, if there is too little."""
        try:
            return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            free, total = torch.cuda.mem_get_info(self.torch_device)
            ours = torch.cuda.memory_reserved(self.torch_device)
            raise CapacityError(
                f"{self.torch_device} has no {format_bytes(nbytes)} left: {format_bytes(free)} of {format_bytes(total)} are "
                f"free, this process holds {format_bytes(ours)} and others hold {format_bytes(total - free - ours)}; end "
                f"other processes, or lower device_memory by what they took since it was chosen"
            ) from error

    def allocate_block(self, nbytes: int) -> AllocatedBlock:
        """Return one allocation for many tensors. CapacityError, with the free bytes, if there is too little."""
        return AllocatedBlock(self.allocate([nbytes], torch.uint8))

    def selected(self) -> AbstractContextManager[object]:
        """A block in which the calling thread enqueues ops on the compute stream, even if it is not the model's thread."""
        return self.compute.current()

    def synchronize(self) -> None:
        """Block until all streams have finished their work."""
        torch.cuda.synchronize(self.torch_device)

    def pin(self, address: int, nbytes: int) -> str | None:
        """Pin whole pages of host memory; return the reason as text if that fails, else None."""
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self.torch_device):  # CUDA makes a context on the current device
            code = runtime.cudaHostRegister(address, nbytes, _PORTABLE | _MAPPED)
        if int(code) == 0:
            return None
        with suppress(RuntimeError):  # CUDA keeps the error, and the next kernel would report it
            torch.zeros(1, device=self.torch_device)
            self.synchronize()
        return str(runtime.cudaGetErrorString(code))

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        self.synchronize()  # a copy in flight must not continue with unpinned pages
        with torch.cuda.device(self.torch_device):
            torch.cuda.cudart().cudaHostUnregister(address)

    def in_place(self, home: Tensor) -> Tensor:
        """See Device.in_place."""
        return alias_bytes(home, 0, home.numel(), home.dtype, self.torch_device).view(home.shape)

    @property
    def requested_nbytes(self) -> int:
        """Return the bytes of all tensors of this process on the device."""
        return self._requested("current")

    @property
    def peak_requested_nbytes(self) -> int:
        """Return the most bytes of tensors since the last ``forget_peak``."""
        return self._requested("peak")

    def _requested(self, when: str) -> int:
        """Return a count of bytes as requested; as allocated with cudaMallocAsync, which counts nothing else."""
        counted = "requested_bytes" if torch.cuda.get_allocator_backend() == "native" else "allocated_bytes"
        nbytes: int = torch.cuda.memory_stats(self.torch_device).get(f"{counted}.all.{when}", 0)
        return nbytes

    @property
    def allocated_nbytes(self) -> int:
        """Return the bytes of all tensors, each with what the allocator rounds it up to."""
        return torch.cuda.memory_allocated(self.torch_device)

    @property
    def peak_reserved_nbytes(self) -> int:
        """Return the most that the allocator has taken from the device since the last ``forget_peak``."""
        return torch.cuda.max_memory_reserved(self.torch_device)

    @property
    def free_nbytes(self) -> int:
        """Return the bytes that this process may still allocate, also by the limit that its user has set."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        if self.memory.integrated:  # CUDA does not count what the page cache would give back
            free = free_memory()
        reserved = torch.cuda.memory_reserved(self.torch_device)
        allowed = int(self._users_fraction * torch.cuda.get_device_properties(self.torch_device).total_memory)
        return max(0, min(free, allowed - reserved)) + reserved - self.allocated_nbytes

    @property
    def libraries_nbytes(self) -> int:
        """Return the bytes of cuBLAS's workspaces: torch has one for each thread that launches products, on its stream."""
        return _THREADS * _cublas_workspace_nbytes(torch.cuda.get_device_properties(self.torch_device).major)

    def measure_use(self, *, budget: int) -> MemoryUse:
        """Return what measures a model's memory use by torch's allocator."""
        return DeviceAllocations(self, budget=budget)

    def forget_peak(self) -> None:
        """Reset the peaks to what is requested and reserved now."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def limit(self, nbytes: int | None) -> None:
        """Make torch refuse to hold more than ``nbytes`` for this process from now on; None restores the user's limit."""
        if nbytes is None and self._own_limit is None:
            return
        fraction = self._own_limit = self._users_fraction
        if nbytes is None:
            self._own_limit = None
        else:
            total = torch.cuda.get_device_properties(self.torch_device).total_memory
            fraction = min(fraction, nbytes / total)
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)

    @property
    def _users_fraction(self) -> float:
        """The share of the memory that the user lets this process take; 1 if nothing is set."""
        if self._own_limit is not None:
            return self._own_limit
        fraction: float = torch.cuda.get_per_process_memory_fraction(self.torch_device)
        return fraction

    def give_back(self) -> None:
        """Return memory that torch's allocator caches to the system."""
        torch.cuda.empty_cache()

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same GPU, so that its rates are measured once."""
        return isinstance(other, CudaDevice) and self.torch_device == other.torch_device

    def __hash__(self) -> int:
        """Return the hash of the GPU's name."""
        return hash(self.torch_device)
