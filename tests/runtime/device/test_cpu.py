"""The CPU is a device like any other: no code checks whether there is a device, and it adds neither copies nor threads."""

import ast
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zinf_compile.ir.config import make_config
from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import MemorySpace
from zinf_compile.runtime.device.cpu import CPU, CpuDevice
from zinf_compile.runtime.device.device import AllocatedBlock
from zinf_compile.runtime.device.make_device import find_device, make_device
from zinf_compile.runtime.transfer.link import Link

ROOT = Path(__file__).parents[3]
ALWAYS_THERE = {"device", "link", "device_updates", "stream"}
TYPES = {"Device", "Link", "DeviceUpdates", "Stream"}


def sources() -> Iterator[tuple[Path, str]]:
    for package in ("zinf_compile", "passes", "runtime"):
        paths = (path for path in (ROOT / package).rglob("*.py") if not path.is_symlink())
        yield from ((path.relative_to(ROOT), path.read_text()) for path in sorted(paths))


def name_of(node: ast.expr) -> str:
    """Return the last name of an expression: ``device`` of ``self._store.device`` and of ``(device := make())``."""
    node = node.target if isinstance(node, ast.NamedExpr) else node
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_")


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def find_checks(source: str) -> list[int]:
    """Return the lines that check whether a device, its link or a stream exists, or annotate it as optional."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            found = any(map(is_none, sides)) and any(name_of(side) in ALWAYS_THERE for side in sides)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            sides = [node.left, node.right]
            found = any(map(is_none, sides)) and any(name_of(side) in TYPES for side in sides)
        else:
            continue
        lines += [node.lineno] if found else []
    return lines


def test_no_source_checks_whether_a_device_exists() -> None:
    files = list(sources())
    assert len(files) > 200
    assert [f"{path}:{line}" for path, source in files for line in find_checks(source)] == []
    assert [str(path) for path, source in files if re.search(r"\bis_apart\b|\bhas_own_memory\b", source)] == []


@pytest.mark.parametrize(
    "line",
    [
        "a = store.device is None",
        "if self._link is not None: pass",
        "b = None if (link := f()) is None else link",
        "def f(stream: Stream | None = None): pass",
        "assert None is not device_updates",
    ],
)
def test_device_checks_are_found(line: str) -> None:
    assert find_checks(line) == [1]


def test_longer_names_are_not_devices() -> None:
    assert find_checks("a = device_share is None or slot.device_bytes is not None or args.device_memory is None") == []


def test_its_memory_is_the_hosts() -> None:
    assert make_device("cpu") == CPU == CpuDevice()
    assert hash(CPU) == hash(CpuDevice())
    assert CPU.memory.unified
    assert not CPU.memory.is_behind_link(Tier.DEVICE)
    assert [tier for tier in Tier if MemorySpace(unified=False).is_behind_link(tier)] == [Tier.DEVICE]
    assert find_device("cpu").memory == CPU.memory
    assert find_device("cpu").largest_budget > 0


def test_options_and_devices_agree_on_whose_memory_it_is() -> None:
    budgets = {"device_memory": 0, "host_memory": 0}
    assert make_config({**budgets, "device": "cpu"}).memory == CpuDevice.memory
    assert make_config({**budgets, "device": "cuda"}).memory == MemorySpace(unified=False)


def test_what_is_enqueued_is_done_when_the_call_returns() -> None:
    threads = threading.active_count()
    source, destination = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    start = CPU.compute.record(timed=True)
    CPU.copies.to_device.copy_all([(source, destination)])
    assert destination.equal(source)
    CPU.compute.wait(CPU.copies.to_device.record())
    CPU.compute.record().wait()
    CPU.synchronize()
    assert 0 <= start.seconds_until(CPU.compute.record(timed=True)) < 60
    assert threading.active_count() == threads


def test_nothing_crosses_its_link_which_has_no_thread() -> None:
    threads = threading.active_count()
    link = Link(CPU)
    assert not link.is_crossed
    link.join(link.mark())
    link.close()
    assert threading.active_count() == threads


def test_tensors_of_a_block_share_its_bytes() -> None:
    block = CPU.allocate_block(2 * 4096)
    assert block.bytes.data_ptr() % 4096 == 0
    block.buffer(4096, 4)[:] = torch.tensor([1.5]).numpy().tobytes()
    elements = block.elements(4096, 2, torch.float32)
    assert elements.tolist() == [1.5, 0.0]
    assert elements.storage_offset() == 0
    del block
    elements.add_(1)
    assert elements.tolist() == [2.5, 1.0]


def test_the_disk_does_not_reach_the_block_of_a_device_with_memory_of_its_own() -> None:
    with pytest.raises(VerifyError, match=r"bytes \[8, 12\) are memory of cpu, which disk I/O cannot access"):
        AllocatedBlock(torch.empty(16, dtype=torch.uint8)).buffer(8, 4)
