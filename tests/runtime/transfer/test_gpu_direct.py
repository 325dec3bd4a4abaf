"""GPUDirect Storage with a fake kvikio: it is used if it is faster, with the same bits and without a race."""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.fake_device import FakeDevice, on_fake_device
from tests.support.memory_engine import MemoryEngine
from tests.support.races import watching_races
from tests.support.small_training import train
from zinf_compile.ir.config import make_config
from zinf_compile.ir.errors import StoreError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.calibration import calibrate
from zinf_compile.runtime.execute.op_bodies import register
from zinf_compile.runtime.storage.nvme.posix import PosixEngine
from zinf_compile.runtime.store.store import Store
from zinf_compile.runtime.transfer import link
from zinf_compile.runtime.transfer.gpu_direct import NUM_CALLS, GpuDirectFiller, open_direct_reads
from zinf_compile.runtime.transfer.in_flight import InFlight, LinkFiller

KIB, MIB = 2**10, 2**20
SMALL = {"width": 192, "depth": 2, "device_memory": 2 * MIB, "host_memory": 700 * KIB, "tiles": False}


class CuFile:
    """A file as kvikio opens it, which reads into CPU tensors."""

    num_reads = 0
    num_open = 0
    missing = 0  # bytes by which every read is short

    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r"
        self._descriptor = os.open(path, os.O_RDONLY)
        CuFile.num_open += 1

    def pread(self, destination: Tensor, *, size: int, file_offset: int) -> Any:
        """Read into a tensor of bytes."""
        CuFile.num_reads += 1
        found = os.pread(self._descriptor, size - CuFile.missing, file_offset)
        destination[: len(found)].copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))
        return SimpleNamespace(get=lambda: len(found))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
        CuFile.num_open -= 1


@pytest.fixture(autouse=True)
def _kvikio(monkeypatch: pytest.MonkeyPatch, unmeasured: None) -> Iterator[None]:
    module = ModuleType("kvikio")
    settings = {"num_threads": 1}
    module.defaults = SimpleNamespace(get=settings.__getitem__, set=settings.__setitem__)  # type: ignore[attr-defined]
    module.CuFile = CuFile  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setattr(CuFile, "num_reads", 0)
    yield
    assert CuFile.num_open == 0


@contextmanager
def measured_at(bytes_per_second: float) -> Iterator[None]:
    """Let calibration measure this speed of direct reads."""
    with mock.patch.object(calibrate, "_measure_direct", return_value=bytes_per_second):
        yield


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_what_is_faster_is_used_with_the_same_bits_and_no_race(tmp_path: Path, seed: int) -> None:
    options = {**SMALL, "nvme": tmp_path, "update_on": ["device", "host"][seed], "step_in_backward": seed == 1}
    plain = train(**{name: option for name, option in options.items() if name != "update_on"})
    with on_fake_device(FakeDevice(seed=seed)), measured_at(1e15), watching_races() as races:
        ours = train(**options, device="cuda")
    assert races.found == []
    assert races.num_accesses["the direct read"] == 2 * CuFile.num_reads > 0  # one of the file, one of memory
    for ours_now, plain_now in zip(ours, plain, strict=True):
        assert torch.equal(ours_now, plain_now)


@pytest.mark.long
def test_threads_that_read_have_chosen_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, read = set[str](), set[str]()
    pread = CuFile.pread

    def note(file: CuFile, *args: Any, **kwargs: Any) -> Any:
        read.add(threading.current_thread().name)
        return pread(file, *args, **kwargs)

    monkeypatch.setattr(CuFile, "pread", note)
    monkeypatch.setattr(link, "use_on_this_thread", lambda _: begun.add(threading.current_thread().name))
    with on_fake_device(), measured_at(1e15):
        train(**SMALL, nvme=tmp_path, device="cuda")
    assert any("gpu-direct" in name for name in read)
    assert read <= begun


def test_what_is_slower_is_not_used(tmp_path: Path) -> None:
    with on_fake_device(), measured_at(1.0):
        train(**SMALL, nvme=tmp_path, device="cuda")
    assert CuFile.num_reads == 0


@pytest.mark.long
def test_a_read_that_does_not_wait_for_compute_is_found(tmp_path: Path) -> None:
    def at_once(filler: GpuDirectFiller, moving: InFlight, name: str, offset: int, destination: Tensor) -> None:
        filler._reads.read(offset, destination)

    with (
        on_fake_device(),
        measured_at(1e15),
        watching_races() as races,
        mock.patch.object(GpuDirectFiller, "_read", at_once),
    ):
        train(**SMALL, nvme=tmp_path, device="cuda")
    assert any("the direct read" in race and "compute" in race for race in races.found)


def test_it_is_measured_on_bytes_that_were_written(tmp_path: Path) -> None:
    register()
    with on_fake_device():
        store = Store(
            make_config({"device": "cuda", "device_memory": "64MiB", "host_memory": "64MiB", "nvme": str(tmp_path)})
        )
        try:
            hardware = calibrate.measure_hardware(store, {torch.float32}, repeats=1)
            store.layout.check_integrity()
            store.staging.check_integrity(expect_idle=True)
            assert store.meter.moved == ()
            route = hardware.route(Tier.NVME, Tier.DEVICE)
            used = isinstance(store.transfers.filler, GpuDirectFiller)
            assert used or isinstance(store.transfers.filler, LinkFiller)
            slower = min(
                hardware.route(*way).bytes_per_second for way in ((Tier.NVME, Tier.HOST), (Tier.HOST, Tier.DEVICE))
            )
            assert (route.bytes_per_second > slower) == used
        finally:
            store.close()
    assert CuFile.num_reads >= 4


def test_a_short_read_names_the_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuFile, "missing", 1)
    with on_fake_device(), measured_at(1e15), pytest.raises(StoreError, match=r"layers.*kvikio read \d+ of \d+ bytes"):
        train(**SMALL, nvme=tmp_path, device="cuda")


def test_a_machine_where_it_fails_goes_by_way_of_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(CuFile, "pread", refuse)
    with caplog.at_level(logging.INFO, logger="zinf_compile"), on_fake_device():
        train(**SMALL, nvme=tmp_path, device="cuda")
    assert any("GPUDirect Storage is not used" in message and "libcuda" in message for message in caplog.messages)


def test_without_kvikio_or_a_file_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with MemoryEngine(max_nbytes=MIB) as memory:
        assert open_direct_reads(memory) is None
    with PosixEngine(tmp_path) as engine:
        reads = open_direct_reads(engine)
        assert reads is not None
        assert sys.modules["kvikio"].defaults.get("num_threads") == NUM_CALLS, (
            "all reads share them, and one is the default"
        )
        reads.close()
        with caplog.at_level(logging.INFO, logger="zinf_compile"), monkeypatch.context() as patch:
            patch.setattr(os, "open", mock.Mock(side_effect=OSError("no O_DIRECT here")))
            assert open_direct_reads(engine) is None
        assert "kvikio cannot open the store's file: no O_DIRECT here" in caplog.text
        monkeypatch.setitem(sys.modules, "kvikio", None)
        assert open_direct_reads(engine) is None
