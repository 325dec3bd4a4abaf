"""The pass runner rejects a wrong order, and names the pass, the property and the node when a property breaks."""

from collections.abc import Callable

import pytest
import torch
from torch import fx

from zinf_compile.ir.errors import VerifyError
from zinf_compile.passes.contract import NodeFacts, Pass, Property, check_order, node_facts, run_pipeline
from zinf_compile.passes.pipeline import FORM, JOINT, LOWER, PREPARE
from zinf_compile.passes.properties import VALUES_KNOWN


def _check_no_cosine(graph_module: fx.GraphModule) -> None:
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.cos):
        raise VerifyError(f"'{node.name}' is a cosine")


NO_COSINE = Property(name="no_cosine", check=_check_no_cosine)


def _make_graph() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.sin, (graph.placeholder("x"),)))
    return fx.GraphModule({}, graph)


def _append_cosine(graph_module: fx.GraphModule, inputs: None) -> None:
    output = graph_module.graph.output_node()
    (value,) = output.args
    assert isinstance(value, fx.Node)
    with graph_module.graph.inserting_before(output):
        output.update_arg(0, graph_module.graph.call_function(torch.cos, (value,)))


def _do_nothing(graph_module: fx.GraphModule, inputs: None) -> None:
    pass


CLEAN: Pass[None] = Pass(name="clean", run=_do_nothing, establishes=frozenset({NO_COSINE}))
NEEDY: Pass[None] = Pass(name="needy", run=_do_nothing, requires=frozenset({NO_COSINE}))
CARELESS: Pass[None] = Pass(name="careless", run=_append_cosine)
HONEST: Pass[None] = Pass(name="honest", run=_append_cosine, breaks=frozenset({NO_COSINE}))


def test_a_missing_property_is_refused() -> None:
    with pytest.raises(VerifyError, match="pass 'needy' requires no_cosine, which no pass before it establishes"):
        check_order([NEEDY, CLEAN])


def test_a_broken_property_is_missing_again() -> None:
    with pytest.raises(VerifyError, match="pass 'needy' requires no_cosine"):
        check_order([CLEAN, HONEST, NEEDY])


def test_a_given_property_is_held() -> None:
    check_order([NEEDY], given=frozenset({NO_COSINE}))


def test_the_order_is_refused_before_anything_runs() -> None:
    graph_module = _make_graph()
    with pytest.raises(VerifyError, match="needy"):
        run_pipeline(graph_module, [HONEST, NEEDY], None)
    assert not graph_module.graph.find_nodes(op="call_function", target=torch.cos)


def test_a_pass_that_breaks_a_property_is_named_with_the_node() -> None:
    expected = "after pass 'careless', property 'no_cosine' does not hold: 'cos' is a cosine"
    with pytest.raises(VerifyError, match=expected):
        run_pipeline(_make_graph(), [CLEAN, CARELESS], None)


def test_a_property_that_a_pass_says_it_breaks_is_not_checked() -> None:
    graph_module = _make_graph()
    run_pipeline(graph_module, [CLEAN, HONEST], None)
    x = torch.rand(3)
    assert torch.equal(graph_module(x), torch.cos(torch.sin(x)))  # recompiled


def test_a_call_without_a_fake_value_is_named() -> None:
    with pytest.raises(VerifyError, match=r"node 'sin' \(.*\) has no meta\['val'\]"):
        VALUES_KNOWN.check(_make_graph())


def test_the_real_pipelines_are_in_order() -> None:
    check_order(PREPARE)
    check_order(JOINT)
    check_order(FORM)
    check_order(LOWER, given=frozenset({VALUES_KNOWN}))


def test_equal_gradients_are_never_merged_before_they_are_summed() -> None:
    """Two equal contributions would become one: a gradient of half its size."""
    with pytest.raises(VerifyError, match="'merge_subexpressions' requires one_gradient_each"):
        check_order(tuple(reversed(JOINT)))


def test_names_of_passes_are_unique() -> None:
    names = [item.name for pipeline in (PREPARE, JOINT, FORM, LOWER) for item in pipeline]
    assert len(set(names)) == len(names)


def test_a_node_we_know_nothing_of_has_no_facts(trace: Callable[..., fx.GraphModule]) -> None:
    graph_module = trace(lambda anchor, x: x + 1, (2,))
    assert node_facts(next(iter(graph_module.graph.nodes))) == NodeFacts()
