"""Measure what a device computes per second: products, attention, ops of each kind, memory, and what calling an op costs."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zinf_compile import ops
from zinf_compile.hardware import OpKind
from zinf_compile.runtime.device import CPU, StreamDevice
from zinf_compile.runtime.nvme.engine import ALIGN
from zinf_compile.runtime.store import Store

_NUM_CALLS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large measured ops are: as large as in a model, and small enough to be over soon."""

    tokens: int  # of a linear layer
    hidden: int
    inner: int
    heads: int
    head_width: int
    context: int
    op_shape: tuple[int, int]  # what a block of that width has between two products
    copy_elements: int  # of float32, beyond most caches
    num_cold: int  # tensors to take turns with, so that none is in the cache when its turn comes: as in a model


CPU_SIZES = Sizes(  # 0.5 GFLOP a product, enough to be threaded; 64 MiB of fp32: beyond the caches even of servers
    tokens=512,
    hidden=512,
    inner=1024,
    heads=8,
    head_width=64,
    context=256,
    op_shape=(512, 2048),
    copy_elements=2**24,
    num_cold=8,
)
GPU_SIZES = (
    Sizes(  # 137 GFLOP a product, 0.2 ms on the fastest; 64 MiB tensors, of which no two are in a cache: 200 MiB in all
        tokens=4096,
        hidden=2048,
        inner=8192,
        heads=16,
        head_width=128,
        context=2048,
        op_shape=(4096, 4096),
        copy_elements=2**24,
        num_cold=1,
    )
)


@dataclass(frozen=True, slots=True)
class OpRates:
    """Measures one device."""

    device: StreamDevice | None  # None: the CPU
    sizes: Sizes
    repeats: int

    @property
    def torch_device(self) -> torch.device:
        """Return the device as torch names it."""
        return CPU if self.device is None else self.device.torch_device

    def usual_seconds(self, call: Callable[[], object]) -> float:
        """Return the median of the seconds that a call takes, until the device has done what it was told."""
        self._run(call)
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            self._run(call)
            times.append(time.perf_counter() - start)
        return max(statistics.median(times), 1e-9)

    def _run(self, call: Callable[[], object]) -> None:
        call()
        if self.device is not None:
            self.device.synchronize()


def ones(bench: OpRates, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor to compute on."""
    return torch.ones(shape, dtype=dtype, device=bench.torch_device)


@functools.cache
def measure_products(bench: OpRates, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a linear layer's three products: result, gradient of its input, gradient of its weight."""
    sizes = bench.sizes
    tokens = ones(bench, sizes.tokens, sizes.hidden, dtype=dtype)
    weights = [ones(bench, sizes.inner, sizes.hidden, dtype=dtype) for _ in range(sizes.num_cold)]
    gradient = ones(bench, sizes.tokens, sizes.inner, dtype=dtype)

    def products() -> None:
        for weight in weights:
            torch.mm(tokens, weight.t())
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), tokens)

    return sizes.num_cold * 3 * 2 * sizes.tokens * sizes.hidden * sizes.inner / bench.usual_seconds(products)


@functools.cache
def measure_attention(bench: OpRates, dtype: torch.dtype) -> float:
    """Return the FLOP/s of causal attention, forward and backward, counting what is not masked."""
    sizes = bench.sizes
    shape = (1, sizes.heads, sizes.context, sizes.head_width)
    query, key, value = (ones(bench, *shape, dtype=dtype).requires_grad_() for _ in range(3))
    gradient = ones(bench, *shape, dtype=dtype)

    def attend() -> None:
        result = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(result, (query, key, value), gradient)

    num_products = 2 + 5  # forward, backward
    num_flops = num_products * sizes.heads * sizes.context**2 * sizes.head_width
    return num_flops / bench.usual_seconds(attend)


@functools.cache
def measure_op(bench: OpRates, kind: OpKind, dtype: torch.dtype) -> float:
    """Return the bytes per second that a typical op of a kind reads and writes, into memory that is there already."""
    sizes = bench.sizes
    x = ones(bench, *sizes.op_shape, dtype=dtype)
    if kind is OpKind.RANDOM:  # bounded by drawing, so that caches do not matter
        with torch.random.fork_rng(_rng_devices(bench)):  # the model's own numbers stay as they would be
            return (2 * x.nbytes + x.numel()) / bench.usual_seconds(lambda: torch.native_dropout(x, 0.1, True))
    xs = [torch.ones_like(x) for _ in range(sizes.num_cold)]
    outs = [torch.ones_like(x) for _ in range(sizes.num_cold)]

    def run() -> None:
        for x, out in zip(xs, outs, strict=True):
            if kind is OpKind.ELEMENTWISE:
                torch.neg(x, out=out)
            elif kind is OpKind.TRANSCENDENTAL:
                torch.ops.aten.gelu.out(x, out=out)
            else:
                x.mean(-1)

    num_tensors = 1 if kind is OpKind.REDUCTION else 2
    return sizes.num_cold * num_tensors * x.nbytes / bench.usual_seconds(run)


def _rng_devices(bench: OpRates) -> list[torch.device]:
    return [bench.torch_device] if bench.torch_device.type == "cuda" else []


def measure_overhead(bench: OpRates, store: Store) -> float:
    """Return the seconds of calling an op on tensors so small that nothing else counts, in the median.

    Half of the ops of a model are views, the others mostly write to arena memory. In between the caches are filled with
    other things, as large tensors do in a model: calls then take two to three times as long. Of a device with streams it is
    what telling it costs, one op after the other.
    """
    store.arena.reserve(ALIGN)
    small = ones(bench, 8, 8, dtype=torch.float32)
    place = (store.store_id, 0, (8, 8), (8, 1), small.dtype, small.device)
    mul, transpose = torch.ops.aten.mul.out, torch.ops.aten.t.default

    def call() -> None:
        mul(transpose(small), small, out=ops.ARENA_VIEW(*place))

    if bench.device is not None:

        def calls() -> None:
            for _ in range(_NUM_CALLS):
                call()

        return bench.usual_seconds(calls) / (2 * _NUM_CALLS)
    large = torch.ones(bench.sizes.op_shape)
    others, times = torch.empty_like(large), []
    for _ in range(_NUM_CALLS):
        others.copy_(large)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / 2


@functools.cache
def measure_memory(bench: OpRates) -> float:
    """Return the bytes per second that the device reads and writes, by a copy, which does both."""
    source, destination = (ones(bench, bench.sizes.copy_elements, dtype=torch.float32) for _ in range(2))
    return 2 * source.nbytes / bench.usual_seconds(lambda: destination.copy_(source))
