"""Tag nodes for torch's min-cut partitioner: what backward must not save, and what it must recompute.

Tags set on forward nodes::

    gather, and every view or cast of one     MUST_RECOMPUTE: full weights are never saved, backward gathers again
    everything inside a repeated block        MUST_RECOMPUTE under ``ActivationPolicy.RECOMPUTE_BLOCKS``, one
                                              checkpoint region per block, so that inputs of a block are saved
    ops named in ``inputs.recomputed``,       MUST_RECOMPUTE under the policies by value
        their results and views of those
    random numbers                            MUST_SAVE: drawing again would give different numbers
    collectives of the user's, if             MUST_SAVE: the ranks between which they are may have chosen other policies
        ``inputs.keeps_collectives``
    what the micro-batches of a block give    MUST_SAVE: for what reads it after the block, backward would otherwise
                                              recompute all of them at once

Regions of the user's own ``torch.utils.checkpoint`` keep their tags.
"""

import itertools
import operator
from collections.abc import Collection

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.ir.ops import GATHER, STORE_GRAD
from zinf_compile.passes.analysis.collectives import is_collective
from zinf_compile.passes.analysis.modules import block_of, is_repeated, module_path
from zinf_compile.passes.analysis.repeatable import RECOMPUTE, REGION, is_random
from zinf_compile.passes.contract import JOINED, FormInputs, Pass
from zinf_compile.passes.fx_edit import view_source


def _run(graph_module: fx.GraphModule, inputs: FormInputs) -> None:
    nodes = list(graph_module.graph.nodes)
    if inputs.policy is ActivationPolicy.RECOMPUTE_BLOCKS:
        _tag_blocks([node for node in nodes if _is_forward_op(node)], keeps_collectives=inputs.keeps_collectives)
    for node in nodes:
        if inputs.recomputed and REGION not in node.meta and _is_made_by(node, inputs.recomputed):
            node.meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
        if node.target is GATHER or _is_cast_or_view_of_gather(node):
            node.meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.pop(REGION, None)


def _is_forward_op(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not STORE_GRAD and "fwd_nn_module_stack" not in node.meta


def _is_cast_or_view_of_gather(node: fx.Node) -> bool:
    wraps = node.target in (torch.ops.aten._to_copy.default, operator.getitem)
    source = node.args[0] if wraps else view_source(node)
    if not isinstance(source, fx.Node) or "fwd_nn_module_stack" in node.meta:
        return False
    return source.target is GATHER or _is_cast_or_view_of_gather(source)


def _is_made_by(node: fx.Node, names: Collection[str]) -> bool:
    """Return whether a forward node is one of the named ops, a result of one, or a view of a result."""
    if node.op != "call_function" or "fwd_nn_module_stack" in node.meta:
        return False
    source = node.args[0] if node.target is operator.getitem else view_source(node)
    return node.name in names or (isinstance(source, fx.Node) and _is_made_by(source, names))


def _tag_blocks(nodes: list[fx.Node], *, keeps_collectives: bool) -> None:
    regions: dict[tuple[str, int], int] = {}
    # A block that runs twice (a module used twice) is two regions: consecutive nodes are one execution.
    for run, (block, members) in enumerate(itertools.groupby(nodes, key=lambda node: block_of(module_path(node)))):
        if not is_repeated(block):
            continue
        for node in members:
            if REGION in node.meta:
                continue
            source = node.args[0] if node.target is operator.getitem else node
            assert isinstance(source, fx.Node)
            if is_random(source):
                if isinstance(node.meta["val"], torch.Tensor):  # for an op with several results, each result separately
                    node.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE
                continue
            if (node.meta.get("custom") or {}).get(JOINED) or (keeps_collectives and is_collective(node)):
                node.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE
                continue
            node.meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta[REGION] = regions.setdefault((block, run), len(regions))


TAG_RECOMPUTE: Pass[FormInputs] = Pass(name="tag_recompute", run=_run)
