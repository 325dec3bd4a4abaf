"""GraphFacts of small graphs, against ticks and live ranges counted by hand."""

from collections.abc import Callable

import torch
from torch import Tensor, fx

from zinf_compile.ir.facts import GraphFacts, working_set
from zinf_compile.ir.schedule import Schedule
from zinf_compile.passes.contract import node_facts

Function = Callable[..., object]


def _live(facts: GraphFacts) -> dict[str, tuple[int, int]]:
    return {value.name: (value.live.start, value.live.end) for value in facts.values}


def test_a_value_lives_from_its_node_to_its_last_reader(trace: Function, analyze: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.exp(torch.cos(torch.sin(x))), (4,))
    facts = analyze(graph_module)  # anchor 0, x 1, sin 2, cos 3, exp 4, output 5
    assert _live(facts) == {"sin": (2, 4), "cos": (3, 5), "exp": (4, 6)}
    assert facts.schedule == Schedule.of_one_graph(6, 6)
    assert working_set(facts.values, facts.num_ticks) == [0, 0, 16, 32, 32, 16]


def test_a_view_keeps_its_storage_alive(trace: Function, analyze: Function) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        turned = torch.sin(x).t()
        return torch.mm(torch.cos(x), turned)

    assert _live(analyze(trace(forward, (2, 4)))) == {"sin": (2, 6), "cos": (4, 6), "mm": (5, 7)}


def test_pieces_keep_their_storage_alive(trace: Function, analyze: Function) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        left, right = torch.sin(x).split(2)
        return torch.cos(left) * right  # sin 2, split 3, getitem 4 5, cos 6, mul 7

    assert _live(analyze(trace(forward, (4,)))) == {"sin": (2, 8), "cos": (6, 8), "mul": (7, 9)}


def test_an_in_place_op_allocates_nothing(trace: Function, analyze: Function) -> None:
    facts = analyze(trace(lambda anchor, x: torch.cos(torch.sin(x).add_(1)), (4,)))
    assert _live(facts) == {"sin": (2, 5), "cos": (4, 6)}


def test_inputs_and_empty_tensors_are_not_counted(trace: Function, analyze: Function) -> None:
    facts = analyze(trace(lambda anchor, x: (torch.sin(anchor), torch.cos(x)), (4,)), num_outputs=2)
    assert _live(facts) == {"cos": (3, 5)}


def test_results_of_one_node_die_on_their_own(trace: Function, analyze: Function) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        values, indices = torch.ops.aten.max.dim(x, 1)  # x 1, max 2, getitem 3, getitem 4, cos 5, sin 6, mul 7
        return torch.cos(values) * torch.sin(indices)

    facts = analyze(trace(forward, (4, 3)))
    nbytes = {value.name: value.nbytes for value in facts.values}
    ends = {name: end for name, (_, end) in _live(facts).items()}
    assert sorted(nbytes.values()) == [16, 16, 16, 16, 32]
    # The op allocates both results while its inputs are live, however late getitem reads them.
    assert [start for name, (start, _) in _live(facts).items() if name.startswith("max")] == [2, 2]
    values, indices = (name for name in nbytes if name.startswith("max"))
    assert (nbytes[values], ends[values]) == (16, 6)
    assert (nbytes[indices], ends[indices]) == (32, 7)


