"""A device that computes: its memory, and the streams on which copies, ops and updates are enqueued."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.hardware import MemorySpace

Pair = tuple[Tensor, Tensor]  # the source of a copy, and its destination


class Event(Protocol):
    """A point in the order of a stream."""

    def wait(self) -> None:
        """Block the calling thread until the stream has reached the event."""

    def has_happened(self) -> bool:
        """Return whether the stream has reached the event. Does not block; raises what work before the event raised."""

    def seconds_until(self, later: "Event") -> float:
        """Return the seconds between two timed events, both of which have been waited for."""


class Stream(Protocol):
    """Runs work in the order in which it was enqueued, concurrently with other streams."""

    synchronous: bool  # work is done when the call that enqueues it returns

    def wait(self, event: Event) -> None:
        """Make later work on this stream wait for an event of another stream. Does not block."""

    def record(self, *, timed: bool = False) -> Event:
        """Return an event after all work enqueued so far; with ``timed`` it can be used to measure seconds."""

    def copy_all(self, pairs: Iterable[Pair]) -> None:
        """Enqueue copies of flat bytes, in this order. A pair has one length, and must stay alive until it is copied."""

    def run(self, call: Callable[[], None]) -> None:
        """Enqueue what ``call`` enqueues on the current stream of torch. The tensors it uses must stay alive until then."""


class Block(Protocol):
    """One allocation on a device that many tensors share."""

    bytes: Tensor  # all of it, flat

    def elements(self, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor over bytes of the block, whose storage begins at ``offset``. It keeps the block alive."""

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the block for disk I/O. VerifyError if disk I/O cannot access this memory."""


class MemoryUse(Protocol):
    """Measures how much of the device tier a model uses, and keeps it within its budget."""

    budget: int
    promised: int  # bytes that plans promise not to exceed
    least_promised: int

    @property
    def may_settle_again(self) -> bool:
        """Return whether ``settle(again=True)`` would do anything."""

    @property
    def peak(self) -> int:
        """Return the peak bytes of the device tier, under any plan."""

    @property
    def process_peak(self) -> int:
        """Return the largest anonymous memory of the process of any sample; 0 if it is not measured."""

    @property
    def reserved_peak(self) -> int:
        """Return the most that an allocator has taken from the device for the model; 0 if it is not measured."""

    @property
    def reserved_limit(self) -> int:
        """Return the most that it may take; 0 if it is not limited."""

    def begin_again(self, *, after_capture: bool = False) -> None:
        """Start measuring again, after plans changed or one was added."""

    def apart(self) -> AbstractContextManager[None]:
        """A block for planning between runs, whose memory does not count."""

    def compiling(self, homes_nbytes: int) -> AbstractContextManager[None]:
        """A block between runs that compiles kernels, beside homes. What timing them takes does not count."""

    def promise(self, nbytes: int, workspace_nbytes: int = 0) -> None:
        """Set the limit that the plans promise for the device tier, with the share of it that is workspace of kernels."""

    def promise_at_least(self, nbytes: int) -> None:
        """Raise the limit to at least ``nbytes``, for memory that plans do not know."""

    def begin(self, homes_nbytes: int) -> None:
        """Begin a graph run. At the first one, everything beyond ``homes_nbytes`` is not the model's."""

    def end(self) -> None:
        """End a graph run."""

    def settle(self, ours_nbytes: int, *, again: bool = False) -> None:
        """Count what is held now beyond ``ours_nbytes`` as not the model's."""

    def sample(self, host_nbytes: int) -> None:
        """Measure what is held now; the model's memory beyond ``host_nbytes`` belongs to the device tier."""


class CopyStreams(NamedTuple):
    """Two streams of copies between host memory and a device, which run concurrently."""

    to_device: Stream
    to_host: Stream


