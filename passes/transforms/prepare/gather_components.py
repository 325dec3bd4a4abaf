"""Gather the components of quantised parameters, which come as inputs of a torch-level graph.

Emitted for a tensor of a quantised weight, and for a weight that wraps other tensors::

    absmax   = zinf.gather(frozen_anchor, 7, [4096], uint8, device)           instead of placeholder[l_..._absmax]
    codes    = zinf.gather(frozen_anchor, 8, [64, 64], int8, device)
    weight   = rebuild_wrapper(l_..._weight, [('qdata',)], codes)             the same wrapper around the gathered tensor

The placeholders stay, so that the graph is called as before. bitsandbytes lets a weight show the memory that it shows
already (``weight.data = state.CB``): that does nothing, and is removed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zinf_compile.ir.ops import GATHER
from zinf_compile.passes.contract import ComponentHandle, ComponentInputs, Pass
from zinf_compile.passes.fx_edit import node_name

_ANCHOR = "zinf_frozen_anchor"


def rebuild_wrapper(wrapper: Tensor, paths: Sequence[tuple[str, ...]], *tensors: Tensor) -> Tensor:
    """Return a wrapper like this one, in which the tensors at some paths of attributes are others."""
    wrapped: Any = wrapper  # a traceable wrapper subclass, which mypy takes for impossible
    names, context = wrapped.__tensor_flatten__()
    inner: dict[str, Any] = {name: getattr(wrapper, name) for name in names}
    for name in names:
        below = [(path[1:], tensor) for path, tensor in zip(paths, tensors, strict=True) if path[0] == name]
        if len(below) == 1 and not below[0][0]:
            inner[name] = below[0][1]
        elif below:
            inner[name] = rebuild_wrapper(inner[name], [path for path, _ in below], *(tensor for _, tensor in below))
    rebuilt: Tensor = type(wrapped).__tensor_unflatten__(inner, context, wrapper.shape, wrapper.stride())
    return rebuilt


def _run(graph_module: fx.GraphModule, inputs: ComponentInputs) -> None:
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    by_name = {node.name: node for node in placeholders}
    _remove_vain_sets(graph, inputs)
    if inputs.frozen_anchor is not None:
        anchor = by_name[inputs.frozen_anchor]
    else:
        with graph.inserting_before(placeholders[0]):
            anchor = graph.placeholder(_ANCHOR)
        anchor._dynamo_source = None  # AOTAutograd reads it of every input of a Dynamo graph
    gathered: dict[int, fx.Node] = {}
    last = placeholders[-1]
    for name, handles in inputs.handles.items():
        placeholder = by_name[name]
        readers = [user for user in placeholder.users if user.op != "output"]
        if not readers:
            continue
        parts = []
        for handle in handles:
            if handle.of.param not in gathered:
                with graph.inserting_after(last):
                    last = gathered[handle.of.param] = _gather(graph, anchor, placeholder, handle)
            parts.append(gathered[handle.of.param])
        value = parts[0]
        if handles[0].path:
            paths = [handle.path for handle in handles]
            with graph.inserting_after(last):
                value = graph.call_function(rebuild_wrapper, (placeholder, paths, *parts))
            last = value
            value.meta = dict(placeholder.meta)
        for reader in readers:
            if reader is not value:
                reader.replace_input_with(placeholder, value)


def _gather(graph: fx.Graph, anchor: fx.Node, placeholder: fx.Node, handle: ComponentHandle) -> fx.Node:
    of = handle.of
    arguments = (anchor, of.param, list(of.shape), of.dtype, of.device)
    node = graph.create_node("call_function", GATHER, arguments, name=node_name(of.name))
    value = placeholder.meta.get("example_value")
    for name in handle.path:
        value = getattr(value, name, None)
    node.meta = {"example_value": value, "val": value}
    return node


def _remove_vain_sets(graph: fx.Graph, inputs: ComponentInputs) -> None:
    """Remove ``a.set_(b)`` of two inputs that show the same component."""
    for node in graph.find_nodes(op="call_function", target=torch.Tensor.set_):
        shown = [inputs.handles.get(getattr(argument, "name", ""), ()) for argument in node.args]
        if len(shown) == 2 and shown[0] and shown[0] == shown[1]:
            for user in [user for user in node.users if not user.users]:  # which hides the write from autograd
                graph.erase_node(user)
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


GATHER_COMPONENTS: Pass[ComponentInputs] = Pass(name="gather_components", run=_run)
