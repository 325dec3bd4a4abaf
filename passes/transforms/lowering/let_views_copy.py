"""Let views copy where a tensor has other strides than the fake one it was captured with: ``view`` would raise.

Emitted::

    view = aten.reshape.default(softplus_backward, [32, 30])     a view, wherever that is possible

For ``softplus_backward`` of tensors with different strides, for one, the fake kernel takes those of the input, and the CPU
those of the gradient.
"""

import torch
from torch import fx

from zinf_compile.passes.contract import LowerInputs, Pass

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _run(graph_module: fx.GraphModule, inputs: LowerInputs) -> None:
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in _VIEWS:
            node.target = torch.ops.aten.reshape.default


LET_VIEWS_COPY: Pass[LowerInputs] = Pass(name="let_views_copy", run=_run)
