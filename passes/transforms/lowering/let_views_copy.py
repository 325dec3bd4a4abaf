"""Let views copy where a tensor may have other strides than the fake one it was captured with: ``view`` would raise.

Emitted::

    view = aten.reshape.default(softplus_backward, [32, 30])     a view, wherever that is possible

For ``softplus_backward`` of tensors with different strides, for one, the fake kernel takes those of the input, and the CPU
those of the gradient. So views become reshapes behind ops that read such tensors.
"""

import torch
from torch import fx

from zinf_compile.passes.contract import LowerInputs, Pass
from zinf_compile.passes.fx_edit import view_source

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _run(graph_module: fx.GraphModule, inputs: LowerInputs) -> None:
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in _VIEWS and _reads_other_strides(_source_of(node)):
            node.target = torch.ops.aten.reshape.default


def _source_of(node: fx.Node) -> fx.Node:
    """Return the node that made the tensor of which a node is a view."""
    while (source := view_source(node)) is not None:
        node = source
    return node


def _reads_other_strides(node: fx.Node) -> bool:
    """Return whether an op reads tensors of the shape of its result that have different strides.

    Sizes may be symbols. They are compared as text, since comparing symbols would add guards.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    read = [each for source in node.all_input_nodes if isinstance(each := source.meta.get("val"), torch.Tensor)]
    return len({str(each.stride()) for each in read if str(each.shape) == str(value.shape)}) > 1


LET_VIEWS_COPY: Pass[LowerInputs] = Pass(name="let_views_copy", run=_run)
