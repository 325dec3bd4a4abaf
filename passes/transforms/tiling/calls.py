"""Calls of a torch-level graph as the table of tilings sees them: the op, the shapes of its operands, its options."""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

ELEMENT_WISE = "element_wise"

_PARAMETERS = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other"),
    "embedding": ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    "conv": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}

_OPS: dict[Callable[..., Any], str] = {
    F.linear: "linear",
    torch.matmul: "matmul",
    torch.mm: "matmul",
    torch.bmm: "matmul",
    operator.matmul: "matmul",
    F.embedding: "embedding",
    F.conv1d: "conv",
    F.conv2d: "conv",
    F.conv3d: "conv",
    F.scaled_dot_product_attention: "attention",
    F.layer_norm: "layer_norm",
    F.rms_norm: "rms_norm",
    torch.rms_norm: "rms_norm",
}

_ALIASES = {"mat2": "other"}  # of operands, in the arguments of some functions

_MATMUL_METHODS = ("matmul", "mm", "bmm", "__matmul__")

# Each element is rounded once, as IEEE 754 defines, so every kernel gives the same bits. For other ops kernels use
# different formulas for the elements after the last whole vector, and those elements change with the tile size.
_ROUNDED_ONCE = (
    *("relu", "relu6", "leaky_relu", "hardtanh", "neg", "abs", "sign", "sqrt", "reciprocal"),
    *("add", "sub", "mul", "div", "truediv", "maximum", "minimum", "clamp", "where", "masked_fill"),
    *("to", "float", "double", "half", "bfloat16"),
)
_ELEMENT_WISE = (
    *_ROUNDED_ONCE,
    *("gelu", "silu", "mish", "elu", "selu", "celu", "softplus", "softsign", "hardswish", "hardsigmoid", "logsigmoid"),
    *("sigmoid", "tanh", "tanhshrink", "exp", "exp2", "expm1", "log", "log1p", "log2", "rsqrt", "square", "pow"),
    *("sin", "cos", "erf", "addcmul", "addcdiv", "lerp", "eq", "ne", "gt", "ge", "lt", "le"),
)


def _functions(names: Iterable[str]) -> frozenset[object]:
    found = (getattr(module, name, None) for module in (torch, F, operator) for name in names)
    return frozenset(function for function in found if callable(function))


def _methods(names: Iterable[str]) -> frozenset[object]:
    operators = {name: f"__{name}__" for name in ("add", "sub", "mul", "truediv")}
    return frozenset(names) | {operators[name] for name in names if name in operators}


_ROUNDED_ONCE_TARGETS = _functions(_ROUNDED_ONCE) | _methods(_ROUNDED_ONCE)
_ELEMENT_WISE_TARGETS = _functions(_ELEMENT_WISE) | _methods(_ELEMENT_WISE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An op with the shapes of its tensor operands and its other arguments, by name; arguments not passed are absent.

    A size that changes from call to call has its value at capture, and is listed in ``changing``: such dimensions are
    not cut.
    """

    op: str
    output: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    rounded_once: bool = False  # each element of the output, and of its gradients
    changing: frozenset[tuple[str, int]] = frozenset()  # operands, and which of their dimensions

    def has(self, operand: str) -> bool:
        """Return whether a tensor was given for an operand."""
        return operand in self.shapes


def read_call(node: fx.Node) -> Call | None:
    """Return the call of a node; None if the op is not in the table, or a shape depends on values."""
    op = _op_of(node)
    output = value_of(node)
    if op is None or not isinstance(output, Tensor) or (shape := _shape_at_capture(output)) is None:
        return None
    shapes, options, changing = {}, {}, set()
    for name, argument in arguments_of(node).items():
        value = value_of(argument) if isinstance(argument, fx.Node) else argument
        if not isinstance(value, Tensor):
            options[name] = value
        elif (known := _shape_at_capture(value)) is not None:
            shapes[name] = known
            changing |= {(name, dim) for dim, size in enumerate(value.shape) if not isinstance(size, int)}
        else:
            return None
    rounded_once = node.target in _ROUNDED_ONCE_TARGETS
    return Call(
        op=op,
        output=shape,
        shapes=shapes,
        options=options,
        rounded_once=rounded_once,
        changing=frozenset(changing),
    )


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by operand name; the op must be in the table."""
    return {name: _argument_at(node, place) for name, place in places_of(node).items()}


def places_of(node: fx.Node) -> dict[str, int | str]:
    """Return the place of each operand of a call: its position in ``args``, or its key in ``kwargs``."""
    op = _op_of(node)
    assert op is not None, f"{node} is not in the table"
    names = _PARAMETERS.get(op) or tuple(f"operand_{position}" for position in range(len(node.args)))
    named = {_ALIASES.get(name, name): name for name in node.kwargs}
    return {names[position]: position for position in range(len(node.args))} | named


def value_of(node: fx.Node) -> Any:
    """Return the fake value of a node: Dynamo stores it under ``example_value``, our passes under ``val``."""
    return node.meta.get("val", node.meta.get("example_value"))


def _argument_at(node: fx.Node, place: int | str) -> Any:
    return node.args[place] if isinstance(place, int) else node.kwargs[place]


def _op_of(node: fx.Node) -> str | None:
    if node.op == "call_method":
        if node.target in _MATMUL_METHODS:
            return "matmul"
        return ELEMENT_WISE if node.target in _ELEMENT_WISE_TARGETS else None
    if node.op != "call_function" or not callable(node.target):
        return None
    return _OPS.get(node.target) or (ELEMENT_WISE if node.target in _ELEMENT_WISE_TARGETS else None)


def _shape_at_capture(value: Tensor) -> tuple[int, ...] | None:
    """Return a shape as it was at capture; None if a size depends on values and is unknown."""
    sizes = [size if isinstance(size, int) else size.node.hint for size in value.shape]
    return None if None in sizes else tuple(sizes)
