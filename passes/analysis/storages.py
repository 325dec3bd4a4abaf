"""Finds which nodes share storage: views, in-place results and unpacked tuples point to the node that allocated it.

So does what waits for a collective, to the node that started it.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.ir.ops import GATHER
from zinf_compile.ir.sizes import Size
from zinf_compile.passes.analysis.collectives import awaited
from zinf_compile.passes.fx_edit import view_source


@dataclass(frozen=True, slots=True)
class StorageRoot:
    """The node that allocated a storage, and the indices of the storage in the tuples that the node returns."""

    node: fx.Node
    path: tuple[int, ...] = ()

    @property
    def is_gathered(self) -> bool:
        """Return whether the bytes are a gathered parameter's, which the plan counts in the arena."""
        return self.node.target is GATHER

    @property
    def name(self) -> str:
        """Return the name of the value in facts and plans: ``mm_1``, or ``max_1.0`` for the first of several results."""
        return ".".join([self.node.name, *map(str, self.path)])

    @property
    def value(self) -> object:
        """Return the fake value, a tensor unless the node returns something else."""
        value = self.node.meta.get("val")
        for index in self.path:
            assert isinstance(value, list | tuple)
            value = value[index]
        return value

    @property
    def nbytes(self) -> Size:
        """Return the bytes of the storage, in torch's symbols where its shape has some; 0 if it is not a tensor."""
        return tensor_nbytes(self.value) if isinstance(self.value, torch.Tensor) else 0


def raw_size(size: int | torch.SymInt) -> Size:
    """Return a size as an int, or as torch's expression in its own symbols; UnsupportedError if it depends on values."""
    if isinstance(size, int):
        return size
    expression: Any = size.node.expr
    if expression.is_Integer:
        return int(expression)
    if size.node.hint is None:
        raise UnsupportedError(
            f"size {size} depends on values, not on shapes, so nothing can be planned for it; take the op that makes it out "
            "of the captured graph, for example with torch.compiler.disable"
        )
    known: Size = expression
    return known


def tensor_nbytes(tensor: torch.Tensor) -> Size:
    """Return the bytes of a dense tensor of this shape and dtype, in torch's symbols where the shape has some."""
    num_elements: Any = 1
    for size in tensor.shape:
        num_elements *= raw_size(size)
    nbytes: Size = num_elements * tensor.dtype.itemsize
    return nbytes


def find_roots(graph: fx.Graph) -> dict[fx.Node, StorageRoot]:
    """Return the root of each node. The root of a node that returns several tensors is the tuple, which has no bytes."""
    roots: dict[fx.Node, StorageRoot] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        source = awaited(node) or view_source(node)
        if source is not None:
            roots[node] = roots[source]
        elif node.target is operator.getitem:
            producer, index = node.args
            if view_source(producer) is not None:  # a list of views of one tensor, as split returns
                roots[node] = roots[producer]
            else:
                roots[node] = StorageRoot(roots[producer].node, (*roots[producer].path, index))
        else:
            roots[node] = StorageRoot(node)
    return roots
