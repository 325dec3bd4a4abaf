"""Rates of an ordinary machine, whatever the load is: plans are the same in every run, and measuring is done once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from tests.support.run_cache import made_once
from zinf_compile.ir.hardware import Hardware, Route
from zinf_compile.runtime.calibration.calibrate import measure_hardware
from zinf_compile.runtime.store.store import Store

_FLOPS = 1.5e11  # per second
_MEMORY_RATE = 14e9  # bytes per second, as the two below
_DISK_RATE = 0.45e9
LINK_RATE = 2e9  # that a rank receives in an all-gather


def with_fixed_rates(store: Store, dtypes: frozenset[torch.dtype]) -> Hardware:
    """Return the routes and dtypes of this machine, measured once per run, with the rates of an ordinary one.

    Measuring takes as long as a whole test of a small model, and plans would differ from run to run.
    """
    key = ("hardware", type(store.device), type(store.engine), store.device.memory, sorted(map(str, dtypes)))
    measured = made_once(repr(key), lambda: measure_hardware(store, dtypes))
    return replace(
        measured,
        flops=tuple(replace(rate, per_second=_FLOPS) for rate in measured.flops),
        attention_flops=tuple(replace(rate, per_second=_FLOPS / 3) for rate in measured.attention_flops),
        memory_bytes_per_second=_MEMORY_RATE,
        routes=tuple(_with_fixed_rate(route) for route in measured.routes),
        op_rates=tuple(replace(rate, bytes_per_second=_MEMORY_RATE) for rate in measured.op_rates),
        op_overhead_seconds=5e-5,
        optimizer_elements_per_second=5e8,
    )


@contextmanager
def fixed_rates() -> Iterator[None]:
    """Plan models by these rates inside the block, except on a GPU: there, measuring also chooses the path from the disk."""
    from zinf_compile.driver import session

    def rates(store: Store, dtypes: frozenset[torch.dtype]) -> Hardware:
        on_cpu = store.device.torch_device.type == "cpu"
        return with_fixed_rates(store, dtypes) if on_cpu else measure_hardware(store, dtypes)

    with mock.patch.object(session, "measure_hardware", rates):
        yield


def _with_fixed_rate(route: Route) -> Route:
    """Return a measured route with the rate of an ordinary disk, or of memory."""
    if "nvme" in route.name:
        return replace(route, bytes_per_second=_DISK_RATE, latency_seconds=4e-4, takes_of_compute=0.1)
    return replace(route, bytes_per_second=_MEMORY_RATE / 2)
