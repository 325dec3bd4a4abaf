"""Small edits of an FX graph: insert a node with its fake value and a readable name; find views; dump as text."""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

from zinf_compile.ir.ops import ALL_OPS

_NOT_IN_NAMES = re.compile(r"\W+")
_UNSAFE_VIEWS = (  # their schemas declare new storage, but they always return views
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
)


def insert_call(
    graph: fx.Graph, before: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], *, name: str
) -> fx.Node:
    """Insert ``target(*args)`` before a node and return it, with ``meta["val"]`` and a name made from ``name``."""
    with graph.inserting_before(before):
        node = graph.create_node("call_function", target, args, name=node_name(name))
    set_value(node, _fake_mode_of(graph))
    return node


def set_value(node: fx.Node, fake_mode: FakeTensorMode) -> None:
    """Set ``meta["val"]`` of a call by running it on the fake values of its arguments."""
    assert callable(node.target)
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda arg: arg.meta["val"])
    with fake_mode:
        node.meta["val"] = node.target(*args, **kwargs)


def set_missing_values(graph: fx.Graph) -> None:
    """Set ``meta["val"]`` of every call that has none: torch's partitioner wraps random ops and leaves theirs out."""
    fake_mode = _fake_mode_of(graph)
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            set_value(node, fake_mode)


def set_values_before(node: fx.Node) -> None:
    """Set ``meta["val"]`` of the calls just before a node that have none."""
    made, before = [], node.prev
    while "val" not in before.meta:
        made.append(before)
        before = before.prev
    for call in reversed(made):
        set_value(call, _fake_mode_of(node.graph))


def set_values_again(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Set ``meta["val"]`` of some calls, given in order, after their arguments have changed."""
    fake_mode = _fake_mode_of(graph)
    for node in nodes:
        node.meta.pop("tensor_meta", None)  # left by tracing, and now outdated
        set_value(node, fake_mode)


def copy_graph_module(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph module with its own copy of the graph, whose nodes have their own ``meta``.

    ``generate_code`` generates its Python code, which is slow; most copies are only analysed and never run.
    """
    copied = fx.Graph()
    results = copied.graph_copy(graph_module.graph, val_map={})
    copied.output(results).meta = dict(graph_module.graph.output_node().meta)
    return _LazyGraphModule(graph_module, copied)


def generate_code(graph_module: fx.GraphModule) -> None:
    """Generate the Python code of a graph module now: at its first run, this would use memory of the device budget."""
    _LazyGraphModule.force_recompile(graph_module)


def node_name(name: str) -> str:
    """Return ``name`` as an identifier: ``layers.3.up.weight`` gives ``layers_3_up_weight``."""
    cleaned = _NOT_IN_NAMES.sub("_", name).strip("_")
    return cleaned if cleaned and not cleaned[0].isdigit() else f"p_{cleaned}"


def _fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """Return the fake mode a graph was traced under, or a fresh one for a graph without tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (mode := detect_fake_mode([value])) is not None:
            return mode
    return FakeTensorMode()


def view_source(node: fx.Node) -> fx.Node | None:
    """Return the argument whose storage a node's output shares, by the op's schema; None if it makes new storage."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target in ALL_OPS:
        return None
    if target in _UNSAFE_VIEWS:
        return _as_node(node.args[0])
    schema = target._schema
    if not schema.returns or schema.returns[0].alias_info is None:
        return None
    aliased = schema.returns[0].alias_info.before_set
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        # "(a -> *)" stands for a list of views, which has no alias set of its own: split, unbind
        if alias is not None and (alias.before_set & aliased or "*" in alias.after_set):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return _as_node(given)
    return None


_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def describe_place(node: fx.Node) -> str:
    """Return the line of the user's code for a node, as `` at file.py:12``; an empty string if unknown."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    of_user = [line for line in lines if not line.startswith(f'File "{_PACKAGE}')]  # our accessors call modules
    file, number, *_ = (of_user or lines)[-1].removeprefix("File ").split(", ")
    return f" at {file.strip(chr(34))}:{number.removeprefix('line ')}"


def _as_node(argument: object) -> fx.Node | None:
    return argument if isinstance(argument, fx.Node) else None


def dump_graph(graph: fx.Graph) -> str:
    """Return a graph as text, one line per node, ``name = target(args)``, the format of the docstrings of passes."""
    return "".join(f"{_dump_node(node)}\n" for node in graph.nodes)


def _dump_node(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_dump_argument(node.args[0])}"
    if node.op in ("placeholder", "get_attr"):
        return f"{node.name} = {node.op}[{node.target}]"
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if isinstance(target, torch._ops.OpOverload):
        name = str(target).removesuffix(".default")
    arguments = [_dump_argument(argument) for argument in node.args]
    arguments += [f"{keyword}={_dump_argument(argument)}" for keyword, argument in node.kwargs.items()]
    return f"{node.name} = {name}({', '.join(arguments)})"


def _dump_argument(argument: object) -> str:
    if isinstance(argument, list | tuple):
        items = ", ".join(map(_dump_argument, argument))
        return f"[{items}]" if isinstance(argument, list) else f"({items})"
    return str(argument).removeprefix("torch.")
