"""Turns forward and backward graphs into GraphFacts: ticks, ops, live ranges, uses of parameters, gradients.

Every node is numbered with its tick (``NodeFacts``); lowering finds nodes by it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from zinf_compile.ir.facts import GradientFact, GraphFacts, OpFact, RoutedFact, UseFact, ValueFact
from zinf_compile.ir.glossary import ActivationPolicy, LiveRange, dtype_name
from zinf_compile.ir.ops import GATHER, RUN_SEGMENT, STORE_GRAD
from zinf_compile.ir.schedule import Schedule
from zinf_compile.ir.sizes import Size
from zinf_compile.passes.analysis.collectives import reads_of
from zinf_compile.passes.analysis.costs import count_bytes_accessed, count_flops, unwrap_call
from zinf_compile.passes.analysis.idle import find_idle
from zinf_compile.passes.analysis.modules import blocks_of_nodes
from zinf_compile.passes.analysis.out_forms import has_out_form
from zinf_compile.passes.analysis.peaks import peak_inside, scratch_of
from zinf_compile.passes.analysis.repeatable import is_repeatable
from zinf_compile.passes.analysis.routed import find_gradient_routing, find_routed
from zinf_compile.passes.analysis.shapes import GraphShapes, find_sources, symbols_in
from zinf_compile.passes.analysis.storages import StorageRoot, find_roots, tensor_nbytes
from zinf_compile.passes.contract import NODE_FACTS, SEGMENT, NodeFacts, node_facts

# How many copies of a graph's output a loss of eager PyTorch holds at once, besides the output and its gradient.
# Measured: none for ``sum()``, one for a mean squared error, two for a cross entropy, three for a binary cross entropy
# with logits, four for ``square().mean()``.
_COPIES_OUTSIDE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """A forward graph, and its backward graph for training. The first ``num_outputs`` forward outputs are the user's."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_outputs: int
    policy: ActivationPolicy
    dividable: tuple[str, ...] = ()  # saved values of which tensor-parallel ranks could save a part each
    divided: tuple[str, ...] = ()  # those of which they do


def analyze_graph(captured: CapturedGraph, *, name: str, param_names: Mapping[int, str]) -> GraphFacts[Size]:
    """Return the facts of a captured graph, with sizes in the symbols of its shapes.

    ``param_names`` maps the ids in its gathers to names. Raises UnsupportedError for a size that depends on values.
    """
    graphs = [captured.forward.graph] + ([captured.backward.graph] if captured.backward is not None else [])
    _number_nodes(graphs, param_names)
    nodes = [node for graph in graphs for node in graph.nodes]
    schedule = Schedule.of_one_graph(len(captured.forward.graph.nodes), len(nodes))
    roots = _join_roots(captured)
    if captured.backward is not None:
        _name_saved(captured.backward.graph, roots)
    shapes = GraphShapes(*graphs)
    gradients = [_gradient(node, param_names[node.args[1]], shapes) for node in nodes if node.target is STORE_GRAD]
    routed = [each for graph in graphs for each in find_routed(graph, roots, shapes)]
    routed.sort(key=lambda each: (each.parameter, each.routing.ends))
    return GraphFacts(
        name=name,
        policy=captured.policy,
        schedule=schedule,
        ops=_collect_ops(nodes, roots, shapes),
        values=_collect_values(captured, nodes, schedule, roots, shapes, _last_looks(gradients, routed, nodes, roots)),
        uses=_collect_uses(nodes, roots),
        gradients=tuple(gradients),
        routed=tuple(routed),
        symbols=shapes.symbols,
        outside_nbytes=shapes.size(_count_outside(captured, roots)),
    )


def _gradient(node: fx.Node, parameter: str, shapes: GraphShapes) -> GradientFact[Size]:
    (grad, *_) = node.all_input_nodes
    nbytes = tensor_nbytes(grad.meta["val"])
    assert isinstance(nbytes, int)  # it has the shape of its parameter
    return GradientFact(
        parameter=parameter, tick=_tick(node), nbytes=nbytes, routing=find_gradient_routing(node, shapes)
    )


def _last_looks(
    gradients: Iterable[GradientFact[Size]],
    routed: Iterable[RoutedFact[Size]],
    nodes: Sequence[fx.Node],
    roots: Mapping[fx.Node, StorageRoot],
) -> dict[StorageRoot, int]:
    """Return the last tick at which a transfer may look which experts have rows, for each value that says so."""
    last = {roots[nodes[each.routing.ends]]: each.routing.ends for each in routed}  # readers look at it later
    for gradient in gradients:
        if gradient.routing is not None:
            root = roots[nodes[gradient.routing.ends]]
            last[root] = max(last.get(root, 0), gradient.tick)
    return last


