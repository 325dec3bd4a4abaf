"""Replace everything that a block computes between its gathers and its stores by one call.

Emitted for a block of a backward graph::

    up = zinf.gather(anchor, 3, ..)                        gathers come first
    layers_0_segment = zinf.run_segment([up, add, gelu], [], 2)
    mm_4 = getitem(layers_0_segment, 0)                    results that others read, under their old names
    t_9 = t(mm_4)                                          views of results and inputs are made outside
    token = zinf.store_grad(t_9, 3)                        stores come last

``node.meta[SEGMENT]`` holds the body: a graph module that takes sizes and inputs and returns the results. Sizes (none
above) are those that may change from call to call: every symbol in a shape inside, and every size that is an argument
of an op inside::

    layers_0_segment = zinf.run_segment([up, add, gelu], [primals_2, primals_3, mul_16], 2)
"""

import operator
from collections.abc import Collection

import torch
from torch import fx

from zinf_compile.ir.ops import RUN_SEGMENT
from zinf_compile.passes.contract import BLOCK, SEGMENT, Pass, SegmentInputs
from zinf_compile.passes.fx_edit import node_name, view_source
from zinf_compile.passes.transforms.segments.find_runs import Run, find_runs
from zinf_compile.passes.transforms.segments.shown_sizes import ShownSizes, is_size

_ORIGIN = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr")


def _run(graph_module: fx.GraphModule, inputs: SegmentInputs) -> None:
    shown = ShownSizes(graph_module.graph)
    for run in list(find_runs(graph_module.graph, inputs.blocks, inputs.apart)):
        _make_segment(run, inputs, shown)


def _make_segment(run: Run, inputs: SegmentInputs, shown: ShownSizes) -> None:
    graph, inside = run.compute[0].graph, set(run.compute)
    results, views = _split_escaping(run.compute, inside)
    needed = _needed_for(results, inside)
    body = [node for node in run.compute if node in needed]
    given = [
        used for used in dict.fromkeys(used for node in body for used in node.all_input_nodes) if used not in needed
    ]
    tensors = [node for node in given if not is_size(node)]
    if not results or not all(isinstance(node.meta["val"], torch.Tensor) for node in (*tensors, *results)):
        return
    symbols = shown.of([*given, *body])
    if symbols is None:
        return
    sizes = list(dict.fromkeys((*symbols, *filter(is_size, given))))
    segment = _extract(graph, body, [*sizes, *tensors], results)
    for gather in run.gathers:
        run.compute[0].prepend(gather)
    with graph.inserting_after(run.compute[-1]):
        arguments = (tensors, sizes, inputs.number_of(segment))
        call = graph.create_node("call_function", RUN_SEGMENT, arguments, name=node_name(f"{run.block}_segment"))
    call.meta = {key: run.compute[0].meta[key] for key in _ORIGIN if key in run.compute[0].meta}
    call.meta |= {"val": [node.meta["val"] for node in results], SEGMENT: segment, BLOCK: run.block}
    made: dict[fx.Node, fx.Node] = {}
    last = call
    for node in (*results, *(node for node in run.compute if node in views)):
        with graph.inserting_after(last):
            if node in views:
                last = graph.node_copy(node, lambda used: made.get(used, used))
            else:
                last = graph.call_function(operator.getitem, (call, results.index(node)))
                last.meta = dict(node.meta)
        made[node] = last
    for node, replacement in made.items():
        node.replace_all_uses_with(replacement)
    for node in run.stores:
        last.append(node)
        last = node
    for node in reversed(run.compute):
        name = node.name
        graph.erase_node(node)
        if node in made:
            made[node].name = name


def _split_escaping(nodes: list[fx.Node], inside: Collection[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
    """Return what a segment has to return, in order, and the views that are made outside of it for other readers.

    Every result owns its memory: no two results share bytes, and none shares bytes with an input.
    """
    results: set[fx.Node] = set()
    views: set[fx.Node] = set()
    for node in nodes:
        if all(user in inside for user in node.users):
            continue
        viewed = _source(node)
        while viewed is not None:
            views.add(node)
            if viewed not in inside:
                break
            node, viewed = viewed, _source(viewed)
        else:
            results.add(node)
    return [node for node in nodes if node in results], views


def _source(node: fx.Node) -> fx.Node | None:
    """Return what a node is a view of, alone or in a list; None if it owns its memory."""
    viewed = view_source(node)
    if viewed is not None or node.target is not operator.getitem:
        return viewed
    producer = node.args[0]
    assert isinstance(producer, fx.Node)
    return producer if view_source(producer) is not None else None


def _needed_for(results: list[fx.Node], inside: Collection[fx.Node]) -> set[fx.Node]:
    needed, left = set(results), list(results)
    while left:
        new = {used for used in left.pop().all_input_nodes if used in inside} - needed
        needed |= new
        left += new
    return needed


def _extract(graph: fx.Graph, body: list[fx.Node], given: list[fx.Node], results: list[fx.Node]) -> fx.GraphModule:
    """Return the graph module of a segment."""
    extracted = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in given:
        made[node] = extracted.placeholder(node.name)
        made[node].meta["val"] = node.meta["val"]
    for node in body:
        made[node] = extracted.node_copy(node, made.__getitem__)
    extracted.output(tuple(made[node] for node in results))
    assert graph.owning_module is not None
    return fx.GraphModule(graph.owning_module, extracted)


MAKE_SEGMENTS: Pass[SegmentInputs] = Pass(name="make_segments", run=_run)