class CollectiveStreams(NamedTuple):
    """Streams of collectives between ranks, which run concurrently with each other and with compute."""

    gathers: Stream
    reductions: Stream  # among the ranks of a replica
    replicas: Stream  # of what is reduced there, between replicas


class Device(Protocol):
    """A device. A CPU shares the host's memory and its streams are synchronous; others copy bytes on their streams."""

    torch_device: torch.device
    memory: MemorySpace

    @property
    def identity(self) -> str:
        """The hardware, by a name that is the same in every process of a machine."""

    @property
    def compute(self) -> Stream:
        """The stream of the model's ops."""

    @property
    def copies(self) -> CopyStreams:
        """The streams that copy parameters, gradients and activations."""

    @property
    def update_copies(self) -> CopyStreams:
        """The streams that copy what optimizer updates read and write: other copies often wait for compute, these do not."""

    @property
    def collectives(self) -> CollectiveStreams:
        """The streams of collectives between ranks."""

    @property
    def update(self) -> Stream:
        """The stream of optimizer updates, beside the model's ops."""

    def updating(self) -> AbstractContextManager[object]:
        """A block in which the calling thread enqueues ops on the update stream."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return device memory with undefined content. CapacityError, with the free bytes, if there is too little."""

    def allocate_block(self, nbytes: int) -> Block:
        """Return one allocation for many tensors. CapacityError, with the free bytes, if there is too little."""

    def selected(self) -> AbstractContextManager[object]:
        """A block in which the calling thread enqueues ops on the compute stream, even if it is not the model's thread.

        This device is the current one in it, as ops expect that look for no device in their inputs.
        """

    def follow(self) -> None:
        """Use the caller's current stream as the compute stream. Called on the model's thread before it runs ops."""

    def synchronize(self) -> None:
        """Block until all streams have finished their work."""

    def pin(self, address: int, nbytes: int) -> str | None:
        """Pin whole pages of host memory; return the reason as text if that fails, else None."""

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""

    def in_place(self, home: Tensor) -> Tensor:
        """Return contiguous host memory as a tensor of the device, which keeps it alive; beside a GPU it is pinned."""

    @property
    def free_nbytes(self) -> int:
        """Return the bytes that this process may still allocate."""

    @property
    def libraries_nbytes(self) -> int:
        """Return the bytes of device memory that libraries under torch take once and keep, through torch's allocator."""

    def measure_use(self, *, budget: int) -> MemoryUse:
        """Return what measures a model's memory use on the device."""

    def give_back(self) -> None:
        """Return memory that torch's allocator caches to the system."""


# A block in which the work to be timed is enqueued on a stream.
Timing = Callable[[Stream], AbstractContextManager[None]]


def use_on_this_thread(device: torch.device) -> None:
    """Make a GPU the current one of the calling thread, to be called when a thread starts.

    A new thread has the first GPU of the process, where CUDA would make a context that takes half a gigabyte.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


class AllocatedBlock:
    """A block from torch's allocator, on a device whose memory disk I/O cannot access."""

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory

    def elements(self, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """See Block.elements."""
        return alias_bytes(self.bytes, offset, num_elements, dtype)

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        """See Block.buffer."""
        raise VerifyError(
            f"bytes [{offset}, {offset + nbytes}) are memory of {self.bytes.device}, which disk I/O cannot access; copy "
            "them through staging"
        )


def alias_bytes(
    memory: Tensor, offset: int, num_elements: int, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Return flat elements over bytes of ``memory``, as a tensor whose storage begins there.

    It is one of ``device``, if that is another that reaches them at the same address. The storage keeps ``memory`` alive
    by a finalizer, as long as a tensor over it is.
    """
    nbytes, device = num_elements * dtype.itemsize, device or memory.device
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr() + offset, device, nbytes)
    weakref.finalize(storage, _drop, memory).atexit = False
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (num_elements,), (1,))


def _drop(memory: Tensor) -> None:
    """Drop the last reference to memory that a finalizer kept alive."""