def _tick(node: fx.Node) -> int:
    tick = node_facts(node).tick
    assert tick is not None
    return tick


def _number_nodes(graphs: list[fx.Graph], param_names: Mapping[int, str]) -> None:
    for tick, node in enumerate(node for graph in graphs for node in graph.nodes):
        param = node.args[1] if node.target in (GATHER, STORE_GRAD) else None
        parameter = param_names[param] if isinstance(param, int) else None
        node.meta[NODE_FACTS] = NodeFacts(tick=tick, parameter=parameter)


def _join_roots(captured: CapturedGraph) -> dict[fx.Node, StorageRoot]:
    """Return storage roots over both graphs: the root of a saved value in backward is the forward node that computed it."""
    roots = find_roots(captured.forward.graph)
    if captured.backward is None:
        return roots
    saved = {node.name: node for node in saved_nodes(captured)}
    for node, root in find_roots(captured.backward.graph).items():
        source = root.node
        crosses = source.op == "placeholder" and source.name in saved
        roots[node] = roots[saved[source.name]] if crosses else root
    return roots


def _name_saved(backward: fx.Graph, roots: Mapping[fx.Node, StorageRoot]) -> None:
    """Record the value behind every backward input that is a saved value or a view of one."""
    for node in backward.find_nodes(op="placeholder"):
        if roots[node].node is not node:
            node.meta[NODE_FACTS] = replace(node_facts(node), value=roots[node].name)


def output_args(graph: fx.Graph) -> list[Any]:
    """Return what a graph returns."""
    (outputs,) = graph.output_node().args
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def saved_nodes(captured: CapturedGraph) -> list[fx.Node]:
    """Return the nodes of the forward graph whose values are saved for backward."""
    outputs = output_args(captured.forward.graph)
    return [node for node in outputs[captured.num_outputs :] if isinstance(node, fx.Node)]


def _collect_ops(
    nodes: list[fx.Node], roots: Mapping[fx.Node, StorageRoot], shapes: GraphShapes
) -> tuple[OpFact[Size], ...]:
    blocks = blocks_of_nodes(nodes)
    return tuple(
        replace(
            _describe_op(node, _tick(node), blocks[node], shapes),
            inputs=tuple(sorted({_tick(roots[used].node) for used in node.all_input_nodes})),
        )
        for node in nodes
    )


def _describe_op(node: fx.Node, tick: int, block: str, shapes: GraphShapes) -> OpFact[Size]:
    """Return the fact of an op, without its reads; for a segment, with the facts of the ops it runs."""
    call = unwrap_call(node)
    inside = node.meta[SEGMENT].graph.nodes if node.target is RUN_SEGMENT else ()
    inner = tuple(_describe_op(each, tick, block, shapes) for each in inside if each.op == "call_function")
    return OpFact(
        tick=tick,
        name=node.name,
        op=str(call.target),
        module=block,
        dtype=_dtype_of(call.value),
        num_flops=shapes.size(count_flops(node)),
        nbytes_accessed=shapes.size(count_bytes_accessed(node)),
        repeatable=is_repeatable(node),
        inner=inner,
    )


def _dtype_of(value: object) -> str:
    """Return the dtype of a result, of several that of the first tensor: attention and norms return statistics beside it."""
    tensors = (each for each in tree_leaves(value) if isinstance(each, torch.Tensor))
    return next((dtype_name(each.dtype) for each in tensors), "")


