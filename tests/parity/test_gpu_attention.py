"""The ops of a GPU's attention kernels, with all of their results, on a device with streams. The kernels are stand-ins."""

from collections import Counter
from collections.abc import Iterator
from functools import cache, partial

import pytest

import zinf_compile
from tests.support.gpu_attention import (
    BATCH,
    GROUPED,
    HEAD_WIDTH,
    HEADS,
    KERNELS,
    LAYERS,
    SEQUENCE,
    backward_op,
    forward_op,
    kernels_on_cpu,
    transformer,
)
from tests.support.traces import Trace, Workload
from zinf_compile.inspect.reports import Report
from zinf_compile.ir.facts import OpFact
from zinf_compile.runtime.execute import segments
from zinf_compile.runtime.native.compiled import find_compiler

CASES = [*((kernel, HEADS) for kernel in KERNELS), *((kernel, HEADS // 2) for kernel in GROUPED)]
QUERY_NBYTES = BATCH * HEADS * SEQUENCE * HEAD_WIDTH * 4
# What is saved of the results of a forward, in bytes by position: output, log-sum-exp, and what its random numbers were.
SAVED = {
    "cudnn": {0: QUERY_NBYTES, 1: BATCH * HEADS * SEQUENCE * 4, 6: 8, 7: 8},
    "efficient": {0: QUERY_NBYTES, 1: BATCH * HEADS * 32 * 4, 2: 8, 3: 8},  # it rounds queries up to 32
    "flash": {0: QUERY_NBYTES, 1: BATCH * HEADS * SEQUENCE * 4, 6: 16, 7: 8},
}


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with kernels_on_cpu():
        yield


@cache
def workload(kernel: str, key_heads: int) -> Workload:
    """Return the same function each time: plain runs are found by it."""
    return partial(transformer, kernel, key_heads)


def train(parity, kernel: str, key_heads: int, **options: object) -> tuple[Trace, Report]:
    """Train on streams with little memory; return all numbers, and the report."""
    parity.on_streams()
    model, batches = workload(kernel, key_heads)()
    budgets = {"device_memory": f"{252 + 6 * key_heads}KiB", "host_memory": "64MiB", "tiles": False}
    ours = parity.train(parity.optimize(model, **budgets, **options), batches)
    report = zinf_compile.report(model)
    assert not report.fallbacks
    assert report.plans[0].gathers
    return ours, report


def find_ops(report: Report, op: object) -> list[OpFact]:
    """Return the facts of an op, by itself or wrapped."""
    (plan,) = report.plans
    (facts,) = plan.request.candidates
    return [each for each in facts.ops if each.op == str(op)]


saved_or_recomputed = pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
by_each_kernel = pytest.mark.parametrize(("kernel", "key_heads"), CASES)


@saved_or_recomputed
@by_each_kernel
def test_op_by_op(parity, kernel: str, key_heads: int, recompute: bool) -> None:
    """Bits are those of plain PyTorch, and the plan counts what the kernels compute, return, and allocate besides."""
    ours, report = train(parity, kernel, key_heads, compute="aten", recompute=recompute)
    parity.assert_plain(ours, parity.plain_runs(workload(kernel, key_heads)), captured=True)
    product = 2 * BATCH * HEADS * SEQUENCE * SEQUENCE * HEAD_WIDTH // 2  # half of it is masked
    forwards, backwards = (find_ops(report, op(kernel)) for op in (forward_op, backward_op))
    assert [each.num_flops for each in forwards] == (1 + recompute) * LAYERS * [2 * product]
    assert [each.num_flops for each in backwards] == LAYERS * [5 * product]
    (plan,) = report.plans
    (facts,) = plan.request.candidates
    values = {value.name: value for value in facts.values}
    saved = {f"{op.name}.{position}": nbytes for op in forwards for position, nbytes in SAVED[kernel].items()}
    found = {name: value.nbytes for name, value in values.items() if value.saved and "attention" in name}
    assert found == ({} if recompute else saved)
    is_shared = kernel == "flash" and key_heads < HEADS  # it has gradients of keys and values for each head of queries
    assert [values[f"{op.name}_workspace"].nbytes for op in backwards] == LAYERS * [QUERY_NBYTES * (1 + 2 * is_shared)]


@saved_or_recomputed
@by_each_kernel
def test_grouped_into_segments(parity, monkeypatch, kernel: str, key_heads: int, recompute: bool) -> None:
    """Segments, of which nothing is compiled here, take and return all that forward and backward pass on.

    A forward that is recomputed draws its random numbers, of which it has none, twice, and so is outside of segments.
    """
    monkeypatch.setattr(segments, "_compiled", {})
    monkeypatch.setattr(segments, "_compile", lambda number, segment: segment.forward)
    ours, report = train(parity, kernel, key_heads, compute="inductor", recompute=recompute)
    parity.assert_plain(ours, parity.plain_runs(workload(kernel, key_heads)), captured=True)
    (plan,) = report.plans
    (facts,) = plan.request.candidates
    inside = Counter(op.op for outer in facts.ops for op in outer.inner)
    assert inside[str(backward_op(kernel))] == LAYERS
    assert inside[str(forward_op(kernel))] == (0 if recompute else LAYERS)
    assert len(find_ops(report, forward_op(kernel))) == (2 * LAYERS if recompute else 0)


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on the PATH")
@pytest.mark.long
@saved_or_recomputed
@by_each_kernel
def test_in_compiled_segments(parity, monkeypatch, kernel: str, key_heads: int, recompute: bool) -> None:
    """Compiled code calls the kernels, and what it allocates is read from it."""
    monkeypatch.setattr(segments, "_compiled", {})
    ours, _ = train(parity, kernel, key_heads, compute="inductor", recompute=recompute)
    parity.assert_same(ours, parity.resident_run(workload(kernel, key_heads), compute="inductor", recompute=recompute))
    attending = [
        compiled
        for key, compiled in segments._compiled.items()
        if any(kernel in str(node.target) for node in segments._segment(key.number).graph.nodes)
    ]
    assert len(attending) == 2  # a forward and a backward
    assert all(each.workspace is not None for each in attending)
