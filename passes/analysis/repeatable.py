"""Which ops give the same result when they run again."""

import operator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

RECOMPUTE = (
    "recompute"  # the key under which torch's partitioner reads, and users' checkpoint policies write, their tags
)


def is_repeatable(node: fx.Node) -> bool:
    """Return whether backward may run a node again: it writes and draws nothing, and its user does not want it saved."""
    if node.op != "call_function" or node.meta.get(RECOMPUTE) in (
        CheckpointPolicy.MUST_SAVE,
        CheckpointPolicy.PREFER_SAVE,
    ):
        return False
    if node.target is operator.getitem:
        return True
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable and not is_random(node)


def is_random(node: fx.Node) -> bool:
    """Return whether a node's result differs from call to call. Attention without dropout is marked so, and is not."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) != 0)
    return True
