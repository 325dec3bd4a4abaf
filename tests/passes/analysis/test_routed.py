"""Which weights are read expert by expert, and which gradients are zero for experts without rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.conftest import PARAM_IDS
from zinf_compile.ir.facts import GraphFacts
from zinf_compile.ir.ops import GATHER
from zinf_compile.ir.sizes import Size

Function = Callable[..., object]
Analyze = Callable[..., GraphFacts[Size]]

EXPERTS, IN, OUT, ROWS = 4, 8, 16, 6
INPUTS = ((ROWS, IN), (EXPERTS,))


def _gather(anchor: Tensor, *shape: int) -> Tensor:
    """Gather the parameter a in bfloat16, which the fake implementation of the product wants."""
    gathered: Tensor = GATHER(anchor, PARAM_IDS["a"], list(shape), torch.bfloat16, torch.device("cpu"))
    return gathered


def _ends(routing: Tensor) -> Tensor:
    """Return where the rows of each expert end: the first op that makes integers."""
    return routing.to(torch.int32)


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    product: Tensor = torch.ops.aten._grouped_mm(rows.to(torch.bfloat16), weight.to(torch.bfloat16), ends)
    return product


def _reads(trace: Function, analyze: Analyze, function: Callable[..., object]) -> list[tuple[str, int, int, int]]:
    """Return, of each parameter that is read by expert, the tick of its ends, its experts and its rows."""
    facts = analyze(trace(function, *INPUTS))
    return [
        (each.parameter, each.routing.ends, each.routing.num_experts, each.routing.num_rows) for each in facts.routed
    ]


def test_a_grouped_product_reads_experts_with_rows(trace: Function, analyze: Analyze) -> None:
    def forward(anchor: Tensor, x: Tensor, routing: Tensor) -> Tensor:
        ends = _ends(routing)  # anchor 0, x 1, routing 2, _to_copy 3
        return _product(x, _gather(anchor, EXPERTS, IN, OUT), ends)

    assert _reads(trace, analyze, forward) == [("a", 3, EXPERTS, ROWS)]


def test_views_that_keep_experts_are_looked_through(trace: Function, analyze: Analyze) -> None:
    """As transformers stores weights, ``[experts, out, in]``, of which it takes the transpose."""

    def forward(anchor: Tensor, x: Tensor, routing: Tensor) -> Tensor:
        ends = _ends(routing)
        return _product(x, _gather(anchor, EXPERTS, OUT, IN).transpose(-2, -1), ends)

    assert _reads(trace, analyze, forward) == [("a", 3, EXPERTS, ROWS)]


def test_two_products_with_the_same_ends_are_one_routing(trace: Function, analyze: Analyze) -> None:
    def forward(anchor: Tensor, x: Tensor, routing: Tensor) -> Tensor:
        ends, weight = _ends(routing), _gather(anchor, EXPERTS, IN, OUT)
        return _product(x, weight, ends) + _product(torch.sin(x), weight, ends)

    assert _reads(trace, analyze, forward) == [("a", 3, EXPERTS, ROWS)]


@pytest.mark.parametrize(
    "read",
    [
        lambda x, weight, ends: weight.sum() + _product(x, weight, ends),
        lambda x, weight, ends: _product(x, weight.clone(), ends),
        lambda x, weight, ends: _product(x, weight.flip(0), ends),
        lambda x, weight, ends: _product(x, weight, ends) + _product(x, weight, ends.sort()[0]),
        lambda x, weight, ends: _product(x.to(weight.dtype) @ weight[0], weight.transpose(1, 2), ends),
        lambda x, weight, ends: x.to(weight.dtype) @ weight[1],
    ],
    ids=["all of it too", "a copy", "other experts", "two routings", "one expert always", "no product of experts"],
)
def test_what_reads_more_is_not_routed(trace: Function, analyze: Analyze, read: Function) -> None:
    def forward(anchor: Tensor, x: Tensor, routing: Tensor) -> object:
        return read(x, _gather(anchor, EXPERTS, IN, OUT), _ends(routing))

    assert _reads(trace, analyze, forward) == []


def test_a_matrix_has_no_experts(trace: Function, analyze: Analyze) -> None:
    """Ends that cut the inner dimension: all of both matrices is read."""

    def forward(anchor: Tensor, x: Tensor, routing: Tensor) -> Tensor:
        return _product(x.t(), _gather(anchor, ROWS, OUT), _ends(routing))

    assert _reads(trace, analyze, forward) == []


@pytest.mark.parametrize(
    ("gradient", "is_routed"),
    [
        (lambda x, dy, ends: _product(x.t(), dy, ends), True),
        (lambda x, dy, ends: _product(dy.t(), x, ends).transpose(1, 2), True),
        (lambda x, dy, ends: _product(x.t(), dy, ends).to(torch.float64), True),
        (lambda x, dy, ends: _product(x.t(), dy, ends) + 1, False),
        (lambda x, dy, ends: _product(x.t(), dy, ends).flip(0), False),
    ],
    ids=["product", "transposed", "cast", "added to", "other experts"],
)
def test_gradients_made_by_expert_are_zero_for_those_without_rows(
    trace: Function, analyze: Analyze, store_grad: Function, gradient: Function, is_routed: bool
) -> None:
    def backward(anchor: Tensor, x: Tensor, routing: Tensor, dy: Tensor) -> object:
        return store_grad(gradient(x, dy, _ends(routing)), "a")

    facts = analyze(trace(backward, *INPUTS, (ROWS, OUT)))
    (fact,) = facts.gradients
    found = None if fact.routing is None else (fact.routing.ends, fact.routing.num_experts, fact.routing.num_rows)
    assert found == ((4, EXPERTS, ROWS) if is_routed else None)  # of which anchor, x, routing and dy are 0 to 3
