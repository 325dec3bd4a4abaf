"""Models of one process share what was measured of its machine: a measurement takes as long as the test of a small model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def measured_once() -> Iterator[None]:
    """Measure each kind of device and disk only once inside the block."""
    from zinf_compile.driver import session  # imports torch

    measure, measured = session.measure_hardware, {}

    def measure_once(store: Any, dtypes: Any) -> Any:
        if store.device.torch_device.type != "cpu":  # on a GPU, measuring also chooses the path from the disk
            return measure(store, dtypes)
        key = (type(store.device), type(store.engine), store.device.memory.unified, frozenset(dtypes))
        if key not in measured:
            measured[key] = measure(store, dtypes)
        return measured[key]

    with mock.patch.object(session, "measure_hardware", measure_once):
        yield
