"""Estimates seconds (roofline): an op takes the longer of its arithmetic and its memory traffic; a module sums its ops.

In a compiled segment ops fuse, so that only its inputs and results cost traffic, and its matrix products arithmetic.
A CPU calls an op and then runs it. A device with memory of its own runs it while the host launches the next ones.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from zinf_compile.ir.facts import GraphFacts, OpFact
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.sizes import Expression, Size, SizeT_co
from zinf_compile.passes.planner.cost.op_kinds import is_collective, is_message, kind_of, num_calls

# A transfer of so few bytes takes longer to start than to move them: 64 KiB is under 0.1 ms of disk time.
RESIDENT_THRESHOLD = 64 * 2**10


@dataclass(frozen=True, slots=True)
class _Rates:
    """The rates that give the seconds of an op."""

    flops_per_second: float
    bytes_per_second: float
    overhead_seconds: float
    overlaps: bool  # the device computes while the host launches


def op_seconds(op: OpFact, hardware: Hardware) -> float:
    """Return the estimated seconds of one op: call overhead, plus the longer of its arithmetic and its memory traffic.

    Where launches overlap with compute it is the longest of the three.
    """
    if op.inner:
        return sum(ops_seconds(_fused(op), hardware))
    return _seconds_at(op, _rates(op, hardware))


def ops_seconds(ops: Iterable[OpFact], hardware: Hardware) -> Iterator[float]:
    """Yield ``op_seconds`` of each. A graph has few kinds of ops, whose rates are looked up once."""
    rates: dict[tuple[str, str], _Rates] = {}
    for op in ops:
        if op.inner:
            yield op_seconds(op, hardware)
            continue
        kind = "input" if op.op == op.name else op.op, op.dtype
        if kind not in rates:
            rates[kind] = _rates(op, hardware)
        yield _seconds_at(op, rates[kind])


def _seconds_at(op: OpFact, rates: _Rates) -> float:
    longer = max(op.num_flops / rates.flops_per_second, op.nbytes_accessed / rates.bytes_per_second)
    return max(rates.overhead_seconds, longer) if rates.overlaps else rates.overhead_seconds + longer


def seconds_expression(op: OpFact[Size], hardware: Hardware) -> Expression:
    """Return ``op_seconds`` in the symbols of its sizes: overhead + Max(FLOPs / rate, bytes / bandwidth), or Max of all."""
    import sympy

    if op.inner:
        total: Expression = sympy.Add(*(seconds_expression(each, hardware) for each in _fused(op)))
        return total
    rates = _rates(op, hardware)
    arithmetic = sympy.sympify(op.num_flops) / rates.flops_per_second
    traffic = sympy.sympify(op.nbytes_accessed) / rates.bytes_per_second
    if rates.overlaps:
        longest: Expression = sympy.Max(rates.overhead_seconds, arithmetic, traffic)
        return longest
    seconds: Expression = rates.overhead_seconds + sympy.Max(arithmetic, traffic)
    return seconds


def unfused(graph: GraphFacts) -> Iterator[OpFact]:
    """Yield the ops of a graph, those inside its segments one by one, as they would run without a compiler."""
    for op in graph.ops:
        yield from op.inner or (op,)


def _fused(segment: OpFact[SizeT_co]) -> Iterator[OpFact[SizeT_co]]:
    """Yield what a compiled segment costs: the traffic of its inputs and results, and the arithmetic inside.

    Compute of gpt-small, vit, opt, mlp and gpt-deep (``benchmarks/accuracy_models.py``) measured 0.99, 0.72, 0.94, 1.05
    and 0.94 times this, and 0.91, 0.70, 0.92, 1.09 and 0.64 times the sum of the ops inside.
    """
    yield replace(segment, inner=())
    for op in segment.inner:
        if op.num_flops != 0:
            yield replace(op, nbytes_accessed=0)  # type: ignore[arg-type]  # 0 is a number and an expression


def _rates(op: OpFact[Size], hardware: Hardware) -> _Rates:
    if is_collective(op.op) or is_message(op.op):  # the ranks are those of one node
        return _Rates(
            flops_per_second=math.inf,
            bytes_per_second=hardware.device_link_bytes_per_second or hardware.memory_bytes_per_second,
            overhead_seconds=hardware.op_overhead_seconds,
            overlaps=not hardware.memory.unified,
        )
    is_attention = "attention" in op.op
    flops_per_second = hardware.attention_flops_per_second if is_attention else hardware.flops_per_second
    return _Rates(
        flops_per_second=flops_per_second(op.dtype),
        bytes_per_second=hardware.op_bytes_per_second(kind_of(op.op), op.dtype),
        overhead_seconds=hardware.op_overhead_seconds * num_calls(op.op),
        overlaps=not hardware.memory.unified,
    )
