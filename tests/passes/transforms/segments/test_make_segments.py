"""The compute of a block becomes one call: its ops, inputs and outputs, and what stays outside."""

import operator
from collections.abc import Callable, Container, Mapping

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from zinf_compile.ir.ops import GATHER, RUN_SEGMENT
from zinf_compile.passes.analysis.modules import blocks_of_nodes
from zinf_compile.passes.contract import SEGMENT, TILE, SegmentInputs
from zinf_compile.passes.fx_edit import copy_graph_module, dump_graph
from zinf_compile.passes.pipeline import segment_graph
from zinf_compile.passes.transforms.segments.structure import describe_structure

Trace = Callable[..., fx.GraphModule]


def segment(
    graph_module: fx.GraphModule, blocks: Mapping[str, str] | None = None, apart: Container[int] = ()
) -> list[fx.GraphModule]:
    """Return the segments made of a graph. ``blocks`` maps node names to blocks; by default all nodes are of one block."""
    by_structure: dict[str, int] = {}

    def number_of(inside: fx.GraphModule) -> int:
        return by_structure.setdefault(describe_structure(inside.graph), len(by_structure))

    nodes = list(graph_module.graph.nodes)
    named = {node: (blocks or {}).get(node.name, "layers.0") for node in nodes}
    segment_graph(graph_module, SegmentInputs(blocks=named, apart=apart, number_of=number_of))
    return [node.meta[SEGMENT] for node in graph_module.graph.find_nodes(op="call_function", target=RUN_SEGMENT)]


def run(graph_module: fx.GraphModule, inputs: list[Tensor], parameters: Mapping[int, Tensor]) -> list[Tensor]:
    """Run a graph with its segments op by op; check that no result of a segment aliases an input."""

    class Interpreter(fx.Interpreter):
        def run_node(self, node: fx.Node) -> object:
            if node.target is GATHER:
                return parameters[node.args[1]]
            if node.target is RUN_SEGMENT:
                given, sizes, _ = self.fetch_args_kwargs_from_env(node)[0]
                results = node.meta[SEGMENT].forward(*sizes, *given)
                storages = [each.untyped_storage().data_ptr() for each in (*given, *results)]
                assert len(set(storages[len(given) :])) == len(results)
                assert set(storages[: len(given)]).isdisjoint(storages[len(given) :])
                return list(results)
            return super().run_node(node)

    results: list[Tensor] = Interpreter(graph_module).run(*inputs)
    return results


def test_a_block_is_one_call_behind_what_it_gathers(trace: Trace, gather: Callable[..., Tensor]) -> None:
    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        up = torch.relu(x @ gather(anchor, "a", 4, 8).t())
        return (up @ gather(anchor, "b", 8, 4).t()) + x, up

    graph_module = trace(forward, (2, 8))
    (inside,) = segment(graph_module)
    assert_expected_inline(
        dump_graph(graph_module.graph),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
gather = zinf.gather(anchor_1, 1, [4, 8], float32, cpu)
gather_1 = zinf.gather(anchor_1, 2, [8, 4], float32, cpu)
layers_0_segment = zinf.run_segment([gather, x_1, gather_1], [], 0)
relu = getitem(layers_0_segment, 0)
add = getitem(layers_0_segment, 1)
return (add, relu)
""",
    )
    assert_expected_inline(
        dump_graph(inside.graph),
        """\
gather = placeholder[gather]
x_1 = placeholder[x_1]
gather_1 = placeholder[gather_1]
t = aten.t(gather)
mm = aten.mm(x_1, t)
relu = aten.relu(mm)
t_1 = aten.t(gather_1)
mm_1 = aten.mm(relu, t_1)
add = aten.add.Tensor(mm_1, x_1)
return (relu, add)
""",
    )


def test_stores_follow_and_views_are_made_outside(
    trace: Trace, gather: Callable[..., Tensor], store_grad: Callable[[Tensor, str], Tensor]
) -> None:
    def backward(anchor: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        weight = gather(anchor, "a", 4, 8)
        token = store_grad((x.t() @ grad).t(), "a")
        return torch.relu(grad @ weight) * 2, token

    graph_module = trace(backward, (2, 8), (2, 4))
    segment(graph_module)
    assert_expected_inline(
        dump_graph(graph_module.graph),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
grad_1 = placeholder[grad_1]
gather = zinf.gather(anchor_1, 1, [4, 8], float32, cpu)
layers_0_segment = zinf.run_segment([x_1, grad_1, gather], [], 0)
mm = getitem(layers_0_segment, 0)
mul = getitem(layers_0_segment, 1)
t_1 = aten.t(mm)
store_grad = zinf.store_grad(t_1, 1)
return (mul, store_grad)
""",
    )


def _views(x: Tensor) -> list[Tensor]:
    first, second = torch.relu(x).chunk(2, 1)
    return [first.t(), first + 1, second, x.t(), x.view(-1) * 2, x.t() + 1]


