"""Whether a call can be moved later: nothing in between may write to what it reads, or change a mode."""

import inspect

from torch import Tensor, fx

from zinf_compile.passes.transforms.tiling.calls import value_of

_IN_PLACE_OPERATORS = frozenset(
    f"i{name}" for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


def may_run_later(first: fx.Node, last: fx.Node) -> bool:
    """Return whether ``first``, and the nodes in between, may run just before ``last`` instead."""
    return find_barrier(first, last) is None


def find_barrier(first: fx.Node, last: fx.Node) -> fx.Node | None:
    """Return the first node, from ``first`` up to ``last``, that has to stay where it is; None if there is none.

    It may write to what other nodes read, or returns no tensor: then it may begin a mode, such as autocast.
    """
    node = first
    while node is not last:
        # A node without a tensor result may begin or end autocast, or switch gradients off.
        if not isinstance(value_of(node), Tensor | tuple | list) or may_write(node):
            return node
        node = node.next
    return None


def may_write(node: fx.Node) -> bool:
    """Return whether a call may write to its operands: by torch's naming convention, or by an argument."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or name.strip("_") in {"setitem", *_IN_PLACE_OPERATORS}:
        return True
    return "out" in node.kwargs or _is_in_place(node)


def _is_in_place(node: fx.Node) -> bool:
    """Return whether the argument ``inplace`` of a function is not False. Functions written in C++ have none."""
    given: object = node.kwargs.get("inplace", False)
    if callable(node.target) and "inplace" not in node.kwargs:
        try:
            names = list(inspect.signature(node.target).parameters)
        except (TypeError, ValueError):
            return False
        if "inplace" in names[: len(node.args)]:
            given = node.args[names.index("inplace")]
    return given is not False
