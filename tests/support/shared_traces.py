"""Captures in one process share traces of AOTAutograd, since most tests capture a graph that an earlier test captured.

A third of a capture is tracing through autograd. The trace depends on the graph from Dynamo, its inputs, and modes of
torch. Of zinf_compile it depends only on the numbers of parameters, not on budgets, placements or options. So the first
capture of a graph caches a copy of the trace, and later captures use a copy of it with their own numbers. Another third
is torch's partitioner: splits of a shared trace are cached too, by all that our passes have made of it. Dynamo, the
choice of what to save, all passes and lowering still run every time.

Graphs with symbolic sizes, constants, or inputs that are tensor subclasses are always traced.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._guards import TracingContext
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from zinf_compile.ir.ops import ALL_OPS
from zinf_compile.passes.capture import aot
from zinf_compile.passes.fx_edit import copy_graph_module

_MAKE_WRAP = aot.aot_autograd  # the originals, before patching
_TRACE = graph_compile.aot_dispatch_autograd_graph
_COMPILE = graph_compile.aot_stage2_autograd
_SPLIT = aot.min_cut_rematerialization_partition
_MODE = "shared_fake_mode"  # key in a graph's meta: the fake mode it was traced in
_TRACE_KEY = "shared_trace"  # key in a graph's meta: the key of the trace that it is, or was before passes edited it
_SYMBOLS = torch.SymInt | torch.SymFloat | torch.SymBool
_FIRST_NUMBER = 2**20  # of parameters; all other integers in the graphs of tests are smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """A cached trace: a private copy of the traced graph, with the metadata that tracing produced."""

    graph: fx.GraphModule
    inputs: Any
    input_descriptions: Any
    fake_mode: FakeTensorMode
    numbers: tuple[int, ...]  # of the parameters, in the order in which Dynamo's graph reads them
    notes: dict[str, Any]  # that tracing writes to AOTAutograd's metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """A cached split: private copies of the forward and backward graphs."""

    graphs: tuple[fx.GraphModule, fx.GraphModule]
    numbers: tuple[int, ...]  # of the parameters, in the order in which the joint graph reads them


_NOTES = ("mutated_inp_stream_indices", "tangent_source_stack_traces", "static_input_indices")


class SharedTraces:
    """The traced graphs of a process."""

    def __init__(self) -> None:
        self.num_traced = 0
        self.num_shared = 0
        self.num_split = 0
        self.num_splits_shared = 0
        self._kept: dict[Hashable, _Traced] = {}
        self._splits: dict[Hashable, _Split] = {}
        self._captured: fx.GraphModule | None = None  # the graph that AOTAutograd is working on

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Share traces between captures inside the block."""

        def aot_autograd(**options: Any) -> Callable[..., Any]:
            wrap = _MAKE_WRAP(**options)

            def call(graph_module: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
                before, self._captured = self._captured, graph_module
                try:
                    return wrap(graph_module, inputs)
                finally:
                    self._captured = before

            return call

        def trace_once(
            function: Any, inputs: Any, descriptions: Any, config: Any, *, fw_metadata: Any
        ) -> tuple[Any, Any, Any, Any]:
            context = TracingContext.try_get()
            found = None
            if self._captured is not None and context is not None and context.fake_mode is not None:
                found = _identify(self._captured, inputs, fw_metadata)
            if found is None:
                return _TRACE(function, inputs, descriptions, config, fw_metadata=fw_metadata)
            key, numbers = found
            if key in self._kept:
                self.num_shared += 1
                kept = self._kept[key]
                for name, note in kept.notes.items():
                    setattr(fw_metadata, name, note)
                copied = _renumbered(kept.graph, kept.numbers, numbers)
                copied.meta = {**copied.meta, _MODE: kept.fake_mode, _TRACE_KEY: key}
                return copied, kept.inputs, kept.input_descriptions, None
            self.num_traced += 1
            graph, joint_inputs, joint_descriptions, of_subclasses = _TRACE(
                function, inputs, descriptions, config, fw_metadata=fw_metadata
            )
            if of_subclasses is None and _has_own_values_only(graph):
                self._kept[key] = _Traced(
                    graph=copy_graph_module(graph),
                    inputs=joint_inputs,
                    input_descriptions=joint_descriptions,
                    fake_mode=context.fake_mode,
                    numbers=numbers,
                    notes={name: getattr(fw_metadata, name) for name in _NOTES if hasattr(fw_metadata, name)},
                )
                graph.meta = {**graph.meta, _TRACE_KEY: key}
            return graph, joint_inputs, joint_descriptions, of_subclasses

        def compile_under_its_mode(state: Any, captured: Any, *compilers: Any) -> Any:
            mode, context = captured.graph_module.meta.get(_MODE), TracingContext.try_get()
            if mode is None or context is None:
                return _COMPILE(state, captured, *compilers)
            # AOTAutograd has already entered the mode of this capture.
            with mock.patch.object(context, "fake_mode", mode), mode:
                return _COMPILE(state, captured, *compilers)

        def split_once(
            joint: fx.GraphModule, inputs: Sequence[Any], **options: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            found = _identify_joint(joint, options)
            if found is None:
                return _SPLIT(joint, inputs, **options)
            key, numbers = found
            if key in self._splits:
                self.num_splits_shared += 1
                forward, backward = self._splits[key].graphs
                before = self._splits[key].numbers
                return _renumbered(forward, before, numbers), _renumbered(backward, before, numbers)
            self.num_split += 1
            forward, backward = _SPLIT(joint, inputs, **options)
            self._splits[key] = _Split(
                graphs=(copy_graph_module(forward), copy_graph_module(backward)), numbers=numbers
            )
            return forward, backward

        with (
            mock.patch.object(aot, "aot_autograd", aot_autograd),
            mock.patch.object(aot, "copy_graph_module", _copy_with_key),
            mock.patch.object(aot, "min_cut_rematerialization_partition", split_once),
            mock.patch.object(graph_compile, "aot_dispatch_autograd_graph", trace_once),
            mock.patch.object(graph_compile, "aot_stage2_autograd", compile_under_its_mode),
        ):
            yield


def _identify(
    captured: fx.GraphModule, inputs: Sequence[Any], metadata: Any
) -> tuple[Hashable, tuple[int, ...]] | None:
    """Return the cache key of a trace, and the numbers of its parameters; None if the graph is always traced."""
    numbers: dict[int, int] = {}
    nodes = _identify_nodes(captured, numbers)
    if nodes is None:
        return None
    storages: dict[Any, int] = {}
    tensors = []
    for each in [*inputs, *metadata.traced_tangents]:
        if type(each) is not FakeTensor or _has_symbols(each):
            return None
        tensors.append((*_describe(each), storages.setdefault(each.untyped_storage()._cdata, len(storages))))
    infos = repr(metadata.input_info), repr([replaced.output_type for replaced in metadata.output_info])
    return (nodes, tuple(tensors), infos, _modes()), tuple(numbers)


def _identify_nodes(captured: fx.GraphModule, numbers: dict[int, int]) -> Hashable | None:
    """Return a key of the nodes of a graph and of its subgraphs; None if something in it cannot be compared."""
    nodes: list[Hashable] = []
    for node in captured.graph.nodes:
        example = node.meta.get("example_value")
        arguments = repr((_anonymous(node.args, numbers), _anonymous(node.kwargs, numbers)))
        is_symbolic = _has_symbols(example) if isinstance(example, Tensor) else isinstance(example, _SYMBOLS)
        if node.op == "call_module" or is_symbolic or " at 0x" in arguments:
            return None
        inner: Hashable = None
        if node.op == "get_attr":  # the graph of a checkpoint, or a constant
            held = getattr(captured, str(node.target), None)
            inner = _identify_nodes(held, numbers) if isinstance(held, fx.GraphModule) else None
            if inner is None:
                return None
        nodes.append(
            (
                *(node.name, node.op, node.target, arguments, inner, repr(node.meta.get("stack_trace"))),
                repr(list((node.meta.get("nn_module_stack") or {}).values())),
                _describe(example) if isinstance(example, Tensor) else type(example),
            )
        )
    return tuple(nodes)


def _anonymous(arguments: Any, numbers: dict[int, int]) -> Any:
    """Return arguments with nodes replaced by names, and numbers of parameters by their order of appearance."""
    if isinstance(arguments, fx.Node):
        return f"%{arguments.name}"
    if isinstance(arguments, tuple | list):
        return [type(arguments).__name__, *(_anonymous(each, numbers) for each in arguments)]
    if isinstance(arguments, dict):
        return {name: _anonymous(each, numbers) for name, each in arguments.items()}
    if isinstance(arguments, slice):
        return ["slice", *(_anonymous(each, numbers) for each in (arguments.start, arguments.stop, arguments.step))]
    if type(arguments) is int and arguments >= _FIRST_NUMBER:
        return f"#{numbers.setdefault(arguments, len(numbers))}"
    return arguments


def _has_symbols(tensor: Tensor) -> bool:
    placed = (*tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()
    return any(isinstance(size, _SYMBOLS) for size in (*tensor.shape, *placed))


def _describe(tensor: Tensor) -> tuple[Hashable, ...]:
    return (
        *(type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, tensor.is_leaf),
        *((tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()),
    )


def _modes() -> tuple[Hashable, ...]:
    """Return the modes of torch that affect tracing."""
    return (
        *(torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        *(torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled, _len_torch_dispatch_stack()),
        *(torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()),
        *(torch.backends.cuda.math_sdp_enabled(), functorch_config.get_hash()),
    )


def _has_own_values_only(graph_module: fx.GraphModule) -> bool:
    """Return whether a traced graph has no constants, submodules or symbolic sizes."""
    return not any(
        node.op in ("get_attr", "call_module") or any(isinstance(value, _SYMBOLS) for value in _values(node))
        for node in graph_module.graph.nodes
    )


def _copy_with_key(graph_module: fx.GraphModule) -> fx.GraphModule:
    copied = copy_graph_module(graph_module)
    if _TRACE_KEY in graph_module.meta:
        copied.meta[_TRACE_KEY] = graph_module.meta[_TRACE_KEY]
    return copied


def _identify_joint(joint: fx.GraphModule, options: Mapping[str, Any]) -> tuple[Hashable, tuple[int, ...]] | None:
    """Return the cache key of a split, and the numbers of the graph's parameters; None for a trace that is not shared."""
    if _TRACE_KEY not in joint.meta or not _has_own_values_only(joint):
        return None
    numbers: dict[int, int] = {}
    nodes = tuple(
        (
            *(node.name, node.op, node.target),
            repr((_anonymous(node.args, numbers), _anonymous(node.kwargs, numbers))),
            repr([node.meta.get(name) for name in _READ_BY_PARTITIONER]),
            repr([_describe(each) if isinstance(each, Tensor) else type(each) for each in _values(node)]),
        )
        for node in joint.graph.nodes
    )
    if any(" at 0x" in text for node in nodes for text in node[3:]):
        return None
    return (joint.meta[_TRACE_KEY], nodes, repr(sorted(options.items())), functorch_config.get_hash()), tuple(numbers)


_READ_BY_PARTITIONER = (
    *("recompute", "ac_graph_id", "partitioner_tag", "custom", "memory_budget", "autograd_backward"),
    *("has_backward_hook", "saved_tensor_with_no_vc_check", "saved_for_quantization"),
)


def _values(node: fx.Node) -> Sequence[Any]:
    values = node.meta.get("val")
    return values if isinstance(values, tuple | list) else (values,)


def _renumbered(graph_module: fx.GraphModule, before: Sequence[int], after: Sequence[int]) -> fx.GraphModule:
    """Return a copy of a graph that reads the parameters of the numbers ``after``, where it read those ``before``."""
    copied = copy_graph_module(graph_module)
    new = dict(zip(before, after, strict=True))
    for node in copied.graph.nodes:
        if node.target in ALL_OPS:
            node.args = tuple(new.get(each, each) if type(each) is int else each for each in node.args)
            node.kwargs = {
                name: new.get(each, each) if type(each) is int else each for name, each in node.kwargs.items()
            }
    return copied
