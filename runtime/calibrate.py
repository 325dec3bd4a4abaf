"""Measure what this machine does per second: short, before the first graph is planned, or thorough for `zinf doctor`."""

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from zinf_compile import ops
from zinf_compile.hardware import Hardware, OpKind, OpRate, Rate, Route, make_route
from zinf_compile.runtime.arena import Arena
from zinf_compile.runtime.fused_adamw import find_kernel
from zinf_compile.runtime.futures import wait_all
from zinf_compile.runtime.meter import Meter
from zinf_compile.runtime.nvme.engine import ALIGN
from zinf_compile.runtime.slots import Slot
from zinf_compile.runtime.store import Store
from zinf_compile.runtime.transfers import Transfers
from zinf_compile.terms import Tier

_TOKENS, _HIDDEN, _INNER = 512, 512, 1024  # of a linear layer: 0.5 GFLOP a product, enough to be threaded
_HEADS, _HEAD_WIDTH, _CONTEXT = 8, 64, 256
_COPY_ELEMENTS = 16 * 2**20  # 64 MiB of fp32: beyond most caches, even of servers
_OP_SHAPE = (512, 2048)  # what a block of that width has between two products
_OPTIMIZER_ELEMENTS = 2**22  # 64 MiB in all: a model's do not stay in the cache either
_DISK_NBYTES = 32 * 2**20
_DUPLEX_SHARE = 0.75  # of both rates together, from which on reads and writes count as not in each other's way
_NUM_CALLS = 100
_SMALL_OPS = 10  # a block has about as many for each product
_MOST_TAKEN = 0.9  # beyond that something else was in the way
_ROUND_SECONDS = 0.03  # of compute alone
_MOVES = 2  # one after another, in a round of compute beside
_REPEATS = 3  # the median of these, behind one that nobody counts
_NUM_COLD = 8  # tensors to take turns with, so that none is in the cache when its turn comes: as in a model
_UNUSABLE = torch.float16  # on a CPU a product takes a thousand times as long as in float32


def measure_hardware(store: Store, dtypes: Iterable[torch.dtype], *, repeats: int = _REPEATS) -> Hardware:
    """Return the rates of this machine: ops in ``dtypes``, memory, disk (by writing and reading the store).

    float16 is left out, as long as there is another: it takes minutes on a CPU, and nobody computes in it there.
    """
    chosen = sorted(set(dtypes) - {_UNUSABLE}, key=str) or [torch.float32]
    memory = _measure_copy(repeats)
    pairs = ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE))
    # What moves is read and written, by the processors that compute.
    routes = [make_route(*pair, memory / 2, takes_of_compute=1.0) for pair in pairs]
    if store.engine is not None:
        routes += _measure_disk(store, repeats)
    return Hardware(
        name=os.uname().nodename,
        flops=tuple(Rate(name=_name(dtype), per_second=_measure_products(dtype, repeats)) for dtype in chosen),
        attention_flops=tuple(
            Rate(name=_name(dtype), per_second=_measure_attention(dtype, repeats)) for dtype in chosen
        ),
        op_rates=tuple(
            OpRate(kind=kind, dtype=_name(dtype), bytes_per_second=_measure_op(kind, dtype, repeats))
            for kind in OpKind
            for dtype in chosen
        ),
        op_overhead_seconds=_measure_overhead(store),
        memory_bytes_per_second=memory,
        routes=tuple(sorted(routes, key=lambda route: route.name)),
        optimizer_elements_per_second=_measure_optimizer(repeats),
        sources=("measured on this machine",),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _usual_seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return max(statistics.median(times), 1e-9)


@functools.cache
def _measure_products(dtype: torch.dtype, repeats: int) -> float:
    """Return the FLOP/s of a linear layer's three products: result, gradient of its input, gradient of its weight."""
    tokens = torch.ones(_TOKENS, _HIDDEN, dtype=dtype)
    weights = [torch.ones(_INNER, _HIDDEN, dtype=dtype) for _ in range(_NUM_COLD)]
    gradient = torch.ones(_TOKENS, _INNER, dtype=dtype)

    def products() -> None:
        for weight in weights:
            torch.mm(tokens, weight.t())
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), tokens)

    return _NUM_COLD * 3 * 2 * _TOKENS * _HIDDEN * _INNER / _usual_seconds(products, repeats)


