"""Floating-point operations against formulas, bytes accessed against sizes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from zinf_compile.ir.facts import at_sizes
from zinf_compile.ir.ops import LOGIT_SUMS, LOGIT_SUMS_BACKWARD, WEIGH_LOGIT_SUMS
from zinf_compile.passes.analysis import costs
from zinf_compile.passes.analysis.costs import count_bytes_accessed, count_flops

Function = Callable[..., object]
aten = torch.ops.aten


def _only(graph_module: fx.GraphModule, target: object) -> fx.Node:
    (node,) = graph_module.graph.find_nodes(op="call_function", target=target)
    return node


def test_a_matrix_product(trace: Function) -> None:
    node = _only(trace(lambda anchor, x, y: torch.mm(x, y), (2, 3), (3, 5)), aten.mm.default)
    assert count_flops(node) == 2 * 2 * 3 * 5
    assert count_bytes_accessed(node) == 4 * (2 * 3 + 3 * 5 + 2 * 5)


def test_a_matrix_product_with_bias(trace: Function) -> None:
    node = _only(trace(lambda anchor, b, x, y: torch.addmm(b, x, y), (5,), (2, 3), (3, 5)), aten.addmm.default)
    assert count_flops(node) == 2 * 2 * 3 * 5
    assert count_bytes_accessed(node) == 4 * (5 + 2 * 3 + 3 * 5 + 2 * 5)


def test_a_batch_of_matrix_products(trace: Function) -> None:
    node = _only(trace(lambda anchor, x, y: torch.bmm(x, y), (7, 2, 3), (7, 3, 5)), aten.bmm.default)
    assert count_flops(node) == 7 * 2 * 2 * 3 * 5


def test_a_convolution(trace: Function) -> None:
    def forward(anchor: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x, weight)

    node = _only(trace(forward, (1, 3, 8, 8), (5, 3, 3, 3)), aten.convolution.default)
    assert count_flops(node) == 2 * (6 * 6) * 5 * (3 * 3 * 3)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_leaves_out_what_is_masked(trace: Function, is_causal: bool) -> None:
    def forward(anchor: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)[0]

    shape = (2, 3, 16, 8)
    node = _only(trace(forward, shape, shape, shape), aten._scaled_dot_product_flash_attention_for_cpu.default)
    whole = 2 * (2 * 3) * (2 * 16 * 16 * 8)  # query with key, scores with value
    assert count_flops(node) == (whole // 2 if is_causal else whole)


ROWS, GROUPS, INNER, OUTER = 48, 4, 16, 32


@pytest.mark.parametrize(
    ("left", "right", "num_flops"),
    [
        ((ROWS, INNER), (GROUPS, INNER, OUTER), 2 * ROWS * INNER * OUTER),  # rows grouped by expert: forward
        ((GROUPS, OUTER, INNER), (INNER, ROWS), 2 * OUTER * INNER * ROWS),
        ((INNER, ROWS), (ROWS, OUTER), 2 * INNER * ROWS * OUTER),  # the gradient of each expert's weight
        ((GROUPS, ROWS, INNER), (GROUPS, INNER, OUTER), 2 * GROUPS * ROWS * INNER * OUTER),
    ],
)
def test_products_of_groups(trace: Function, left: tuple[int, ...], right: tuple[int, ...], num_flops: int) -> None:
    def forward(anchor: Tensor, left: Tensor, right: Tensor) -> Tensor:
        ends = None if left.dim() == right.dim() == 3 else torch.arange(1, GROUPS + 1, dtype=torch.int32)
        return aten._grouped_mm(left.bfloat16(), right.bfloat16(), ends)

    node = _only(trace(forward, left, right), aten._grouped_mm.default)
    assert count_flops(node) == num_flops


def test_an_elementwise_op_is_all_traffic(trace: Function) -> None:
    node = _only(trace(lambda anchor, x: torch.sin(x), (4, 4)), aten.sin.default)
    assert count_flops(node) == 0
    assert count_bytes_accessed(node) == 2 * 64


def test_a_result_of_several_tensors_counts_all(trace: Function) -> None:
    node = _only(trace(lambda anchor, x: torch.ops.aten.max.dim(x, 1)[0], (2, 3)), aten.max.dim)
    assert count_bytes_accessed(node) == 2 * 3 * 4 + 2 * 4 + 2 * 8


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x.split(2), lambda x: x.view(8)], ids=["t", "split", "view"]
)
def test_a_view_costs_nothing(trace: Function, view: Callable[[Tensor], object]) -> None:
    graph_module = trace(lambda anchor, x: view(x), (4, 2))
    for node in graph_module.graph.nodes:
        assert count_bytes_accessed(node) == 0
        assert count_flops(node) == 0


def test_attention_on_the_cpu(trace: Function) -> None:
    def forward(anchor: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]

    graph_module = trace(forward, (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    node = _only(graph_module, aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert count_flops(node) == (2 * 3) * (2 * 5 * 8 * 7 + 2 * 5 * 7 * 8)  # query by key, weights by value


def test_attention_backward_on_the_cpu(trace: Function) -> None:
    def backward(anchor: Tensor, grad: Tensor, query: Tensor, key: Tensor, out: Tensor, logsumexp: Tensor) -> Tensor:
        attend = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return attend(grad, query, key, key, out, logsumexp, 0.0, False)[0]

    rows, columns = (2, 3, 5, 8), (2, 3, 7, 8)
    graph_module = trace(backward, rows, rows, columns, rows, (2, 3, 5))
    node = _only(graph_module, aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    # recomputed scores, gradients of the weights, of the values, of the queries and of the keys
    assert count_flops(node) == 5 * (2 * 3) * (2 * 5 * 7 * 8)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_on_a_gpu_whose_queries_share_keys(
    kernel: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight heads of queries, two of keys and values: the formulas of torch 2.11 refuse that, and are not asked."""
    monkeypatch.setattr(costs, "flop_registry", {})
    query, key, grad = (torch.empty(2, heads, 64, 16, device="meta") for heads in (8, 2, 8))
    forward = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    of_forward = {"query": query, "key": key, "value": key, "is_causal": is_causal}
    of_backward = {"grad_out": grad, "grad_out_": grad, **of_forward}
    for op, given, num_products in ((forward, of_forward, 2), (backward, of_backward, 5)):
        graph = fx.Graph()
        names = [argument.name for argument in op._schema.arguments]
        values = {name: value for name, value in given.items() if name in names}
        positions: list[object] = [None] * (max(map(names.index, values)) + 1)
        for name, value in values.items():
            positions[names.index(name)] = value
            if isinstance(value, Tensor):
                node = positions[names.index(name)] = graph.placeholder(name)
                node.meta["val"] = value
        called = graph.call_function(op, tuple(positions))  # type: ignore[arg-type]
        called.meta["val"] = query
        counted = num_products * 2 * 2 * 8 * 64 * 64 * 16
        assert count_flops(called) == (counted // 2 if is_causal else counted)


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_wrapped_to_draw_the_same_twice_counts_as_by_itself(
    trace: Function, analyze: Function, is_causal: bool
) -> None:
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    random = torch._prims.rng_prims
    state_nbytes = torch.get_rng_state().nbytes

    def forward(anchor: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        (plain, _) = attention(query, key, value, 0.0, is_causal)
        _, (first, _) = random.run_and_save_rng_state(attention, query, key, value, 0.0, is_causal)
        state = torch.zeros(state_nbytes, dtype=torch.uint8)
        (again, _) = random.run_with_rng_state(state, attention, query, key, value, 0.0, is_causal)
        return plain, first, again

    shape = (2, 3, 16, 8)
    facts = analyze(trace(forward, shape, shape, shape), num_outputs=3)
    plain, first, again = (op for op in facts.ops if "attention" in op.op)
    assert {op.name for op in (first, again)} == {"run_and_save_rng_state", "run_with_rng_state"}
    assert plain.num_flops > 0
    for wrapped in (first, again):
        assert (wrapped.op, wrapped.dtype, wrapped.num_flops) == (plain.op, plain.dtype, plain.num_flops)
        assert wrapped.nbytes_accessed == plain.nbytes_accessed + state_nbytes


def test_flops_in_symbols_are_those_of_every_shape(trace: Function, trace_dynamic: Function, analyze: Function) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        folded = torch.nn.functional.conv1d(x, torch.ones(5, 4, 3), stride=2)
        return torch.bmm(folded, folded.transpose(1, 2)).exp()

    symbolic = analyze(trace_dynamic(forward, torch.empty(2, 4, 9)))
    names = {symbol.value: symbol.name for symbol in symbolic.symbols}
    for batch, length in ((2, 9), (3, 10), (64, 11), (7, 5000)):
        fixed = analyze(trace(forward, (batch, 4, length)))
        numbers = at_sizes(symbolic, {names[2]: batch, names[9]: length})
        for count in ("num_flops", "nbytes_accessed"):
            expected = sorted(getattr(op, count) for op in fixed.ops if getattr(op, count))
            assert sorted(getattr(op, count) for op in numbers.ops if getattr(op, count)) == expected
        assert sorted(value.nbytes for value in numbers.values) == sorted(value.nbytes for value in fixed.values)


@pytest.mark.parametrize("trains_weight", [True, False])
def test_sums_over_logits_cost_their_products(trains_weight: bool, trace: Function) -> None:
    def step(anchor: Tensor, hidden: Tensor, weight: Tensor, rows: Tensor) -> object:
        target = torch.zeros(3, dtype=torch.int64)
        wanted = [True, trains_weight, False]
        one, two, _ = LOGIT_SUMS(hidden, weight, None, target, None, 0, True, 2)
        again = LOGIT_SUMS_BACKWARD(rows, rows, None, one, two, hidden, weight, None, target, None, 0, True, 2, wanted)
        return again, WEIGH_LOGIT_SUMS(hidden, weight, None, target, None, rows, rows, None, 2, wanted)

    graph_module = trace(step, (3, 4), (7, 4), (3,))
    product = 2 * 3 * 4 * 7
    assert count_flops(_only(graph_module, LOGIT_SUMS)) == product
    for op in (LOGIT_SUMS_BACKWARD, WEIGH_LOGIT_SUMS):
        assert count_flops(_only(graph_module, op)) == (3 if trains_weight else 2) * product
