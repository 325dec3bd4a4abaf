"""The memory snapshot agrees with the plan, and PyTorch's own tools can read it."""

import base64
import json
import pickle
import pickletools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from zinf_compile.inspect.memory_viz import memory_snapshot, save_memory_viz
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.simulator.memory import memory_by_role
from zinf_compile.passes.planner.simulator.simulate import simulate

# The opcodes of pytorch.org/memory_viz's own unpickler (torch/utils/viz/MemoryViz.js).
READABLE = set(b"ehJKM}]\x95\x8aj(\x94\x80u\x8c.\x86a\x89qX)\x88NGt\x85\x87rlds")


@pytest.fixture(params=["small_plan", "swapping_plan", "layered_plan"])
def plan(request: pytest.FixtureRequest) -> Plan:
    chosen: Plan = request.getfixturevalue(request.param)
    return chosen


def trace_of(plan: Plan) -> list[Any]:
    snapshot: Any = memory_snapshot(plan)
    (trace,) = snapshot["device_traces"]
    return list(trace)


def test_blocks_stay_inside_the_segment_and_never_overlap(plan: Plan) -> None:
    snapshot: Any = memory_snapshot(plan)
    (segment,) = snapshot["segments"]
    end = segment["address"] + segment["total_size"]
    held: dict[int, int] = {}
    for event in trace_of(plan)[1:]:
        start, nbytes = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert segment["address"] <= start < start + nbytes <= end
            assert all(start + nbytes <= other or other + size <= start for other, size in held.items())
            held[start] = nbytes
        elif event["action"] == "free_completed":
            assert held.pop(start) == nbytes
    left = {block["address"]: block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"}
    assert held == left


def test_what_is_taken_is_what_the_simulation_says_but_for_the_idle_arena(plan: Plan) -> None:
    """At each time the blocks add up to the bytes of all roles except the reserve, which has the arena's idle bytes."""
    taken = 0
    by_time: dict[int, int] = {}
    standing = sum(nbytes for part, nbytes in plan.tier(Tier.DEVICE).parts if part in ("workspace", "reserve"))
    for event in trace_of(plan)[1:]:
        if event["action"] != "free_requested":
            taken += event["size"] if event["action"] == "alloc" else -event["size"]
        by_time[event["time_us"]] = taken
    expected = {
        round(point.seconds * 1e6): standing + sum(nbytes for role, nbytes in point.nbytes if role != "reserve")
        for point in memory_by_role(simulate(plan), Tier.DEVICE)
    }
    assert by_time == {moment: expected[moment] for moment in by_time}
    assert len(by_time) > plan.num_ticks // 20


def test_frames_carry_role_tick_and_name(small_plan: Plan) -> None:
    frames = {tuple(event["frames"][0].values()) for event in trace_of(small_plan) if event["action"] == "alloc"}
    assert ("parameter", 1, "layers.1") in frames
    assert ("activation", 2, "gelu") in frames
    assert ("parameter", 0, "embed.weight") in frames
    assert ("activation", 5, "others in loss") in frames


def test_pytorch_reads_it(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "memory.pickle"
    save_memory_viz(plan, file)
    snapshot: Any = pickle.loads(file.read_bytes())
    assert snapshot == memory_snapshot(plan)
    assert "total_reserved" in _memory_viz.segsum(snapshot)
    num_allocated = Counter(event["action"] for event in trace_of(plan))["alloc"]
    assert len(re.findall(r"^\w+ = \w+\[\d+:", _memory_viz.trace(snapshot), re.MULTILINE)) == num_allocated
    page = _memory_viz.trace_plot(snapshot)
    (embedded,) = re.findall(r'"base64": ("[^"]*")', page)
    assert pickle.loads(base64.b64decode(json.loads(embedded))) == snapshot


def test_the_page_of_pytorch_knows_every_opcode(plan: Plan, tmp_path: Path) -> None:
    save_memory_viz(plan, tmp_path / "memory.pickle")
    opcodes = {ord(opcode.code) for opcode, _, _ in pickletools.genops((tmp_path / "memory.pickle").read_bytes())}
    assert opcodes <= READABLE


def test_the_command_of_pytorch_draws_it(small_plan: Plan, tmp_path: Path) -> None:
    save_memory_viz(small_plan, tmp_path / "memory.pickle")
    command = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", "memory.pickle", "-o", "page.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Active Memory Timeline" in (tmp_path / "page.html").read_text()


def test_a_path_that_cannot_be_written_is_an_error(small_plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the memory snapshot cannot be written to"):
        save_memory_viz(small_plan, tmp_path / "absent" / "memory.pickle")
