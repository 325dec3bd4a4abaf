"""Compute a block for one micro-batch after another, and read its weights once: the block is cut along its samples.

Emitted for a block and two micro-batches::

    x_samples      = split(x, [4, 4], 0)
    x_samples_0    = getitem(x_samples, 0)
    norm_batch_0   = layer_norm(x_samples_0, ...)           all of the block, for the first samples
    up_batch_0     = linear(norm_batch_0, up_weight)
    ...
    add_batch_1    = add(x_samples_1, down_batch_1)         and again, for the last
    add_whole      = cat([add_batch_0, add_batch_1], 0)

What enters and leaves a block stays whole. Everything in between exists for one micro-batch at a time, if backward
recomputes it or it is offloaded. In backward the gradients of a weight are added up on the device, as autograd does for a
weight that is read several times, and leave once. What does not depend on the samples is computed once, before.

Sums over samples are taken in another order, so results are equal to rounding. Random ops draw other numbers.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from zinf_compile.ir.ops import GATHER
from zinf_compile.passes.analysis.modules import block_of, is_repeated, module_path
from zinf_compile.passes.contract import JOINED, TILE, Pass, TileInputs
from zinf_compile.passes.transforms.tiling.calls import value_of
from zinf_compile.passes.transforms.tiling.emit import Emitter
from zinf_compile.passes.transforms.tiling.order import find_barrier
from zinf_compile.passes.transforms.tiling.samples import (
    BySample,
    MixedSamplesError,
    Samples,
    follow_samples,
    name_of,
)

_GATHERS = (GATHER, torch.ops.zinf.gather)
_INPUTS = ("placeholder", "get_attr")
_MOST_DIMS = 2  # the first dimensions, in which samples are looked for: batch first, or sequence first


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block that can be cut: its nodes in order, and how those that depend on samples are called for some of them."""

    name: str
    nodes: Sequence[fx.Node]
    num_samples: int
    inputs: Mapping[fx.Node, Samples]
    calls: Mapping[fx.Node, BySample]

    @property
    def results(self) -> list[fx.Node]:
        """The nodes with samples that are read after the block."""
        inside = set(self.nodes)
        return [node for node in self.calls if not inside.issuperset(node.users)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBlock:
    """A block that cannot be cut, and why."""

    name: str
    why: str
    node: fx.Node


def find_blocks(graph: fx.Graph) -> Iterator[Block | WholeBlock]:
    """Yield the repeated blocks of a torch-level graph that keep something for each sample between their ops."""
    for name, nodes in _runs(graph):
        barrier = find_barrier(nodes[0], nodes[-1].next)
        if barrier is not None:
            yield WholeBlock(name=name, why=f"{name_of(barrier)} may write in place or change a mode", node=barrier)
            continue
        try:
            block = _cut_along_any(name, nodes)
        except MixedSamplesError as error:
            yield WholeBlock(name=name, why=str(error), node=error.node)
            continue
        if block is not None:
            yield block


def _runs(graph: fx.Graph) -> Iterator[tuple[str, list[fx.Node]]]:
    """Yield the consecutive nodes of each execution of a repeated block; nodes in between that have no module included."""
    block, run, between = "", list[fx.Node](), list[fx.Node]()
    for node in graph.nodes:
        if not node.meta.get("nn_module_stack") or node.op in _INPUTS or node.target in _GATHERS:
            between.append(node)
            continue
        path = module_path(node)
        if block_of(path) != block:
            if run:
                yield block, run
            block, run = block_of(path), []
        if is_repeated(block):
            run += [*(between if run else ()), node]
        between = []
    if run:
        yield block, run


def _cut_along_any(name: str, nodes: Sequence[fx.Node]) -> Block | None:
    """Return the block cut along one of the first dimensions of its inputs; None if nothing is gained.

    Raises MixedSamplesError for a block that mixes samples along all of them.
    """
    first_error: MixedSamplesError | None = None
    inputs = _inputs(nodes)
    for samples, num_samples in _candidates(inputs):
        alike = [node for node in inputs if _size(node, samples.dim) == num_samples]
        for chosen in (alike, alike[:1]):  # others may have as many heads, say, as there are samples
            try:
                return _cut_along(name, nodes, dict.fromkeys(chosen, samples), num_samples)
            except MixedSamplesError as error:
                first_error = first_error or error
    if first_error is not None:
        raise first_error
    return None


def _inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the tensors of fixed sizes that are read from outside, except for parameters, the largest first."""
    inside = set(nodes)
    read = dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside)
    found = [node for node in read if node.target not in _GATHERS and _size(node, 0) is not None]
    return sorted(found, key=lambda node: -value_of(node).numel())


def _candidates(inputs: Sequence[fx.Node]) -> Iterable[tuple[Samples, int]]:
    """Return where samples may be, and how many there would be: along the first dimension before the second."""
    sizes = ((Samples(dim), _size(node, dim)) for dim in range(_MOST_DIMS) for node in inputs)
    return dict.fromkeys((samples, size) for samples, size in sizes if size is not None and size > 1)


def _size(node: fx.Node, dim: int) -> int | None:
    """Return the size of a dimension; None if there is none, or the tensor has sizes that change from call to call."""
    value = value_of(node)
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return value.shape[dim] if dim < value.dim() else None


def _cut_along(name: str, nodes: Sequence[fx.Node], inputs: dict[fx.Node, Samples], num_samples: int) -> Block | None:
    at, calls = dict(inputs), dict[fx.Node, BySample]()
    for node in nodes:
        if node.op in ("call_function", "call_method") and not at.keys().isdisjoint(node.all_input_nodes):
            calls[node] = follow_samples(node, at, num_samples)
            at[node] = calls[node].result
    block = Block(name=name, nodes=nodes, num_samples=num_samples, inputs=inputs, calls=calls)
    results = block.results
    if len(calls) <= len(results):
        return None
    for node in results:
        if not isinstance(value_of(node), Tensor):
            raise MixedSamplesError(node, "returns several tensors from the block")
    return block


def cut_block(block: Block, num_batches: int) -> None:
    """Replace a block by as many copies as there are micro-batches, one after another."""
    per_batch = block.num_samples // num_batches
    emitter = Emitter(block.nodes[-1].next)
    splits: dict[tuple[fx.Node, Samples], fx.Node] = {}
    pieces: dict[fx.Node, list[fx.Node]] = {node: [] for node in block.results}

    def some_of(source: fx.Node, samples: Samples, number: int, reader: fx.Node) -> fx.Node:
        if (source, samples) not in splits:
            sizes = [per_batch * samples.unit] * num_batches
            splits[source, samples] = emitter.call(
                f"{source.name}_samples", torch.split, source, sizes, samples.dim, origin=reader
            )
        split = splits[source, samples]
        return emitter.call(f"{source.name}_samples_{number}", operator.getitem, split, number, origin=reader)

    for number in range(num_batches):
        made: dict[fx.Node, fx.Node] = {}

        def operand(used: fx.Node, call: BySample, reader: fx.Node) -> fx.Node:
            if used in block.inputs and used not in made:
                made[used] = some_of(used, block.inputs[used], number, reader)  # noqa: B023  # called in this round
            if used in call.cuts:
                return some_of(used, call.cuts[used], number, reader)  # noqa: B023
            return made.get(used, used)  # noqa: B023

        for node, call in block.calls.items():
            args = node.args if call.resize is None else call.resize(per_batch)
            replaced: tuple[Any, ...] = fx.node.map_arg(
                (args, dict(node.kwargs)), lambda used: operand(used, call, node)  # noqa: B023
            )
            piece = emitter.call_like(f"{node.name}_batch_{number}", node, *replaced)
            piece.meta["custom"] = {**piece.meta.get("custom", {}), TILE: number}
            made[node] = piece
            if node in pieces:
                pieces[node].append(piece)
    for node, parts in pieces.items():
        dim = block.calls[node].result.dim
        whole = emitter.call(f"{node.name}_whole", torch.cat, list(parts), dim, origin=node)
        whole.meta["custom"] = {**whole.meta.get("custom", {}), JOINED: True}
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in block.calls)
    for node in reversed(list(block.calls)):
        node.graph.erase_node(node)


def _run(graph_module: fx.GraphModule, inputs: TileInputs) -> None:
    if inputs.micro_batches > 1:
        for block in reversed(list(find_blocks(graph_module.graph))):  # a block is known by the nodes that it reads
            if isinstance(block, Block) and block.num_samples % inputs.micro_batches == 0:
                cut_block(block, inputs.micro_batches)


CUT_BLOCKS: Pass[TileInputs] = Pass(name="cut_blocks", run=_run)