def _collect_values(
    captured: CapturedGraph,
    nodes: list[fx.Node],
    schedule: Schedule,
    roots: Mapping[fx.Node, StorageRoot],
    shapes: GraphShapes,
    last_looks: Mapping[StorageRoot, int],
) -> tuple[ValueFact[Size], ...]:
    """Return the values that compute allocates: not gathered parameters, nor inputs that the caller keeps.

    Those in ``last_looks`` never leave the device, and live until a transfer has looked at them.
    """
    forward_inputs = set(captured.forward.graph.find_nodes(op="placeholder"))
    saved = {roots[node] for node in saved_nodes(captured)}
    results = output_args(captured.forward.graph)[: captured.num_outputs]
    if captured.backward is not None:
        results += output_args(captured.backward.graph)
    returned = {roots[node] for node in results if isinstance(node, fx.Node)}
    idle = find_idle(nodes, roots, saved, schedule)
    births: dict[StorageRoot, int] = {}
    ends: dict[StorageRoot, int] = {}
    for node in nodes:
        root = roots.get(node)
        if root is not None:
            births.setdefault(root, _tick(root.node))  # all results exist before any is unpacked
            ends[root] = max(ends.get(root, 0), _tick(node) + 1)
        for used in reads_of(node):
            ends[roots[used]] = max(ends[roots[used]], _tick(node) + 1)
    shown = {graph: {source.symbol for source in find_sources(graph)} for graph in {node.graph for node in nodes}}
    values: list[ValueFact[Size]] = []
    for root, birth in births.items():
        if (root.is_gathered and root not in returned) or root.node in forward_inputs or root.nbytes == 0:
            continue
        is_saved, is_returned = root in saved, root in returned
        end = (
            len(nodes) if is_returned else max(ends[root], last_looks.get(root, 0) + 1)
        )  # the caller may hold a result as long as it likes
        values.append(
            ValueFact(
                name=root.name,
                nbytes=shapes.size(root.nbytes),
                live=LiveRange(start=birth, end=end),
                saved=is_saved,
                bindable=not (is_saved or is_returned or root.path)
                and has_out_form(root.node)
                # lowering computes its size from these at run time
                and symbols_in(root.node.meta["val"]) <= shown[root.node.graph],
                idle=None if is_returned or root in last_looks else idle.get(root),
            )
        )
    values += _workspaces(nodes, shapes)
    return tuple(sorted(values, key=lambda value: (value.live.start, value.name)))


def workspace_name(node: fx.Node) -> str:
    """Return the name of the value that stands for what a node allocates and frees again while it runs."""
    return f"{node.name}_workspace"


def _workspaces(nodes: list[fx.Node], shapes: GraphShapes) -> list[ValueFact[Size]]:
    """Return the memory that nodes allocate and free again while they run.

    For a segment: everything between its inputs and results. For a convolution: a copy of every tensor in another
    layout. For the backward of attention on a GPU: what ``attention_scratch`` counts.
    """
    counted: dict[fx.Node, Size] = {
        node: shapes.size(peak_inside(node.meta[SEGMENT].graph)) for node in nodes if node.target is RUN_SEGMENT
    }
    counted |= {node: shapes.size(scratch) for node in nodes if (scratch := scratch_of(node)) != 0}
    return [
        ValueFact(
            name=workspace_name(node),
            nbytes=nbytes,
            live=LiveRange(start=_tick(node), end=_tick(node) + 1),
            saved=False,
        )
        for node, nbytes in counted.items()
    ]


def _count_outside(captured: CapturedGraph, roots: Mapping[fx.Node, StorageRoot]) -> Size:
    """Return the bytes that a loss outside the graph holds between forward and backward, besides its inputs.

    They are estimated from the gradients that the graph receives. A graph that receives the gradient of a single number
    has computed its loss itself.
    """
    if captured.backward is None:
        return 0
    given = [node for node in captured.backward.graph.find_nodes(op="placeholder") if roots[node].node is node]
    gradients = [node.meta["val"] for node in given if isinstance(node.meta["val"], torch.Tensor)]
    if any(all(isinstance(size, int) and size == 1 for size in gradient.shape) for gradient in gradients):
        return 0
    nbytes: Any = sum(tensor_nbytes(gradient) for gradient in gradients)
    held: Size = _COPIES_OUTSIDE * nbytes
    return held


def _collect_uses(nodes: list[fx.Node], roots: Mapping[fx.Node, StorageRoot]) -> tuple[UseFact, ...]:
    """Return the ticks at which each parameter is read, directly or through a view. Creating a view is not a read."""
    ticks: dict[tuple[str, str], set[int]] = {}
    for node in nodes:
        for used in reads_of(node) if node.op != "output" else ():
            root = roots[used]
            facts = root.node.meta[NODE_FACTS]
            if root.is_gathered and facts.parameter is not None and roots.get(node) != root:
                dtype = dtype_name(root.node.meta["val"].dtype)
                ticks.setdefault((facts.parameter, dtype), set()).add(_tick(node))
    return tuple(
        UseFact(parameter=name, dtype=dtype, ticks=tuple(sorted(found)))
        for (name, dtype), found in sorted(ticks.items())
    )
