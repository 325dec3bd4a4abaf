"""What the tests of tiling share: calls made into torch-level graphs, and what they give with their gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A graph whose result is one tensor, and the tensors it is called with."""

    graph_module: fx.GraphModule
    inputs: tuple[Tensor, ...]

    @property
    def result(self) -> fx.Node:
        """The node that has the result."""
        node = self.graph_module.graph.output_node().args[0]
        assert isinstance(node, fx.Node)
        return node

    def run(self) -> dict[str, Tensor]:
        """Return the output, and the gradients of the inputs that require them by their names."""
        self.graph_module.graph.lint()
        self.graph_module.recompile()
        leaves = [value.detach().requires_grad_(value.requires_grad) for value in self.inputs]
        output = self.graph_module(*leaves)
        names = [node.name for node in self.graph_module.graph.find_nodes(op="placeholder")]
        asked = {name: leaf for name, leaf in zip(names, leaves, strict=True) if leaf.requires_grad}
        if not asked or not output.requires_grad:
            return {"output": output.detach()}
        given = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(output, list(asked.values()), given, allow_unused=True)
        made = {name: gradient for name, gradient in zip(asked, gradients, strict=True) if gradient is not None}
        return {"output": output.detach()} | made


def _capture_call(target: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    graph, fake_mode = fx.Graph(), FakeTensorMode()
    inputs: list[Tensor] = []

    def as_input(argument: object) -> object:
        if not isinstance(argument, Tensor):
            return argument
        node = graph.placeholder(f"input_{len(inputs)}")
        node.meta["example_value"] = fake_mode.from_tensor(argument)
        inputs.append(argument)
        return node

    arguments, options = pytree.tree_map(as_input, (tuple(args), dict(kwargs)))
    node = graph.create_node("call_function" if callable(target) else "call_method", target, arguments, options)
    fake_arguments, fake_options = fx.node.map_arg((arguments, options), lambda node: node.meta["example_value"])
    with fake_mode:
        call = target if callable(target) else getattr(torch.Tensor, target)
        node.meta["example_value"] = call(*fake_arguments, **fake_options)
    graph.output(node)
    return Captured(graph_module=fx.GraphModule({}, graph), inputs=tuple(inputs))


@pytest.fixture(scope="session")
def capture_call() -> Callable[..., Captured]:
    """Return ``capture_call(target, args, kwargs)``: a graph of one call, its tensors being the inputs."""
    return _capture_call


@pytest.fixture(scope="session")
def capture() -> Callable[..., Captured]:
    """Return ``capture(function, *inputs)``: the torch-level graph that Dynamo makes of a function of tensors."""

    def run(function: Callable[..., Tensor], *inputs: Tensor) -> Captured:
        found: list[Captured] = []

        def backend(graph_module: fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
            found.append(Captured(graph_module=graph_module, inputs=tuple(examples)))
            return graph_module.forward

        torch._dynamo.reset()
        torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
        (captured,) = found
        output = captured.graph_module.graph.output_node()
        output.args = (output.args[0][0],)  # Dynamo returns a tuple
        return captured

    return run
