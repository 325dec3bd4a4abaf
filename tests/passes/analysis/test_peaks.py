"""Peak memory of a segment besides its inputs and outputs, and its run time, computed by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx

from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.ir.facts import OpFact
from zinf_compile.ir.sizes import evaluate_sizes
from zinf_compile.passes.analysis.peaks import peak_inside
from zinf_compile.passes.analysis.shapes import GraphShapes
from zinf_compile.passes.planner.cost.costs import op_seconds, ops_seconds, seconds_expression

Trace = Callable[..., fx.GraphModule]
KIB = 1024


def test_a_chain_holds_two_at_once_and_its_result_is_counted_elsewhere(trace: Trace) -> None:
    """In a chain of four tensors of 1 KiB, each is allocated while the previous one is live; the last is the result."""

    def run(anchor: Tensor, x: Tensor) -> Tensor:
        return x.sin().cos().exp().neg()

    assert peak_inside(trace(run, (256,)).graph) == 2 * KIB - KIB


def test_what_is_read_late_is_held_and_views_keep_what_they_show(trace: Trace) -> None:
    def run(anchor: Tensor, x: Tensor) -> Tensor:
        kept = x.sin()
        shown = kept.view(16, 16).t()
        return x.cos().exp().neg() + shown.reshape(256)

    # kept, exp and neg at once; then kept, its transposed copy, neg and the result.
    assert peak_inside(trace(run, (256,)).graph) == 3 * KIB - KIB


def test_a_convolution_has_its_copies_inside(trace: Trace) -> None:
    def run(anchor: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.conv2d(x, weight).relu()

    graph = trace(run, (1, 1, 4, 4), (1, 1, 1, 1)).graph
    image, weight = 64, 4
    assert peak_inside(graph) == image + (image + weight + 2 * image) - image


def test_peaks_of_changing_sizes_are_the_largest_of_what_may_be_largest(trace: Trace, trace_dynamic: Trace) -> None:
    """One chain has tensors of rows x columns, the other of rows x rows: which peak is larger depends on the call."""

    def run(anchor: Tensor, x: Tensor) -> Tensor:
        wide = x.sin().cos().sum(1)
        return (x @ x.t()).sin().cos().sum(1) + wide

    graph_module = trace_dynamic(run, torch.empty(4, 6))
    shapes = GraphShapes(graph_module.graph)
    peak = shapes.size(peak_inside(graph_module.graph))
    for rows, columns in ((4, 6), (6, 4), (100, 3), (3, 100)):
        sizes = {symbol.name: rows if symbol.value == 4 else columns for symbol in shapes.symbols}
        assert evaluate_sizes([peak], sizes)[peak] == peak_inside(trace(run, (rows, columns)).graph)


def test_a_peak_that_is_larger_by_a_constant_is_not_dropped(trace: Trace, trace_dynamic: Trace) -> None:
    """The second chain has one row less, and holds one more tensor to the end."""

    def run(anchor: Tensor, x: Tensor, z: Tensor) -> Tensor:
        wide = x.sin()
        first = wide.cos().sin().sum()
        held = z.sin()
        return wide[1:].sin().cos().sum() + first + held.sum()

    graph = trace_dynamic(run, torch.empty(4, 64), torch.empty(7)).graph
    shapes = GraphShapes(graph)
    peak = shapes.size(peak_inside(graph))
    for rows in (4, 9):
        sizes = {symbol.name: rows if symbol.value == 4 else symbol.value for symbol in shapes.symbols}
        assert evaluate_sizes([peak], sizes)[peak] >= peak_inside(trace(run, (rows, 64), (7,)).graph)


def test_a_segment_takes_its_own_traffic_and_the_products_inside() -> None:
    hardware = load_hardware("laptop-16g")
    mm = OpFact(
        tick=0, name="mm", op="aten.mm.default", module="up", dtype="float32", num_flops=10**9, nbytes_accessed=10**6
    )
    gelu = replace(mm, name="gelu", op="aten.gelu.default", num_flops=0, nbytes_accessed=10**7)
    segment = replace(mm, name="segment", op="zinf.run_segment.default", num_flops=0, inner=(mm, gelu, gelu))
    product = 10**9 / hardware.flops_per_second("float32")
    traffic = 10**6 / hardware.memory_bytes_per_second
    expected = 2 * hardware.op_overhead_seconds + product + traffic
    assert product > traffic, "the product takes its arithmetic, and its operands are traffic of the segment"
    assert expected < op_seconds(mm, hardware) + op_seconds(gelu, hardware)
    assert op_seconds(segment, hardware) == pytest.approx(expected)
    assert list(ops_seconds([segment, mm], hardware)) == pytest.approx([expected, op_seconds(mm, hardware)])
    assert abs(float(seconds_expression(segment, hardware)) - expected) < 1e-12
