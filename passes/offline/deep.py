"""Deep models in seconds: runs of alike blocks are captured cut short, their facts expanded where that is shown right."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch._dynamo.exc import TorchDynamoException
from torch._subclasses import FakeTensorMode
from torch.nn import Module

from zinf_compile.errors import UnsupportedError
from zinf_compile.facts import GraphFacts, at_sizes
from zinf_compile.hardware import Hardware
from zinf_compile.passes.analysis.repeats import NUM_TEMPLATES, NotRepeatedError, Run, expand_runs, without_names
from zinf_compile.passes.contract import JointInputs
from zinf_compile.passes.offline.runs import dropped_blocks, find_runs, shorten_runs
from zinf_compile.passes.offline.skeleton import make_skeleton
from zinf_compile.passes.offline.trace import Inputs, TileGraph, Trace, TracedGraph, leave_whole, trace_model
from zinf_compile.passes.planning.recompute import Kind, ops_made_again, policy_levels
from zinf_compile.sizes import Size
from zinf_compile.terms import ActivationPolicy

# What a model may raise that counts its blocks, when some are missing.
_MISSED = (
    UnsupportedError,
    TorchDynamoException,
    LookupError,
    ValueError,
    AttributeError,
    AssertionError,
    RuntimeError,
)


def trace_deep(
    model: Module,
    inputs: Inputs,
    *,
    name: str,
    compute_dtype: str | None,
    policies: Sequence[ActivationPolicy],
    hardware: Hardware,
    train: bool,
    dynamic: bool,
    tile: TileGraph = leave_whole,
    look_at_short: Callable[[TracedGraph], None] = lambda _: None,
) -> Trace:
    """Return the graphs of one call of ``model``, which stays as it is, each as ``tile`` makes it.

    ``look_at_short`` is given the graph that has few of the blocks before any more is done, if there is one: it may raise a
    CapacityError.

    ``hardware`` tells what its values cost to make again, for policies by value; where none is cheap, a graph has no such
    candidates.

    Runs of more than five alike blocks are captured with four of each, and once more with five: if expanding the facts of
    the first by a block gives those of the second, the whole model's are had the same way. Else the whole is captured. The
    trace's notes say which. Raises UnsupportedError for a model that cannot be captured.
    """

    def trace(runs: Sequence[Run], num_blocks: int) -> Trace:
        fake_mode = FakeTensorMode()
        edit = functools.partial(shorten_runs, runs=runs, num_blocks=num_blocks)
        dropped = list(dropped_blocks(model, runs, num_blocks))
        skeleton = make_skeleton(model, fake_mode, compute_dtype=compute_dtype, without=dropped, edit=edit)
        given = [policy for policy in policies if not policy.is_by_value]
        return trace_model(
            skeleton, fake_mode, inputs, name=name, policies=given, train=train, dynamic=dynamic, tile=tile
        )

    runs = find_runs(model, longer_than=NUM_TEMPLATES + 1)
    by_value = any(policy.is_by_value for policy in policies)

    def trace_whole() -> Trace:
        whole = trace((), 0)
        if not by_value:
            return whole
        return replace(whole, graphs=tuple(with_values(graph, hardware) for graph in whole.graphs))

    if not runs:
        return trace_whole()
    where = " and ".join(f"{run.num_blocks} blocks of {run.container or 'the model'}" for run in runs)
    try:
        short = trace(runs, NUM_TEMPLATES)
        look_at_short(_only_graph(short))
        graphs = _only_graph(short), _only_graph(trace(runs, NUM_TEMPLATES + 1))
        pairs = zip(*(graph.candidates for graph in graphs), strict=True)
        candidates = tuple(_expand(short_facts, longer_facts, runs) for short_facts, longer_facts in pairs)
        if by_value:
            candidates = _with_values_of_both(graphs, candidates, runs, hardware)
    except (NotRepeatedError, *_MISSED) as error:
        reason = str(error).strip().partition("\n")[0]
        return replace(trace_whole(), notes=(f"The {where} were captured one by one: {reason}.",))
    note = f"The {where} are alike: {NUM_TEMPLATES} of each were captured, and one more adds what it should."
    return replace(short, graphs=(TracedGraph(candidates=candidates, ended_by=None),), notes=(note,))


def _only_graph(trace: Trace) -> TracedGraph:
    if trace.stopped_by is not None or len(trace.graphs) != 1 or trace.graphs[0].ended_by is not None:
        raise NotRepeatedError(f"a shorter model is captured as {len(trace.graphs)} graphs")
    return trace.graphs[0]


def _expand(short: GraphFacts[Size], longer: GraphFacts[Size], runs: Sequence[Run]) -> GraphFacts[Size]:
    """Return the facts of the whole model; NotRepeatedError unless those of the longer one are had in the same way."""
    if without_names(expand_runs(short, runs, [NUM_TEMPLATES + 1] * len(runs))) != without_names(longer):
        raise NotRepeatedError(f"with a block more, the graph that is to {short.policy} is another")
    return expand_runs(short, runs, [run.num_blocks for run in runs])


def with_values(graph: TracedGraph, hardware: Hardware) -> TracedGraph:
    """Return the graph with a candidate more for each policy by value, behind that which saves all."""
    if graph.split is None:
        return graph
    saving, *others = graph.candidates
    levels = policy_levels(at_sizes(saving), hardware)
    by_value = (_split(graph, policy, level.kinds) for policy, level in levels.items())
    return replace(graph, candidates=(saving, *by_value, *others))


def _with_values_of_both(
    graphs: Sequence[TracedGraph],
    expanded: tuple[GraphFacts[Size], ...],
    runs: Sequence[Run],
    hardware: Hardware,
) -> tuple[GraphFacts[Size], ...]:
    """Return the whole model's candidates with more, expanded likewise: what is cheap in the whole is made again."""
    if any(graph.split is None for graph in graphs):
        return expanded
    saving, *others = expanded
    by_value = []
    for policy, level in policy_levels(at_sizes(saving), hardware).items():
        short, longer = (_split(graph, policy, level.kinds) for graph in graphs)
        by_value.append(_expand(short, longer, runs))
    return (saving, *by_value, *others)


def _split(graph: TracedGraph, policy: ActivationPolicy, kinds: frozenset[Kind]) -> GraphFacts[Size]:
    assert graph.split is not None
    made_again = ops_made_again(at_sizes(graph.candidates[0]), kinds)
    return graph.split(JointInputs(policy=policy, made_again=made_again))
