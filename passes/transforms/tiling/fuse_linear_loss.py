"""Finds linear layers whose logits only a cross entropy reads, and replaces both by one call that never holds all logits.

Emitted for logits [batch, sequence, classes] that are cast to float32 and reshaped to rows::

    hidden_rows = reshape(hidden, [-1, 512])
    cross_entropy_fused = linear_cross_entropy(hidden_rows, weight, target, bias, ignore_index=-100, ...)
    cross_entropy_typed = to(cross_entropy_fused, bfloat16)             if the loss had another dtype than its sums

Views and slices of the logits that do not touch the classes are applied to the hidden states instead.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from zinf_compile.ir.ops import sums_dtype
from zinf_compile.passes.contract import Pass, TileInputs
from zinf_compile.passes.transforms.tiling.calls import arguments_of, value_of
from zinf_compile.passes.transforms.tiling.emit import Emitter
from zinf_compile.passes.transforms.tiling.linear_loss import holds_little, linear_cross_entropy
from zinf_compile.passes.transforms.tiling.order import may_run_later

_PARAMETERS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_RESHAPES = ("view", "reshape", "flatten", "contiguous")
_CASTS = ("float", "to", "double")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLoss:
    """A linear layer, the ops applied to its logits, in order, and their cross entropy."""

    linear: fx.Node
    between: tuple[fx.Node, ...]
    loss: fx.Node


def find_linear_losses(graph: fx.Graph) -> Iterator[LinearLoss]:
    """Yield every pair of a linear layer and a cross entropy that can be replaced."""
    for loss in graph.find_nodes(op="call_function", target=F.cross_entropy):
        arguments = _loss_arguments(loss)
        if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
            continue  # the deprecated names of reductions
        between: list[fx.Node] = []
        node = arguments["input"]
        while _leaves_classes_alone(node) and len(node.users) == 1:
            between.insert(0, node)
            node = node.args[0]
        found = LinearLoss(linear=node, between=tuple(between), loss=loss)
        if node.target is F.linear and len(node.users) == 1 and _fits(found) and may_run_later(node, loss):
            yield found


def fuse_linear_loss(found: LinearLoss, *, tile_rows: int | None = None, one_pass: bool | None = None) -> fx.Node:
    """Replace a layer and its loss; return the node of the loss."""
    emitter = Emitter(found.loss)
    layer, arguments = arguments_of(found.linear), _loss_arguments(found.loss)
    rows, weight = layer["input"], value_of(layer["weight"])
    for node in found.between:
        if node.target is operator.getitem:
            rows = emitter.call(f"{rows.name}_part", operator.getitem, rows, node.args[1], origin=node)
        elif value_of(node).dim() != value_of(rows).dim():
            rows = emitter.call(f"{rows.name}_rows", torch.reshape, rows, [-1, weight.shape[1]], origin=node)
    options: dict[str, Any] = {"class_weight": arguments["weight"]} if arguments.get("weight") is not None else {}
    options |= {name: arguments[name] for name in ("ignore_index", "reduction", "label_smoothing") if name in arguments}
    name = found.loss.name
    fused = emitter.call(
        f"{name}_fused",
        linear_cross_entropy,
        *(rows, layer["weight"], arguments["target"], layer.get("bias")),
        **options,
        tile_rows=tile_rows,
        one_pass=one_pass,
    )
    dtype = value_of(found.loss).dtype
    if value_of(fused).dtype != dtype:
        fused = emitter.call(f"{name}_typed", Tensor.to, fused, dtype)
    found.loss.replace_all_uses_with(fused)
    for node in (found.loss, *reversed(found.between), found.linear):
        node.graph.erase_node(node)
    return fused


def takes_one_pass(found: LinearLoss) -> bool:
    """Return whether loss and gradients are computed in one pass by default, if the layer is not tiled."""
    weight, arguments = arguments_of(found.linear)["weight"], _loss_arguments(found.loss)
    return arguments.get("reduction") != "none" and holds_little(value_of(arguments["target"]), value_of(weight))


def _loss_arguments(loss: fx.Node) -> dict[str, Any]:
    return dict(zip(_PARAMETERS, loss.args, strict=False)) | loss.kwargs


def _leaves_classes_alone(node: fx.Node) -> bool:
    """Return whether a call casts logits, or views or slices them along dimensions other than the classes."""
    if not isinstance(value_of(node), Tensor) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before = value_of(node.args[0])
    if not isinstance(before, Tensor) or before.dim() == 0 or before.shape[-1:] != value_of(node).shape[-1:]:
        return False
    if node.op == "call_function" and node.target is operator.getitem:
        index = node.args[1]
        whole = slice(None, None, None)
        return isinstance(index, tuple) and len(index) > 1 and index[-1] == whole and _is_slices(index, before.dim())
    if node.op == "call_method" and node.target in _CASTS:
        return True
    reshapes = node.target in (torch.reshape, torch.flatten) if node.op == "call_function" else node.target in _RESHAPES
    return reshapes and (value_of(node).dim() == 2 or value_of(node).shape == before.shape)


def _is_slices(index: tuple[Any, ...], num_dims: int) -> bool:
    """Return whether an index has only slices with fixed bounds, and its last slice is for the last dimension."""
    parts = [part for part in index if part is not Ellipsis]
    if not all(isinstance(part, slice) for part in parts):
        return False
    bounds = {bound for part in parts for bound in (part.start, part.stop, part.step)}
    return all(bound is None or isinstance(bound, int) for bound in bounds) and (
        len(parts) == num_dims or Ellipsis in index
    )


def _fits(found: LinearLoss) -> bool:
    """Return whether the replacement computes the same loss for these shapes and dtypes."""
    layer, arguments = arguments_of(found.linear), _loss_arguments(found.loss)
    logits, scored, target = value_of(found.linear), value_of(arguments["input"]), value_of(arguments["target"])
    hidden, weight = value_of(layer["input"]), value_of(layer["weight"])
    if scored.dim() != 2 or target.dim() != 1 or target.dtype is not torch.int64 or weight.dim() != 2:
        return False
    if not hidden.dtype == weight.dtype == logits.dtype or not logits.is_floating_point():
        return False  # autocast computes the logits in another dtype
    casts = {value_of(node).dtype for node in found.between} - {logits.dtype}
    return casts <= {sums_dtype(logits.dtype)}


def _run(graph_module: fx.GraphModule, inputs: TileInputs) -> None:
    if inputs.fuses_losses:
        for found in list(find_linear_losses(graph_module.graph)):
            fuse_linear_loss(found, one_pass=False if inputs.recomputes_logits else None)


FUSE_LINEAR_LOSSES: Pass[TileInputs] = Pass(name="fuse_linear_losses", run=_run)
