"""An NVIDIA GPU as the device that computes: four streams, events between them, and memory from torch's allocator.

What hangs on the order of streams and events is in ``link.py``, which tests run on a device of their own: most machines have
no GPU.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress

import torch
from torch import Tensor

from zinf_compile.errors import CapacityError, ConfigError
from zinf_compile.runtime.device import Event, Stream
from zinf_compile.terms import format_bytes

_PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process


class CudaEvent:
    """A point in the order of a CUDA stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        """Block the calling thread, and no other, until the stream has got there."""
        self.event.synchronize()

    def seconds_until(self, later: Event) -> float:
        """Return the seconds between two timed events, both of which have been waited for."""
        assert isinstance(later, CudaEvent)
        milliseconds: float = self.event.elapsed_time(later.event)
        return milliseconds / 1000


class CudaStream:
    """A CUDA stream of torch's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def wait(self, event: Event) -> None:
        """Do what is told from now on only behind an event. Returns at once."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def record(self, *, timed: bool = False) -> CudaEvent:
        """Return an event behind all that was told so far, which may tell the time."""
        # Blocking: a thread that waits for it sleeps, and leaves its core to those that launch ops and update.
        return CudaEvent(self.stream.record_event(torch.cuda.Event(enable_timing=timed, blocking=True)))

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Copy flat bytes. Returns at once where the host memory is pinned; else CUDA copies by way of its own first."""
        with torch.cuda.stream(self.stream), torch.no_grad():
            destination.copy_(source, non_blocking=True)


class CudaDevice:
    """One GPU. ConfigError where torch finds none of that number."""

    def __init__(self, name: str) -> None:
        if not torch.cuda.is_available():
            why = "torch here is built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
            raise ConfigError(
                f"device={name!r} asks for an NVIDIA GPU, and {why}; say device='cpu', or install torch for CUDA and check "
                "that `nvidia-smi` lists the GPU"
            )
        asked = torch.device(name)
        index = torch.cuda.current_device() if asked.index is None else asked.index
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device={name!r} is not there: torch finds {torch.cuda.device_count()} GPUs, the last is "
                f"'cuda:{torch.cuda.device_count() - 1}'"
            )
        self.torch_device = torch.device("cuda", index)
        # Copies of each direction have a stream, and updates: all go on at once. Hazards are between them, and in link.py.
        self._to_device = CudaStream(torch.cuda.Stream(self.torch_device))
        self._to_host = CudaStream(torch.cuda.Stream(self.torch_device))
        self._update = CudaStream(torch.cuda.Stream(self.torch_device))
        self._compute: CudaStream | None = None

    @property
    def compute(self) -> CudaStream:
        """The stream that the model's ops go to: the one that was current when ``follow`` was last called."""
        if self._compute is None:
            self.follow()
        assert self._compute is not None
        return self._compute

    def follow(self) -> None:
        """Take the caller's current stream for that of compute. Called where the model's own thread is about to run ops."""
        current = torch.cuda.current_stream(self.torch_device)
        if self._compute is not None:
            if self._compute.stream == current:
                return
            # Hazard: what was told to the stream before may still write what is read on this one, residents for example.
            current.wait_stream(self._compute.stream)
        self._compute = CudaStream(current)

    @property
    def to_device(self) -> Stream:
        """The stream of copies from host memory."""
        return self._to_device

    @property
    def to_host(self) -> Stream:
        """The stream of copies to host memory."""
        return self._to_host

    @property
    def update(self) -> Stream:
        """The stream of optimizer updates, beside the model's ops."""
        return self._update

    def updating(self) -> AbstractContextManager[object]:
        """Let the calling thread tell ops to the update stream inside."""
        return torch.cuda.stream(self._update.stream)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory of the device, counted by torch's allocator. CapacityError, with what is free, without room."""
        try:
            return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            free, total = torch.cuda.mem_get_info(self.torch_device)
            ours = torch.cuda.memory_reserved(self.torch_device)
            raise CapacityError(
                f"{self.torch_device} has no {format_bytes(nbytes)} left: {format_bytes(free)} of {format_bytes(total)} are "
                f"free, this process holds {format_bytes(ours)} and others {format_bytes(total - free - ours)}; end these, "
                f"or lower device_memory by what they took since it was chosen"
            ) from error

    def selected(self) -> AbstractContextManager[object]:
        """Let the calling thread tell ops to the compute stream inside, whatever thread the model runs on."""
        return torch.cuda.stream(self.compute.stream)

    def synchronize(self) -> None:
        """Block until all streams have done what they were told."""
        torch.cuda.synchronize(self.torch_device)

    def pin(self, address: int, nbytes: int) -> str | None:
        """Pin whole pages of host memory; return why not, in words, if that was refused."""
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
        if int(code) == 0:
            return None
        with suppress(RuntimeError):  # CUDA remembers the error, and the next kernel would be blamed for it
            torch.zeros(1, device=self.torch_device)
            self.synchronize()
        return str(runtime.cudaGetErrorString(code))

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        self.synchronize()  # a copy in flight would go on with pages that may move
        torch.cuda.cudart().cudaHostUnregister(address)

    @property
    def allocated_nbytes(self) -> int:
        """Return the bytes of all tensors of this process on the device."""
        return torch.cuda.memory_allocated(self.torch_device)

    @property
    def peak_allocated_nbytes(self) -> int:
        """Return the most that these were since the peak was forgotten."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    @property
    def free_nbytes(self) -> int:
        """Return the bytes that this process may still allocate."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free + torch.cuda.memory_reserved(self.torch_device) - self.allocated_nbytes

    def forget_peak(self) -> None:
        """Let the peak be what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def limit(self, nbytes: int | None) -> None:
        """Let torch refuse, from now on, to hold more than so many bytes for this process; None: what there is."""
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        fraction = 1.0 if nbytes is None else min(1.0, nbytes / total)
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)

    def give_back(self) -> None:
        """Give memory that torch keeps for later back to others."""
        torch.cuda.empty_cache()

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same GPU: what it does per second is measured once."""
        return isinstance(other, CudaDevice) and self.torch_device == other.torch_device

    def __hash__(self) -> int:
        """Return the hash of the GPU's name."""
        return hash(self.torch_device)
