"""Which module of the model a node came from, and which repeated block a name belongs to."""

import re
from collections.abc import Iterable

from torch import fx

# A forward behind a decorator that takes ``*args`` gets the model as ``args[0]``.
_ROOT = re.compile(r"^[LG]\[['\"](?:args['\"]\]\[0|\w+['\"])\]\.?")
_INDEXED = re.compile(r"(?:\._modules)?\[['\"]?(\w+)['\"]?\]")
# Prefixes by which Dynamo names the captured model: a bound method, a wrapper, a module's own call.
_WAY_TO_MODEL = re.compile(r"^(?:(?:__self__|_modules|_orig_mod)(?:\.|$))+")


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module that ran the node (of its forward node, in backward); "" for none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return _plain_path(next(reversed(stack.values()))[0]) if stack else ""


def block_call(node: fx.Node) -> tuple[str, str] | None:
    """Return the repeated block that ran a node of a torch-level graph, and what tells its calls apart; None for none."""
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        block = block_of(_plain_path(path))
        if is_repeated(block):
            return block, str(key)
    return None


def _plain_path(path: str) -> str:
    path = _INDEXED.sub(r".\1", _ROOT.sub("", path)).removeprefix(".")
    return _WAY_TO_MODEL.sub("", path)


def blocks_of_nodes(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Return the block of each node of a forward graph, or of forward and backward; "model" if unknown."""
    blocks: dict[fx.Node, str] = {}
    block = ""
    of_forward: dict[int | None, str] = {}  # of forward ops, by the sequence number shared with backward
    begins_backward = False
    for node in nodes:
        path, number = module_path(node), node.meta.get("seq_nr")
        if path:
            block = block_of(path)
            begins_backward &= node.op != "call_function"
        elif node.op == "placeholder":  # inputs are in no block
            blocks[node] = "model"
            continue
        elif begins_backward:  # the gradient of the loss, whose inputs come from all modules
            block = of_forward.get(number, block)
        # Any other op without a module of its own belongs to the run of ops around it.
        begins_backward |= node.op == "output"
        if number is not None and node.op == "call_function":
            of_forward.setdefault(number, block)
        blocks[node] = block or "model"
    return blocks


def block_of(path: str) -> str:
    """Return the repeated block a module or parameter path lies in: up to its first number, else its first name.

    ``model.layers.3.mlp.up`` gives ``model.layers.3``; ``embed`` gives ``embed``.
    """
    parts = path.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return parts[0]


def is_repeated(block: str) -> bool:
    """Return whether a block is one of a numbered series."""
    return block.rpartition(".")[2].isdigit()
