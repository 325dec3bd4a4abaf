"""The structure of a segment: ops, arguments, and the shapes, strides, dtypes and devices of its inputs."""

from typing import Any

import torch
from torch import fx


def describe_structure(graph: fx.Graph) -> str:
    """Return a text that is equal for segments with the same ops and the same layouts of inputs; names do not matter."""
    names: dict[fx.Node, str] = {}
    lines = []
    for number, node in enumerate(graph.nodes):
        names[node] = f"%{number}"
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), names.__getitem__)
        lines.append(f"{names[node]} = {_describe_call(node)} {args} {kwargs}")
    return "\n".join(lines)


def _describe_call(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"input {_describe_input(node.meta['val'])}"
    return str(node.target)


def _describe_input(value: Any) -> str:
    if isinstance(value, torch.SymInt):
        return str(value)
    assert isinstance(value, torch.Tensor)
    layout = tuple(value.shape), value.stride()  # compiled code does not depend on the storage offset
    return f"{value.dtype} {value.device} {layout}"
