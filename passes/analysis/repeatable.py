"""Which ops may be recomputed: they give the same result when they run again."""

import operator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

# Keys of the tags that users' checkpoint regions write and torch's partitioner reads.
RECOMPUTE = "recompute"
REGION = "ac_graph_id"

_KNOWN = ("aten", "prims")  # other ops may have side effects: they may gather, send or count


def is_repeatable(node: fx.Node) -> bool:
    """Return whether backward may recompute a node: it always gives the same, and is not tagged by the user."""
    if node.op != "call_function" or REGION in node.meta:
        return False
    if node.meta.get(RECOMPUTE) in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
        return False
    return is_pure(node)


def is_pure(node: fx.Node) -> bool:
    """Return whether a node is one of torch's own ops, which has no side effects and draws no random numbers."""
    if node.target is operator.getitem:
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _KNOWN:
        return False
    return not target._schema.is_mutable and not is_random(node)


def is_random(node: fx.Node) -> bool:
    """Return whether a node's result differs from call to call. Attention without dropout is tagged random, but is not."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) != 0)
    return True
