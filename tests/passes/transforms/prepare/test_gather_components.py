"""GATHER_COMPONENTS: inputs of a torch-level graph that show components of quantised parameters become gathers."""

import torch
from expecttest import assert_expected_inline
from torch import fx

from zinf_compile.passes.contract import ComponentHandle, ComponentInputs, ParameterHandle
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.pipeline import gather_components


def _handle(name: str, param: int, *path: str) -> ComponentHandle:
    of = ParameterHandle(
        name=name, param=param, shape=(4, 4), dtype=torch.int8, device=torch.device("cpu"), trainable=False
    )
    return ComponentHandle(path=path, of=of)


def _hide_write(written: torch.Tensor) -> None:
    """Stand for a function of Dynamo, which lowers autograd's version."""


def _graph(*placeholders: str) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    return graph, [graph.placeholder(name) for name in placeholders]


def test_a_weight_and_its_alias_are_one_gather_and_setting_one_to_the_other_is_removed() -> None:
    graph, (x, weight, codes) = _graph("l_x_", "l_weight_", "l_codes_")
    product = graph.call_function(torch.mul, (x, codes))
    written = graph.call_function(torch.Tensor.set_, (weight, codes))
    graph.call_function(_hide_write, (written,))
    graph.output((product,))
    graph_module = fx.GraphModule({}, graph)
    handles = {"l_weight_": (_handle("up.weight", 1),), "l_codes_": (_handle("up.weight", 1),)}
    gather_components(graph_module, ComponentInputs(handles=handles, frozen_anchor=None))
    assert_expected_inline(
        dump_graph(graph_module.graph),
        """\
zinf_frozen_anchor = placeholder[zinf_frozen_anchor]
l_x_ = placeholder[l_x_]
l_weight_ = placeholder[l_weight_]
l_codes_ = placeholder[l_codes_]
up_weight = zinf.gather(zinf_frozen_anchor, 1, [4, 4], int8, cpu)
mul = mul(l_x_, up_weight)
return (mul)
""",
    )


def test_a_write_of_other_memory_stays() -> None:
    """The session refuses it: the write would be lost."""
    graph, (weight, other) = _graph("l_weight_", "l_other_")
    graph.call_function(torch.Tensor.set_, (weight, other))
    graph.output((other,))
    graph_module = fx.GraphModule({}, graph)
    handles = {"l_weight_": (_handle("up.weight", 1),)}
    gather_components(graph_module, ComponentInputs(handles=handles, frozen_anchor=None))
    (written,) = graph_module.graph.find_nodes(op="call_function", target=torch.Tensor.set_)
    assert [argument.name for argument in written.args] == ["up_weight", "l_other_"]


def test_a_wrapper_is_rebuilt_around_what_is_gathered_and_the_anchor_is_used_again() -> None:
    graph, (x, _, weight) = _graph("l_x_", "anchor", "l_weight_")
    graph.output((graph.call_function(torch.nn.functional.linear, (x, weight)),))
    graph_module = fx.GraphModule({}, graph)
    handles = {"l_weight_": (_handle("up.weight.codes", 1, "codes"), _handle("up.weight.scale", 2, "scale"))}
    gather_components(graph_module, ComponentInputs(handles=handles, frozen_anchor="anchor"))
    assert_expected_inline(
        dump_graph(graph_module.graph),
        """\
l_x_ = placeholder[l_x_]
anchor = placeholder[anchor]
l_weight_ = placeholder[l_weight_]
up_weight_codes = zinf.gather(anchor, 1, [4, 4], int8, cpu)
up_weight_scale = zinf.gather(anchor, 2, [4, 4], int8, cpu)
rebuild_wrapper = rebuild_wrapper(l_weight_, [(codes), (scale)], up_weight_codes, up_weight_scale)
linear = linear(l_x_, rebuild_wrapper)
return (linear)
""",
    )
