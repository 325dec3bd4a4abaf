"""BIND_OUTPUTS: ops write their results to the arena offsets that the plan has bound."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from zinf_compile.ir.facts import GraphFacts
from zinf_compile.ir.glossary import LiveRange
from zinf_compile.ir.plan import BoundValue, Plan
from zinf_compile.passes.analysis.out_forms import _OUT_VARIANTS, has_out_form, out_form
from zinf_compile.passes.contract import LowerInputs, run_pipeline
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.properties import TRANSFERS_STARTED, VALUES_KNOWN
from zinf_compile.passes.transforms.lowering.bind_outputs import BIND_OUTPUTS

Function = Callable[..., object]


@pytest.fixture
def bind(analyze: Callable[..., GraphFacts], hand_made_plan: Callable[..., Plan]) -> Callable[..., str]:
    """Return ``bind(graph_module, {tick: offset})``."""

    def run(graph_module: fx.GraphModule, offsets: Mapping[int, int]) -> str:
        plan = replace(
            hand_made_plan(analyze(graph_module)),
            bound=tuple(
                BoundValue(name="value", offset=offset, nbytes=64, live=LiveRange(start=tick, end=tick + 1))
                for tick, offset in offsets.items()
            ),
        )
        inputs = LowerInputs(plan=plan, store_id=7, param_ids={})
        given = frozenset({VALUES_KNOWN, TRANSFERS_STARTED})
        run_pipeline(graph_module, [BIND_OUTPUTS], inputs, given=given)
        return dump_graph(graph_module.graph)

    return run


def test_a_bound_op_writes_to_its_offset(trace: Function, bind: Function) -> None:
    graph_module = trace(lambda anchor, x, y: torch.sin(torch.mm(x, y)), (2, 4), (4, 4))
    assert_expected_inline(
        bind(graph_module, {3: 8192}),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
y_1 = placeholder[y_1]
mm_memory = zinf.arena_view(7, 8192, [2, 4], [4, 1], float32, cpu)
mm = aten.mm.out(x_1, y_1, out=mm_memory)
sin = aten.sin(mm)
return sin
""",
    )


def test_a_copy_writes_what_it_copies(trace: Function, bind: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.sin(x.t().clone().to(torch.float64)), (2, 4))
    assert_expected_inline(
        bind(graph_module, {3: 0, 4: 4096}),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
t = aten.t(x_1)
clone_memory = zinf.arena_view(7, 0, [4, 2], [1, 4], float32, cpu)
clone = aten.copy_(clone_memory, t)
to_copy_memory = zinf.arena_view(7, 4096, [4, 2], [1, 4], float64, cpu)
_to_copy = aten.copy_(to_copy_memory, clone)
sin = aten.sin(_to_copy)
return sin
""",
    )


def test_keywords_stay(trace: Function, bind: Function) -> None:
    graph_module = trace(lambda anchor, x, y: torch.add(x, y, alpha=2), (4,), (4,))
    assert_expected_inline(
        bind(graph_module, {3: 0}),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
y_1 = placeholder[y_1]
add_memory = zinf.arena_view(7, 0, [4], [1], float32, cpu)
add = aten.add.out(x_1, y_1, alpha=2, out=add_memory)
return add
""",
    )


