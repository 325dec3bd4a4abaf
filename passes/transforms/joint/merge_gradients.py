"""Give every parameter one gradient: sum the contributions of its uses in the order in which autograd would.

Emitted::

    grad_sum = aten.add(grad_1, grad_2)            first arrived plus next arrived, as autograd's input buffer does
    token = zinf.store_grad(grad_sum, param)       one per parameter; the anchor's gradient is the last token alone

Accumulation into ``p.grad`` then adds the same sum as plain PyTorch. This also keeps common-subexpression elimination
from merging two equal contributions.

Contributions to a tile are offloaded one by one and added where the gradient is stored: keeping them until the last one
would need the memory of all tiles. Each is added to the previous ``p.grad``, so sums may round differently::

    token = zinf.store_grad(grad_2, tile, 1)       distinguished from the first by its number
"""

from collections import defaultdict

import torch
from torch import fx

from zinf_compile.ir.ops import STORE_GRAD
from zinf_compile.passes.contract import JointInputs, Pass
from zinf_compile.passes.fx_edit import insert_call
from zinf_compile.passes.properties import ONE_GRADIENT_EACH


def _run(graph_module: fx.GraphModule, inputs: JointInputs) -> None:
    graph = graph_module.graph
    stores = graph.find_nodes(op="call_function", target=STORE_GRAD)
    if not stores:
        return
    _fold_token_sums(graph, stores)
    by_param: dict[int, list[fx.Node]] = defaultdict(list)
    for store in stores:
        param = store.args[1]
        assert isinstance(param, int)
        by_param[param].append(store)
    for param, (first, *others) in by_param.items():
        if not others:
            continue
        if param in inputs.added_at_home:
            for part, store in enumerate(others, start=1):
                store.args = (*store.args, part)
            continue
        last, total = others[-1], first.args[0]
        for store in others:
            total = insert_call(graph, last, torch.ops.aten.add.Tensor, (total, store.args[0]), name="grad_sum")
        last.update_arg(0, total)
        for store in (first, *others[:-1]):
            graph.erase_node(store)


def _fold_token_sums(graph: fx.Graph, stores: list[fx.Node]) -> None:
    """Let the output return the last token instead of the sum of all, and erase the additions of empty tensors."""
    tokens = set(stores)
    sums = []
    for node in graph.nodes:
        if node.target is torch.ops.aten.add.Tensor and tokens.issuperset(node.all_input_nodes):
            tokens.add(node)
            sums.append(node)
    for token in tokens:
        if graph.output_node() in token.users:
            graph.output_node().replace_input_with(token, stores[-1])
    for node in reversed(sums):
        graph.erase_node(node)


MERGE_GRADIENTS: Pass[JointInputs] = Pass(name="merge_gradients", run=_run, establishes=frozenset({ONE_GRADIENT_EACH}))
