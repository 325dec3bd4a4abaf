"""The benchmark of the thread that enqueues updates runs, and all of its chunks are updated on the device."""

from typing import Any
from unittest import mock

from benchmarks.update_overhead import _CHUNKS, measure
from zinf_compile.runtime.transfer.device_updates import DeviceUpdates


def test_every_chunk_is_timed() -> None:
    run, num_chunks = DeviceUpdates.run, 0

    def counted(updates: DeviceUpdates, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_chunks
        num_chunks += 1
        return run(updates, *args, **kwargs)

    with mock.patch.object(DeviceUpdates, "run", counted):
        seconds = measure(rounds=2)
    assert len(seconds) == 2
    assert min(seconds) > 0.0
    assert num_chunks >= 2 * _CHUNKS
