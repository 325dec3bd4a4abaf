"""Pinned host memory: spans that are pinned whole, blocks that are returned, and what is logged when pinning is refused."""

import logging

import pytest
import torch

from tests.support.fake_device import FakeDevice
from zinf_compile.runtime.device.host_mapping import map_memory
from zinf_compile.runtime.storage.host_memory import PinnedMemory

PAGE, MIB = 4096, 2**20


def test_what_is_announced_is_one_span_of_exactly_that() -> None:
    device = FakeDevice()
    memory = PinnedMemory(device)
    memory.announce(10 * PAGE - 1)
    blocks = [memory.take(4 * PAGE), memory.take(6 * PAGE)]
    assert list(device.pinned.values()) == [10 * PAGE]
    assert [len(block) for block in blocks] == [4 * PAGE, 6 * PAGE]
    further = memory.take(PAGE)
    assert list(device.pinned.values()) == [10 * PAGE, 16 * MIB], "what was not announced comes from larger spans"
    large = memory.take(17 * MIB)
    assert list(device.pinned.values())[-1] == 17 * MIB
    memory.check_integrity()
    memory.close()
    assert device.pinned == {}
    del blocks, further, large


def test_a_block_comes_back_when_the_last_tensor_over_it_is_gone() -> None:
    device = FakeDevice()
    memory = PinnedMemory(device)
    memory.announce(4 * PAGE)
    tensor = torch.frombuffer(memoryview(memory.take(4 * PAGE)).cast("B"), dtype=torch.float32)
    row = tensor.fill_(3.0)[:8]
    del tensor
    memory.take(PAGE)
    assert len(device.pinned) == 2, "the first span is full"
    assert row.tolist() == [3.0] * 8
    address = row.data_ptr()
    del row
    again = torch.frombuffer(memoryview(memory.take(4 * PAGE)).cast("B"), dtype=torch.uint8)
    assert again.data_ptr() == address
    assert len(device.pinned) == 2
    memory.close()


def test_pinning_that_is_refused_is_said_once_and_leaves_pageable_memory(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(pinning="out of memory")
    memory = PinnedMemory(device)
    with caplog.at_level(logging.WARNING, logger="zinf_compile.runtime.storage.host_memory"):
        blocks = [memory.take(16 * MIB), memory.take(16 * MIB)]
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("16.0 MiB of host memory cannot be pinned (out of memory; `ulimit -l` is ")
    assert "--ulimit memlock=-1" in message
    assert memory.refusal == "out of memory"
    assert device.pinned == {}
    for block in blocks:
        memoryview(block).cast("B")[-1] = 7
    memory.close()


def test_pages_of_a_cpu_are_their_own_mapping() -> None:
    block = map_memory(2 * PAGE)
    assert len(block) == 2 * PAGE
    assert torch.frombuffer(block, dtype=torch.uint8).data_ptr() % PAGE == 0