def _several_results(x: Tensor) -> list[Tensor]:
    values, indices = torch.sin(x).max(1)
    return [values.exp(), indices, values]


def _unused(x: Tensor) -> list[Tensor]:
    torch.cos(x) + 1
    return [torch.sin(x) * 3]


@pytest.mark.parametrize("function", [_views, _several_results, _unused])
def test_a_graph_in_segments_gives_what_it_gave(trace: Trace, function: Callable[[Tensor], list[Tensor]]) -> None:
    graph_module = trace(lambda anchor, x: function(x), (4, 8))
    plain = copy_graph_module(graph_module)
    names = [node.name for node in plain.graph.output_node().all_input_nodes]
    assert len(segment(graph_module)) == 1
    assert [node.name for node in graph_module.graph.output_node().all_input_nodes] == names
    inputs = [torch.empty(0), torch.randn(4, 8)]
    for ours, theirs in zip(run(graph_module, inputs, {}), plain(*inputs), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_what_is_random_or_alone_stays_as_it_is(trace: Trace) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(torch.sin(x) + 1, 0.5).exp()

    graph_module = trace(forward, (4, 8))
    before, *_ = inside = segment(graph_module)
    assert len(inside) <= 2
    assert "sin" in dump_graph(before.graph)
    assert not any("bernoulli" in dump_graph(each.graph) or "dropout" in dump_graph(each.graph) for each in inside)
    assert segment(trace(lambda anchor, x: torch.sin(x), (4, 8))) == []
    assert segment(trace(lambda anchor, x: x.t() @ x, (4, 8))) == []
    beside_products = trace(lambda anchor, x: torch.relu(x @ x.t()) @ x, (4, 8))
    assert segment(beside_products) == []  # a single op has nothing to fuse with
    assert len(segment(trace(lambda anchor, x: torch.relu(x.t() @ x) + 1, (4, 8)))) == 1


def test_blocks_are_apart_and_equal_ones_are_one_structure(trace: Trace) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        return (x.sin() + 1).sin() + 1

    graph_module = trace(forward, (4, 8))
    ops = [node.name for node in graph_module.graph.nodes if node.op == "call_function"]
    blocks = {name: f"layers.{position // 2}" for position, name in enumerate(ops)}
    assert len(segment(graph_module, blocks)) == 2
    calls = graph_module.graph.find_nodes(op="call_function", target=RUN_SEGMENT)
    assert [call.args[2] for call in calls] == [0, 0]
    assert [call.name.startswith(f"layers_{number}_segment") for number, call in enumerate(calls)] == [True, True]


def test_structure_is_what_goes_in_and_what_is_done(trace: Trace) -> None:
    def describe(function: Callable[[Tensor], Tensor], *shape: int) -> str:
        return describe_structure(trace(lambda anchor, x: function(x), shape).graph)

    assert describe(torch.sin, 4) == describe(lambda x: torch.sin(x), 4)
    others = [
        describe(torch.sin, 8),
        describe(torch.cos, 4),
        describe(lambda x: x + 1, 4),
        describe(lambda x: x + 2, 4),
    ]
    assert len({describe(torch.sin, 4), *others}) == 5


def test_the_loss_belongs_to_the_block_that_computed_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    of_layer = graph.call_function(torch.sin, (x,))
    of_layer.meta = {"nn_module_stack": {"": ("L['self'].layers.0", object)}, "seq_nr": 1}
    head = graph.call_function(torch.cos, (of_layer,))
    head.meta = {"nn_module_stack": {"": ("L['self'].head", object)}, "seq_nr": 2}
    loss = graph.call_function(operator.neg, (head,))
    loss.meta = {"seq_nr": 3}
    saved = graph.call_function(torch.detach, (of_layer,))
    saved.meta = dict(of_layer.meta)
    output = graph.output((loss, saved))
    backward = fx.Graph()
    given = backward.placeholder("given")
    given.meta = dict(of_layer.meta)
    of_loss = backward.call_function(operator.neg, (given,))
    of_loss.meta = {"seq_nr": 3}
    of_head = backward.call_function(torch.sin, (of_loss,))
    of_head.meta = {"fwd_nn_module_stack": head.meta["nn_module_stack"], "seq_nr": 2}
    summed = backward.call_function(torch.add, (of_head, of_head))
    summed.meta = {"seq_nr": 1}
    blocks = blocks_of_nodes([*graph.nodes, *backward.nodes])
    assert [blocks[node] for node in (x, of_layer, head, loss, saved, output)] == [
        *("model", "layers.0", "head", "head", "layers.0", "layers.0")
    ]
    assert [blocks[node] for node in (given, of_loss, of_head, summed)] == ["layers.0", "head", "head", "head"]


def test_results_of_what_stays_outside_stay_outside(trace: Trace) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        kept, mask = torch.native_dropout(torch.sin(x) + 1, 0.5, True)
        return (kept.exp() + 1) * mask

    graph_module = trace(forward, (4, 8))
    assert len(segment(graph_module)) == 2
    (dropout,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.native_dropout.default)
    assert {user.target for user in dropout.users} == {operator.getitem}
    calls = graph_module.graph.find_nodes(op="call_function", target=RUN_SEGMENT)
    assert all(isinstance(given.meta["val"], Tensor) for call in calls for given in call.all_input_nodes)


def test_what_counts_from_the_start_of_a_storage_stays_outside(trace: Trace) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        return (x[1:].as_strided((1, 8), (8, 1), 16).exp() + 1) * 2

    graph_module = trace(forward, (4, 8))
    (inside,) = segment(graph_module)
    assert "aten.as_strided" not in dump_graph(inside.graph)
    assert graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)


