"""Inserts the calls of a tiling, each with its fake value, a readable name, and the metadata of the node it replaces."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from zinf_compile.passes.fx_edit import node_name
from zinf_compile.passes.transforms.tiling.calls import value_of

_VALUES = ("val", "example_value", "tensor_meta")


class Emitter:
    """Inserts calls before a node, and splits operands: each one once, however many pieces read its tiles."""

    def __init__(self, before: fx.Node) -> None:
        self._before = before
        self._splits: dict[tuple[fx.Node, tuple[int, ...], int], fx.Node] = {}
        self._tiles: dict[tuple[fx.Node, int], fx.Node] = {}

    def call(
        self, name: str, target: Callable[..., Any], *args: Any, origin: fx.Node | None = None, **kwargs: Any
    ) -> fx.Node:
        """Insert ``target(*args)`` with the metadata of ``origin``, or of the node before which it is inserted."""
        return self._insert("call_function", target, name, args, kwargs, origin or self._before)

    def call_like(self, name: str, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> fx.Node:
        """Insert a call of the same target as a node's, with other arguments."""
        return self._insert(node.op, node.target, name, tuple(args), kwargs, node)

    def tile_of(self, source: fx.Node, sizes: tuple[int, ...], dim: int, number: int) -> fx.Node:
        """Return one of the tiles of a tensor that is cut into these sizes."""
        key = (source, sizes, dim)
        if key not in self._splits:
            self._splits[key] = self.call(f"{source.name}_tiles", torch.split, source, list(sizes), dim, origin=source)
        tiles = self._splits[key]
        if (tiles, number) not in self._tiles:
            name = f"{source.name}_tile_{number}"
            self._tiles[tiles, number] = self.call(name, operator.getitem, tiles, number, origin=source)
        return self._tiles[tiles, number]

    def _insert(
        self,
        kind: str,
        target: Callable[..., Any] | str,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        origin: fx.Node,
    ) -> fx.Node:
        with self._before.graph.inserting_before(self._before):
            node = self._before.graph.create_node(kind, target, args, kwargs, name=node_name(name))
        node.meta = {key: fact for key, fact in origin.meta.items() if key not in _VALUES}
        node.meta["val"] = node.meta["example_value"] = fake_result(
            node, *fx.node.map_arg((node.args, dict(node.kwargs)), value_of), value_of(self._before)
        )
        return node


def fake_result(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    """Return what a node's function or method gives for fake arguments; they, or ``like``, have the fake mode."""
    # Not torch's own lookup: under Dynamo that finds the fake mode of the backend, but these values belong to that of
    # the capture.
    leaves = pytree.tree_leaves((args, kwargs, like))
    modes = (leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor))
    with next(modes, None) or FakeTensorMode():
        if callable(node.target):
            return node.target(*args, **kwargs)
        return getattr(args[0], node.target)(*args[1:], **kwargs)
