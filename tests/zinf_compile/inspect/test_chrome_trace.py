"""The Chrome trace is well formed, agrees with the simulation, and has no overlap within a lane."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from zinf_compile.inspect.chrome_trace import chrome_trace, save_chrome_trace
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.simulator.simulate import simulate


@pytest.fixture(params=["small_plan", "layered_plan"])
def plan(request: pytest.FixtureRequest) -> Plan:
    chosen: Plan = request.getfixturevalue(request.param)
    return chosen


def events_of(plan: Plan, kind: str) -> list[Any]:
    trace: Any = chrome_trace(plan)
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def lane_names(plan: Plan) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events_of(plan, "M") if event["name"] == "thread_name"}


def test_every_event_is_well_formed(plan: Plan) -> None:
    trace: Any = chrome_trace(plan)
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C"}
    lanes = lane_names(plan)
    for event in events_of(plan, "X"):
        assert event["pid"] == 1
        assert event["tid"] in lanes
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["name"]


def test_lanes_are_named_compute_first(small_plan: Plan) -> None:
    assert lane_names(small_plan) == {
        0: "compute",
        1: "device -> host",
        2: "device -> nvme",
        3: "host -> nvme",
        4: "nvme -> device",
        5: "nvme -> host",
    }
    (process,) = (event for event in events_of(small_plan, "M") if event["name"] == "process_name")
    assert process["args"] == {"name": "plan small (predicted)"}


def test_events_of_one_lane_do_not_overlap_to_the_nanosecond(plan: Plan) -> None:
    lanes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in events_of(plan, "X"):
        start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
        lanes[event["tid"]].append((start, start + length))
    for spans in lanes.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_stalls_are_events_of_the_compute_lane(small_plan: Plan) -> None:
    stalls = [event for event in events_of(small_plan, "X") if event["cat"] == "stall"]
    assert [(event["tid"], event["name"], event["ts"], event["dur"]) for event in stalls] == [
        (0, "stall: layers.0", 1e6, 1e6),
        (0, "stall: layers.1", 8e6, 1e6),
        (0, "stall: gradient layers.0.weight", 14e6, 5e6),
        (0, "stall: optimizer state", 31e6, 28e6),
    ]


def test_moves_carry_their_bytes(plan: Plan) -> None:
    moves = [event for event in events_of(plan, "X") if event["cat"] == "transfer"]
    simulated = [event.nbytes for event in simulate(plan).events if event.lane != "compute"]
    assert [event["args"]["nbytes"] for event in moves] == simulated


def test_every_tier_has_a_counter_to_the_end(plan: Plan) -> None:
    counters: dict[str, list[Any]] = defaultdict(list)
    for event in events_of(plan, "C"):
        counters[event["name"]].append(event)
    assert counters.keys() == {f"{tier} bytes" for tier in Tier}
    end = round(simulate(plan).step_seconds * 1e9) / 1000
    for tier in Tier:
        points = counters[f"{tier} bytes"]
        assert points[0]["ts"] == 0
        assert points[-1]["ts"] == end
        assert max(point["args"]["nbytes"] for point in points) == plan.tier(tier).predicted_peak


def test_the_file_is_json_and_written_whole(small_plan: Plan, tmp_path: Path) -> None:
    save_chrome_trace(small_plan, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == chrome_trace(small_plan)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    with pytest.raises(ConfigError, match="the trace cannot be written to"):
        save_chrome_trace(small_plan, tmp_path / "absent" / "trace.json")
