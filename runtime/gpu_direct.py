"""GPUDirect Storage: the store's file is read into the memory of the device, past host memory, by NVIDIA's kvikio.

    disk -> arena     a pool thread, which waits for the mark of the issue first; compute is told nothing until it is there

No stream knows of such a read, so that threads wait where streams would. Whether it is worth it is measured: kvikio reads
by way of host memory of its own where drivers or filesystem cannot do better.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from zinf_compile.errors import StoreError
from zinf_compile.runtime.arena import Arena
from zinf_compile.runtime.in_flight import Filler, InFlight, Named
from zinf_compile.runtime.meter import Meter
from zinf_compile.runtime.nvme.engine import Engine
from zinf_compile.terms import Tier

NUM_CALLS = 4  # at once
_BLOCK_NBYTES = 16 * 2**20  # one call

_log = logging.getLogger(__name__)


class DirectReads(Protocol):
    """Reads of one file into memory of the device. Every call blocks, and several threads may call at once."""

    def read(self, offset: int, destination: Tensor) -> None:
        """Fill flat bytes of the device with the file's bytes from ``offset``, or raise StoreError."""

    def close(self) -> None:
        """Give the file back. Nobody reads any more."""


class KvikioReads:
    """Reads by kvikio. ImportError without it; RuntimeError or OSError where it refuses the file."""

    def __init__(self, path: str) -> None:
        import kvikio

        self._path = path
        self._file: Any = kvikio.CuFile(path, "r")

    def read(self, offset: int, destination: Tensor) -> None:
        """See DirectReads.read."""
        nbytes = destination.numel()
        try:
            with torch.cuda.device(destination.device) if destination.is_cuda else nullcontext():
                found = self._file.pread(destination, size=nbytes, file_offset=offset).get()
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            raise StoreError(f"kvikio reading {nbytes} bytes at offset {offset} failed: {error}") from error
        if found != nbytes:
            raise StoreError(f"kvikio read {found} of {nbytes} bytes at offset {offset}: the file is shorter")

    def close(self) -> None:
        """See DirectReads.close."""
        self._file.close()


def open_direct_reads(engine: Engine) -> DirectReads | None:
    """Return direct reads of an engine's file; None without kvikio, without a file, or if it is refused, as the log says."""
    if engine.path is None:
        return None
    try:
        return KvikioReads(engine.path)
    except ImportError:
        return None
    except (RuntimeError, OSError) as error:
        _log.info("GPUDirect Storage is not used, since kvikio cannot open the store's file: %s", error)
        return None


class GpuDirectFiller:
    """Fills the arena of a device from the file directly, and from host memory over the link."""

    def __init__(self, arena: Arena, over_link: Filler, reads: DirectReads, meter: Meter) -> None:
        """``over_link`` moves what is not in the file."""
        self._arena, self._over_link, self._reads, self._meter = arena, over_link, reads, meter
        self._pool = ThreadPoolExecutor(NUM_CALLS, thread_name_prefix="zinf-gpu-direct")

    def fill_from_file(self, moving: InFlight, slot: Named, file_offset: int, arena_offset: int, nbytes: int) -> None:
        """Start reading into the arena itself."""
        if slot.device_bytes is not None:
            self._over_link.fill_from_file(moving, slot, file_offset, arena_offset, nbytes)
            return
        self._meter.add_moved(Tier.NVME, Tier.DEVICE, nbytes)
        for start in range(0, nbytes, _BLOCK_NBYTES):
            destination = self._arena.bytes_at(arena_offset + start, min(_BLOCK_NBYTES, nbytes - start))
            moving.futures.append(self._pool.submit(self._read, moving, slot.name, file_offset + start, destination))

    def fill_from_memory(self, moving: InFlight, source: Tensor, arena_offset: int, home: Tier, slot: Named) -> None:
        """Tell the stream to copy."""
        self._over_link.fill_from_memory(moving, source, arena_offset, home, slot)

    def _read(self, moving: InFlight, name: str, offset: int, destination: Tensor) -> None:
        assert moving.mark is not None
        # Hazard: ops that read what these bytes held before have been told and may not be done.
        moving.mark.wait()
        with self._meter.moving(Tier.NVME, Tier.DEVICE, destination.numel(), name):
            try:
                self._reads.read(offset, destination)
            except StoreError as error:
                raise StoreError(f"{name}: {error}") from error

    def close(self) -> None:
        """Wait for what is being read, and give the file back."""
        self._pool.shutdown(wait=True)
        self._over_link.close()
        self._reads.close()
