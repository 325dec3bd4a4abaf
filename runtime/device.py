"""What computes: the memory it has, and the streams it is told things through. A CPU has neither of its own."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the order of a stream."""

    def wait(self) -> None:
        """Block the calling thread until the stream has got there."""

    def seconds_until(self, later: "Event") -> float:
        """Return the seconds between two timed events, both of which have been waited for."""


class Stream(Protocol):
    """Does what it is told one after the other, beside what other streams do."""

    def wait(self, event: Event) -> None:
        """Do what is told from now on only behind an event of another stream. Returns at once."""

    def record(self, *, timed: bool = False) -> Event:
        """Return an event behind all that was told so far, which may tell the time."""

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Copy flat bytes, both of one length and alive until it is done. Returns at once."""


class StreamDevice(Protocol):
    """A device with memory that no CPU op and no disk reaches: bytes come and go by copies on its streams."""

    torch_device: torch.device

    @property
    def compute(self) -> Stream:
        """The stream that the model's ops go to."""

    @property
    def to_device(self) -> Stream:
        """The stream of copies from host memory."""

    @property
    def to_host(self) -> Stream:
        """The stream of copies to host memory."""

    @property
    def update(self) -> Stream:
        """The stream of optimizer updates, beside the model's ops."""

    def updating(self) -> AbstractContextManager[object]:
        """Let the calling thread tell ops to the update stream inside."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory of the device, counted by torch's allocator. CapacityError, with what is free, without room."""

    def selected(self) -> AbstractContextManager[object]:
        """Let the calling thread tell ops to the compute stream inside, whatever thread the model runs on."""

    def follow(self) -> None:
        """Take the caller's current stream for that of compute. Called where the model's own thread is about to run ops."""

    def synchronize(self) -> None:
        """Block until all streams have done what they were told."""

    def pin(self, address: int, nbytes: int) -> str | None:
        """Pin whole pages of host memory; return why not, in words, if that was refused."""

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""

    @property
    def allocated_nbytes(self) -> int:
        """Return the bytes of all tensors of this process on the device."""

    @property
    def peak_allocated_nbytes(self) -> int:
        """Return the most that these were since the peak was forgotten."""

    @property
    def free_nbytes(self) -> int:
        """Return the bytes that this process may still allocate."""

    def forget_peak(self) -> None:
        """Let the peak be what is allocated now."""

    def limit(self, nbytes: int | None) -> None:
        """Let torch refuse, from now on, to hold more than so many bytes for this process; None: what there is."""

    def give_back(self) -> None:
        """Give memory that torch keeps for later back to others."""


Timing = Callable[[Stream], AbstractContextManager[None]]  # inside of which a stream is told what is timed

CPU = torch.device("cpu")


def free_device_memory(name: str) -> int:
    """Return the bytes that a device has free. ConfigError for one that is not there."""
    device = make_device(name)
    assert device is not None
    return device.free_nbytes


def make_device(name: str) -> StreamDevice | None:
    """Return the device of a name as torch writes it; None for the CPU, whose memory is the host's.

    ConfigError for a device that is not there.
    """
    if torch.device(name).type == "cpu":
        return None
    from zinf_compile.runtime.cuda import CudaDevice  # only who has such a device needs it

    return CudaDevice(name)


def alias_bytes(memory: Tensor, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return flat elements over bytes of ``memory``, as a tensor whose storage begins there.

    The storage keeps ``memory`` alive by a finalizer, as long as a tensor over it is.
    """
    nbytes = num_elements * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr() + offset, memory.device, nbytes)
    weakref.finalize(storage, _drop, memory).atexit = False
    return torch.empty(0, dtype=dtype, device=memory.device).set_(storage, 0, (num_elements,), (1,))


def _drop(memory: Tensor) -> None:
    """Forget memory that a finalizer has kept until now."""
