"""Measure the rates of this machine: briefly before the first graph is planned, or thoroughly for `zinf doctor`."""

import functools
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from zinf_compile.ir.copies import Code, RowCode
from zinf_compile.ir.errors import StoreError
from zinf_compile.ir.glossary import Tier, dtype_name
from zinf_compile.ir.hardware import Hardware, OpKind, OpRate, Rate, Route, make_route
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.calibration.op_rates import (
    CPU_SIZES,
    GPU_SIZES,
    OpRates,
    measure_attention,
    measure_memory,
    measure_op,
    measure_overhead,
    measure_products,
    warm_up,
)
from zinf_compile.runtime.device.cpu import CPU
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.optim.fused_adamw import find_kernel, update_threads
from zinf_compile.runtime.process.waiting import future_result, join_thread
from zinf_compile.runtime.storage.arena import Arena
from zinf_compile.runtime.storage.engine import ALIGN
from zinf_compile.runtime.storage.futures import wait_all
from zinf_compile.runtime.storage.row_codes import decode_rows, encode_rows
from zinf_compile.runtime.storage.slots import Slot
from zinf_compile.runtime.storage.state_codes import decode, encode
from zinf_compile.runtime.store.store import Store
from zinf_compile.runtime.transfer.gpu_direct import NUM_CALLS, DirectReads, open_direct_reads
from zinf_compile.runtime.transfer.transfers import Transfers

_OPTIMIZER_ELEMENTS = 2**22  # 64 MiB in all, more than a cache holds, as in a model
_SERVER_OPTIMIZER_ELEMENTS = 2**26  # 1 GiB beside a GPU: such machines have caches of hundreds of MiB
_ROWS, _ROW_COLUMNS = 256, 4096  # of frozen weights: 4 MiB of values
_CODED_PAGES = 64
_DISK_NBYTES = 32 * 2**20
_LINK_NBYTES = 64 * 2**20  # more than a millisecond on the fastest
_COPIES_IN_A_ROW = 4
_DUPLEX_SHARE = 0.75  # of the sum of both rates; above it reads and writes count as independent (full duplex)
_SMALL_OPS = 10  # a block has about as many for each product
_MOST_TAKEN = 0.9  # more than that is other load on the machine
_ROUND_SECONDS = 0.03  # of a round of compute without transfers
_MOVES = 2  # consecutive ones, during a round of compute with transfers
_REPEATS = 3  # the median of these, after one warm-up
_UNUSABLE = torch.float16  # on a CPU a matrix product takes a thousand times as long as in float32

_log = logging.getLogger(__name__)


def measure_hardware(store: Store, dtypes: Iterable[torch.dtype], *, repeats: int = _REPEATS) -> Hardware:
    """Return the rates of this machine: ops in ``dtypes``, memory, disk (by writing and reading the store), copies to a GPU.

    On a CPU float16 is left out if there is another dtype: measuring it takes minutes, and it is too slow to be used.
    """
    device = store.device
    unified, is_cpu = device.memory.unified, device.torch_device.type == "cpu"
    bench = OpRates(device, CPU_SIZES if is_cpu else GPU_SIZES, repeats)
    unusable = {_UNUSABLE} if is_cpu else set()
    chosen = sorted(set(dtypes) - unusable, key=str) or [torch.float32]
    warm_up(bench)
    # What the device computes comes first: its clock falls again while only disk and host are measured.
    flops = tuple(Rate(name=dtype_name(dtype), per_second=measure_products(bench, dtype)) for dtype in chosen)
    attention = tuple(Rate(name=dtype_name(dtype), per_second=measure_attention(bench, dtype)) for dtype in chosen)
    op_rates = tuple(
        OpRate(kind=kind, dtype=dtype_name(dtype), bytes_per_second=measure_op(bench, kind, dtype))
        for kind in OpKind
        for dtype in chosen
    )
    overhead, memory = measure_overhead(bench, store), measure_memory(bench)
    pairs = ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE))
    if unified:
        # The cores that compute read and write what moves.
        routes = [make_route(*pair, memory / 2, takes_of_compute=1.0) for pair in pairs]
    else:
        routes = [make_route(*pair, _measure_link(bench, store, pair[0])) for pair in pairs]
    if store.engine is not None:
        disk = _measure_disk(store, repeats)
        routes += disk if unified else _choose_way(store, bench, _by_way_of_host(disk, routes))
    num_elements = _OPTIMIZER_ELEMENTS if is_cpu else _SERVER_OPTIMIZER_ELEMENTS
    with nullcontext() if unified else _copying(bench, store):
        optimizer = _measure_optimizer(num_elements, update_threads(unified=unified), repeats)
    hardware = Hardware(
        unified=unified,
        integrated=device.memory.integrated,
        name=os.uname().nodename,
        flops=flops,
        attention_flops=attention,
        op_rates=op_rates,
        op_overhead_seconds=overhead,
        memory_bytes_per_second=memory,
        routes=tuple(sorted(routes, key=lambda route: route.name)),
        optimizer_elements_per_second=optimizer,
        updates_take_of_compute=1.0 if unified else 0.0,  # on other processors
        sources=("measured on this machine",),
    )
    device.give_back()  # the tensors that ops were measured on
    return hardware


