"""Which values collectives leave the same on all ranks, and how long they read what they are given."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.conftest import PARAM_IDS
from zinf_compile.ir.facts import GraphFacts
from zinf_compile.passes.analysis.collectives import awaited, find_replicated

Function = Callable[..., object]
c10d = torch.ops._c10d_functional


def reduced(x: Tensor, group: str = "tp") -> Tensor:
    """Return what an all-reduce over a group gives."""
    result: Tensor = c10d.wait_tensor(c10d.all_reduce(x, "sum", group))
    return result


def test_what_follows_from_collectives_alone_is_the_same(trace: Function, gather: Function) -> None:
    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        weight = gather(anchor, "a", 4, 4)
        same = reduced(torch.mm(x, weight)).relu()
        whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "tp"))
        part = c10d.wait_tensor(c10d.reduce_scatter_tensor(same, "sum", 2, "tp"))
        return same, whole.exp(), part, same + x, torch.mm(same, weight), reduced(x, "dp").exp()

    graph = trace(forward, (4, 4)).graph
    found = find_replicated(graph, ["tp"])
    names = {node.name for node in found}
    assert {"relu", "exp"} <= names
    assert not {"mm", "reduce_scatter_tensor", "add", "mm_1", "exp_1", "x_1", "gather"} & names
    assert set(found.values()) == {"tp"}


def test_inputs_and_parameters_are_taken_to_be_the_same_only_if_told(trace: Function, gather: Function) -> None:
    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.mm(x, gather(anchor, "a", 4, 4)),
            torch.mm(x, gather(anchor, "b", 4, 4)),
            torch.dropout(x, 0.5, True),
        )

    graph = trace(forward, (4, 4)).graph
    assert not {node.name for node in find_replicated(graph, ["tp"])} & {"mm", "mm_1", "x_1"}
    told = find_replicated(graph, ["tp"], alike={PARAM_IDS["a"]}, are_inputs_alike=True)
    names = {node.name for node in told}
    assert {"x_1", "mm"} <= names
    assert "mm_1" not in names
    assert not any(name.startswith(("native_dropout", "bernoulli")) for name in names)  # ranks draw as they like


def test_what_a_collective_reads_lives_until_it_is_done(trace: Function, analyze: Callable[..., GraphFacts]) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        sent = x.sin()
        started = c10d.all_gather_into_tensor(sent, 2, "tp")
        meanwhile = x.cos()
        return c10d.wait_tensor(started)[:4] + meanwhile

    graph_module = trace(forward, (4, 4))
    facts = analyze(graph_module)
    ticks = {node.name: tick for tick, node in enumerate(graph_module.graph.nodes)}
    live = {value.name: value.live for value in facts.values}
    assert live["sin"].end == ticks["wait_tensor"] + 1
    assert "wait_tensor" not in live  # it is what was started
    assert live["all_gather_into_tensor"].start == ticks["all_gather_into_tensor"]


@pytest.mark.parametrize("read", ["anchor", "x"])
def test_what_several_groups_share_is_of_one(trace: Function, read: str) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        return reduced(reduced(x if read == "x" else x.sin(), "tp").exp(), "dp").cos()

    found = find_replicated(trace(forward, (4, 4)).graph, ["tp", "dp"])
    assert {node.name: group for node, group in found.items() if node.name in ("exp", "cos")} == {
        "exp": "tp",
        "cos": "dp",
    }


def test_results_of_coalesced_collectives_are_their_own(trace: Function, analyze: Callable[..., GraphFacts]) -> None:
    """They are unpacked before somebody waits for each: what waits makes them known, and all are read until the last."""

    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        sent = [x.sin(), x.cos()]
        first, second = c10d.all_gather_into_tensor_coalesced(sent, 2, "tp")
        return c10d.wait_tensor(first).exp() + c10d.wait_tensor(second)

    graph_module = trace(forward, (4, 4))
    waits = [node for node in graph_module.graph.nodes if node.name.startswith("wait_tensor")]
    assert [awaited(node) for node in waits] == [None, None]
    live = {value.name: value.live for value in analyze(graph_module).values}
    ticks = {node.name: tick for tick, node in enumerate(graph_module.graph.nodes)}
    assert live["sin"].end == live["cos"].end == ticks["wait_tensor_1"] + 1
    assert live["wait_tensor"].start == ticks["wait_tensor"]
