"""Symbols of shapes: their names, which input has them as a dimension, and torch's arithmetic in plain sympy."""

from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy import functions

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.ir.sizes import Expression, evaluate_sizes, size_symbol
from zinf_compile.passes.analysis.shapes import GraphShapes, find_sources

Function = Callable[..., object]


def _names(trace_dynamic: Function, *inputs: Tensor) -> dict[int, str]:
    """Return the name of each dynamic size of the inputs, by its value at capture."""
    graph_module = trace_dynamic(lambda anchor, *tensors: [torch.sin(tensor) for tensor in tensors], *inputs)
    return {symbol.value: symbol.name for symbol in GraphShapes(graph_module.graph).symbols}


def test_tokens_have_a_batch_and_a_sequence(trace_dynamic: Function) -> None:
    ids, mask = torch.zeros(3, 70, dtype=torch.int64), torch.zeros(3, 70, dtype=torch.bool)
    assert _names(trace_dynamic, ids, mask) == {3: "batch", 70: "sequence"}


def test_the_second_dimension_of_floats_is_no_sequence(trace_dynamic: Function) -> None:
    names = _names(trace_dynamic, torch.zeros(3, 5, 70))
    assert names[3] == "batch"
    assert "sequence" not in names.values()
    assert len(set(names.values())) == 3


def _make_graph(*inputs: Tensor) -> fx.Graph:
    """Return a graph with placeholders only and a symbol for each dimension, as Dynamo makes for ``mark_dynamic``."""
    graph, env = fx.Graph(), ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    for position, tensor in enumerate(inputs):
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
        source = ConstantSource(f"input_{position}")
        fake = mode.from_tensor(tensor, source=source, symbolic_context=context)
        graph.placeholder(f"input_{position}").meta["val"] = fake
    graph.output(())
    return graph


def test_inputs_of_one_batch_share_its_name() -> None:
    ids, targets = torch.zeros(3, 70, dtype=torch.int64), torch.zeros(3, 70, dtype=torch.int64)
    graph = _make_graph(ids, targets)
    assert len(find_sources(graph)) == 4
    shapes = GraphShapes(graph)
    assert [(symbol.name, symbol.value) for symbol in shapes.symbols] == [("batch", 3), ("sequence", 70)]
    # If a call has two of them, the larger counts.
    assert shapes.read([torch.zeros(8, 60), torch.zeros(5, 512)]) == {"batch": 8, "sequence": 512}


def test_no_size_is_less_for_sharing_a_name() -> None:
    graph = _make_graph(torch.zeros(4), torch.zeros(4))
    shapes = GraphShapes(graph)
    longer, shorter = (source.symbol for source in find_sources(graph))
    size = shapes.size(8 * (longer - shorter + 3))  # a call may have a size of the difference plus 3
    assert evaluate_sizes([size], {"batch": 10}) == {size: 8 * 13}


def test_what_two_sizes_could_claim_goes_to_neither(trace_dynamic: Function) -> None:
    source, target = torch.zeros(3, 70, dtype=torch.int64), torch.zeros(3, 60, dtype=torch.int64)
    assert "sequence" not in _names(trace_dynamic, source, target).values()
    assert "batch" not in _names(trace_dynamic, torch.zeros(3, 5), torch.zeros(4, 5)).values()


def test_a_fixed_size_has_no_symbol(trace: Function) -> None:
    assert GraphShapes(trace(lambda anchor, x: torch.neg(x), (3, 5)).graph).symbols == ()


def test_sizes_are_read_from_the_inputs_of_a_call(trace_dynamic: Function) -> None:
    ids = torch.zeros(3, 70, dtype=torch.int64)
    graph_module = trace_dynamic(lambda anchor, x: torch.neg(x), ids)
    shapes = GraphShapes(graph_module.graph)
    assert shapes.read([torch.empty(0), torch.zeros(8, 512)]) == {"batch": 8, "sequence": 512}
    assert [(source.position, source.dim) for source in find_sources(graph_module.graph)] == [(1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda n: functions.FloorDiv(n, 4), 7 // 4),
        (lambda n: functions.CleanDiv(2 * n, 7), 2),
        (lambda n: functions.CeilDiv(n, 4), 2),
        (lambda n: functions.CeilToInt(functions.IntTrueDiv(n, 4)), 2),
        (lambda n: functions.FloorToInt(functions.FloatTrueDiv(functions.ToFloat(n), 4)), 1),
        (lambda n: functions.TruncToInt(n * sympy.Float(1.5)), 10),
        (lambda n: functions.RoundToInt(n * sympy.Float(0.51)), 4),
        (lambda n: functions.ModularIndexing(n, 2, 2), 1),
        (lambda n: functions.Mod(n, 4), 3),
        (lambda n: functions.PythonMod(n, 4), 3),
        (lambda n: functions.Max(n, 10), 10),
        (lambda n: functions.Min(n, 10) * n, 49),
        (lambda n: functions.Where(sympy.Gt(n, 5), n, 2 * n), 7),
        (lambda n: functions.PowByNatural(n, sympy.Integer(2)), 49),
        (lambda n: functions.FloorDiv(functions.FloorDiv(n + 1, 2) + 3, 2), 3),
    ],
)
def test_torchs_arithmetic_becomes_plain(
    trace_dynamic: Function, write: Callable[[sympy.Expr], Expression], expected: int
) -> None:
    shapes = GraphShapes(trace_dynamic(lambda anchor, x: torch.neg(x), torch.zeros(7)).graph)
    (source,) = shapes._sources
    size = shapes.size(write(source.symbol))
    assert evaluate_sizes([size], {"batch": 7}) == {size: expected}
    assert size.free_symbols == {size_symbol("batch")}
    assert not {type(part).__module__ for part in sympy.preorder_traversal(size)} & {functions.__name__}


def test_a_size_that_no_input_shows_is_refused(trace_dynamic: Function) -> None:
    shapes = GraphShapes(trace_dynamic(lambda anchor, x: torch.neg(x), torch.zeros(7)).graph)
    with pytest.raises(UnsupportedError, match="none of its inputs shows hidden; fix that dimension"):
        shapes.size(4 * sympy.Symbol("hidden"))


def test_a_size_that_no_input_has_in_any_way_is_fixed(trace_dynamic: Function) -> None:
    graph_module = trace_dynamic(lambda anchor, x: torch.sin(x), torch.zeros(7))
    env = graph_module.graph.find_nodes(op="placeholder")[1].meta["val"].shape[0].node.shape_env
    state = env.create_symintnode(env.create_symbol(11, ConstantSource("state")), hint=11)  # as of a random state
    graph_module.graph.output_node().prev.meta["val"] = state
    shapes = GraphShapes(graph_module.graph)
    assert [symbol.name for symbol in shapes.symbols] == ["batch"]
    assert shapes.size(4 * state.node.expr) == 44
