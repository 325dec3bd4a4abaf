"""Captures a skeleton and returns its facts: Dynamo and AOTAutograd on fake tensors, as at run time, but nothing runs."""

import functools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, TorchRuntimeError
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import _pop_mode_temporarily
from torch.utils import _pytree as pytree

from zinf_compile.ir.errors import UnsupportedError, ZinfError
from zinf_compile.ir.facts import GraphFacts
from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.ir.ops import make_anchor
from zinf_compile.ir.sizes import Size
from zinf_compile.passes.analysis.collect import CapturedGraph
from zinf_compile.passes.capture.aot import (
    BoxedCallable,
    Partition,
    compile_graph,
    describe_break,
    refuse_writes_to_parameters,
)
from zinf_compile.passes.capture.offline.skeleton import Skeleton, as_fake
from zinf_compile.passes.capture.splits import JointGraph, Splitter
from zinf_compile.passes.contract import Division, FormInputs, RoundInputs
from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.pipeline import work_in_rounds
from zinf_compile.passes.transforms.prepare.work_in_rounds import find_gathered
from zinf_compile.passes.transforms.segments.structure import describe_structure

_DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_NUM_DYNAMIC_DIMS = 2  # of an input: batch and sequence


# Returns a torch-level graph that reads some parameters in tiles, and the numbers of those parameters. Its second
# argument maps numbers to names; it adds those of the tiles.
Divide = Callable[[Mapping[int, str]], Division]
TileGraph = Callable[[fx.GraphModule, dict[int, str]], tuple[fx.GraphModule, frozenset[int]]]


def leave_whole(graph_module: fx.GraphModule, _: dict[int, str]) -> tuple[fx.GraphModule, frozenset[int]]:
    """Return the graph as it is, without tiles."""
    return graph_module, frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInRounds:
    """One of some ranks that work in rounds."""

    owners: Mapping[str, int]  # the rank that has a parameter, by name
    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The arguments of a model; ``loss``, if given, is called with what the model returns."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGraph:
    """One captured graph: its facts under the first requested policy, and the source of its other forms."""

    facts: GraphFacts[Size]
    ended_by: str | None  # where and why Dynamo ended it early: ``file:line: reason``
    graph: Splitter = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All graphs of one call, and what the call returned, as fake tensors; ``stopped_by`` says why the rest is missing."""

    graphs: tuple[TracedGraph, ...]
    result: Any
    stopped_by: str | None
    notes: tuple[str, ...] = ()  # on how it was captured


def trace_model(
    skeleton: Skeleton,
    fake_mode: FakeTensorMode,
    inputs: Inputs,
    *,
    name: str,
    policies: Sequence[ActivationPolicy],
    train: bool,
    dynamic: bool,
    tile: TileGraph = leave_whole,
    in_rounds: RankInRounds | None = None,
    divide: Divide | None = None,
) -> Trace:
    """Return the graphs captured from one call of the skeleton, each as ``tile`` transforms it.

    With ``dynamic``, the first two dimensions of every input are symbols. ``in_rounds`` is the rank whose stages the graphs
    compute, for one such call of each rank; None: they compute the whole model. ``divide`` returns which saved values
    tensor-parallel ranks divide, given the names of parameters by their numbers. Raises UnsupportedError if nothing could be
    captured, because shapes or branches of the model depend on values or it cannot be traced.
    """
    with fake_mode:
        as_input = functools.cache(as_fake)  # an argument that is passed twice is one input
        args, kwargs = pytree.tree_map_only(Tensor, as_input, (inputs.args, dict(inputs.kwargs)))
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if dynamic:
        for leaf in leaves:
            torch._dynamo.mark_static(leaf, list(range(_NUM_DYNAMIC_DIMS, leaf.dim())))
    graphs: list[TracedGraph] = []

    def backend(graph_module: fx.GraphModule, graph_inputs: Sequence[Tensor]) -> Callable[..., Any]:
        refuse_writes_to_parameters(graph_module)
        compiler = _Keeper(f"{name} graph {len(graphs)}", skeleton.param_names, policies, divide)
        of_rank, divisor = graph_module, 1.0
        if in_rounds is not None:
            of_rank, graph_inputs = _keep_stages(graph_module, graph_inputs, in_rounds, skeleton, leaves)
            divisor = float(in_rounds.num_ranks)
        tiled, tiles = tile(of_rank, skeleton.param_names)
        compile_graph(tiled, graph_inputs, compiler, added_at_home=tiles, divisor=divisor)
        assert compiler.graph is not None
        assert compiler.facts is not None
        graphs.append(TracedGraph(facts=compiler.facts, ended_by=describe_break(graph_module), graph=compiler.graph))
        return graph_module.forward  # runs on fake tensors, so that code after a graph break is captured too

    def call(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = model(*args, **kwargs)
        return result if inputs.loss is None else inputs.loss(result)

    skeleton.module.train(train)
    result, stopped_by = None, None
    try:
        with _without_function_modes(), fake_mode, torch.set_grad_enabled(train), _apart(leaves):
            result = torch.compile(call, backend=backend, dynamic=dynamic)(skeleton.module, args, kwargs)
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, ZinfError):
            raise error.inner_exception from None
        raise
    except TorchRuntimeError as error:  # raised by the model itself while it is traced
        raise UnsupportedError(
            f"{name} cannot be called with such inputs; at {_where(error)} it raises {_reason(error)}"
        ) from error
    except (TorchDynamoException, *_DEPENDS_ON_VALUES) as error:
        stopped_by = f"{_where(error)}: {str(error).strip().splitlines()[0]}"
        if not graphs:
            raise UnsupportedError(
                f"{name} cannot be planned: its shapes or branches depend on values, which planning does not have "
                f"({stopped_by}); make them depend on shapes alone"
            ) from error
    finally:
        torch._C._dynamo.eval_frame.reset_code(call.__code__)  # otherwise every call counts as a recompilation
    return Trace(graphs=tuple(graphs), result=result, stopped_by=stopped_by)


def _keep_stages(
    graph_module: fx.GraphModule,
    inputs: Sequence[Tensor],
    in_rounds: RankInRounds,
    skeleton: Skeleton,
    leaves: Sequence[Tensor],
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return the graph of a rank's stages, from that of the model, and its inputs. ``leaves`` are those of a call."""
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    of_call, buffers = ({id(each) for each in tensors} for tensors in (leaves, skeleton.module.buffers()))
    anchors = {node.args[0] for node in graph.find_nodes(op="call_function", target=torch.ops.zinf.gather)}
    shared = set()
    for node, each in zip(placeholders, inputs, strict=True):
        if node in anchors or id(each) in buffers:
            shared.add(node.name)
        elif id(each) not in of_call or each.requires_grad:
            raise UnsupportedError(
                f"the graph input '{node.name}' is neither a buffer nor a tensor of the call that needs no gradient, and "
                "with schedule='rounds' every rank gets the inputs of all; leave schedule out (ZeRO stage 3)"
            )
    given = RoundInputs(
        owners={number: in_rounds.owners[skeleton.param_names[number]] for number in find_gathered(graph)},
        shared=shared,
        rank=in_rounds.rank,
        num_ranks=in_rounds.num_ranks,
        own=frozenset(),
        has_grad=True,
        store_id=0,
    )
    of_rank = copy_graph_module(graph_module)  # Dynamo still uses the original
    work_in_rounds(of_rank, given)
    spread = [make_anchor(requires_grad=True)]
    for node, each in zip(placeholders, inputs, strict=True):
        if node.name in shared:
            spread.append(each)
        else:  # each rank's are a tensor of their own
            spread += (torch.empty_like(each) for _ in range(in_rounds.num_ranks))
    return of_rank, spread


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Disable modes such as ``with torch.device("meta")`` inside the block, in case the model is being built in one."""
    with ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield


@contextmanager
def _apart(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Give equal sizes one symbol, as they usually are one dimension, unless a batch size equals a sequence length."""
    sizes = [{leaf.shape[dim] for leaf in inputs if leaf.dim() > dim} for dim in range(_NUM_DYNAMIC_DIMS)]
    with torch.fx.experimental._config.patch(use_duck_shape=not sizes[0] & sizes[1]):  # type: ignore[attr-defined]  # made by torch
        yield


