"""Deep models in seconds: runs of alike blocks are captured cut short, their facts expanded where that is shown right."""

import functools
from collections.abc import Sequence
from dataclasses import replace

from torch._dynamo.exc import TorchDynamoException
from torch._subclasses import FakeTensorMode
from torch.nn import Module

from zinf_compile.errors import UnsupportedError
from zinf_compile.facts import GraphFacts
from zinf_compile.passes.analysis.repeats import NUM_TEMPLATES, NotRepeatedError, Run, expand_runs, without_names
from zinf_compile.passes.offline.runs import find_runs, shorten_runs
from zinf_compile.passes.offline.skeleton import make_skeleton
from zinf_compile.passes.offline.trace import Inputs, TileGraph, Trace, TracedGraph, leave_whole, trace_model
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
    train: bool,
    dynamic: bool,
    tile: TileGraph = leave_whole,
) -> Trace:
    """Return the graphs of one call of ``model``, which stays as it is, each as ``tile`` makes it.

    Runs of more than five alike blocks are captured with four of each, and once more with five: if expanding the facts of
    the first by a block gives those of the second, the whole model's are had the same way. Else the whole is captured. The
    trace's notes say which. Raises UnsupportedError for a model that cannot be captured.
    """

    def trace(runs: Sequence[Run], num_blocks: int) -> Trace:
        fake_mode = FakeTensorMode()
        edit = functools.partial(shorten_runs, runs=runs, num_blocks=num_blocks)
        skeleton = make_skeleton(model, fake_mode, compute_dtype=compute_dtype, edit=edit)
        return trace_model(
            skeleton, fake_mode, inputs, name=name, policies=policies, train=train, dynamic=dynamic, tile=tile
        )

    runs = find_runs(model, longer_than=NUM_TEMPLATES + 1)
    if not runs:
        return trace(runs, 0)
    where = " and ".join(f"{run.num_blocks} blocks of {run.container or 'the model'}" for run in runs)
    try:
        short = trace(runs, NUM_TEMPLATES)
        candidates = _expand(_only_graph(short), _only_graph(trace(runs, NUM_TEMPLATES + 1)), runs)
    except (NotRepeatedError, *_MISSED) as error:
        reason = str(error).strip().partition("\n")[0]
        return replace(trace((), 0), notes=(f"The {where} were captured one by one: {reason}.",))
    note = f"The {where} are alike: {NUM_TEMPLATES} of each were captured, and one more adds what it should."
    return replace(short, graphs=(TracedGraph(candidates=candidates, ended_by=None),), notes=(note,))


def _only_graph(trace: Trace) -> tuple[GraphFacts[Size], ...]:
    if trace.stopped_by is not None or len(trace.graphs) != 1 or trace.graphs[0].ended_by is not None:
        raise NotRepeatedError(f"a shorter model is captured as {len(trace.graphs)} graphs")
    return trace.graphs[0].candidates


def _expand(
    short: Sequence[GraphFacts[Size]], longer: Sequence[GraphFacts[Size]], runs: Sequence[Run]
) -> tuple[GraphFacts[Size], ...]:
    """Return the facts of the whole model; NotRepeatedError unless those of the longer one are had in the same way."""
    for facts, expected in zip(short, longer, strict=True):
        if without_names(expand_runs(facts, runs, [NUM_TEMPLATES + 1] * len(runs))) != without_names(expected):
            raise NotRepeatedError(f"with a block more, the graph that is to {facts.policy} is another")
    depths = [run.num_blocks for run in runs]
    return tuple(expand_runs(facts, runs, depths) for facts in short)
