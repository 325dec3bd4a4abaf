"""Measure the rates of a device: matrix products, attention, ops of each kind, memory, and the overhead of an op call."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zinf_compile.ir import ops
from zinf_compile.ir.hardware import OpKind
from zinf_compile.runtime.device.device import Device
from zinf_compile.runtime.storage.engine import ALIGN
from zinf_compile.runtime.store.store import Store

_NUM_CALLS = 100
# From so many seconds on, a call on a CPU is timed once, without a first call to warm up, which takes far less. A matrix
# product in bfloat16 takes seconds on one that has no instruction for it.
_LONG_SECONDS = 0.5
_LEAST_SECONDS = 0.005  # of calls in a row on a device with streams, beside which a wait of 20 us does not count
_MOST_IN_A_ROW = 256
_WARM_UP_SECONDS = 0.2  # after which a GPU has the clock that it computes with


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of measured ops: as in a model, and small enough to finish soon."""

    tokens: int  # of a linear layer
    hidden: int
    inner: int
    heads: int
    head_width: int
    context: int
    op_shape: tuple[int, int]  # of an activation between two matrix products of a block of that width
    copy_elements: int  # of float32, beyond most caches
    num_cold: int  # tensors that are used in turn, so that none is still in the cache: as in a model


# 0.5 GFLOP a matrix product, enough to be threaded; 64 MiB of fp32: beyond the caches even of servers.
CPU_SIZES = Sizes(
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
# 137 GFLOP a matrix product, 0.2 ms on the fastest; tensors of 64 MiB, of which no two are in a cache; 200 MiB in all.
GPU_SIZES = Sizes(
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


@dataclass(frozen=True, slots=True)
class OpRates:
    """Measures one device."""

    device: Device
    sizes: Sizes
    repeats: int

    @property
    def torch_device(self) -> torch.device:
        """Return the device as torch names it."""
        return self.device.torch_device

    def usual_seconds(self, call: Callable[[], object]) -> float:
        """Return the median of the seconds that a call takes, until the device has done what was enqueued.

        On a device with streams, calls follow one another until waiting for their end does not count.
        """
        if not self.device.compute.synchronous:
            count = 1
            while self._time(call, count) < _LEAST_SECONDS and count < _MOST_IN_A_ROW:
                count *= 2
            return max(statistics.median(self._time(call, count) / count for _ in range(self.repeats)), 1e-9)
        first = self._time(call)
        if first >= _LONG_SECONDS and self.torch_device.type == "cpu":
            return first
        return max(statistics.median(self._time(call) for _ in range(self.repeats)), 1e-9)

    def _time(self, call: Callable[[], object], count: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.device.synchronize()
        return time.perf_counter() - start


def warm_up(bench: OpRates) -> None:
    """Keep a device with streams busy until its clock is up: an idle GPU begins at a sixth of it."""
    if bench.device.compute.synchronous or bench.torch_device.type == "cpu":
        return
    x = ones(bench, bench.sizes.tokens, bench.sizes.hidden, dtype=torch.float32)
    start = time.perf_counter()
    while time.perf_counter() - start < _WARM_UP_SECONDS:
        torch.mm(x, x.t())
        bench.device.synchronize()


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
    """Return the FLOP/s of causal attention, forward and backward, counting only what is not masked."""
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
    """Return the bytes per second that a typical op of a kind reads and writes, into memory that is allocated already."""
    sizes = bench.sizes
    x = ones(bench, *sizes.op_shape, dtype=dtype)
    if kind is OpKind.RANDOM:  # bound by random number generation, so that caches do not matter
        with torch.random.fork_rng(_rng_devices(bench)):  # the random state of the model is kept
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
    """Return the median overhead of an op call in seconds, on tensors so small that nothing else counts.

    Half of the ops of a model are views, the others mostly write to arena memory. A large copy between the calls evicts
    them from the caches, as large tensors do in a model: calls then take two to three times as long. On an asynchronous
    stream it is the cost of enqueuing, one op after the other.
    """
    store.arena.reserve(ALIGN)
    small = ones(bench, 8, 8, dtype=torch.float32)
    place = (store.store_id, 0, (8, 8), (8, 1), small.dtype, small.device)
    mul, transpose = torch.ops.aten.mul.out, torch.ops.aten.t.default

    def call() -> None:
        mul(transpose(small), small, out=ops.ARENA_VIEW(*place))

    if not bench.device.compute.synchronous:

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
