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
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zinf_compile.ir.ops import GATHER
from zinf_compile.passes.analysis.modules import block_call
from zinf_compile.passes.contract import JOINED, TILE, Pass, TileInputs
from zinf_compile.passes.transforms.tiling.calls import value_of
from zinf_compile.passes.transforms.tiling.emit import Emitter, fake_result
from zinf_compile.passes.transforms.tiling.order import find_barrier
from zinf_compile.passes.transforms.tiling.samples import (
    BySample,
    MixedSamplesError,
    Samples,
    follow_samples,
    name_of,
)

_GATHERS = (GATHER, torch.ops.zinf.gather)
_MAY_WRITE = "may write in place, or returns no tensor, as what begins autocast does"
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
        try:
            block = _cut_along_any(name, nodes)
        except MixedSamplesError as error:
            yield WholeBlock(name=name, why=str(error), node=error.node)
            continue
        barrier = find_barrier(nodes[0], nodes[-1].next)
        if block is not None and barrier is not None:
            yield WholeBlock(name=name, why=f"{name_of(barrier)} {_MAY_WRITE}", node=barrier)
        elif block is not None:
            yield block


def _runs(graph: fx.Graph) -> Iterator[tuple[str, list[fx.Node]]]:
    """Yield the nodes of each call of a repeated block, those of no module in between included."""
    call: tuple[str, str] | None = None
    run, between = list[fx.Node](), list[fx.Node]()
    for node in graph.nodes:
        if not node.meta.get("nn_module_stack") or node.op in _INPUTS or node.target in _GATHERS:
            between.append(node)
            continue
        if block_call(node) != call:
            if call is not None:
                yield call[0], run
            call, run = block_call(node), []
        if call is not None:
            run += [*(between if run else ()), node]
        between = []
    if call is not None:
        yield call[0], run


def _cut_along_any(name: str, nodes: Sequence[fx.Node]) -> Block | None:
    """Return the block cut along one of the first dimensions of its inputs; None if nothing is gained.

    Raises MixedSamplesError for a block that mixes samples along all of them: for the first dimension, with the op that
    comes last.
    """
    errors: list[tuple[int, int, MixedSamplesError]] = []
    inputs = _inputs(nodes)
    for samples, num_samples in _candidates(inputs):
        alike = [node for node in inputs if _size(node, samples.dim) == num_samples]
        for chosen in (alike, alike[:1]):  # others may have as many heads, say, as there are samples
            try:
                block = _cut_along(name, nodes, dict.fromkeys(chosen, samples), num_samples)
            except MixedSamplesError as error:
                errors.append((-samples.dim, nodes.index(error.node), error))
                continue
            if block is not None:
                return block
    if errors:
        raise max(errors, key=operator.itemgetter(0, 1))[2]
    return None