@functools.cache
def _measure_attention(dtype: torch.dtype, repeats: int) -> float:
    """Return the FLOP/s of causal attention, forward and backward, counting what is not masked."""
    shape = (1, _HEADS, _CONTEXT, _HEAD_WIDTH)
    query, key, value = (torch.ones(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.ones(shape, dtype=dtype)

    def attend() -> None:
        result = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(result, (query, key, value), gradient)

    num_products = 2 + 5  # forward, backward
    return num_products * _HEADS * _CONTEXT**2 * _HEAD_WIDTH / _usual_seconds(attend, repeats)


@functools.cache
def _measure_op(kind: OpKind, dtype: torch.dtype, repeats: int) -> float:
    """Return the bytes per second that a typical op of a kind reads and writes, into memory that is there already."""
    x = torch.ones(_OP_SHAPE, dtype=dtype)
    if kind is OpKind.RANDOM:  # bounded by drawing, so that caches do not matter
        with torch.random.fork_rng(devices=()):  # the model's own numbers stay as they would be
            return (2 * x.nbytes + x.numel()) / _usual_seconds(lambda: torch.native_dropout(x, 0.1, True), repeats)
    xs = [torch.ones_like(x) for _ in range(_NUM_COLD)]
    outs = [torch.ones_like(x) for _ in range(_NUM_COLD)]

    def run() -> None:
        for x, out in zip(xs, outs, strict=True):
            if kind is OpKind.ELEMENTWISE:
                torch.neg(x, out=out)
            elif kind is OpKind.TRANSCENDENTAL:
                torch.ops.aten.gelu.out(x, out=out)
            else:
                x.mean(-1)

    num_tensors = 1 if kind is OpKind.REDUCTION else 2
    return _NUM_COLD * num_tensors * x.nbytes / _usual_seconds(run, repeats)


def _measure_overhead(store: Store) -> float:
    """Return the seconds of calling an op on tensors so small that nothing else counts, in the median.

    Half of the ops of a model are views, the others mostly write to arena memory. In between the caches are filled with
    other things, as large tensors do in a model: calls then take two to three times as long.
    """
    store.arena.reserve(ALIGN)
    small, large = torch.ones(8, 8), torch.ones(_OP_SHAPE)
    place = (store.store_id, 0, (8, 8), (8, 1), small.dtype, small.device)
    mul, transpose, others = torch.ops.aten.mul.out, torch.ops.aten.t.default, torch.empty_like(large)
    times = []
    for _ in range(_NUM_CALLS):
        others.copy_(large)
        start = time.perf_counter()
        mul(transpose(small), small, out=ops.ARENA_VIEW(*place))
        times.append(time.perf_counter() - start)
    return statistics.median(times) / 2


@functools.cache
def _measure_copy(repeats: int) -> float:
    source, destination = torch.ones(_COPY_ELEMENTS), torch.ones(_COPY_ELEMENTS)
    # A copy reads and writes: twice the bytes of the tensor.
    return 2 * source.nbytes / _usual_seconds(lambda: destination.copy_(source), repeats)


@functools.cache
def _measure_optimizer(repeats: int) -> float:
    """Return the elements per second of AdamW: the compiled kernel's where there is one, else torch's fused one."""
    parameter = torch.ones(_OPTIMIZER_ELEMENTS, requires_grad=True)
    gradient = parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    (group,) = optimizer.param_groups
    kernel = find_kernel(optimizer, group, master_dtype=torch.float32, gradient_dtype=torch.float32, compute_dtype=None)
    if kernel is None:
        return _OPTIMIZER_ELEMENTS / _usual_seconds(optimizer.step, repeats)
    master = parameter.detach()
    state: dict[str, Tensor] = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
    threads = torch.get_num_threads()
    return _OPTIMIZER_ELEMENTS / _usual_seconds(
        lambda: kernel.update(group, state, master, gradient, None, num_threads=threads), repeats
    )


def _measure_taken(move: Callable[[], object], repeats: int) -> float:
    """Return the share of its time that compute loses while bytes move to and from the disk, in the median.

    It does what a block does: products, and small ops between them, whose threads wait for each other. Rounds alone and
    beside take turns, since what else the machine does changes meanwhile.
    """
    tokens, weight = torch.ones(_TOKENS, _HIDDEN), torch.ones(_INNER, _HIDDEN)
    small = torch.ones(_TOKENS, _HIDDEN // 8)

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

    rounds_alone()  # warm
    shares = []
    with ThreadPoolExecutor(1) as mover:
        for _ in range(repeats):
            alone = rounds_alone()
            moving = mover.submit(move_several)
            beside = rounds_per_second(lambda _, moving=moving: not moving.done())  # type: ignore[misc]  # bound now
            moving.result()  # raises what moving has raised
            if beside:  # else it was over before compute began
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
        slot = Slot(name="calibration", tier=Tier.NVME, tensor=torch.empty(0), extent=extent)
        with store.staging.lease(nbytes) as lease:
            view, half = lease.view, nbytes // 2

            def write(start: int = 0, end: int = nbytes) -> None:
                wait_all(transfers.write(slot, extent.offset + start, view[start:end]))

            def read(start: int = 0, end: int = nbytes) -> None:
                wait_all(transfers.read(slot, extent.offset + start, view[start:end]))

            def both() -> None:
                with ThreadPoolExecutor(1) as writer:
                    writing = writer.submit(write, 0, half)
                    read(half, nbytes)
                    writing.result()

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
