"""A skeleton to facts: Dynamo and AOTAutograd on fake tensors, as at run time, with nobody to run what they make."""

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

from zinf_compile.errors import UnsupportedError, ZinfError
from zinf_compile.facts import GraphFacts
from zinf_compile.passes.analysis.collect import CapturedGraph, analyze_graph
from zinf_compile.passes.capture import (
    BoxedCallable,
    Partition,
    compile_graph,
    describe_break,
    refuse_writes_to_parameters,
)
from zinf_compile.passes.contract import JointInputs
from zinf_compile.passes.offline.skeleton import Skeleton, as_fake
from zinf_compile.sizes import Size
from zinf_compile.terms import ActivationPolicy

_DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_NUM_DYNAMIC_DIMS = 2  # of an input: batch and sequence


# Returns a torch-level graph that reads some parameters by tiles, and the numbers of those. It is given the names of
# parameters by their numbers, and adds those of tiles.
TileGraph = Callable[[fx.GraphModule, dict[int, str]], tuple[fx.GraphModule, frozenset[int]]]


def leave_whole(graph_module: fx.GraphModule, _: dict[int, str]) -> tuple[fx.GraphModule, frozenset[int]]:
    """Return the graph as it is, without tiles."""
    return graph_module, frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a model is called with; ``loss`` is called with what it returns, if there is one."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGraph:
    """One captured graph: its facts under each policy asked for, the first alone if there is no backward."""

    candidates: tuple[GraphFacts[Size], ...]
    ended_by: str | None  # where and why Dynamo ended it early: ``file:line: reason``
    # Its facts when it is split in another way; None if it has no backward.
    split: Callable[[JointInputs], GraphFacts[Size]] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All graphs of one call, and what the call returned, as fake tensors; ``stopped_by`` says why the rest is missing."""

    graphs: tuple[TracedGraph, ...]
    result: Any
    stopped_by: str | None
    notes: tuple[str, ...] = ()  # on how it was had


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
) -> Trace:
    """Return the graphs that one call of the skeleton is captured as, each as ``tile`` makes it.

    With ``dynamic``, the first two dimensions of every input are symbols. Raises UnsupportedError where nothing could be
    captured, since the model's shapes or branches depend on values, or it cannot be traced.
    """
    with fake_mode:
        as_input = functools.cache(as_fake)  # what is passed twice is one input
        args, kwargs = pytree.tree_map_only(Tensor, as_input, (inputs.args, dict(inputs.kwargs)))
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if dynamic:
        for leaf in leaves:
            torch._dynamo.mark_static(leaf, list(range(_NUM_DYNAMIC_DIMS, leaf.dim())))
    graphs: list[TracedGraph] = []

    def backend(graph_module: fx.GraphModule, graph_inputs: Sequence[Tensor]) -> Callable[..., Any]:
        refuse_writes_to_parameters(graph_module)
        facts = _Facts(f"{name} graph {len(graphs)}", skeleton.param_names, policies)
        tiled, tiles = tile(graph_module, skeleton.param_names)
        compile_graph(tiled, graph_inputs, facts, added_at_home=tiles)
        ended_by = describe_break(graph_module)
        graphs.append(TracedGraph(candidates=tuple(facts.candidates), ended_by=ended_by, split=facts.split))
        return graph_module.forward  # on fake tensors, so that what comes after a graph break is captured too

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
    except TorchRuntimeError as error:  # what the model itself raises when it is traced
        raise UnsupportedError(
            f"{name} cannot be called with such inputs; at {_where(error)} it raises {_reason(error)}"
        ) from error
    except (TorchDynamoException, *_DEPENDS_ON_VALUES) as error:
        stopped_by = f"{_where(error)}: {str(error).strip().splitlines()[0]}"
        if not graphs:
            raise UnsupportedError(
                f"{name} cannot be planned: what it computes depends on values, which planning does not have "
                f"({stopped_by}); make shapes and branches depend on shapes alone"
            ) from error
    finally:
        torch._C._dynamo.eval_frame.reset_code(call.__code__)  # else every call counts as a recompilation of it
    return Trace(graphs=tuple(graphs), result=result, stopped_by=stopped_by)


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Leave modes such as ``with torch.device("meta")`` inside of the block, in which the model may have been built."""
    with ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield


@contextmanager
def _apart(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Give equal sizes one symbol, as they are mostly one dimension; unless a batch is as long as a sequence."""
    sizes = [{leaf.shape[dim] for leaf in inputs if leaf.dim() > dim} for dim in range(_NUM_DYNAMIC_DIMS)]
    with torch.fx.experimental._config.patch(use_duck_shape=not sizes[0] & sizes[1]):  # type: ignore[attr-defined]  # made by torch
        yield


def _where(error: BaseException) -> str:
    """Return ``file:line`` of the model's code that an error came out of: the last that is neither torch's nor ours."""
    ours = (torch.__path__[0], __file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    stack = getattr(error, "real_stack", None)
    frame = stack[-1] if stack else frames[-1] if frames else None
    return f"{frame.filename}:{frame.lineno}" if frame is not None else "its forward"


def _reason(error: TorchRuntimeError) -> str:
    """Return what was raised in the model, of all that Dynamo says about it."""
    lines = str(error).strip().splitlines()
    return next((line.partition("got ")[2] for line in lines if "got " in line), lines[0])


class _Facts:
    """A compiler that analyses what is captured, and compiles nothing."""

    def __init__(self, name: str, param_names: Mapping[int, str], policies: Sequence[ActivationPolicy]) -> None:
        self._name, self._param_names, self._policies = name, param_names, policies
        self.candidates: list[GraphFacts[Size]] = []
        self.split: Callable[[JointInputs], GraphFacts[Size]] | None = None

    def choose(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> CapturedGraph:
        """Analyse the split of every policy, with parameters in the dtypes they have, and return the last."""
        splits = [partition(JointInputs(policy=policy)) for policy in self._policies]
        self.candidates = [self._analyze(split) for split in splits]
        context = TracingContext.try_get()

        def split_later(inputs: JointInputs) -> GraphFacts[Size]:
            with tracing(context):  # where the partitioner finds the fake mode that it makes new tensors in
                return self._analyze(partition(inputs))

        self.split = split_later
        return splits[-1]

    def choose_inference(self, partition: Partition, reads: Mapping[int, torch.dtype]) -> CapturedGraph:
        """Analyse a graph without backward, with parameters in the dtypes they have."""
        captured = partition(JointInputs(policy=ActivationPolicy.SAVE))
        self.candidates = [self._analyze(captured)]
        return captured

    def compile_forward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        """Return the graph as it is; nobody calls it."""
        return _never_called

    def compile_backward(self, graph_module: fx.GraphModule) -> BoxedCallable:
        """Return the graph as it is; nobody calls it."""
        return _never_called

    def _analyze(self, captured: CapturedGraph) -> GraphFacts[Size]:
        return analyze_graph(captured, name=self._name, param_names=self._param_names)


def _never_called(inputs: list[Any]) -> Sequence[Any]:
    raise AssertionError("planning does not run graphs")
