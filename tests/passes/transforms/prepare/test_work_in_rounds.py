"""WORK_IN_ROUNDS: a rank computes its stages for the batches of all ranks."""

import operator
import random
from collections import defaultdict, deque
from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from tests.support.examples import examples
from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.ir.ops import GATHER, RECEIVE, SEND
from zinf_compile.passes.contract import RoundInputs
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.pipeline import work_in_rounds

_CPU = torch.device("cpu")


class Builder:
    """Builds a torch-level graph of which all values are 4 x 4."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.anchor = self._with_value(self.graph.placeholder("anchor"), torch.empty(0, requires_grad=True))
        self.x = self._with_value(self.graph.placeholder("x"), torch.empty(4, 4))

    def _with_value(self, node: fx.Node, value: object) -> fx.Node:
        node.meta["example_value"] = value
        return node

    def layer(self, number: int, x: fx.Node) -> fx.Node:
        """Return x times a parameter."""
        weight = self.graph.call_function(GATHER, (self.anchor, number, [4, 4], torch.float32, _CPU))
        self._with_value(weight, torch.empty(4, 4, requires_grad=True))
        return self._with_value(self.graph.call_function(torch.mm, (x, weight)), torch.empty(4, 4, requires_grad=True))

    def call(self, function: object, *args: object, trained: bool = True) -> fx.Node:
        """Return a value of a function without a parameter."""
        node = self.graph.call_function(function, args)  # type: ignore[arg-type]  # the tests give functions
        return self._with_value(node, torch.empty(4, 4, requires_grad=trained))

    def on_rank(self, rank: int, num_ranks: int, *results: fx.Node) -> fx.GraphModule:
        """Return the graph of a rank; parameter ``n`` is on rank ``n % num_ranks``."""
        copied = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        copied.graph_copy(self.graph, values)
        copied.output(tuple(values[result] for result in results))
        module = fx.GraphModule({}, copied)
        numbers = {node.args[1] for node in copied.nodes if node.target is GATHER}
        owners = {number: number % num_ranks for number in numbers if isinstance(number, int)}
        given = RoundInputs(
            owners=owners,
            shared=frozenset({"anchor"}),
            rank=rank,
            num_ranks=num_ranks,
            store_id=9,
            own=frozenset(),
            has_grad=True,
        )
        work_in_rounds(module, given)
        return module


def test_a_rank_computes_its_stages_for_all_batches_and_returns_its_own_result() -> None:
    build = Builder()
    result = build.layer(1, build.layer(0, build.x))
    assert_expected_inline(
        dump_graph(build.on_rank(1, 2, result).graph),
        """\
zinf_token = placeholder[zinf_token]
anchor = placeholder[anchor]
x_0 = placeholder[x_0]
x_1 = placeholder[x_1]
mm_1_received = zinf.receive(zinf_token, 9, 1, 0, True, [4, 4], float32, cpu)
mm_1 = getitem(mm_1_received, 0)
mm_1_token = getitem(mm_1_received, 1)
gather_default_1 = zinf.gather(anchor, 1, [4, 4], float32, cpu)
mm_2 = mm(mm_1, gather_default_1)
mm_0_received = zinf.receive(mm_1_token, 9, 0, 0, True, [4, 4], float32, cpu)
mm_0 = getitem(mm_0_received, 0)
mm_0_token = getitem(mm_0_received, 1)
mm_3 = mm(mm_0, gather_default_1)
mm_1_0_to_0 = zinf.send(mm_3, mm_0_token, 9, 2, 0, True)
return (mm_2, mm_1_0_to_0)
""",
    )


def test_what_follows_from_inputs_is_computed_by_each_rank_that_reads_it() -> None:
    build = Builder()
    mask = build.call(torch.sin, build.x, trained=False)
    result = build.layer(1, build.call(torch.add, build.layer(0, build.x), mask))
    other = build.on_rank(1, 2, build.call(torch.mul, result, mask))
    assert sum(node.target is torch.sin for node in other.graph.nodes) == 2  # one of each batch, on rank 1 too
    assert sum(node.target is RECEIVE for node in other.graph.nodes) == 2


@pytest.mark.parametrize("function", [torch.relu_, torch.add])
def test_writing_in_place_to_what_an_earlier_stage_has_computed_is_refused(function: object) -> None:
    build = Builder()
    first = build.layer(0, build.x)
    second = build.layer(1, build.x)
    result = build.call(function, first, *([second] if function is torch.add else []))
    if function is torch.add:
        build.on_rank(0, 2, result)
        return
    with pytest.raises(UnsupportedError, match="writes in place to what an earlier stage has computed"):
        build.on_rank(0, 2, result)


def _messages(module: fx.GraphModule) -> Iterator[tuple[bool, int, int]]:
    """Yield whether a rank sends or receives, the message and the other rank, in the order of its graph."""
    for node in module.graph.nodes:
        if node.target is SEND:
            yield True, node.args[3], node.args[4]
        elif node.target is RECEIVE:
            yield False, node.args[2], node.args[3]


@examples(60)
@given(seed=st.integers(0, 10**6))
def test_every_message_arrives_in_the_order_in_which_it_is_sent_and_nobody_waits_for_ever(seed: int) -> None:
    generator = random.Random(seed)
    num_ranks, build = generator.randint(2, 5), Builder()
    values = [build.x]
    for number in range(generator.randint(num_ranks, 3 * num_ranks)):
        again = generator.random() < 0.2  # reads a parameter that was read before
        parameter = generator.randint(0, number) if again else number
        value = build.layer(parameter, generator.choice(values[-2:]))
        if generator.random() < 0.5:
            value = build.call(torch.add, value, generator.choice(values))
        values.append(value)
    results = [values[-1], *([generator.choice(values[1:])] if generator.random() < 0.5 else [])]
    graphs = [build.on_rank(rank, num_ranks, *results) for rank in range(num_ranks)]
    left = [deque(_messages(graph)) for graph in graphs]
    sent: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    num_sent = 0
    while any(left):
        before = sum(map(len, left))
        for rank, messages in enumerate(left):
            while messages:
                sends, message, other = messages[0]
                if sends:
                    sent[rank, other].append(message)
                    num_sent += 1
                elif not sent[other, rank]:
                    break
                else:
                    assert sent[other, rank].popleft() == message
                messages.popleft()
        assert sum(map(len, left)) < before, "every rank waits"
    assert not any(sent.values())
    assert num_sent > 0
    # Each layer is computed once for each batch, by the rank that has its parameter.
    total = sum(node.target is torch.mm for graph in graphs for node in graph.graph.nodes)
    assert total == num_ranks * sum(node.target is torch.mm for node in build.graph.nodes)
    assert all(node.target is not operator.getitem or node.users for graph in graphs for node in graph.graph.nodes)