def _inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the tensors of fixed sizes that are read from outside, except for parameters, the largest first.

    A tensor that wraps others is a quantised parameter.
    """
    inside = set(nodes)
    read = dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside)
    found = [
        node
        for node in read
        if node.target not in _GATHERS
        and _size(node, 0) is not None
        and not is_traceable_wrapper_subclass(value_of(node))
    ]
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


def _num_elements(nodes: Iterable[fx.Node]) -> int:
    """Return the elements of all tensors that ops return."""
    values = (value_of(node) for node in nodes if node.target not in _GATHERS)
    return sum(value.numel() for value in values if isinstance(value, Tensor))


def _cut_along(name: str, nodes: Sequence[fx.Node], inputs: dict[fx.Node, Samples], num_samples: int) -> Block | None:
    """Return a block with its samples in these inputs; None if it would keep at least half of its values whole."""
    at, calls = dict(inputs), dict[fx.Node, BySample]()
    for node in nodes:
        if not at.keys().isdisjoint(node.all_input_nodes):
            if find_barrier(node, node.next) is not None:
                raise MixedSamplesError(node, _MAY_WRITE)
            calls[node] = follow_samples(node, at, num_samples)
            at[node] = calls[node].result
            _check_place(node, at[node], num_samples)
    block = Block(name=name, nodes=nodes, num_samples=num_samples, inputs=inputs, calls=calls)
    results = block.results
    if len(calls) <= len(results) or 2 * _num_elements(calls) < _num_elements(nodes):
        return None
    for per_batch in dict.fromkeys((1, num_samples // 2)):
        _check_pieces(block, per_batch)
    _check_results(block)
    return block


def _check_place(node: fx.Node, samples: Samples, num_samples: int) -> None:
    """Raise MixedSamplesError unless a node has as many indices for each sample as the rules say."""
    value = value_of(node)
    for tensor in value if isinstance(value, tuple | list) else (value,):
        if isinstance(tensor, Tensor) and (
            samples.dim >= tensor.dim() or tensor.shape[samples.dim] != num_samples * samples.unit
        ):
            raise MixedSamplesError(node, "returns something else than its samples")


def _check_pieces(block: Block, per_batch: int) -> None:
    """Compute some of the samples with fake values. MixedSamplesError unless each node gives its share of the whole."""
    made: dict[fx.Node, Any] = {node: _some_of(node, samples, per_batch) for node, samples in block.inputs.items()}
    for node, call in block.calls.items():
        given = {
            used: _some_of(used, call.cuts[used], per_batch) if used in call.cuts else made.get(used, value_of(used))
            for used in node.all_input_nodes
        }
        args = node.args if call.resize is None else call.resize(per_batch)
        args, kwargs = fx.node.map_arg((args, dict(node.kwargs)), given.__getitem__)
        try:
            made[node] = piece = fake_result(node, args, kwargs, value_of(node))
        except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:  # of torch's fake kernels
            reason = str(error).strip().partition("\n")[0]
            raise MixedSamplesError(node, f"refuses {per_batch} of {block.num_samples} samples: {reason}") from error
        if not _is_share(piece, value_of(node), call.result, per_batch):
            some = f"{per_batch} of {block.num_samples} samples"
            raise MixedSamplesError(node, f"gives another shape for {some}, or another dtype, as under autocast")


def _some_of(node: fx.Node, samples: Samples, per_batch: int) -> Tensor:
    value: Tensor = value_of(node)
    with value.fake_mode if isinstance(value, FakeTensor) else nullcontext():
        return value.narrow(samples.dim, 0, per_batch * samples.unit)


def _is_share(piece: Any, whole: Any, samples: Samples, per_batch: int) -> bool:
    if isinstance(whole, tuple | list):
        return len(piece) == len(whole) and all(
            _is_share(one, other, samples, per_batch) for one, other in zip(piece, whole, strict=True)
        )
    if not isinstance(whole, Tensor):
        return bool(piece == whole)
    shape = [*whole.shape[: samples.dim], per_batch * samples.unit, *whole.shape[samples.dim + 1 :]]
    return list(piece.shape) == shape and piece.dtype is whole.dtype


def _check_results(block: Block) -> None:
    """Raise MixedSamplesError for a result that shares memory with something else, or has gaps."""
    inside = set(block.nodes)
    others = dict.fromkeys(used for node in block.nodes for used in node.all_input_nodes if used not in inside)
    known = {_storage(value_of(node)) for node in (*others, *(inside - block.calls.keys()))}
    for node in block.results:
        value = value_of(node)
        if not isinstance(value, Tensor):
            raise MixedSamplesError(node, "returns a tuple that is read outside of the block")
        if _storage(value) in known:
            raise MixedSamplesError(node, "returns memory that something else in the block has as well")
        known.add(_storage(value))
        if not value.permute(_dims_by_stride(value)).is_contiguous():
            raise MixedSamplesError(node, "returns a tensor with gaps in its memory")


def _storage(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _dims_by_stride(value: Tensor) -> list[int]:
    """Return the dimensions of a tensor in the order of its memory, the outermost first."""
    return sorted(range(value.dim()), key=lambda dim: (-value.stride()[dim], dim))


def cut_block(block: Block, num_batches: int) -> None:
    """Replace a block by as many copies as there are micro-batches, one after another."""
    cut = _Cut(block, num_batches)
    batches = [cut.emit(number) for number in range(num_batches)]
    for node in block.results:
        whole = cut.join(node, [made[node] for made in batches])
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in block.calls)
    for node in reversed(list(block.calls)):
        node.graph.erase_node(node)


class _Cut:
    """Emits the micro-batches of a block behind it."""

    def __init__(self, block: Block, num_batches: int) -> None:
        self.emitter = Emitter(block.nodes[-1].next)
        self._block, self._num_batches = block, num_batches
        self._per_batch = block.num_samples // num_batches
        self._splits: dict[tuple[fx.Node, Samples], fx.Node] = {}

    def emit(self, number: int) -> Mapping[fx.Node, fx.Node]:
        """Emit one micro-batch; return its node for each node of the block that depends on samples."""
        made: dict[fx.Node, fx.Node] = {}
        for node, call in self._block.calls.items():
            of_batch: dict[fx.Node, fx.Node] = {}
            for used in node.all_input_nodes:
                if used in call.cuts:
                    of_batch[used] = self._some_of(used, call.cuts[used], number, node)
                    continue
                if used in self._block.inputs and used not in made:
                    made[used] = self._some_of(used, self._block.inputs[used], number, node)
                of_batch[used] = made.get(used, used)
            args = node.args if call.resize is None else call.resize(self._per_batch)
            args, kwargs = fx.node.map_arg((args, dict(node.kwargs)), of_batch.__getitem__)
            made[node] = piece = self.emitter.call_like(f"{node.name}_batch_{number}", node, args, kwargs)
            piece.meta["custom"] = {**piece.meta.get("custom", {}), TILE: number}
        return made

    def join(self, node: fx.Node, parts: Sequence[fx.Node]) -> fx.Node:
        """Emit a result of the block from that of each micro-batch, with its own strides."""
        dims, dim, name = _dims_by_stride(value_of(node)), self._block.calls[node].result.dim, f"{node.name}_whole"
        is_in_order = dims == sorted(dims)
        if not is_in_order:
            parts = [self.emitter.call(f"{each.name}_turned", torch.permute, each, dims, origin=node) for each in parts]
            dim = dims.index(dim)
        whole = self.emitter.call(name, torch.cat, list(parts), dim, origin=node)
        whole.meta["custom"] = {**whole.meta.get("custom", {}), JOINED: True}
        if not is_in_order:
            back = [dims.index(each) for each in range(len(dims))]
            whole = self.emitter.call(f"{name}_back", torch.permute, whole, back, origin=node)
        return whole

    def _some_of(self, source: fx.Node, samples: Samples, number: int, reader: fx.Node) -> fx.Node:
        """Return what a tensor has of the samples of a micro-batch."""
        name = f"{source.name}_samples"
        if (source, samples) not in self._splits:
            sizes = [self._per_batch * samples.unit] * self._num_batches
            self._splits[source, samples] = self.emitter.call(
                name, torch.split, source, sizes, samples.dim, origin=reader
            )
        split = self._splits[source, samples]
        return self.emitter.call(f"{name}_{number}", operator.getitem, split, number, origin=reader)


def _run(graph_module: fx.GraphModule, inputs: TileInputs) -> None:
    if inputs.micro_batches > 1:
        for block in reversed(list(find_blocks(graph_module.graph))):  # a block is known by the nodes that it reads
            if isinstance(block, Block) and block.num_samples % inputs.micro_batches == 0:
                cut_block(block, inputs.micro_batches)


CUT_BLOCKS: Pass[TileInputs] = Pass(name="cut_blocks", run=_run)
