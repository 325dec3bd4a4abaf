"""Calibration measures every rate that planning needs. How fast a machine is, is not asserted."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.fake_device import FakeDevice, on_fake_device
from tests.support.planner_inputs import make_hardware
from zinf_compile.hardware.check import find_problems
from zinf_compile.ir.config import make_config
from zinf_compile.ir.copies import Code
from zinf_compile.ir.errors import StoreError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import OpKind
from zinf_compile.runtime.calibration import calibrate, op_rates
from zinf_compile.runtime.calibration.calibrate import _measure_taken, measure_hardware
from zinf_compile.runtime.calibration.op_rates import CPU_SIZES, OpRates
from zinf_compile.runtime.device.cpu import CPU
from zinf_compile.runtime.execute.op_bodies import register
from zinf_compile.runtime.store.store import Store


@pytest.mark.parametrize("has_disk", [False, True])
def test_every_rate_is_measured(has_disk: bool, tmp_path: Path) -> None:
    register()
    options = {"device_memory": 0, "host_memory": "128MiB", "nvme": str(tmp_path) if has_disk else None}
    store = Store(make_config(options))
    try:
        hardware = measure_hardware(store, {torch.float32, torch.bfloat16}, repeats=1)
        store.layout.check_integrity()
        store.staging.check_integrity()
        assert store.meter.moved == ()  # calibration traffic is not the model's
    finally:
        store.close()
    dtypes = {"bfloat16", "float32"}
    assert {rate.name for rate in hardware.flops} == {rate.name for rate in hardware.attention_flops} == dtypes
    assert {(rate.kind, rate.dtype) for rate in hardware.op_rates} == {
        (kind, name) for kind in OpKind for name in dtypes
    }
    assert hardware.op_overhead_seconds > 0
    tiers = list(Tier) if has_disk else [Tier.DEVICE, Tier.HOST]
    for source in tiers:
        for destination in tiers:
            if source is not destination:
                route = hardware.route(source, destination)
                assert route.bytes_per_second > 0
                assert 0 <= route.takes_of_compute <= 1
                assert Tier.NVME in (source, destination) or route.takes_of_compute == 1
    if has_disk:
        assert hardware.route(Tier.NVME, Tier.DEVICE).latency_seconds > 0
    assert not [problem for problem in find_problems(hardware) if "is not between" not in problem]  # however slow


def test_float16_is_left_to_other_dtypes(tmp_path: Path) -> None:
    register()
    store = Store(make_config({"device_memory": 0, "host_memory": 0}))
    try:
        for dtypes in ({torch.float16}, {torch.float16, torch.float32}):
            hardware = measure_hardware(store, dtypes, repeats=1)
            assert [rate.name for rate in hardware.flops] == ["float32"]
    finally:
        store.close()


class _Clock:
    """Time that passes as it is looked at, more of it while something moves; no load on the machine changes it."""

    def __init__(self, seconds_moving: float) -> None:
        self._seconds_moving = seconds_moving
        self._now = 0.0
        self._looks_moving = 0
        self._moving = threading.Event()
        self._seen = threading.Event()

    def perf_counter(self) -> float:
        self._now += self._seconds_moving if self._moving.is_set() else 1e-3
        self._looks_moving += self._moving.is_set()
        if self._looks_moving >= 40:
            self._seen.set()
        return self._now

    def move(self) -> None:
        self._looks_moving = 0
        self._seen.clear()
        self._moving.set()
        assert self._seen.wait(60)
        self._moving.clear()


@pytest.mark.parametrize(
    ("seconds_moving", "least", "most"),
    [(1e-3, 0.0, 0.1), (4e-3, 0.4, 0.8), pytest.param(1.0, 0.9, 0.9, marks=pytest.mark.long)],
)
def test_what_moves_takes_a_share_of_compute(
    seconds_moving: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock(seconds_moving)
    monkeypatch.setattr(calibrate, "time", clock)
    assert least <= _measure_taken(clock.move, repeats=3) <= most


def test_moves_that_end_before_compute_begins_take_nothing_and_errors_of_moves_are_raised() -> None:
    assert 0 <= _measure_taken(lambda: None, repeats=1) <= 1

    def refuse() -> None:
        raise StoreError("the disk is gone")

    with pytest.raises(StoreError, match="the disk is gone"):
        _measure_taken(refuse, repeats=1)


def test_what_a_device_computes_is_measured_while_its_clock_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not behind the disk and the host's optimizer, which take seconds: an idle GPU has a sixth of its clock."""
    register()
    order: list[str] = []
    measured: dict[str, Any] = {}
    for name in [name for name in vars(calibrate) if name.startswith(("measure_", "_measure_")) or name == "warm_up"]:
        if name != "measure_hardware":

            def note(*args: Any, name: str = name, **kwargs: Any) -> Any:
                order.append(name)
                return measured[name](*args, **kwargs)

            measured[name] = getattr(calibrate, name)
            monkeypatch.setattr(calibrate, name, note)
    options = {"device": "cuda", "device_memory": 0, "host_memory": "128MiB", "nvme": str(tmp_path)}
    with on_fake_device():
        store = Store(make_config(options))
        measure_hardware(store, {torch.float32}, repeats=1)
        store.close()
    computed = {"measure_products", "measure_attention", "measure_op", "measure_overhead", "measure_memory"}
    first, *others = order
    assert first == "warm_up"
    num_computed = sum(name in computed for name in others)
    assert set(others[:num_computed]) == computed
    assert {"_measure_disk", "_measure_link", "_measure_optimizer"} <= set(others[num_computed:])