def _make_training_graphs(trace: Function, gather: Function, store_grad: Function) -> tuple[fx.GraphModule, ...]:
    """Return forward and backward of ``sin(x @ a)``; saved values have the names that torch's partitioner gives them."""

    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.mm(x, gather(anchor, "a", 4, 4))
        return torch.sin(y), y  # anchor 0, x 1, gather 2, mm 3, sin 4, output 5

    def backward(anchor: Tensor, x: Tensor, mm: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        dz = torch.cos(mm) * dy  # anchor 6, x 7, mm 8, dy 9, cos 10, mul 11
        token = store_grad(torch.mm(x.t(), dz), "a")  # t 12, mm 13, store_grad 14
        return token, torch.mm(dz, gather(anchor, "a", 4, 4).t())  # gather 15, t 16, mm 17, output 18

    second = trace(backward, (2, 4), (2, 4), (2, 4))
    for node in second.graph.nodes:
        if node.name == "mm":
            node.name = "dw"
    second.graph.find_nodes(op="placeholder")[2].name = "mm"
    return trace(forward, (2, 4)), second


def test_backward_continues_the_ticks_of_forward(
    trace: Function, gather: Function, store_grad: Function, analyze: Function
) -> None:
    forward, backward = _make_training_graphs(trace, gather, store_grad)
    facts = analyze(forward, backward)
    assert facts.schedule == Schedule.of_one_graph(6, 19)
    assert [op.tick for op in facts.ops] == list(range(19))
    assert [node_facts(node).tick for node in backward.graph.nodes] == list(range(6, 19))


def test_uses_and_gradients_of_a_parameter(
    trace: Function, gather: Function, store_grad: Function, analyze: Function
) -> None:
    facts = analyze(*_make_training_graphs(trace, gather, store_grad))
    (use,) = facts.uses
    assert (use.parameter, use.ticks) == ("a", (3, 17))  # mm, and mm through a view; the view itself reads nothing
    (gradient,) = facts.gradients
    assert (gradient.parameter, gradient.tick, gradient.nbytes) == ("a", 14, 64)


def test_a_parameter_that_is_returned_is_not_read_for_it(trace: Function, gather: Function, analyze: Function) -> None:
    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        a = gather(anchor, "a", 4, 4)
        return torch.mm(x, a), a  # anchor 0, x 1, gather 2, mm 3, output 4

    (use,) = analyze(trace(forward, (2, 4)), num_outputs=2).uses
    assert use.ticks == (3,)


def test_a_saved_value_lives_until_its_last_reader_in_backward(
    trace: Function, gather: Function, store_grad: Function, analyze: Function
) -> None:
    facts = analyze(*_make_training_graphs(trace, gather, store_grad))
    saved = {value.name for value in facts.values if value.saved}
    assert saved == {"mm"}
    assert _live(facts)["mm"] == (3, 11)


def test_the_caller_may_hold_a_result_to_the_end(
    trace: Function, gather: Function, store_grad: Function, analyze: Function
) -> None:
    assert _live(analyze(*_make_training_graphs(trace, gather, store_grad)))["sin"] == (4, 19)


def test_gathered_bytes_are_not_activations(
    trace: Function, gather: Function, store_grad: Function, analyze: Function
) -> None:
    facts = analyze(*_make_training_graphs(trace, gather, store_grad))
    assert not [value.name for value in facts.values if "gather" in value.name]


def test_an_op_without_a_module_belongs_to_the_run_around_it(trace: Function, analyze: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.exp(torch.cos(torch.sin(x))), (4,))
    for name, path in (("sin", "layers.0.up"), ("exp", "layers.1.up")):
        node = next(node for node in graph_module.graph.nodes if node.name == name)
        node.meta["nn_module_stack"] = {"key": (f"L['self'].{path}", torch.nn.Linear)}
    facts = analyze(graph_module)
    assert [op.module for op in facts.ops] == ["model", "model", "layers.0", "layers.0", "layers.1", "layers.1"]


def test_an_op_reads_results_and_looks_through_views(
    trace: Function, gather: Function, store_grad: Function, analyze: Function
) -> None:
    facts = analyze(*_make_training_graphs(trace, gather, store_grad))
    inputs = {op.tick: op.inputs for op in facts.ops}
    assert inputs[3] == (1, 2)  # mm reads x and the gathered weight
    assert inputs[10] == (3,)  # cos in backward reads forward's mm, which was saved
    assert inputs[13] == (7, 11)  # mm reads x through a view
    assert inputs[17] == (11, 15)


def test_an_op_with_several_results_has_the_dtype_of_the_first(trace: Function, analyze: Function) -> None:
    """It is computed at the rates of that dtype: attention and norms return float32 statistics beside it."""

    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        each = x.bfloat16().view(1, 2, 8, 16)
        attended, statistics = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(each, each, each)
        return attended + statistics.sum()

    attention = [op for op in analyze(trace(forward, (2, 128))).ops if "attention" in op.op]
    assert [op.dtype for op in attention] == ["bfloat16"]
