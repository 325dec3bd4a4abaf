"""GPUDirect Storage: NVIDIA's kvikio reads the store's file directly into device memory, without host memory.

    disk -> arena     a pool thread, after the mark of the issue; readers are enqueued only when the read is done

Streams cannot wait for such a read, so threads do. Calibration measures whether it is worth it: kvikio uses a buffer in
host memory if drivers or the file system do not support direct reads.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from zinf_compile.ir.errors import StoreError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.process.waiting import end_pool
from zinf_compile.runtime.storage.arena import Arena
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.slots import weights_of
from zinf_compile.runtime.transfer.in_flight import Filler, InFlight, Named, Source
from zinf_compile.runtime.transfer.link import Link

NUM_CALLS = 4  # in flight at once
_BLOCK_NBYTES = 16 * 2**20  # per call

_log = logging.getLogger(__name__)


class DirectReads(Protocol):
    """Reads of one file into device memory. Every call blocks; thread-safe."""

    def read(self, offset: int, destination: Tensor) -> None:
        """Fill flat bytes on the device with the file's bytes from ``offset``, or raise StoreError."""

    def close(self) -> None:
        """Close the file. No read may be in flight."""


class KvikioReads:
    """Reads by kvikio. ImportError if it is not installed; RuntimeError or OSError if it cannot open the file."""

    def __init__(self, path: str) -> None:
        import kvikio

        if kvikio.defaults.get("num_threads") < NUM_CALLS:  # of all its reads together; one, if nobody has chosen
            kvikio.defaults.set("num_threads", NUM_CALLS)
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
    """Return direct reads of an engine's file; None without kvikio or a file, or if opening it fails, which is logged."""
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
    """Fills the arena of a device directly from the file, and from host memory over the link."""

    def __init__(self, arena: Arena, over_link: Filler, reads: DirectReads, meter: Meter, link: Link) -> None:
        """``over_link`` copies what is not in the file, over ``link``."""
        self._arena, self._over_link, self._reads, self._meter = arena, over_link, reads, meter
        self._pool = ThreadPoolExecutor(NUM_CALLS, thread_name_prefix="zinf-gpu-direct", initializer=link.begin_thread)

    def fill_from_file(self, moving: InFlight, slot: Named, file_offset: int, arena_offset: int, nbytes: int) -> None:
        """Start reading directly into the arena."""
        if slot.device_bytes is not None or weights_of(slot) is not None:  # kvikio has the store file open
            self._over_link.fill_from_file(moving, slot, file_offset, arena_offset, nbytes)
            return
        self._meter.add_moved(Tier.NVME, Tier.DEVICE, nbytes)
        for start in range(0, nbytes, _BLOCK_NBYTES):
            destination = self._arena.bytes_at(arena_offset + start, min(_BLOCK_NBYTES, nbytes - start))
            moving.futures.append(self._pool.submit(self._read, moving, slot.name, file_offset + start, destination))

    def fill_from_memory(self, moving: InFlight, sources: Sequence[Source]) -> None:
        """Enqueue the copies."""
        self._over_link.fill_from_memory(moving, sources)

    def _read(self, moving: InFlight, name: str, offset: int, destination: Tensor) -> None:
        # Hazard: ops that read the previous content of these bytes may be enqueued and not yet done.
        moving.mark.wait()
        with self._meter.moving(Tier.NVME, Tier.DEVICE, destination.numel(), name):
            try:
                self._reads.read(offset, destination)
            except StoreError as error:
                raise StoreError(f"{name}: {error}") from error

    def close(self) -> None:
        """Wait for reads in flight, and close the file."""
        end_pool(self._pool, "reads by kvikio")
        self._over_link.close()
        self._reads.close()
