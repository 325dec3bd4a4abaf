"""INSERT_GATHERS: plain parameter placeholders of a torch-level graph become gathers."""

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from zinf_compile.ir.errors import VerifyError
from zinf_compile.passes.contract import ParameterHandle, PrepareInputs
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.pipeline import prepare_graph
from zinf_compile.passes.properties import PARAMETERS_GATHERED


def _make_graph(*placeholders: str) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in placeholders]
    for node in nodes:
        node.meta["example_value"] = torch.empty(4, 4)
    graph.output((graph.call_function(torch.nn.functional.linear, tuple(nodes)),))
    return fx.GraphModule({}, graph)


def _handle(name: str, param: int, *, trainable: bool = True) -> ParameterHandle:
    return ParameterHandle(
        name=name, param=param, shape=(4, 4), dtype=torch.float32, device=torch.device("cpu"), trainable=trainable
    )


def test_parameters_become_gathers_and_their_placeholders_stay_unread() -> None:
    graph_module = _make_graph("l_x_", "l_weight_", "l_bias_")
    handles = {"l_weight_": _handle("up.weight", 1), "l_bias_": _handle("up.bias", 2, trainable=False)}
    prepare_graph(graph_module, PrepareInputs(handles=handles))
    assert_expected_inline(
        dump_graph(graph_module.graph),
        """\
zinf_anchor = placeholder[zinf_anchor]
zinf_frozen_anchor = placeholder[zinf_frozen_anchor]
l_x_ = placeholder[l_x_]
l_weight_ = placeholder[l_weight_]
l_bias_ = placeholder[l_bias_]
up_bias = zinf.gather(zinf_frozen_anchor, 2, [4, 4], float32, cpu)
up_weight = zinf.gather(zinf_anchor, 1, [4, 4], float32, cpu)
linear = linear(l_x_, up_weight, up_bias)
return (linear)
""",
    )


def test_a_gather_knows_its_value() -> None:
    graph_module = _make_graph("l_x_", "l_weight_")
    prepare_graph(graph_module, PrepareInputs(handles={"l_weight_": _handle("up.weight", 1)}))
    gathered = next(node for node in graph_module.graph.nodes if node.name == "up_weight")
    assert tuple(gathered.meta["val"].shape) == (4, 4)
    assert "is_parameter" not in gathered.meta


@pytest.mark.parametrize("placeholders", [(), ("l_x_", "l_y_")])
def test_a_graph_without_parameters_stays(placeholders: tuple[str, ...]) -> None:
    graph_module = _make_graph(*placeholders)
    before = dump_graph(graph_module.graph)
    prepare_graph(graph_module, PrepareInputs(handles={}))
    assert dump_graph(graph_module.graph) == before


def test_a_parameter_that_is_still_read_is_named() -> None:
    graph_module = _make_graph("l_x_", "l_weight_")
    weight = graph_module.graph.find_nodes(op="placeholder")[1]
    weight.meta["is_parameter"] = True
    with pytest.raises(VerifyError, match="parameter placeholder 'l_weight_' is still read by 'linear'"):
        PARAMETERS_GATHERED.check(graph_module)


def _train(model: torch.nn.Module, compiled: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    loss = compiled(torch.ones(2, 4)).sum()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def test_a_compiled_model_that_was_never_optimized_trains_as_under_aot_eager() -> None:
    """Dynamo still reads the graph that it passed to the backend, so preparing must not modify it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    expected = _train(model, torch.compile(model, backend="aot_eager"))
    model.zero_grad()
    torch._dynamo.reset()
    options = {"device_memory": "1MiB", "host_memory": "16MiB"}
    measured = _train(model, torch.compile(model, backend="zinf", options=options))
    torch._dynamo.reset()
    assert len(measured) == 3
    assert all(torch.equal(a, b) for a, b in zip(expected, measured, strict=True))
