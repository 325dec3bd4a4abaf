"""Which saved values may be offloaded: those that own their whole storage, which nothing else holds or writes."""

from collections.abc import Callable

import torch
from torch import Tensor, fx

from zinf_compile.ir.facts import GraphFacts
from zinf_compile.passes.contract import node_facts

Function = Callable[..., fx.GraphModule]
Analyze = Callable[..., GraphFacts]


def _idle(facts: GraphFacts) -> dict[str, tuple[int, int] | None]:
    return {
        value.name: None if value.idle is None else (value.idle.start, value.idle.end)
        for value in facts.values
        if value.saved
    }


def _backward(trace: Function, saved: str, shape: tuple[int, ...], function: Callable[..., object]) -> fx.GraphModule:
    """Return the graph of a function of an anchor, a saved value and a gradient, with the names of torch's partitioner."""
    traced = trace(function, shape, (2, 4))
    traced.graph.find_nodes(op="placeholder")[1].name = saved
    return traced


def test_between_its_last_use_in_forward_and_its_first_in_backward(trace: Function, analyze: Analyze) -> None:
    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sin(x)  # anchor 0, x 1, sin 2
        return torch.cos(y) * torch.exp(x), y  # cos 3, exp 4, mul 5, output 6

    backward = _backward(trace, "sin", (2, 4), lambda anchor, y, dy: torch.exp(dy) * y)  # 7, 8, 9, exp 10, mul 11
    assert _idle(analyze(trace(forward, (2, 4)), backward)) == {"sin": (4, 11)}
    assert [node_facts(node).value for node in backward.graph.find_nodes(op="placeholder")] == [None, "sin", None]


def test_a_view_is_its_value(trace: Function, analyze: Analyze) -> None:
    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sin(x)  # sin 2
        turned = y.t()  # t 3
        return torch.exp(x), turned  # exp 4, output 5

    backward = _backward(trace, "t", (4, 2), lambda anchor, y, dy: torch.mm(dy, y.view(4, 2)))
    assert [node.name for node in backward.graph.nodes][3:5] == ["view", "mm"]  # at ticks 9 and 10
    assert _idle(analyze(trace(forward, (2, 4)), backward)) == {"sin": (4, 9)}
    assert [node_facts(node).value for node in backward.graph.find_nodes(op="placeholder")] == [None, "sin", None]


def test_what_the_caller_gets_stays(trace: Function, analyze: Analyze) -> None:
    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sin(x)
        return y.t(), y

    backward = _backward(trace, "sin", (2, 4), lambda anchor, y, dy: dy * y)
    assert _idle(analyze(trace(forward, (2, 4)), backward)) == {"sin": None}

    def keep(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sin(x)
        return torch.cos(y), y

    backward = _backward(trace, "sin", (2, 4), lambda anchor, y, dy: (dy * y, y.t()))
    assert _idle(analyze(trace(keep, (2, 4)), backward)) == {"sin": None}


def test_what_is_written_again_stays(trace: Function, analyze: Analyze) -> None:
    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sin(x)
        return torch.cos(y.mul_(2)), y

    backward = _backward(trace, "sin", (2, 4), lambda anchor, y, dy: dy * y)
    assert _idle(analyze(trace(forward, (2, 4)), backward)) == {"sin": None}


def test_one_of_several_results_is_a_value_of_its_own(trace: Function, analyze: Analyze) -> None:
    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = torch.ops.aten.max.dim(x, 1)  # max 2, getitem 3, getitem_1 4
        return torch.cos(values), indices  # cos 5, output 6

    backward = _backward(trace, "getitem_1", (2,), lambda anchor, y, dy: dy[0, :2] * y)
    idle = _idle(analyze(trace(forward, (2, 4)), backward))
    assert list(idle) == ["max_1.1"]
    assert idle["max_1.1"] is not None
    assert idle["max_1.1"][0] == 5
