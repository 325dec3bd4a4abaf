"""Prepares a segment for Inductor, so that compiled results have the strides that the segment was captured with.

Inductor decomposes ops again, and some decompositions return other strides than the op: ``cat`` of a tensor and an
empty one, as for the first key of a cache, becomes ``clone``, which keeps the strides of its input. Views of such a
result would fail inside the segment, and readers outside were captured with the strides of the op.
"""

import uuid
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


class KeepStrides(CustomGraphPass):
    """Makes the results of one graph keep the strides that they were captured with."""

    def __init__(self, segment: fx.GraphModule, *, is_only_here: bool = False) -> None:
        """``is_only_here``: code from Inductor's cache on disk is not used."""
        self._values = [node.meta["val"] for node in results_of(segment.graph)]
        self._strides = [tuple(value.stride()) for value in self._values]
        self._salt = uuid.uuid4().hex if is_only_here else ""

    def __call__(self, graph: fx.Graph) -> None:
        """Write the captured strides where Inductor has recorded those of its own decompositions."""
        output = graph.output_node()
        if len(output.meta.get("original_output_strides", ())) == len(self._strides):
            output.meta["original_output_strides"] = list(self._strides)

    def uuid(self) -> Any:
        """Return a key that distinguishes compiled code by the choice of strides, in Inductor's cache."""
        return "zinf_compile.KeepStrides", str(self._strides), self._salt


def for_inductor(segment: fx.GraphModule) -> fx.GraphModule:
    """Return a segment whose views may copy, for sources whose strides differ from the captured ones."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(segment.graph, {}))
    for node in graph.nodes:
        if node.target in _VIEWS:
            node.target = _aten.reshape.default
    return fx.GraphModule(segment, graph)


def example_of(value: Tensor | torch.SymInt) -> Tensor | torch.SymInt:
    """Return a tensor with the layout of a fake one; a size is returned as it is."""
    if isinstance(value, torch.SymInt):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def results_of(graph: fx.Graph) -> Sequence[fx.Node]:
    """Return the result nodes of a segment."""
    (results,) = graph.output_node().args
    assert isinstance(results, tuple | list)
    return [node for node in results if isinstance(node, fx.Node)]
