"""The benchmark of enqueuing runs: blocks are compiled and streamed, and all chunks are updated on the device."""

import cProfile
from typing import Any
from unittest import mock

import pytest

from benchmarks.host_overhead import _CHUNKS, measure_blocks, measure_updates
from zinf_compile.runtime.optim.optimizer import StreamedStep
from zinf_compile.runtime.transfer.device_updates import DeviceUpdates


def test_every_chunk_is_timed() -> None:
    run, num_chunks = DeviceUpdates.run, 0

    def counted(updates: DeviceUpdates, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_chunks
        num_chunks += 1
        return run(updates, *args, **kwargs)

    with mock.patch.object(DeviceUpdates, "run", counted):
        seconds = measure_updates(rounds=2)
    assert len(seconds) == 2
    assert min(seconds) > 0.0
    assert num_chunks >= 2 * _CHUNKS


def test_an_update_of_a_chunk_takes_few_calls() -> None:
    """On any machine they tell what a time tells on an idle one: 127 functions are called, of which 9 are ops of torch."""
    run, calls = StreamedStep.run, list[float]()

    def profiled(step: StreamedStep) -> None:
        with cProfile.Profile() as profile:
            run(step)
        calls.append(sum(entry.callcount for entry in profile.getstats()) / _CHUNKS)

    with mock.patch.object(StreamedStep, "run", profiled):
        measure_updates(rounds=2)
    assert max(calls[2:]) < 135


@pytest.mark.long
@pytest.mark.parametrize("compute", ["inductor", "aten"])
def test_blocks_are_streamed(compute: str) -> None:
    found = measure_blocks(2, compute)
    assert found["op by op"] == 0
    assert found["streamed"] > 0.5
    assert found["transfers"] > 2 * found["streamed"]  # once forward and once backward
    # 27 gathers and gradients, 23 outputs of the two segments, their views; op by op it has 272
    assert (found["nodes"] < 110) == (compute == "inductor")
    times = [found[phase] for phase in ("forward", "backward", "transfer")]
    assert {len(each) for each in times} == {2}
    assert min(map(min, times)) > 0.0
