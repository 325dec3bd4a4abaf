"""Captures deep models in seconds: it captures a few blocks of each run, expands their facts, and checks the result."""

import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses import FakeTensorMode
from torch.nn import Module

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.ir.facts import GraphFacts
from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.ir.sizes import Size
from zinf_compile.passes.analysis.repeats import (
    NUM_TEMPLATES,
    NotRepeatedError,
    Run,
    expand_runs,
    whole_name,
    without_names,
)
from zinf_compile.passes.capture.offline.runs import dropped_blocks, find_runs, shorten_runs
from zinf_compile.passes.capture.offline.skeleton import make_skeleton
from zinf_compile.passes.capture.offline.trace import (
    Divide,
    Inputs,
    RankInRounds,
    TileGraph,
    Trace,
    TracedGraph,
    leave_whole,
    trace_model,
)
from zinf_compile.passes.capture.splits import Form, Splitter
from zinf_compile.passes.planner.memory.recompute import Kind

# Blocks of each run in the two captures: the first is expanded, the second checks the expansion.
_DEPTHS = (NUM_TEMPLATES, NUM_TEMPLATES + 1)
# So many that it is worth asking whether the whole model fits before a second capture: that takes a second.
_MANY_BLOCKS = 32
# Errors of models that count their blocks, when some are missing.
_MISSED = (
    UnsupportedError,
    TorchDynamoException,
    LookupError,
    ValueError,
    AttributeError,
    AssertionError,
    RuntimeError,
)


class DeepGraph:
    """The graph of a deep model, from the graphs of two models with few of its blocks.

    Every form is computed for both: the facts of the first, expanded by one block, must equal those of the second. Before
    the second is captured there is nothing to compare with.
    """

    def __init__(
        self,
        graphs: Sequence[Splitter],
        runs: Sequence[Run],
        expanded: dict[int, tuple[GraphFacts[Size], GraphFacts[Size]]] | None = None,
    ) -> None:
        self._graphs, self._runs = graphs, runs
        self._plain: dict[ActivationPolicy, Form] = {}  # forms that were requested by policy alone
        # Facts of the first graph, and those of the whole model: by the id of the former.
        self._expanded = {} if expanded is None else expanded

    def confirmed_by(self, longer: Splitter) -> "DeepGraph":
        """Return the same graph, compared with that of a model with one more block."""
        return DeepGraph((*self._graphs, longer), self._runs, self._expanded)

    @property
    def has_backward(self) -> bool:
        """Return whether the graph is trained."""
        return self._graphs[0].has_backward

    def split(
        self,
        policy: ActivationPolicy,
        *,
        saving: Form | None = None,
        kinds: frozenset[Kind] = frozenset(),
        narrowed: Mapping[int, torch.dtype] | None = None,
    ) -> Form:
        """Return the graph split under a policy.

        Values of ``kinds`` that the form ``saving`` saves are recomputed. Gathers move the ``narrowed`` dtypes.
        """
        is_plain = not kinds and not narrowed
        if is_plain and policy in self._plain:
            return self._plain[policy]
        likes = [None] * len(self._graphs) if saving is None else saving.parts
        with _as_not_repeated():
            form = self._expand(
                [
                    graph.split(policy, saving=like, kinds=kinds, narrowed=narrowed)
                    for graph, like in zip(self._graphs, likes, strict=True)
                ]
            )
        if is_plain:
            self._plain[policy] = form
        return form

    def segment(self, form: Form, apart: Container[str]) -> Form:
        """Return a form of the graph in segments, none of which reads two parameters of those ``apart``, by name."""
        with _as_not_repeated():
            return self._expand(
                [
                    graph.segment(part, _WholeNames(apart, self._runs, depth))
                    for graph, part, depth in zip(self._graphs, form.parts, _DEPTHS, strict=True)
                ]
            )

    def _expand(self, parts: Sequence[Form]) -> Form:
        """Return the form of the whole model; NotRepeatedError unless expanding also gives the facts of a longer one."""
        short = parts[0].facts
        for longer in parts[1:]:
            expanded = expand_runs(short, self._runs, [_DEPTHS[1]] * len(self._runs))
            if without_names(expanded) != without_names(longer.facts):
                raise NotRepeatedError(f"with one more block, the graph under policy {short.policy} is not as expected")
        if id(short) not in self._expanded:
            self._expanded[id(short)] = short, expand_runs(short, self._runs, [run.num_blocks for run in self._runs])
        _, facts = self._expanded[id(short)]
        return Form(facts=facts, narrowed=parts[0].narrowed, parts=tuple(parts))


