"""Small edits of an FX graph: insert a node with its fake value and a readable name; find views."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from zinf_compile.ops import ALL_OPS

_NOT_IN_NAMES = re.compile(r"\W+")


def insert_call(
    graph: fx.Graph, before: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], *, name: str
) -> fx.Node:
    """Insert ``target(*args)`` before a node and return it, with ``meta["val"]`` and a name made from ``name``."""
    with graph.inserting_before(before):
        node = graph.create_node("call_function", target, args, name=node_name(name))
    values = fx.node.map_arg(args, lambda arg: arg.meta["val"])
    fake_mode = detect_fake_mode([value for value in values if isinstance(value, torch.Tensor)])
    if fake_mode is None:
        fake_mode = _fake_mode_of(graph)
    with fake_mode:
        node.meta["val"] = target(*values)
    return node


def node_name(name: str) -> str:
    """Return ``name`` as an identifier: ``layers.3.up.weight`` gives ``layers_3_up_weight``."""
    cleaned = _NOT_IN_NAMES.sub("_", name).strip("_")
    return cleaned if cleaned and not cleaned[0].isdigit() else f"p_{cleaned}"


def _fake_mode_of(graph: fx.Graph) -> Any:
    """Return the fake mode a graph was traced under, or a fresh one for a graph without tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (mode := detect_fake_mode([value])) is not None:
            return mode
    return torch._subclasses.FakeTensorMode()


def view_source(node: fx.Node) -> fx.Node | None:
    """Return the argument whose storage a node's output shares, by the op's schema; None if it makes new storage."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target in ALL_OPS:
        return None
    if target is torch.ops.aten._unsafe_view.default:  # says it makes new storage, and never does
        return _as_node(node.args[0])
    schema = target._schema
    if not schema.returns or schema.returns[0].alias_info is None:
        return None
    aliased = schema.returns[0].alias_info.before_set
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & aliased:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return _as_node(given)
    return None


def _as_node(argument: object) -> fx.Node | None:
    return argument if isinstance(argument, fx.Node) else None
