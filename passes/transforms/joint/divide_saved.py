"""Let each tensor-parallel rank save a part of what is the same on all of them, and gather the parts in backward.

Emitted in forward, on rank 1 of 4::

    flat = aten.view(gelu, [4096])                  instead of    return (loss, gelu)
    mine = aten.slice(flat, 0, 1024, 2048)
    gelu_part = aten.clone(mine)
    return (loss, gelu_part)

and in backward, before the first reader::

    gelu_gathering = all_gather_into_tensor(gelu_part, 4, group)
    gelu_whole = wait_tensor(gelu_gathering)
    gelu_again = aten.as_strided(gelu_whole, ...)                  likewise for each saved view of it

So of an activation that leaves the device each rank moves and keeps a part: the partitioned activations of ZeRO
(https://arxiv.org/abs/1910.02054, section 6.1). The part is a saved value as any other: what becomes of it is planned.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from zinf_compile.ir.ops import GATHER
from zinf_compile.passes.analysis.collect import CapturedGraph, output_args, saved_nodes
from zinf_compile.passes.analysis.collectives import find_replicated, is_under_way
from zinf_compile.passes.analysis.out_forms import is_dense
from zinf_compile.passes.analysis.shapes import symbols_in
from zinf_compile.passes.analysis.storages import StorageRoot, find_roots
from zinf_compile.passes.contract import Division, TensorGroup
from zinf_compile.passes.fx_edit import insert_call

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
_LEAST_PART_NBYTES = 4096  # a sector of a disk: to move less takes as long
_KEPT = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "custom")  # what says in which block a node is


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dividable:
    """A saved value that is the same on all ranks of a group, with all saved views of it."""

    root: StorageRoot
    whole: fx.Node  # its first node
    saved: tuple[fx.Node, ...]
    group: TensorGroup


def _find_dividable(captured: CapturedGraph, division: Division) -> Iterator[_Dividable]:
    """Yield the saved values that ranks can divide, in the order in which forward computes them.

    They own their bytes, are contiguous, of a number of elements that ranks divide evenly, and nobody else holds them.
    """
    graph = captured.forward.graph
    replicated = find_replicated(
        graph, [*division.groups], alike=division.alike, are_inputs_alike=division.are_inputs_alike
    )
    roots = find_roots(graph)
    results = output_args(graph)[: captured.num_outputs]
    held = {roots[node] for node in results if isinstance(node, fx.Node)}
    held |= {roots[read] for node in graph.nodes if _writes(node) for read in node.all_input_nodes}
    views: dict[StorageRoot, list[fx.Node]] = {}
    for node in saved_nodes(captured):
        views.setdefault(roots[node], []).append(node)
    births: dict[StorageRoot, fx.Node] = {}
    for node, root in roots.items():
        if is_under_way(node):
            continue
        if births.setdefault(root, node) is not node or root not in views or root in held or node not in replicated:
            continue
        group = division.groups[replicated[node]]
        if _owns_even_parts(root, group):
            yield _Dividable(root=root, whole=node, saved=tuple(views[root]), group=group)


def divide_saved(captured: CapturedGraph, division: Division) -> CapturedGraph:
    """Edit a split graph in place so that ranks save parts of the values that ``division`` names.

    Return it with the names of what they save in parts, and of all that they could.
    """
    assert captured.backward is not None
    names, found = division.names, list(_find_dividable(captured, division))
    chosen = [each for each in found if names is None or each.root.name in names]
    inputs = {node.name: node for node in captured.backward.graph.find_nodes(op="placeholder")}
    for each in chosen:
        part = _save_part(captured.forward.graph, each)
        _gather_parts(captured.backward.graph, each, part, [inputs[node.name] for node in each.saved])
    for graph_module in (captured.forward, captured.backward) if chosen else ():
        graph_module.graph.lint()
        graph_module.recompile()
    return replace(
        captured,
        dividable=tuple(each.root.name for each in found),
        divided=tuple(each.root.name for each in chosen),
    )


def _save_part(graph: fx.Graph, each: _Dividable) -> fx.Node:
    """Save this rank's part in the place of the first of the saved nodes, and leave the others out; return it."""
    name, group, value = each.root.name, each.group, each.whole.meta["val"]
    length = value.numel() // group.size
    after = each.whole.next
    flat = insert_call(graph, after, aten.view.default, (each.whole, [value.numel()]), name=f"{name}_flat")
    args = (flat, 0, group.rank * length, (group.rank + 1) * length)
    mine = insert_call(graph, after, aten.slice.Tensor, args, name=f"{name}_mine")
    part = insert_call(graph, after, aten.clone.default, (mine,), name=f"{name}_part")
    _put_beside(each.whole, [flat, mine, part])
    first, *others = each.saved
    outputs = [part if node is first else node for node in output_args(graph) if node not in others]
    graph.output_node().update_arg(0, tuple(outputs))
    return part


def _gather_parts(graph: fx.Graph, each: _Dividable, part: fx.Node, inputs: list[fx.Node]) -> None:
    """Replace the inputs of backward that were saved: one is this rank's part now, and the whole is gathered from it."""
    first, *others = inputs
    with graph.inserting_before(first):
        given = graph.placeholder(part.name)
    given.meta["val"] = first.meta["val"].new_empty(part.meta["val"].shape)
    position = {node: index for index, node in enumerate(graph.nodes)}
    readers = [user for node in inputs for user in node.users if user.op != "output"]
    kept = [user for node in inputs for user in node.users if user.op == "output"]
    before = min(readers or kept, key=position.__getitem__)
    name, group = each.root.name, each.group
    args = (given, group.size, group.name)
    gathering = insert_call(graph, before, c10d.all_gather_into_tensor.default, args, name=f"{name}_gathering")
    whole = insert_call(graph, before, c10d.wait_tensor.default, (gathering,), name=f"{name}_whole")
    new = [gathering, whole]
    for node in inputs:
        value = node.meta["val"]
        place = (list(value.shape), list(value.stride()), value.storage_offset())
        again = insert_call(graph, before, aten.as_strided.default, (whole, *place), name=f"{node.name}_again")
        node.replace_all_uses_with(again)
        new.append(again)
    _put_beside(before, new)
    for node in (first, *others):
        graph.erase_node(node)


def _put_beside(node: fx.Node, new: Iterable[fx.Node]) -> None:
    """Let new nodes be of the block of a node."""
    for each in new:
        each.meta.update({key: value for key, value in node.meta.items() if key in _KEPT})


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _owns_even_parts(root: StorageRoot, group: TensorGroup) -> bool:
    value = root.value
    if not isinstance(value, torch.Tensor) or root.node.op == "placeholder" or root.node.target is GATHER:
        return False
    if symbols_in(value) or value.storage_offset() != 0 or not is_dense(value) or not value.is_contiguous():
        return False
    return value.numel() % group.size == 0 and value.nbytes >= group.size * _LEAST_PART_NBYTES