def _measure_link(bench: OpRates, store: Store, source: Tier) -> float:
    """Return the bytes per second of copies between pinned staging and the device, over the link as transfers use it."""
    link, device = store.transfers.link, store.device
    nbytes = min(_LINK_NBYTES, store.staging.capacity) // ALIGN * ALIGN
    with store.staging.lease(nbytes) as lease:
        here = torch.frombuffer(lease.view, dtype=torch.uint8)
        there = device.allocate([nbytes], torch.uint8)

        def move() -> None:  # copies follow one another, as in a step, where nobody waits for each
            pairs = [(here, there) if source is Tier.HOST else (there, here)] * _COPIES_IN_A_ROW
            enqueue = link.bring_all if source is Tier.HOST else link.take_all
            future_result(enqueue(pairs, behind=link.mark()).done, "measured copies")

        return _COPIES_IN_A_ROW * nbytes / bench.usual_seconds(move)


@contextmanager
def _copying(bench: OpRates, store: Store) -> Iterator[None]:
    """A block during which bytes cross the link in both directions, as they do beside updates on the host."""
    link, device = store.transfers.link, store.device
    nbytes = min(_LINK_NBYTES, store.staging.capacity // 2) // ALIGN * ALIGN
    stop = threading.Event()
    with store.staging.lease(2 * nbytes) as lease:
        here = torch.frombuffer(lease.view, dtype=torch.uint8)
        there = [device.allocate([nbytes], torch.uint8) for _ in range(2)]

        def copy() -> None:
            link.begin_thread()
            while not stop.is_set():
                arriving = link.bring(here[:nbytes], there[0], behind=link.mark())
                leaving = link.take(there[1], here[nbytes : 2 * nbytes])
                wait_all([arriving.done, leaving.done], "copies beside which updates are measured")

        thread = threading.Thread(target=copy, name="zinf-measured-copies", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            join_thread(thread, "copies beside which updates are measured")


def _by_way_of_host(disk: Iterable[Route], routes: Iterable[Route]) -> list[Route]:
    """Return the routes of a disk whose bytes reach the device through host memory: they take the lanes of disk and link."""
    by_name = {route.name: route for route in routes}
    joined = []
    for route in disk:
        source, destination = route.name.split(" -> ")
        if Tier.DEVICE in (source, destination):
            link = by_name[route.name.replace(Tier.NVME, Tier.HOST)]
            speed = min(route.bytes_per_second, link.bytes_per_second)
            joined.append(
                replace(route, bytes_per_second=speed, lanes=(*route.lanes, *link.lanes), takes_of_compute=0.0)
            )
        else:
            joined.append(replace(route, takes_of_compute=0.0))
    return joined


def _choose_way(store: Store, bench: OpRates, routes: list[Route]) -> list[Route]:
    """Let the store read from the disk directly into the device if that is possible and faster; return the routes."""
    assert store.engine is not None
    reads = open_direct_reads(store.engine) if store.staging.capacity >= NUM_CALLS * ALIGN else None
    if reads is None:
        return routes
    (by_host,) = (route for route in routes if route.name == f"{Tier.NVME} -> {Tier.DEVICE}")
    try:
        per_second = _measure_direct(store, bench, reads)
    except StoreError as error:
        reads.close()
        _log.info("GPUDirect Storage is not used: %s", error)
        return routes
    is_faster = per_second > by_host.bytes_per_second
    _log.info(
        "GPUDirect Storage reads %.1f GB/s, and by way of host memory it is %.1f GB/s: it is %s",
        per_second / 1e9,
        by_host.bytes_per_second / 1e9,
        "used" if is_faster else "not used",
    )
    if not is_faster:
        reads.close()
        return routes
    store.transfers.read_directly(reads)
    direct = replace(by_host, bytes_per_second=per_second)  # the disk and the link are busy as before
    return [direct if route is by_host else route for route in routes]


def _measure_direct(store: Store, bench: OpRates, reads: DirectReads) -> float:
    """Return the bytes per second of reads from the disk into the device, as many at once as transfers have."""
    engine, device = store.engine, store.device
    assert engine is not None
    piece = min(_DISK_NBYTES, store.staging.capacity) // NUM_CALLS // ALIGN * ALIGN
    starts = range(0, NUM_CALLS * piece, piece)
    extent = store.layout.allocate(NUM_CALLS * piece)
    there = device.allocate([NUM_CALLS * piece], torch.uint8)

    def read(start: int) -> None:
        reads.read(extent.offset + start, there[start : start + piece])

    try:
        engine.reserve(store.layout.end)
        with store.staging.lease(piece) as lease:  # reads of a hole in the file would not reach the disk
            for start in starts:
                engine.write(extent.offset + start, lease.view)
        with ThreadPoolExecutor(NUM_CALLS, initializer=store.transfers.link.begin_thread) as pool:
            return there.numel() / bench.usual_seconds(lambda: list(pool.map(read, starts)))
    finally:
        store.layout.free(extent)


def _usual_seconds(call: Callable[[], object], repeats: int) -> float:
    return OpRates(CPU, CPU_SIZES, repeats).usual_seconds(call)


@functools.cache
def _measure_optimizer(num_elements: int, num_threads: int, repeats: int) -> float:
    """Return the elements per second of AdamW: the compiled kernel's where there is one, else torch's fused one."""
    parameter = torch.ones(num_elements, requires_grad=True)
    gradient = parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    (group,) = optimizer.param_groups
    kernel = find_kernel(optimizer, group, master_dtype=torch.float32, gradient_dtype=torch.float32, compute_dtype=None)
    if kernel is None:
        return num_elements / _usual_seconds(optimizer.step, repeats)
    master = parameter.detach()
    state: dict[str, Tensor] = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
    return num_elements / _usual_seconds(
        lambda: kernel.update(group, state, master, gradient, None, num_threads=num_threads), repeats
    )


def with_coded_states(hardware: Hardware, code: Code) -> Hardware:
    """Return the rates of this machine with that of updates whose two moments are stored in codes."""
    num_threads = update_threads(unified=True)
    values = torch.ones(_CODED_PAGES * code.page_elements, dtype=torch.float32)
    pages = torch.empty(_CODED_PAGES * ALIGN, dtype=torch.uint8)

    def both() -> None:
        encode(code, values, pages, num_threads=num_threads)
        decode(code, pages, values, num_threads=num_threads)

    both()  # at first use the library is compiled
    each = 2 * _usual_seconds(both, _REPEATS) / values.numel()
    rate = 1 / (1 / hardware.optimizer_elements_per_second + each)
    return replace(hardware, optimizer_elements_per_second=rate)


def with_rows(hardware: Hardware) -> Hardware:
    """Return the rates of this machine with that of decoding frozen weights, as a thread does beside others.

    A device with memory of its own decodes there, at a rate that follows from that of its memory.
    """
    if not hardware.unified:
        return hardware
    code = RowCode(columns=_ROW_COLUMNS)
    values = torch.ones(_ROWS * _ROW_COLUMNS, dtype=torch.float32)
    rows = torch.empty(code.nbytes(values.numel()), dtype=torch.uint8)
    encode_rows(code, values, rows)
    decode_rows(code, rows, values)  # at first use the library is compiled
    seconds = _usual_seconds(lambda: decode_rows(code, rows, values), _REPEATS)
    return replace(hardware, decoded_bytes_per_second=values.nbytes / seconds)


def _measure_taken(move: Callable[[], object], repeats: int) -> float:
    """Return the share of its speed that compute loses while bytes move to and from the disk; the median of rounds.

    The compute is that of a block: matrix products and small ops between them, whose threads wait for each other. Rounds
    with and without transfers alternate, since other load on the machine changes over time.
    """
    tokens, weight = torch.ones(CPU_SIZES.tokens, CPU_SIZES.hidden), torch.ones(CPU_SIZES.inner, CPU_SIZES.hidden)
    small = torch.ones(CPU_SIZES.tokens, CPU_SIZES.hidden // 8)

    def rounds_per_second(goes_on: Callable[[float], bool]) -> float:
        count, start = 0, time.perf_counter()
        while goes_on(time.perf_counter() - start):
            torch.mm(tokens, weight.t())
            for _ in range(_SMALL_OPS):
                torch.mul(small, small, out=small)
            count += 1
        return count / max(time.perf_counter() - start, 1e-9)

    def rounds_alone() -> float:
        return rounds_per_second(lambda elapsed: elapsed < _ROUND_SECONDS)

    def move_several() -> None:
        for _ in range(_MOVES):
            move()

    rounds_alone()  # warm-up
    shares = []
    with ThreadPoolExecutor(1) as mover:
        for _ in range(repeats):
            alone = rounds_alone()
            moving = mover.submit(move_several)
            beside = rounds_per_second(lambda _, moving=moving: not moving.done())  # type: ignore[misc]  # bound now
            future_result(moving, "measured moves")  # raises what moving has raised
            if beside:  # else the transfers ended before compute began
                shares.append(1.0 - beside / alone)
    return min(_MOST_TAKEN, max(0.0, statistics.median(shares or [0.0])))


def _measure_disk(store: Store, repeats: int) -> list[Route]:
    """Return the routes of the store's engine, through staging, as real transfers go."""
    assert store.engine is not None
    nbytes = min(_DISK_NBYTES, store.staging.capacity // 2)
    nbytes -= nbytes % (2 * ALIGN)
    extent = store.layout.allocate(nbytes)
    # Transfers of its own, so that the store's meter counts none of these bytes.
    transfers = Transfers(engine=store.engine, staging=store.staging, arena=Arena(), meter=Meter())
    try:
        store.engine.reserve(store.layout.end)
        part = Slice.of_whole("calibration", (0,))
        slot = Slot(slice=part, tier=Tier.NVME, tensor=torch.empty(0), extent=extent)
        with store.staging.lease(nbytes) as lease:
            view, half = lease.view, nbytes // 2

            def write(start: int = 0, end: int = nbytes) -> None:
                wait_all(transfers.pool.write(slot, extent.offset + start, view[start:end]), "a measured write")

            def read(start: int = 0, end: int = nbytes) -> None:
                wait_all(transfers.pool.read(slot, extent.offset + start, view[start:end]), "a measured read")

            def both() -> None:
                with ThreadPoolExecutor(1) as writer:
                    writing = writer.submit(write, 0, half)
                    read(half, nbytes)
                    future_result(writing, "a measured write")

            taken = _measure_taken(both, repeats)
            write_rate = nbytes / _usual_seconds(write, repeats)
            read_rate = nbytes / _usual_seconds(read, repeats)
            mixed_rate = nbytes / _usual_seconds(both, repeats)
            latency = _usual_seconds(lambda: read(0, ALIGN), repeats)
    finally:
        transfers.close()
        store.layout.free(extent)
    is_duplex = mixed_rate > _DUPLEX_SHARE * (read_rate + write_rate)
    return [
        make_route(source, destination, rate, latency_seconds=latency, is_duplex=is_duplex, takes_of_compute=taken)
        for source, destination, rate in (
            (Tier.NVME, Tier.DEVICE, read_rate),
            (Tier.NVME, Tier.HOST, read_rate),
            (Tier.DEVICE, Tier.NVME, write_rate),
            (Tier.HOST, Tier.NVME, write_rate),
        )
    ]