def test_sizes_in_symbols_are_computed_once_from_the_inputs(trace_dynamic: Function, bind: Function) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        pair = torch.cat([x, x], 1)
        return torch.exp(torch.neg(pair))

    graph_module = trace_dynamic(forward, torch.empty(3, 5))
    nodes = list(graph_module.graph.nodes)
    ticks = {node.name: tick for tick, node in enumerate(nodes)}
    assert_expected_inline(
        bind(graph_module, {ticks["cat"]: 0, ticks["neg"]: 4096}),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
sym_size = aten.sym_size.int(x_1, 0)
sym_size_1 = aten.sym_size.int(x_1, 1)
mul = mul(2, sym_size_1)
cat_memory = zinf.arena_view(7, 0, [sym_size, mul], [mul, 1], float32, cpu)
cat = aten.cat.out([x_1, x_1], 1, out=cat_memory)
neg_memory = zinf.arena_view(7, 4096, [sym_size, mul], [mul, 1], float32, cpu)
neg = aten.neg.out(cat, out=neg_memory)
exp = aten.exp(neg)
return exp
""",
    )


def _make_inputs(op: torch._ops.OpOverload) -> list[object]:
    """Return arguments for an op with an out variant, by the names in its schema."""
    examples: dict[str, object] = {
        "dim": -1,
        "half_to_float": False,
        "input_dtype": torch.float32,
        "exponent": 3,
        "tensors": [torch.rand(4, 4), torch.rand(4, 4)],
        "approximate": "none",
    }
    batched = op in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)
    inputs: list[object] = []
    for argument in op._schema.arguments:
        if argument.kwarg_only:
            continue
        if argument.name in examples:
            inputs.append(examples[argument.name])
        elif str(argument.type) == "Tensor":
            inputs.append(torch.rand(2, 4, 4) if batched else torch.rand(4, 4))
    return inputs


@pytest.mark.parametrize("op", _OUT_VARIANTS, ids=str)
def test_every_out_variant_computes_the_same_bits(op: torch._ops.OpOverload) -> None:
    torch.manual_seed(0)
    inputs = _make_inputs(op)
    expected: Tensor = op(*inputs)
    target, argument = _OUT_VARIANTS[op]
    memory = torch.empty_strided(expected.shape, expected.stride(), dtype=expected.dtype)
    result = target(*inputs, **{argument: memory})
    assert result.data_ptr() == memory.data_ptr()
    assert torch.equal(memory, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda anchor, x: torch.ops.aten.select_backward(x, [4, 3, 4], 1, -2),
        lambda anchor, x: torch.ops.aten.slice_backward(x, [4, 9], 1, 1, 9, 2),
        lambda anchor, x: torch.ops.aten.slice_backward(x, [7, 4], 0, -4, 2**63 - 1, 1),
    ],
    ids=["select", "slice", "slice_to_the_end"],
)
def test_a_part_among_zeros_computes_the_same_bits(trace: Function, function: Function) -> None:
    graph_module = trace(function, (4, 4))
    node = graph_module.graph.output_node().prev
    assert has_out_form(node)
    x = torch.randn(4, 4)
    x[0, 0] = -0.0
    expected = function(None, x)
    memory = torch.full_like(expected, torch.nan)
    form = out_form(node, memory)
    _, *rest = form.args
    result = form.target(memory, *(x if isinstance(arg, torch.fx.Node) else arg for arg in rest))
    assert result is memory
    assert torch.equal(memory.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(
    ("function", "has_form"),
    [
        (lambda anchor, x: torch.exp(x), True),
        (lambda anchor, x: torch.exp(x.t()), True),  # dense, though not contiguous
        (lambda anchor, x: torch.sin(x), False),  # not in the table
        (lambda anchor, x: torch.exp(anchor), False),  # empty: nothing to write
    ],
    ids=["contiguous", "transposed", "not_listed", "empty"],
)
def test_which_results_can_be_bound(trace: Function, function: Function, *, has_form: bool) -> None:
    graph_module = trace(function, (4, 4))
    assert has_out_form(graph_module.graph.output_node().prev) is has_form


@pytest.mark.parametrize(
    "function",
    [lambda anchor, x: torch.exp(x), lambda anchor, x: torch.exp(x.transpose(0, 1))],
    ids=["contiguous", "transposed"],
)
def test_results_of_changing_shape_can_be_bound(trace_dynamic: Function, function: Function) -> None:
    graph_module = trace_dynamic(function, torch.empty(3, 5, 7))
    assert has_out_form(graph_module.graph.output_node().prev)
