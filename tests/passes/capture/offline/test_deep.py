"""Deep models captured with only a few of their blocks get the same facts as when captured in full."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from examples.gpt import GPT, GPTConfig
from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.passes.analysis.repeats import NotRepeatedError, without_names
from zinf_compile.passes.capture.offline import deep as deep_module
from zinf_compile.passes.capture.offline.deep import trace_deep
from zinf_compile.passes.capture.offline.runs import find_runs, shorten_runs
from zinf_compile.passes.capture.offline.skeleton import make_skeleton
from zinf_compile.passes.capture.offline.trace import Inputs, Trace, TracedGraph, trace_model
from zinf_compile.passes.capture.splits import Form, other_forms
from zinf_compile.passes.planner.memory import recompute

POLICIES = tuple(ActivationPolicy)
# With segments, the blocks of this model do not read values at equal distances, so it is captured in full.
NOT_REPEATED = ("translator", ActivationPolicy.RECOMPUTE_MORE)
HARDWARE = load_hardware("laptop-16g")
LAYERS = 6
SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}


def gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    return GPT(GPTConfig(32, LAYERS, 32, 2, 8)), {"tokens": tokens, "targets": tokens}


class Reading(nn.Module):
    """A block that mixes one sequence into another, or into itself. Attention is covered by the other models."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.key, self.out = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        return x + self.out(self.norm(x) * self.key(read).tanh())


class Translator(nn.Module):
    """Two runs of blocks of different lengths. All blocks of the second read the result of the first, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32)
        self.encoder = nn.ModuleList(Reading() for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Reading() for _ in range(LAYERS + 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x, y = self.source(tokens), self.target(tokens)
        for block in self.encoder:
            x = block(x, x)
        read = self.norm(x)
        for block in self.decoder:
            y = block(y, read)
        return nn.functional.cross_entropy(self.head(y).flatten(0, 1), tokens.flatten())


def translator() -> tuple[nn.Module, dict[str, Tensor]]:
    return Translator(), {"tokens": torch.zeros(2, 8, dtype=torch.int64)}


def from_transformers(name: str, config: dict[str, Any]) -> Callable[[], tuple[nn.Module, dict[str, Tensor]]]:
    def make() -> tuple[nn.Module, dict[str, Tensor]]:
        transformers = pytest.importorskip("transformers")
        kind = getattr(transformers, name)
        ids = torch.zeros(2, 8, dtype=torch.int64)
        inputs = {"input_ids": ids, "labels": ids}
        return kind(kind.config_class(**config)), inputs

    return make


MODELS = {
    "gpt": gpt,
    "bert": from_transformers("BertForMaskedLM", {**SMALL, "num_attention_heads": 2}),
    "mixtral": from_transformers(  # its attention and norms are Llama's
        "MixtralForCausalLM", {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    ),
    "translator": translator,
}


def trace_whole(model: nn.Module, inputs: dict[str, Tensor]) -> TracedGraph:
    fake_mode = FakeTensorMode()
    skeleton = make_skeleton(model, fake_mode, compute_dtype=None)
    policies = (ActivationPolicy.SAVE, ActivationPolicy.RECOMPUTE_BLOCKS)
    trace = trace_model(
        skeleton, fake_mode, Inputs(kwargs=inputs), name="model", policies=policies, train=True, dynamic=False
    )
    (graph,) = trace.graphs
    return graph


def forms_of(graph: TracedGraph) -> list[Form]:
    """Return the graph under every policy."""
    saving = graph.graph.split(ActivationPolicy.SAVE)
    return [saving, *other_forms(graph.graph, saving, POLICIES[1:], HARDWARE, None)]


def deep(model: nn.Module, inputs: dict[str, Tensor]) -> Trace:
    return trace_deep(
        model,
        Inputs(kwargs=inputs),
        name="model",
        compute_dtype=None,
        policies=POLICIES,
        train=True,
        dynamic=False,
    )


@pytest.mark.parametrize(
    "kind", ["gpt", *(pytest.param(kind, marks=pytest.mark.long) for kind in MODELS if kind != "gpt")]
)
@pytest.mark.long
def test_facts_are_those_of_the_whole_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "MIN_BOUND_NBYTES", 1)  # these models are tiny
    model, inputs = MODELS[kind]()
    trace = deep(model, inputs)
    (note,) = trace.notes
    assert note.count(" blocks of ") == (2 if kind == "translator" else 1)
    assert "are alike" in note
    deep_graph, whole_graph = trace.graphs[0], trace_whole(model, inputs)
    forms, whole_forms = forms_of(deep_graph), forms_of(whole_graph)
    assert [form.facts.policy for form in forms] == list(POLICIES)
    segmented = []
    for form, whole in zip(forms, whole_forms, strict=True):
        assert without_names(form.facts) == without_names(whole.facts)
        if (kind, form.facts.policy) == NOT_REPEATED:
            with pytest.raises(NotRepeatedError):
                deep_graph.graph.segment(form, frozenset())
            continue
        segmented.append(deep_graph.graph.segment(form, frozenset()))
        whole_segmented = whole_graph.graph.segment(whole, frozenset())
        assert without_names(segmented[-1].facts) == without_names(whole_segmented.facts)
    assert any(op.op == "zinf.run_segment.default" for op in segmented[0].facts.ops)
    for facts in (form.facts for form in (*forms, *segmented)):
        # Under recompute, the graphs of forward and backward have nodes of the same name.
        names = [(value.name, facts.schedule.phase_of(value.live.start)) for value in facts.values]
        assert len(set(names)) == len(names)


class Chain(nn.Module):
    """Sequential linear layers; ``every`` is called between two of them."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Counting(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for index in range(8):
            x = self.layers[index](x)
        return x