def test_parameters_that_are_apart_are_read_by_segments_of_their_own(
    trace: Trace, gather: Callable[..., Tensor]
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        for name in ("a", "b", "c"):
            x = torch.relu(x @ gather(anchor, name, 8, 8)) + 1
        return x

    def read(apart: Container[int]) -> list[int]:
        graph_module = trace(forward, (2, 8))
        segment(graph_module, apart=apart)
        calls = graph_module.graph.find_nodes(op="call_function", target=RUN_SEGMENT)
        return [sum(given.target is GATHER for given in call.all_input_nodes) for call in calls]

    assert read(()) == [3]
    assert read((2, 3)) == [1, 1, 1]
    assert read((3,)) == [2, 1]


def test_each_tile_of_a_chain_is_a_segment_of_its_own(trace: Trace) -> None:
    def forward(anchor: Tensor, x: Tensor) -> list[Tensor]:
        return [torch.relu(part + 1) * 2 for part in x.chunk(3)]

    graph_module = trace(forward, (6, 8))
    tiles = iter([0, 0, 0, 1, 1, 1, 2, 2, 2])
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.name.startswith(("add", "relu", "mul")):
            node.meta["custom"] = {TILE: next(tiles)}
    assert len(segment(graph_module)) == 3
    calls = graph_module.graph.find_nodes(op="call_function", target=RUN_SEGMENT)
    assert [call.args[2] for call in calls] == [0, 0, 0]


def _rows(x: Tensor) -> list[Tensor]:
    first = torch.relu(x).view(x.shape[0] * x.shape[1], 4) + x.shape[0]
    return [first, first.view(x.shape[0], x.shape[1], 4) * 2]


def test_symbols_of_shapes_go_in_and_sizes_are_computed_outside(trace_dynamic: Trace) -> None:
    graph_module = trace_dynamic(lambda anchor, x: _rows(x), torch.empty(2, 3, 4))
    (inside,) = segment(graph_module)
    (call,) = graph_module.graph.find_nodes(op="call_function", target=RUN_SEGMENT)
    _, sizes, _ = call.args
    *values, x = [node.meta["val"] for node in inside.graph.find_nodes(op="placeholder")]
    assert list(map(str, values)) == [str(node.meta["val"]) for node in sizes]
    first, second = sorted(str(size) for size in x.shape if str(size) != "4")
    assert {first, second} < set(map(str, values)) <= {first, second, f"{first}*{second}", f"{second}*{first}"}
    for shape in ((2, 3, 4), (5, 7, 4)):
        inputs = [torch.empty(0), torch.randn(shape)]
        for ours, theirs in zip(run(graph_module, inputs, {}), _rows(inputs[1]), strict=True):
            assert torch.equal(ours, theirs)


def test_blocks_of_changing_sizes_are_one_structure(trace_dynamic: Trace) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        return (x.sin() + 1).sin() + 1

    graph_module = trace_dynamic(forward, torch.empty(4, 8))
    ops = [node.name for node in graph_module.graph.nodes if str(node.target).startswith(("aten.sin", "aten.add"))]
    segment(graph_module, {name: f"layers.{position // 2}" for position, name in enumerate(ops)})
    calls = graph_module.graph.find_nodes(op="call_function", target=RUN_SEGMENT)
    assert [call.args[2] for call in calls] == [0, 0]


def test_what_no_input_shows_runs_op_by_op(trace_dynamic: Trace) -> None:
    """The only input has a product of two symbols as its size, like some values that forward saves for backward."""
    graph_module = trace_dynamic(lambda anchor, x: x.flatten().exp() + 1, torch.empty(3, 4))
    (flat,) = (node for node in graph_module.graph.nodes if str(node.target) == "aten.view.default")
    backward = fx.Graph()
    given = backward.placeholder("given")
    given.meta["val"] = flat.meta["val"]
    made = backward.call_function(
        torch.ops.aten.add.Tensor, (backward.call_function(torch.ops.aten.exp.default, (given,)), 1)
    )
    for node in (made.args[0], made):
        node.meta["val"] = flat.meta["val"]
    backward.output((made,))
    assert segment(fx.GraphModule({}, backward)) == []
