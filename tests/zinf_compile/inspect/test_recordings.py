"""``record``: what a model did, in the lanes of the prediction. It is complete and leaves no hooks behind."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zinf_compile
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Phase

WIDTH = 256


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    """Return a model that streams its weights from nvme and has taken two steps."""
    torch.manual_seed(0)
    built = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))
    made = zinf_compile.optimize(built, device_memory="1MiB", host_memory="2MiB", nvme=tmp_path)
    optimizer = torch.optim.AdamW(made.parameters())
    made.optimizer = optimizer
    for _ in range(2):
        step(made)
    zinf_compile.synchronize(made)
    yield made
    zinf_compile.close(made)


def step(model: nn.Module) -> None:
    model(torch.ones(8, WIDTH)).square().mean().backward()
    model.optimizer.step()
    model.optimizer.zero_grad()


def test_all_that_moves_and_all_waits_are_recorded(model: nn.Module) -> None:
    before = zinf_compile.report(model)
    with zinf_compile.record(model) as recording:
        step(model)
        assert recording.events == ()
    after = zinf_compile.report(model)
    moved = Counter[str]()
    for event in recording.events:
        moved[event.lane] += event.nbytes
    for route in after.moved:
        if "nvme" in route.route:
            had = next(each.nbytes for each in before.moved if each.route == route.route)
            assert moved[route.route] == route.nbytes - had > 0
    waited = sum(each.seconds for each in after.stalls) - sum(each.seconds for each in before.stalls)
    assert sum(stall.seconds for stall in recording.stalls) == pytest.approx(waited)
    stalls = recording.longest_stalls()
    assert [each.seconds for each in stalls] == sorted((each.seconds for each in stalls), reverse=True)
    assert sum(each.count for each in stalls) == len(recording.stalls)


def test_compute_and_its_waits_are_the_phases(model: nn.Module) -> None:
    with zinf_compile.record(model) as recording:
        step(model)
    compute = sorted(
        [*(event for event in recording.events if event.lane == "compute"), *recording.stalls],
        key=lambda event: event.start_seconds,
    )
    assert min(event.start_seconds for event in recording.events) == 0
    assert all(any(str(phase) in event.name for event in compute) for phase in Phase)
    assert all(one.end_seconds <= other.start_seconds for one, other in pairwise(compute))
    assert any(event.name.startswith("2.0.weight") and event.name.endswith("(backward)") for event in compute)
    updated = {event.name for event in recording.events if event.lane == "updates"}
    assert updated == {name for name, _ in model.named_parameters()}


def test_prediction_and_measurement_open_side_by_side(model: nn.Module, tmp_path: Path) -> None:
    with zinf_compile.record(model) as recording:
        step(model)
    recording.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {1: "plan Sequential graph 0 (predicted)", 2: "Sequential (measured)"}
    lanes: dict[int, set[str]] = defaultdict(set)
    for event in events:
        if event["name"] == "thread_name":
            lanes[event["pid"]].add(event["args"]["name"].partition(" (")[0])
    assert lanes[2] >= {"compute", "updates", "nvme -> device", "nvme -> host", "host -> nvme"}
    assert lanes[1] & lanes[2] >= {"compute", "nvme -> device"}
    in_lane: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            in_lane[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert all(one[1] <= other[0] + 1e-3 for each in in_lane.values() for one, other in pairwise(sorted(each)))


def test_a_plan_names_modules_as_the_model_does(model: nn.Module) -> None:
    (plan,) = zinf_compile.report(model).plans
    paths = {op.module for op in plan.request.candidates[0].ops} - {"model"}  # "model" stands for ops in no block
    assert paths == {name for name, _ in model.named_children()}


def test_a_profiler_shows_ranges_by_parameter(model: nn.Module) -> None:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiled:
        step(model)
        zinf_compile.synchronize(model)
    names = {event.name for event in profiled.events()}
    assert {"zinf forward", "zinf backward", "zinf step", "zinf update 0.0.weight"} <= names
    assert any(name.startswith("zinf host -> device 2.0.weight") for name in names)


def test_a_recording_ends_with_its_block(model: nn.Module) -> None:
    def fail() -> None:
        step(model)
        raise ValueError("the user's")

    with pytest.raises(ValueError, match="the user's"), zinf_compile.record(model) as recording:
        fail()
    assert recording.events
    num_events = len(recording.events)
    step(model)
    assert len(recording.events) == num_events
    again = pytest.raises(ConfigError, match="is being recorded already")
    with zinf_compile.record(model), again, zinf_compile.record(model):
        pass
    with pytest.raises(ConfigError, match="has no parameter in a store"), zinf_compile.record(nn.Linear(2, 2)):
        pass
    with pytest.raises(ConfigError, match=r"trace\.json"):
        recording.to_chrome_trace("/no/such/folder/trace.json")


def test_the_graphs_of_a_step_share_one_step(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x)
            torch._dynamo.graph_break()
            return self.two(x)

    made = zinf_compile.optimize(Broken(), device_memory="1MiB", host_memory="2MiB", nvme=tmp_path)
    made.optimizer = torch.optim.AdamW(made.parameters())
    step(made)
    with zinf_compile.record(made) as recording:
        step(made)
    recording.to_chrome_trace(tmp_path / "trace.json")
    zinf_compile.close(made)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "process_name" for event in events) == 3  # two graphs, and the measured run
    updates: dict[int, set[str]] = {1: set(), 2: set()}  # one may be there twice: what its last step left, and its own
    for event in events:
        if event["pid"] in updates and event["ph"] == "X" and event["name"].startswith("optimizer ("):
            updates[event["pid"]].add(event["name"])
    assert updates[1] | updates[2] == {f"optimizer ({name})" for name, _ in Broken().named_parameters()}
    assert updates[1].isdisjoint(updates[2])