class _WholeNames:
    """The names in a model with few blocks that stand for given names of the whole model."""

    def __init__(self, names: Container[str], runs: Sequence[Run], depth: int) -> None:
        self._names, self._runs, self._depth = names, runs, depth

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and whole_name(name, self._runs, self._depth) in self._names


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
    look_at_short: Callable[[TracedGraph], None] = lambda _: None,
    look_at_unchecked: Callable[[TracedGraph], None] = lambda _: None,
    not_repeated: str | None = None,
    in_rounds: RankInRounds | None = None,
    divide: Divide | None = None,
) -> Trace:
    """Return the graphs of one call of ``model``, each as ``tile`` transforms it; the model is not changed.

    ``look_at_short`` is called with the graph that has few of the blocks, if there is one, before anything else is
    done, and ``look_at_unchecked``, if there are many blocks, with the graph of the whole model, before capturing one
    block more has confirmed it. Both may raise a CapacityError.

    Runs of more than five identical blocks are captured with four blocks each, and once more with five. If expanding
    the first facts by one block gives the second, the whole model's facts are expanded in the same way; otherwise the
    whole model is captured, as it is for a rank ``in_rounds``. The trace's notes say which. Each form of the deep graph is
    checked in this way when it is requested, and raises NotRepeatedError if the check fails. ``not_repeated`` is why the
    whole model is to be captured.

    Raises UnsupportedError for a model that cannot be captured.
    """

    def trace(runs: Sequence[Run], num_blocks: int) -> Trace:
        fake_mode = FakeTensorMode()
        edit = functools.partial(shorten_runs, runs=runs, num_blocks=num_blocks)
        dropped = list(dropped_blocks(model, runs, num_blocks))
        skeleton = make_skeleton(model, fake_mode, compute_dtype=compute_dtype, without=dropped, edit=edit)
        return trace_model(
            skeleton,
            fake_mode,
            inputs,
            name=name,
            policies=given,
            train=train,
            dynamic=dynamic,
            tile=tile,
            in_rounds=in_rounds,
            divide=divide,
        )

    given = [policy for policy in policies if not policy.is_by_value]
    runs = find_runs(model, longer_than=_DEPTHS[1]) if in_rounds is None else ()
    if not runs:
        return trace((), 0)
    where = " and ".join(f"{run.num_blocks} blocks of {run.container or 'the model'}" for run in runs)
    try:
        if not_repeated is not None:
            raise NotRepeatedError(not_repeated)
        short = trace(runs, _DEPTHS[0])
        look_at_short(_only_graph(short))
        unchecked = DeepGraph([_only_graph(short).graph], runs)
        if sum(run.num_blocks for run in runs) >= _MANY_BLOCKS:
            facts = unchecked.split(given[0] if unchecked.has_backward else ActivationPolicy.SAVE).facts
            look_at_unchecked(TracedGraph(facts=facts, ended_by=None, graph=unchecked))
        graph = unchecked.confirmed_by(_only_graph(trace(runs, _DEPTHS[1])).graph)
        of_policies = [graph.split(each).facts for each in (given if graph.has_backward else (ActivationPolicy.SAVE,))]
    except (NotRepeatedError, *_MISSED) as error:
        reason = str(error).strip().partition("\n")[0]
        return replace(trace((), 0), notes=(f"The {where} were captured one by one: {reason}.",))
    note = f"The {where} are alike: {NUM_TEMPLATES} of each were captured, and capturing one more confirmed the result."
    return replace(short, graphs=(TracedGraph(facts=of_policies[0], ended_by=None, graph=graph),), notes=(note,))


def _only_graph(trace: Trace) -> TracedGraph:
    if trace.stopped_by is not None or len(trace.graphs) != 1 or trace.graphs[0].ended_by is not None:
        raise NotRepeatedError(f"a shorter model is captured as {len(trace.graphs)} graphs")
    return trace.graphs[0]


@contextmanager
def _as_not_repeated() -> Iterator[None]:
    """Raise errors that may come from missing blocks as NotRepeatedError: the whole model may not have them."""
    try:
        yield
    except _MISSED as error:
        raise NotRepeatedError(str(error).strip().partition("\n")[0]) from error
