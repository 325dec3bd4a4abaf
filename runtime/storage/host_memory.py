"""Host memory for homes and staging: ordinary memory, or for a GPU spans of page-aligned mappings that are pinned.

A GPU's copy engine reads and writes pinned pages by itself, at the link's full speed and beside compute. Pageable memory
is copied through a small buffer of the driver, a piece at a time, while a thread waits.
"""

import ctypes
import logging
import mmap
import resource
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from zinf_compile.ir.glossary import format_bytes
from zinf_compile.runtime.device.host_mapping import map_memory
from zinf_compile.runtime.storage.engine import whole_sectors
from zinf_compile.runtime.storage.layout import Extent, FileLayout

_SPAN_NBYTES = 16 * 2**20  # of spans that were not announced: pinning takes about as long as touching the pages
_log = logging.getLogger(__name__)


class Memory(Protocol):
    """Page-aligned bytes, freed when neither they nor a view of them is referenced."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return a view of them."""


Allocate = Callable[[int], Memory]


class HostMemory(Protocol):
    """Where homes on the host, staging and activations that were offloaded get their memory."""

    @property
    def refusal(self) -> str | None:
        """Return why memory is not pinned, though the device would be faster with it; None if nothing was refused."""

    @property
    def allocate(self) -> Allocate:
        """Return the allocator of page-aligned memory."""

    def announce(self, nbytes: int) -> None:
        """Allocate ``nbytes`` in one piece now, for the homes that are made next."""

    def new_zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return zeros, whose pages are touched."""

    def close(self) -> None:
        """Unpin everything. What was taken can be read and written as before."""


class PageableMemory:
    """Ordinary memory, for a device that computes in it."""

    refusal = None
    allocate = staticmethod(map_memory)

    def announce(self, nbytes: int) -> None:
        """Do nothing: memory is allocated when it is needed."""

    def new_zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """See HostMemory.new_zeros."""
        return torch.empty(shape, dtype=dtype, device="cpu").zero_()

    def close(self) -> None:
        """Do nothing: nothing is pinned."""


class Pinning(Protocol):
    """Pins pages for the GPU."""

    def pin(self, address: int, nbytes: int) -> str | None:
        """Pin whole pages; return the reason, in words, if that was refused."""

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Span:
    """One mapping, pinned as a whole: a copy must not touch two registrations."""

    memory: mmap.mmap
    is_pinned: bool
    layout: FileLayout = field(default_factory=FileLayout)

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


class PinnedMemory:
    """Pinned host memory in as few spans as possible: one for what is announced, and small ones for everything else.

    Thread-safe. Where pinning is refused, the memory is pageable from then on, and the log says why, once.
    """

    def __init__(self, pinning: Pinning) -> None:
        self._pinning = pinning
        self._lock = threading.Lock()
        self._spans: list[_Span] = []
        self._returned: list[tuple[_Span, Extent]] = []  # by finalizers, which run anywhere, even inside of ``take``
        self.refusal: str | None = None

    def announce(self, nbytes: int) -> None:
        """Make one span of exactly so many bytes, in whole pages, for what is taken next."""
        if nbytes > 0:
            with self._lock:
                self._add_span(whole_sectors(nbytes))

    @property
    def allocate(self) -> Allocate:
        """See HostMemory.allocate."""
        return self.take

    def new_zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """See HostMemory.new_zeros."""
        if shape.numel() == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        memory = memoryview(self.take(shape.numel() * dtype.itemsize)).cast("B")
        return torch.frombuffer(memory, dtype=dtype, count=shape.numel()).view(shape).zero_()

    def take(self, nbytes: int) -> Memory:
        """Return memory of at least one byte, in whole pages. It is not cleared."""
        reserved = whole_sectors(nbytes)
        with self._lock:
            while self._returned:
                span, extent = self._returned.pop()
                span.layout.free(extent)
            for span in self._spans:
                extent = span.layout.allocate(reserved)
                if extent.offset + reserved <= len(span.memory):
                    break
                span.layout.free(extent)
            else:
                span = self._add_span(max(_SPAN_NBYTES, reserved))
                extent = span.layout.allocate(reserved)
        block = (ctypes.c_ubyte * reserved).from_buffer(span.memory, extent.offset)
        weakref.finalize(block, self._returned.append, (span, extent)).atexit = False
        return block

    def _add_span(self, nbytes: int) -> _Span:
        memory = map_memory(nbytes)
        span = _Span(memory=memory, is_pinned=False)
        if self.refusal is None:
            self.refusal = self._pinning.pin(span.address, nbytes)
            span.is_pinned = self.refusal is None
            if self.refusal is not None:
                soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
                limit = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
                _log.warning(
                    "%s of host memory cannot be pinned (%s; `ulimit -l` is %s): copies between host and GPU take two to "
                    "three times as long. In a container, raise it with `--ulimit memlock=-1`",
                    format_bytes(nbytes),
                    self.refusal,
                    limit,
                )
        self._spans.append(span)
        return span

    def close(self) -> None:
        """Unpin everything. What was taken can be read and written as before."""
        with self._lock:
            for span in self._spans:
                if span.is_pinned:
                    self._pinning.unpin(span.address)
                    span.is_pinned = False
            self.refusal = "the model is closed"

    def check_integrity(self) -> None:
        """Raise VerifyError if two blocks share bytes."""
        with self._lock:
            for span in self._spans:
                span.layout.check_integrity()