class Dense(Chain):
    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(layer(torch.stack(seen).sum(0)))
        return seen[-1]


@pytest.mark.parametrize("kind", [Counting, Dense])
def test_what_cannot_be_expanded_is_captured_whole(kind: type[Chain]) -> None:
    model, inputs = kind(), {"x": torch.zeros(2, 8)}
    trace = deep(model, inputs)
    (note,) = trace.notes
    assert note.startswith("The 8 blocks of layers were captured one by one: ")
    assert trace.graphs == (trace_whole(model, inputs),)


def test_many_blocks_are_looked_at_before_they_are_captured_again() -> None:
    class Refused(Exception):  # noqa: N818  # not an error
        pass

    looked_at: list[TracedGraph] = []

    def look(graph: TracedGraph) -> None:
        looked_at.append(graph)
        raise Refused

    def capture(num_blocks: int, **look_at: Callable[[TracedGraph], None]) -> Trace:
        return trace_deep(
            Chain(num_blocks),
            Inputs(kwargs={"x": torch.zeros(2, 8)}),
            name="model",
            compute_dtype=None,
            policies=POLICIES,
            train=True,
            dynamic=False,
            **look_at,
        )

    assert capture(31, look_at_unchecked=look).graphs[0].facts.num_ticks > 31
    assert not looked_at
    with mock.patch.object(deep_module, "trace_model", wraps=trace_model) as captured:
        with pytest.raises(Refused):
            capture(32, look_at_unchecked=look)
        assert captured.call_count == 1
        (confirmed,) = capture(32).graphs
        assert captured.call_count == 3
    (unchecked,) = looked_at
    assert unchecked.facts == confirmed.facts
    for policy in (ActivationPolicy.SAVE, ActivationPolicy.RECOMPUTE_BLOCKS):
        assert unchecked.graph.split(policy).facts == confirmed.graph.split(policy).facts


def test_runs_are_found_and_cut_short() -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(nn.Linear(8, 8, bias=False) for _ in range(7)), nn.ReLU(), nn.Linear(8, 2))
    (run,) = find_runs(model, longer_than=5)
    assert (run.container, run.first, run.num_blocks) == ("", 1, 7)
    shorten_runs(model, [run], 4)
    assert [type(module).__name__ for module in model] == ["Linear"] * 5 + ["ReLU", "Linear"]
    assert model[6].out_features == 2


def test_blocks_that_differ_or_share_parameters_are_no_run() -> None:
    def runs(change: Callable[[nn.ModuleList], object]) -> list[int]:
        model = Chain()
        change(model.layers)
        return [run.num_blocks for run in find_runs(model, longer_than=1)]

    def share(layers: nn.ModuleList) -> None:
        layers[3].weight = layers[0].weight  # type: ignore[assignment,union-attr]

    assert runs(lambda layers: None) == [8]
    assert runs(lambda layers: setattr(layers[3], "scale", 2.0)) == [3, 4]
    assert runs(lambda layers: [setattr(layer, "index", index) for index, layer in enumerate(layers)]) == [8]
    assert runs(lambda layers: [setattr(layer, "index", index**2) for index, layer in enumerate(layers)]) == [2]
    assert runs(lambda layers: layers[5].requires_grad_(False)) == [5, 2]
    assert runs(share) == [2, 4]
