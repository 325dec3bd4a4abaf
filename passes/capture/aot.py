"""From a torch-level graph to forward and backward ATen graphs, through AOTAutograd and torch's min-cut partitioner.

The caller chooses what to save and what to recompute: ``GraphCompiler.choose`` gets a function that partitions the graph
under any activation policy, and returns one of the splits. ``compile_forward`` and ``compile_backward`` then turn its
graphs into callables.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.guards import GuardBuilder
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.ir.ops import GATHER
from zinf_compile.passes.analysis.casts import find_narrow_reads
from zinf_compile.passes.analysis.collect import CapturedGraph
from zinf_compile.passes.contract import FormInputs, JointInputs
from zinf_compile.passes.fx_edit import copy_graph_module, describe_place, set_missing_values
from zinf_compile.passes.pipeline import edit_form, edit_inference_graph, edit_joint_graph, edit_split_graph

# Splits a graph into forward and backward under the activation policy of its inputs.
Partition = Callable[[FormInputs], CapturedGraph]
BoxedCallable = Callable[[list[Any]], Sequence[Any]]


class GraphCompiler(Protocol):
    """What capture needs of its caller."""

    def choose(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> CapturedGraph:
        """Return the split of a training graph to compile, one of those that ``partition`` returned.

        ``reads`` maps the parameters that the graph casts at every read to that dtype: their gathers may be narrowed.
        """

    def choose_inference(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> CapturedGraph:
        """Return the graph without backward to compile, one of those that ``partition`` returned."""

    def compile_forward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        """Return a callable for the forward graph chosen last."""

    def compile_backward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        """Return a callable for the backward graph chosen last."""


def compile_graph(
    graph_module: fx.GraphModule,
    inputs: Sequence[Tensor],
    compiler: GraphCompiler,
    *,
    added_at_home: Container[int] = frozenset(),
    divisor: float = 1.0,
) -> Callable[..., Any]:
    """Return a callable for a torch-level graph: AOTAutograd's wrapper around what ``compiler`` makes of its parts.

    ``added_at_home`` are the parameters whose gradient contributions are offloaded one by one and summed at home.
    ``divisor`` is what every gradient is divided by.
    """

    def partition(
        joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        edit_joint_graph(joint, JointInputs(added_at_home=added_at_home, divisor=divisor))

        def split(inputs: FormInputs) -> CapturedGraph:
            candidate = copy_graph_module(joint)
            edit_form(candidate, inputs)
            # Most are only analysed, and need no code. Common subexpressions have been merged. What draws again in backward
            # finds the random state among the saved tensors; on CUDA, torch would make generators inputs of both graphs.
            settings = functorch_config.patch(cse=False, graphsafe_rng_functionalization=False)
            with _use_lazy_graph_module(should_use=True), settings:
                forward, backward = min_cut_rematerialization_partition(
                    candidate, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
                )
            set_missing_values(forward.graph)
            set_missing_values(backward.graph)
            captured = CapturedGraph(
                forward=forward, backward=backward, num_outputs=num_fwd_outputs, policy=inputs.policy
            )
            return edit_split_graph(captured, inputs)

        chosen = compiler.choose(split, find_narrow_reads(joint.graph))
        assert chosen.backward is not None
        return chosen.forward, chosen.backward

    def compile_inference(graph_module: fx.GraphModule, _: Sequence[Any]) -> BoxedCallable:
        (outputs,) = graph_module.graph.output_node().args
        assert isinstance(outputs, list | tuple)

        def edit(inputs: FormInputs) -> CapturedGraph:
            forward = copy_graph_module(graph_module)
            edit_inference_graph(forward, inputs)
            return CapturedGraph(forward=forward, backward=None, num_outputs=len(outputs), policy=inputs.policy)

        chosen = compiler.choose_inference(edit, find_narrow_reads(graph_module.graph))
        return _boxed(compiler.compile_forward(chosen.forward))

    def compile_backward(backward: fx.GraphModule, _: Sequence[Any]) -> BoxedCallable:
        # Donated saved values would let backward run once without retain_graph, but never again with it.
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []
        return _boxed(compiler.compile_backward(backward))

    wrap = aot_autograd(
        fw_compiler=lambda forward, _: _boxed(compiler.compile_forward(forward)),
        bw_compiler=compile_backward,
        inference_compiler=compile_inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = wrap(graph_module, inputs)
    return compiled


def _boxed(function: BoxedCallable) -> BoxedCallable:
    """Mark a callable as taking its inputs in one list, which it may empty."""

    def call(inputs: list[Any]) -> Sequence[Any]:
        return function(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd looks for this attribute
    return call


def describe_break(graph_module: fx.GraphModule) -> str | None:
    """Return where and why Dynamo ended this graph early, as ``file:line: reason``; None if it did not."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return None
    frame = reason.user_stack[-1]
    return f"{frame.filename}:{frame.lineno}: {reason.reason.splitlines()[0]}"


# Functions and methods that return a view of the same tensor in a torch-level graph, by name.
_VIEWS = frozenset(
    {
        *("detach", "_get_data_attr", "view", "reshape", "t", "transpose", "permute", "getitem", "narrow", "select"),
        *("from_local", "prim_from_local", "to_local", "prim_to_local"),  # of a DTensor; older versions of torch: prim
    }
)
_WRITING_OPERATORS = frozenset({"setitem", "iadd", "isub", "imul", "itruediv"})


def refuse_writes_to_parameters(graph_module: fx.GraphModule) -> None:
    """Raise UnsupportedError if a torch-level graph writes to a gathered parameter: the write would be lost."""
    gathered: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        source = node.args[0] if node.args else None
        if node.op == "call_function" and node.target in (GATHER, torch.ops.zinf.gather):
            gathered.add(node)
        elif source in gathered and node.op in ("call_function", "call_method"):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            if name in _VIEWS:
                gathered.add(node)
            elif name in _WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__")):
                raise UnsupportedError(
                    f"the model writes to one of its parameters in its own forward ({name}{describe_place(node)}); a "
                    "gathered value is a copy, so the write would be lost; write to it between steps instead"
                )


def parameter_placeholders(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, torch.nn.Parameter]:
    """Return the placeholders of a torch-level graph whose example input is a parameter."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    return {
        node.name: value
        for node, value in zip(placeholders, inputs, strict=True)
        if isinstance(value, torch.nn.Parameter)
    }


def guard_placeholders(graph_module: fx.GraphModule, names: Container[str]) -> None:
    """Make Dynamo recapture for other tensors in these inputs: a graph that replaces them gathers those of one model."""
    context = TracingContext.try_get()
    if context is None:  # called outside torch.compile
        return
    for node in graph_module.graph.find_nodes(op="placeholder"):
        if node.name in names:
            source = node.meta["grapharg"].source
            context.guards_context.dynamo_guards.add(source.make_guard(GuardBuilder.ID_MATCH))
