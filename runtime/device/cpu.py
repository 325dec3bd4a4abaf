"""The CPU as a device: its memory is the host's, and its streams are synchronous."""

import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from zinf_compile.ir.config import free_memory
from zinf_compile.ir.hardware import MemorySpace
from zinf_compile.runtime.device.device import CollectiveStreams, CopyStreams, Event, MemoryUse, Pair
from zinf_compile.runtime.device.host_mapping import map_memory
from zinf_compile.runtime.process.ram import DeviceRam


def has_fast_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this CPU. Otherwise loops of torch do, up to 200 times slower."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def emulates_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 here without instructions for it, by kernels that allocate copies."""
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return has_fast_bfloat16() and not has_instructions


class CpuEvent:
    """An event of a synchronous stream, which has always happened."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wait(self) -> None:
        """Return at once: the event has happened."""

    def has_happened(self) -> bool:
        """Return True: the work before it was done when it was enqueued."""
        return True

    def seconds_until(self, later: Event) -> float:
        """Return the seconds between two timed events."""
        assert isinstance(later, CpuEvent)
        return later._seconds - self._seconds


_DONE = CpuEvent(0.0)


class CpuStream:
    """A synchronous stream: work runs on the calling thread."""

    synchronous = True

    def wait(self, event: Event) -> None:
        """Return at once: every event of a CPU has happened."""
        assert isinstance(event, CpuEvent)

    def record(self, *, timed: bool = False) -> CpuEvent:
        """Return an event that has happened."""
        return CpuEvent(time.perf_counter()) if timed else _DONE

    def copy_all(self, pairs: Iterable[Pair]) -> None:
        """Copy flat bytes now."""
        for source, destination in pairs:
            destination.copy_(source)

    def run(self, call: Callable[[], None]) -> None:
        """Call it now."""
        call()


class CpuBlock:
    """A page-aligned mapping, as O_DIRECT requires. Its pages are touched, so that the system counts them at once.

    Forked children do not inherit them: they would be copy-on-write, and a read in flight could land in a child's copy.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory: mmap.mmap = map_memory(nbytes)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def elements(self, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """See Block.elements."""
        return torch.frombuffer(self._memory, dtype=dtype, count=num_elements, offset=offset)

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        """See Block.buffer."""
        return memoryview(self._memory)[offset : offset + nbytes]


class CpuDevice:
    """The processors of the host. All CPU devices are one."""

    torch_device = torch.device("cpu")
    memory = MemorySpace(unified=True)
    identity = "cpu"
    compute = update = CpuStream()
    copies = update_copies = CopyStreams(compute, compute)
    collectives = CollectiveStreams(compute, compute, compute)

    def updating(self) -> AbstractContextManager[object]:
        """Do nothing: ops run on the calling thread."""
        return nullcontext()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory, with undefined content."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def allocate_block(self, nbytes: int) -> CpuBlock:
        """Return one mapping for many tensors."""
        return CpuBlock(nbytes)

    def selected(self) -> AbstractContextManager[object]:
        """Do nothing: ops run on the calling thread."""
        return nullcontext()

    def follow(self) -> None:
        """Do nothing: ops run on the calling thread."""

    def synchronize(self) -> None:
        """Return at once: all work is done."""

    def pin(self, address: int, nbytes: int) -> str | None:
        """Do nothing: there is no copy engine that needs pinned pages."""
        return None

    def unpin(self, address: int) -> None:
        """Do nothing."""

    def in_place(self, home: Tensor) -> Tensor:
        """Return it: the host computes there."""
        return home.detach()

    @property
    def free_nbytes(self) -> int:
        """Return the bytes of RAM that this process may still take."""
        return free_memory()

    @property
    def libraries_nbytes(self) -> int:
        """Return 0: what libraries keep is measured with the memory of the process."""
        return 0

    def measure_use(self, *, budget: int) -> MemoryUse:
        """Return what estimates the device tier's share of the memory of the process."""
        return DeviceRam(budget=budget)

    def give_back(self) -> None:
        """Do nothing: torch caches no freed CPU memory."""

    def __eq__(self, other: object) -> bool:
        """Return whether the other device is the CPU too, so that its rates are measured once."""
        return isinstance(other, CpuDevice)

    def __hash__(self) -> int:
        """Return the same for all."""
        return hash(CpuDevice)


CPU = CpuDevice()