class _Gpu(FakeDevice):
    """A fake device that says that it is a GPU, whose synchronisations are counted."""

    num_synchronized = 0

    def synchronize(self) -> None:
        self.num_synchronized += 1


def test_a_gpu_is_kept_busy_until_its_clock_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, device = _Clock(1e-3), _Gpu()
    device.torch_device = torch.device("meta")
    monkeypatch.setattr(op_rates, "time", clock)
    op_rates.warm_up(OpRates(device, CPU_SIZES, repeats=1))
    assert clock.perf_counter() >= 0.2
    assert device.num_synchronized >= 100  # a synchronisation in each millisecond: nothing is enqueued far ahead
    op_rates.warm_up(OpRates(CPU, CPU_SIZES, repeats=1))
    assert clock.perf_counter() < 0.3
    device.close()


def test_calls_on_a_device_follow_one_another_until_a_wait_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes 8 us there, and a wait for its end 20 us: timed one by one, they would be measured at 28 us."""
    now, pending = [0.0], [0.0]

    class Device(FakeDevice):
        def synchronize(self) -> None:
            now[0] += pending[0] + 20e-6
            pending[0] = 0.0

    def call() -> None:
        pending[0] += 8e-6

    monkeypatch.setattr(op_rates, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    device = Device()
    assert OpRates(device, CPU_SIZES, repeats=3).usual_seconds(call) == pytest.approx(8e-6, rel=0.02)
    device.close()


def test_the_optimizer_beside_a_gpu_is_measured_past_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 1 GiB, with two cores left to the threads that launch, and beside copies in both directions."""
    register()
    asked: list[tuple[int, int]] = []
    busy: list[bool] = []
    beside = calibrate._copying

    @contextmanager
    def copying(*args: Any) -> Iterator[None]:
        with beside(*args):
            busy.append(True)
            yield
            busy.pop()

    def note(num_elements: int, num_threads: int, repeats: int) -> float:
        asked.append((num_elements, num_threads))
        assert busy
        return 1e9

    monkeypatch.setattr(calibrate, "_copying", copying)
    monkeypatch.setattr(calibrate, "_measure_optimizer", note)
    monkeypatch.setattr(calibrate, "measure_overhead", lambda bench, store: 1e-5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    with on_fake_device() as device:
        store = Store(make_config({"device": "cuda", "device_memory": 0, "host_memory": "32MiB"}))
        device.torch_device = torch.device("meta")  # not the CPU, and nothing is computed
        measure_hardware(store, {torch.float32}, repeats=1)
        store.close()
    ((num_elements, num_threads),) = asked
    assert num_threads == 14
    assert num_elements * 4 * 4 == 2**30  # parameter, gradient and two moments


def test_compiling_the_library_of_codes_is_no_part_of_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, calls = calibrate.encode, []

    def encode_late(code: Code, values: Tensor, pages: Tensor, **options: Any) -> None:
        if not calls:
            time.sleep(1.0)
        calls.append(values.numel())
        encode(code, values, pages, **options)

    hardware = make_hardware()
    monkeypatch.setattr(calibrate, "encode", encode_late)
    rate = calibrate.with_coded_states(hardware, Code.INT8).optimizer_elements_per_second
    assert calls[0] / 2 < rate < hardware.optimizer_elements_per_second


@pytest.mark.parametrize(("seconds", "num_calls"), [(0.0, 1 + 5), (0.5, 1)])
def test_what_takes_long_is_timed_once(seconds: float, num_calls: int) -> None:
    calls = []

    def call() -> None:
        calls.append(time.sleep(seconds))

    assert OpRates(CPU, CPU_SIZES, repeats=5).usual_seconds(call) >= seconds
    assert len(calls) == num_calls
