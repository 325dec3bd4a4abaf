"""``zinf doctor``: what it prints and stores, and what it says about machines that lack something."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zinf_compile.cli import doctor
from zinf_compile.cli.main import main
from zinf_compile.driver import this_machine
from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware
from zinf_compile.runtime.calibration.machine import Machine, inspect_machine
from zinf_compile.runtime.calibration.measured import find_measured, keep_measured, measured_path

HARDWARE = replace(load_hardware("laptop-16g"), name="kept")
WELL = Machine(
    torch_version="2.13",
    num_cores=8,
    num_threads=8,
    load=0.1,
    memory_nbytes=2**34,
    free_memory_nbytes=2**33,
    cgroup_nbytes=None,
    memlock_nbytes=None,
    open_files=2**20,
    nvme="/fast",
    takes_o_direct=True,
    free_disk_nbytes=2**40,
    has_cuda=True,
    compiler="/usr/bin/g++",
    has_cupy=True,
    has_transformers=True,
)


@pytest.fixture
def is_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float], None]:
    """Return a function that sets the load of the machine; the cache folder is empty, and measuring is quick."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(this_machine, "_REPEATS", 1)

    def say(load: float) -> None:
        monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))

    say(0.0)
    return say


def read(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_what_was_measured_is_kept_saved_and_read_again(
    is_load: Callable[[float], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "mine.json"
    assert main(["doctor", "--nvme", str(tmp_path), "--json", "--save", str(saved)]) == 0
    first = read(capsys)
    hardware = load_hardware(saved)
    assert {rate.name for rate in hardware.flops} == {"bfloat16", "float32"}
    assert {size.tier for size in hardware.tiers} == set(Tier)
    assert hardware.op_overhead_seconds > 0
    assert first["machine"]["nvme"] == str(tmp_path)
    assert not list(tmp_path.glob(".*"))  # the file on disk is gone
    # The profile was reused: two measurements never give equal rates.
    assert find_measured(str(tmp_path), this_machine.DTYPES) == hardware
    assert main(["doctor", "--nvme", str(tmp_path), "--json"]) == 0
    assert read(capsys)["hardware"] == first["hardware"]
    assert main(["doctor", "--nvme", str(tmp_path), "--json", "--again"]) == 0
    assert read(capsys)["hardware"]["routes"] != first["hardware"]["routes"]
    diskless = find_measured(None, this_machine.DTYPES)
    assert diskless is not None
    assert {route.name for route in diskless.routes} == {"device -> host", "host -> device"}


def test_a_busy_machine_is_told_and_not_kept(
    is_load: Callable[[float], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_load(10_000.0)
    assert main(["doctor", "--nvme", str(tmp_path), "--json"]) == 0
    assert any(lack["what"] == "a quiet machine" for lack in read(capsys)["lacks"])
    assert find_measured(str(tmp_path), this_machine.DTYPES) is None


def test_it_prints_tables(
    is_load: Callable[[float], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    keep_measured(HARDWARE, str(tmp_path))
    assert main(["doctor", "--nvme", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for words in (
        "7.00 GiB",
        "O_DIRECT",
        "matrix products, bfloat16",
        "600 GFLOP/s",
        "nvme -> host, on nvme",
        "3.00 GB",
    ):
        assert words in out
    assert "1.20 G elements" in out


def test_a_folder_that_cannot_be_used_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--nvme", str(tmp_path / "absent")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("zinf doctor: nvme=")
    assert "is not a folder" in err


def test_a_machine_that_has_all_lacks_nothing() -> None:
    assert doctor.find_lacks(WELL, HARDWARE) == ()


@pytest.mark.parametrize(
    ("changes", "what", "costs", "is_fatal"),
    [
        ({"free_memory_nbytes": 2**28}, "memory", "256.0 MiB are free", True),
        ({"free_disk_nbytes": 2**20}, "disk space", "1.0 MiB are free in /fast", True),
        ({"load": 7.5}, "a quiet machine", "7.5 threads want 8 cores", False),
        ({"takes_o_direct": False}, "O_DIRECT", "/fast goes through the page cache", False),
        ({"has_cuda": False}, "CUDA", "at 600 GFLOP/s of bfloat16", False),
        ({"has_cupy": False}, "CuPy", "pip install zinf_compile[cuda]", False),
        ({"compiler": None}, "a C++ compiler", "1.20 G elements/s", False),
        ({"open_files": 1024}, "open files", "1,024 files may be open", False),
        ({"cgroup_nbytes": 2**32}, "all of the memory", "this container gets 4.00 GiB of 16.00 GiB", False),
        ({"has_transformers": False}, "transformers", "pip install zinf_compile[hf]", False),
    ],
)
def test_what_is_missing_has_its_cost(changes: dict[str, Any], what: str, costs: str, is_fatal: bool) -> None:
    (lack,) = doctor.find_lacks(replace(WELL, **changes), HARDWARE)
    assert lack.what == what
    assert costs in lack.costs
    assert lack.is_fatal is is_fatal


def test_a_full_disk_is_status_1(
    is_load: Callable[[float], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(nvme: str, *, takes_o_direct: bool) -> Machine:
        return replace(inspect_machine(nvme, takes_o_direct=takes_o_direct), free_disk_nbytes=0)

    monkeypatch.setattr(this_machine, "inspect_machine", full)
    assert main(["doctor", "--nvme", str(tmp_path), "--json"]) == 1
    diagnosis = read(capsys)
    assert [lack["what"] for lack in diagnosis["lacks"] if lack["is_fatal"]] == ["disk space"]
    assert not any("nvme" in route["name"] for route in diagnosis["hardware"]["routes"])


def test_a_kept_profile_that_is_damaged_or_of_other_dtypes_is_not_used(
    is_load: Callable[[float], None], tmp_path: Path
) -> None:
    keep_measured(HARDWARE, str(tmp_path))
    kept: Hardware | None = find_measured(str(tmp_path), [torch.float32])
    assert kept == HARDWARE
    assert find_measured(str(tmp_path), [torch.float16]) is None
    assert find_measured(None, [torch.float32]) is None
    measured_path(str(tmp_path)).write_text("{}")
    assert find_measured(str(tmp_path), [torch.float32]) is None
