"""Functional collectives in a graph: what they read until they are done, and which values are then the same on all ranks."""

import operator
from collections.abc import Collection, Container, Mapping

import torch
from torch import fx

from zinf_compile.ir.ops import ALL_GATHER_COLUMNS, ALL_REDUCE, GATHER
from zinf_compile.passes.analysis.repeatable import is_pure

_NAMESPACE = "_c10d_functional"
_GIVES_ALL_THE_SAME = ("all_reduce", "all_gather_into_tensor", "broadcast")


def is_collective(node: fx.Node) -> bool:
    """Return whether a node is a functional collective of torch's, or waits for one."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == _NAMESPACE


def find_collectives(graph: fx.Graph) -> list[str]:
    """Return the names of the collectives of a graph, in order: all ranks between which they are have to run the same."""
    return [str(node.target) for node in graph.nodes if is_collective(node)]


def awaited(node: fx.Node) -> fx.Node | None:
    """Return the collective of one result that a node waits for, and whose result it returns; None if it does not.

    Results of coalesced collectives are unpacked before somebody waits for each, and another graph may have started one.
    """
    if not _is_wait(node):
        return None
    (started,) = node.all_input_nodes
    return started if is_under_way(started) else None


def is_under_way(node: fx.Node) -> bool:
    """Return whether a node starts a collective, so that its result is there only for what waits for it."""
    return is_collective(node) and not _is_wait(node)


def reads_of(node: fx.Node) -> list[fx.Node]:
    """Return what a node reads. What a collective reads, it reads until the ops that wait for it are done."""
    reads = [*node.all_input_nodes]
    if _is_wait(node):
        started = reads[0].all_input_nodes[0] if reads[0].target is operator.getitem else reads[0]
        reads += started.all_input_nodes if is_under_way(started) else ()
    return reads


def _is_wait(node: fx.Node) -> bool:
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def find_replicated(
    graph: fx.Graph, groups: Collection[str], *, alike: Container[int] = (), are_inputs_alike: bool = False
) -> dict[fx.Node, str]:
    """Return the nodes of a forward graph whose values are the same on all ranks of a process group, with its name.

    An all-reduce and an all-gather give every rank the same, and so does what is computed from such values alone. Gathers of
    the parameters ``alike``, and with ``are_inputs_alike`` inputs of the graph, are taken to be the same on all ranks too.
    """
    found: dict[fx.Node, frozenset[str]] = {}  # of all groups
    everywhere = frozenset(groups)
    for node in graph.nodes:
        found[node] = _groups_of(node, found, everywhere, alike=alike, are_inputs_alike=are_inputs_alike)
    return {node: min(names) for node, names in found.items() if names}


def _groups_of(
    node: fx.Node,
    found: Mapping[fx.Node, frozenset[str]],
    everywhere: frozenset[str],
    *,
    alike: Container[int],
    are_inputs_alike: bool,
) -> frozenset[str]:
    """Return the groups on whose ranks the value of a node is the same."""
    nowhere: frozenset[str] = frozenset()
    if node.op == "placeholder":
        return everywhere if are_inputs_alike else nowhere
    if node.op != "call_function":
        return nowhere
    if node.target is GATHER:
        return everywhere if node.args[1] in alike else nowhere
    if is_collective(node):
        if (started := awaited(node)) is not None:
            return found[started]
        assert isinstance(node.target, torch._ops.OpOverload)
        name = node.target._schema.name.partition("::")[2]
        return everywhere & {str(node.args[-1])} if name in _GIVES_ALL_THE_SAME else nowhere
    if node.target in (ALL_REDUCE, ALL_GATHER_COLUMNS):
        return everywhere
    if not is_pure(node):
        return nowhere
    return everywhere.intersection(*(found[each] for each in node.all_input_nodes))
