"""A shared trace equals the trace that a capture would make itself, and captures do not modify it."""

import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

import zinf_compile
from tests.support.shared_traces import SharedTraces, _identify_nodes
from zinf_compile.passes.capture import aot
from zinf_compile.passes.fx_edit import dump_graph

PLENTY = {"device_memory": "8MiB", "host_memory": "8MiB"}


class Net(nn.Module):
    """Two layers, one of them read twice, and a buffer."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("factor", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.drop(self.second(self.first(x)).relu() * self.factor)).square().mean()


class Checkpointed(Net):
    """A model whose graph has a subgraph."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.first, x, use_reentrant=False)
        return y.mean()


class WithConstant(Net):
    """A model whose trace has a tensor constant."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])).mean()


def _notes(node: fx.Node) -> list[str]:
    """Return the other metadata of a node, except for process-wide counters."""
    known = {name: value for name, value in node.meta.items() if name not in ("seq_nr", "ac_graph_id", "val")}
    return [f"{name}={value if isinstance(value, str | Enum | bool) else type(value)}" for name, value in known.items()]


def _collect_graphs(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Return a list that collects every graph that a function of capture gets, as text with parameters renumbered."""
    found: list[str] = []
    function = getattr(aot, name)

    def note(graph: fx.Graph) -> Any:
        values = [f"{node.name}: {node.meta.get('val')} {_notes(node)}" for node in graph.nodes]
        text = "\n".join([dump_graph(graph), *values])
        numbers: dict[str, str] = {}
        found.append(re.sub(r"\d{7,}", lambda hit: numbers.setdefault(hit[0], f"#{len(numbers)}"), text))
        return function(graph)

    monkeypatch.setattr(aot, name, note)
    return found


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects every graph that is to be split: nodes, values and metadata, parameters renumbered."""
    return _collect_graphs(monkeypatch, "find_narrow_reads")


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the forward and backward graphs of every split in the same way."""
    return _collect_graphs(monkeypatch, "set_missing_values")


@pytest.fixture
def traces() -> Iterator[SharedTraces]:
    traces = SharedTraces()
    with traces.sharing():
        yield traces


def train(model: nn.Module, x: Tensor | None = None, **options: Any) -> None:
    torch._dynamo.reset()
    zinf_compile.optimize(model, **{**PLENTY, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 6) if x is None else x).backward()
        optimizer.step()
    zinf_compile.close(model)


@pytest.mark.parametrize("model", [Net, pytest.param(Checkpointed, marks=pytest.mark.long)])
def test_what_is_shared_is_what_would_be_traced(
    model: type[nn.Module], traced: list[str], traces: SharedTraces
) -> None:
    for options in ({}, {"recompute": True}, {"device_memory": "3KiB", "tiles": False}, {}):
        train(model(), **options)
    assert (traces.num_traced, traces.num_shared) == (1, 3)
    with SharedTraces().sharing():
        train(model())
    first, *others = traced
    assert "zinf.gather(" in first
    assert others == [first] * 4


@pytest.mark.parametrize("options", [{}, {"recompute": True}])
def test_shared_splits_are_what_the_partitioner_returns(
    options: dict[str, Any], split: list[str], traces: SharedTraces
) -> None:
    train(Net(), **options)
    first, num_split = split.copy(), traces.num_split
    split.clear()
    train(Net(), **options)
    assert split == first
    assert traces.num_split == num_split > 0
    assert traces.num_splits_shared >= num_split


def frozen(model: nn.Module) -> None:
    model.get_parameter("second.bias").requires_grad_(False)


def without_bias(model: nn.Module) -> None:
    model.first = nn.Linear(6, 6, bias=False)


def strides(model: nn.Module) -> None:
    model.factor = torch.ones(6, 1).expand(6, 6)[0]


@pytest.mark.parametrize(
    "change",
    [
        frozen,
        *(pytest.param(each, marks=pytest.mark.long) for each in (nn.Module.eval, nn.Module.double, without_bias)),
        strides,
    ],
    ids=lambda change: change.__name__,
)
def test_another_graph_is_traced(change: Callable[[nn.Module], Any], traces: SharedTraces) -> None:
    train(Net())
    model = Net()
    change(model)
    train(model, torch.ones(3, 6, dtype=model.first.weight.dtype))
    assert (traces.num_traced, traces.num_shared) == (2, 0)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.ones(4, 6), id="batch"),
        pytest.param(torch.ones(6, 3).t(), id="strides", marks=pytest.mark.long),
        pytest.param(torch.ones(3, 6).requires_grad_(), id="gradient", marks=pytest.mark.long),
    ],
)
def test_another_input_is_traced(x: Tensor, traces: SharedTraces) -> None:
    train(Net())
    train(Net(), x)
    assert (traces.num_traced, traces.num_shared) == (2, 0)


def test_another_mode_is_traced(traces: SharedTraces) -> None:
    train(Net())
    with torch.autocast("cpu"):
        train(Net())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        train(Net())
    assert (traces.num_traced, traces.num_shared) == (3, 0)


def test_what_holds_constants_is_traced_each_time(traces: SharedTraces) -> None:
    train(WithConstant())
    train(WithConstant())
    assert traces.num_shared == 0


def test_sizes_that_change_are_traced_each_time(traced: list[str], traces: SharedTraces) -> None:
    for _ in range(2):
        x = torch.ones(3, 6)
        torch._dynamo.mark_dynamic(x, 0)
        train(Net(), x)
    assert len(traced) == 2
    assert (traces.num_traced, traces.num_shared) == (0, 0)


def test_a_size_that_is_unknown_inside_of_a_graph_only_is_traced_each_time() -> None:
    """As that of ``nonzero``: such sizes have no hash, which torch 2.11 met in models whose inputs are all fixed."""
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        known, unknown = torch.empty(3), torch.empty(shapes.create_unbacked_symint())
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = known
    inner = graph.call_function(torch.nonzero, (x,))
    inner.meta["example_value"] = known
    graph.output(inner)
    assert _identify_nodes(fx.GraphModule(nn.Module(), graph), {}) is not None
    inner.meta["example_value"] = unknown
    assert _identify_nodes(fx.GraphModule(nn.Module(), graph), {}) is None
