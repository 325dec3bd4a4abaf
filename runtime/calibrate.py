"""Measure what this machine does per second, in a few tenths of a second, for predictions that mean something."""

import functools
import os
import time
from collections.abc import Callable

import torch

from zinf_compile.hardware import Hardware, Rate, make_route
from zinf_compile.runtime.arena import Arena
from zinf_compile.runtime.meter import Meter
from zinf_compile.runtime.nvme.engine import ALIGN
from zinf_compile.runtime.slots import Slot
from zinf_compile.runtime.store import Store
from zinf_compile.runtime.transfers import Transfers, wait_all
from zinf_compile.terms import Tier

_MATMUL_SIZE = 768  # 0.9 GFLOP: a few milliseconds, and long enough to be threaded
_COPY_ELEMENTS = 4 * 2**20  # 16 MiB of fp32: beyond most caches
_DISK_NBYTES = 32 * 2**20
_REPEATS = 3  # the best of these: what stands in the way of one run is not the machine's rate


def measure_hardware(store: Store, dtypes: frozenset[torch.dtype]) -> Hardware:
    """Return the rates of this machine: matrix products of ``dtypes``, memory, disk (by writing and reading the store)."""
    memory = _measure_copy()
    routes = {
        (Tier.HOST, Tier.DEVICE): memory,
        (Tier.DEVICE, Tier.HOST): memory,
        (Tier.DEVICE, Tier.DEVICE): memory,
    }
    if store.engine is not None:
        read, write = _measure_disk(store)
        routes |= {
            (Tier.NVME, Tier.DEVICE): read,
            (Tier.NVME, Tier.HOST): read,
            (Tier.DEVICE, Tier.NVME): write,
            (Tier.HOST, Tier.NVME): write,
        }
    return Hardware(
        name=os.uname().nodename,
        flops=tuple(
            Rate(name=str(dtype).removeprefix("torch."), per_second=_measure_matmul(dtype))
            for dtype in sorted(dtypes, key=str)
        ),
        memory_bytes_per_second=memory,
        routes=tuple(make_route(*tiers, rate) for tiers, rate in sorted(routes.items())),
        optimizer_elements_per_second=_measure_optimizer(),
    )


def _best_seconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)


@functools.cache
def _measure_matmul(dtype: torch.dtype) -> float:
    left = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
    return 2 * _MATMUL_SIZE**3 / _best_seconds(lambda: left @ left)


@functools.cache
def _measure_copy() -> float:
    source, destination = torch.ones(_COPY_ELEMENTS), torch.ones(_COPY_ELEMENTS)
    # A copy reads and writes: twice the bytes of the tensor.
    return 2 * source.nbytes / _best_seconds(lambda: destination.copy_(source))


@functools.cache
def _measure_optimizer() -> float:
    parameter = torch.ones(2**20, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return parameter.numel() / _best_seconds(optimizer.step)


def _measure_disk(store: Store) -> tuple[float, float]:
    """Return read and write bytes per second of the store's engine, through staging, as real transfers go."""
    assert store.engine is not None
    nbytes = min(_DISK_NBYTES, store.staging.capacity // 2)
    nbytes -= nbytes % ALIGN
    extent = store.layout.allocate(nbytes)
    # Transfers of its own, so that the store's meter counts none of these bytes.
    transfers = Transfers(engine=store.engine, staging=store.staging, arena=Arena(), meter=Meter())
    try:
        store.engine.reserve(store.layout.end)
        slot = Slot(name="calibration", tier=Tier.NVME, tensor=torch.empty(0), extent=extent)
        with store.staging.lease(nbytes) as lease:
            view = lease.view
            write = _best_seconds(lambda: wait_all(transfers.write(slot, extent.offset, view)))
            read = _best_seconds(lambda: wait_all(transfers.read(slot, extent.offset, view)))
    finally:
        transfers.close()
        store.layout.free(extent)
    return nbytes / read, nbytes / write