def _where(error: BaseException) -> str:
    """Return ``file:line`` of the model's code that raised an error: the last frame that is neither torch's nor ours."""
    ours = (torch.__path__[0], __file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    stack = getattr(error, "real_stack", None)
    frame = stack[-1] if stack else frames[-1] if frames else None
    return f"{frame.filename}:{frame.lineno}" if frame is not None else "its forward"


def _reason(error: TorchRuntimeError) -> str:
    """Return the model's own error, extracted from Dynamo's message."""
    lines = str(error).strip().splitlines()
    return next((line.partition("got ")[2] for line in lines if "got " in line), lines[0])


class _Keeper:
    """A compiler that keeps the joint graph, analyses splits of it, and compiles nothing."""

    def __init__(
        self,
        name: str,
        param_names: Mapping[int, str],
        policies: Sequence[ActivationPolicy],
        divide: Divide | None = None,
    ) -> None:
        self._division = None if divide is None else divide(param_names)
        self._name, self._param_names, self._policies = name, param_names, policies
        self._numbers: dict[str, int] = {}  # of segments, by structure
        self.graph: JointGraph | None = None
        self.facts: GraphFacts[Size] | None = None  # under the first policy

    def choose(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> CapturedGraph:
        """Analyse the split of every policy, with parameters in their own dtypes, and return the last one."""
        return self._keep(partition, self._policies, has_backward=True)

    def choose_inference(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> CapturedGraph:
        """Analyse a graph without backward, with parameters in their own dtypes."""
        return self._keep(partition, (ActivationPolicy.SAVE,), has_backward=False)

    def _keep(self, partition: Partition, policies: Sequence[ActivationPolicy], *, has_backward: bool) -> CapturedGraph:
        context = TracingContext.try_get()

        def partition_later(inputs: FormInputs) -> CapturedGraph:
            with tracing(context):  # the partitioner creates new tensors in this context's fake mode
                return partition(inputs)

        self.graph = JointGraph(
            partition_later,
            name=self._name,
            param_names=self._param_names,
            number_of=self._number_of,
            has_backward=has_backward,
            division=self._division if has_backward else None,
        )
        forms = [self.graph.split(policy) for policy in policies]
        self.facts = forms[0].facts
        assert forms[-1].captured is not None
        return forms[-1].captured

    def _number_of(self, segment: fx.GraphModule) -> int:
        return self._numbers.setdefault(describe_structure(segment.graph), len(self._numbers))

    def compile_forward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        """Return the graph unchanged; it is never called."""
        return _never_called

    def compile_backward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        """Return the graph unchanged; it is never called."""
        return _never_called


def _never_called(inputs: list[Any]) -> Sequence[Any]:
    raise AssertionError("planning does not run graphs")
