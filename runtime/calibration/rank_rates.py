"""Measures what several ranks get when they use links and disks at the same time. Every rank calls these functions."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.ranks.ranks import Collective, Ranks
from zinf_compile.runtime.storage.arena import Arena
from zinf_compile.runtime.storage.engine import ALIGN
from zinf_compile.runtime.storage.futures import wait_all
from zinf_compile.runtime.storage.slots import Slot
from zinf_compile.runtime.store.store import Store
from zinf_compile.runtime.transfer.transfers import Transfers

LINK_NBYTES = (2**16, 2**20, 2**24)  # of full tensors: a norm's, a layer's, a block's
_ITEM_NBYTES = 4  # of float32
_DISK_NBYTES = 32 * 2**20
_NUM_READS = 4  # without a pause: long enough that a rank which begins late makes no difference
_REPEATS = 5  # the median of these, after one warm-up


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """Bytes per second that each rank receives, or gets reduced, in a collective over full tensors of some size."""

    collective: str
    nbytes: int
    bytes_per_second: tuple[float, ...]  # by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """Bytes per second that ranks read from their disks: each while the others wait, and all at the same time."""

    alone: tuple[float, ...]  # by rank
    together: tuple[float, ...]  # by rank, while the others read as well

    @property
    def share(self) -> float:
        """Return what all of them read together, over what they would if none slowed down another."""
        return sum(self.together) / sum(self.alone)


def measure_links(ranks: Ranks, *, repeats: int = _REPEATS) -> tuple[LinkRate, ...]:
    """Return the rates of all-gathers, and of both ways to reduce a gradient: reduce="fast", and "ordered"."""
    rates = []
    for name in ("all-gather", "reduce-scatter", "all-to-all"):
        for nbytes in LINK_NBYTES:
            shard = torch.zeros(nbytes // _ITEM_NBYTES // ranks.size)
            whole, received = (torch.zeros(shard.numel() * ranks.size) for _ in range(2))
            call = partial(_start, ranks, name, shard, whole, received)
            seconds = _usual_seconds(ranks, call, repeats)
            moved = (whole.numel() - shard.numel()) * _ITEM_NBYTES
            everywhere = ranks.exchange("rates of links", moved / seconds)
            rates.append(LinkRate(collective=name, nbytes=nbytes, bytes_per_second=tuple(everywhere)))
    return tuple(rates)


def _start(ranks: Ranks, name: str, shard: Tensor, whole: Tensor, received: Tensor) -> Collective:
    """Start the collective with this name."""
    counts, what = [shard.numel()] * ranks.size, f"a timed {name}"
    if name == "all-gather":
        return ranks.all_gather(what, [shard], [whole])
    if name == "reduce-scatter":
        return ranks.reduce_rows(what, whole, counts, shard)
    return ranks.exchange_rows(what, whole, counts, received)


def _usual_seconds(ranks: Ranks, call: Callable[[], Collective], repeats: int) -> float:
    """Return the median seconds of a collective that all ranks start at the same time."""
    seconds = []
    for _ in range(repeats + 1):
        ranks.meet("a timed collective")
        start = time.perf_counter()
        ranks.wait(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def measure_disks(ranks: Ranks, store: Store, *, repeats: int = _REPEATS) -> DiskRates:
    """Return the rates of reading the store's file, by one rank after another, and by all at the same time."""
    with ExitStack() as stack:
        read = ranks.do_alike("writing to the disks", lambda: stack.enter_context(_reading(store)))
        alone = []
        for rank in range(ranks.size):
            ranks.meet(f"reading the disk of rank {rank}")
            alone.append(_median_rate(read, repeats) if rank == ranks.rank else 0.0)
        together = []
        for _ in range(repeats):
            ranks.meet("reading all disks")
            together.append(read())
        everywhere = ranks.exchange("rates of disks", (alone[ranks.rank], statistics.median(together)))
    first, second = zip(*everywhere, strict=True)
    return DiskRates(alone=first, together=second)


def _median_rate(read: Callable[[], float], repeats: int) -> float:
    return statistics.median(read() for _ in range(repeats))


@contextmanager
def _reading(store: Store) -> Iterator[Callable[[], float]]:
    """Give a function that reads some of the store's file through staging, and returns the bytes per second."""
    assert store.engine is not None
    nbytes = min(_DISK_NBYTES, store.staging.capacity)
    nbytes -= nbytes % ALIGN
    extent = store.layout.allocate(nbytes)
    transfers = Transfers(engine=store.engine, staging=store.staging, arena=Arena(), meter=Meter())
    try:
        store.engine.reserve(store.layout.end)
        slot = Slot(slice=Slice.of_whole("calibration", (0,)), tier=Tier.NVME, tensor=torch.empty(0), extent=extent)
        with store.staging.lease(nbytes) as lease:
            wait_all(transfers.pool.write(slot, extent.offset, lease.view), "a measured write")

            def read() -> float:
                start = time.perf_counter()
                for _ in range(_NUM_READS):
                    wait_all(transfers.pool.read(slot, extent.offset, lease.view), "a measured read")
                return _NUM_READS * nbytes / (time.perf_counter() - start)

            yield read
    finally:
        transfers.close()
        store.layout.free(extent)
