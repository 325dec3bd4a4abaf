"""Host memory for homes and staging: page-aligned mappings, and for a GPU spans of them that are pinned.

A copy engine reads and writes pinned pages by itself, at the link's full speed and beside everything else; other memory it
gets by way of a small buffer of the driver's, a piece at a time, while a thread waits.
"""

import ctypes
import logging
import mmap
import resource
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from zinf_compile.runtime.nvme.engine import whole_sectors
from zinf_compile.runtime.nvme.layout import Extent, FileLayout
from zinf_compile.terms import format_bytes

MADV_POPULATE_WRITE = 23  # linux/mman.h; the mmap module does not name it
_SPAN_NBYTES = 16 * 2**20  # that nobody has announced: a registration takes about as long as touching the pages does
_log = logging.getLogger(__name__)


class Memory(Protocol):
    """Page-aligned bytes, given back when nobody holds them or a view of them any more."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return a view of them."""


def map_memory(nbytes: int) -> mmap.mmap:
    """Return fresh memory of whole pages, touched, so that what is counted is what the system counts."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    # A fork (a data loader's worker) would make these pages copy-on-write, and a transfer in flight could then
    # land in the copy that the child keeps.
    memory.madvise(mmap.MADV_DONTFORK)
    # One request to a drive takes a limited number of pieces that are contiguous in physical memory, so 2 MiB pages
    # make bigger requests: 16 MiB blocks moved 2.4 times as fast as with 4 KiB pages on a virtio disk (254 pieces).
    with suppress(OSError):  # EINVAL: a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _map_large(nbytes: int) -> mmap.mmap:
    """Return fresh memory of whole pages, of 2 MiB each where that can be: these are asked for before any is touched."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    with suppress(
        OSError
    ):  # before Linux 5.14, memory is taken only where it is touched, at the latest when it is pinned
        memory.madvise(MADV_POPULATE_WRITE)
    return memory


class Pinning(Protocol):
    """What keeps pages where they are, and tells the GPU so."""

    def pin(self, address: int, nbytes: int) -> str | None:
        """Pin whole pages; return why not, in words, if that was refused."""

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
    """Pinned host memory in as few spans as may be: one for what is announced, and small ones for what is not.

    Thread-safe. Where pinning is refused, the memory is pageable from then on, and the log says why, once.
    """

    def __init__(self, pinning: Pinning) -> None:
        self._pinning = pinning
        self._lock = threading.Lock()
        self._spans: list[_Span] = []
        self._returned: list[tuple[_Span, Extent]] = []  # by finalizers, which run anywhere, even inside of ``take``
        self.refusal: str | None = None

    @property
    def pinned_nbytes(self) -> int:
        """Return the bytes of all pinned spans."""
        return sum(len(span.memory) for span in self._spans if span.is_pinned)

    def announce(self, nbytes: int) -> None:
        """Make one span of exactly so many bytes, in whole pages, for what is taken next."""
        if nbytes > 0:
            with self._lock:
                self._add_span(whole_sectors(nbytes))

    def take(self, nbytes: int) -> Memory:
        """Return memory of at least one byte, in whole pages. What was in it before is still there."""
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
        memory = _map_large(nbytes)
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


Allocate = Callable[[int], Memory]
