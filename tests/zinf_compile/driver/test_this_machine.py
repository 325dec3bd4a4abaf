"""``plan`` without hardware: this machine, with its cached rates, or with rates that are measured then."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.driver import this_machine
from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.ir.config import free_memory
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.calibration.machine import Machine, inspect_machine
from zinf_compile.runtime.calibration.measured import find_measured, keep_measured

MIB = 2**20
KEPT = replace(load_hardware("laptop-16g"), name="kept", tiers=())


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give every test its own cache folder, and make measuring quick on a machine that looks idle."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(this_machine, "_REPEATS", 1)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))


def subject() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), torch.empty(4, 256)


def test_the_kept_rates_are_planned_with(tmp_path: Path) -> None:
    keep_measured(KEPT, str(tmp_path))
    plan = zinf_compile.plan(*subject(), nvme=tmp_path, device_memory="48MiB", host_memory="64MiB")
    assert plan.hardware.name == "kept"
    assert plan.hardware.routes == KEPT.routes
    assert {tier.tier: tier.capacity for tier in plan.tiers if tier.tier is not Tier.NVME} == {
        Tier.DEVICE: 48 * MIB,
        Tier.HOST: 64 * MIB,
    }
    with_name = zinf_compile.plan(*subject(), hardware=plan.hardware, device_memory="48MiB", host_memory="64MiB")
    assert with_name == plan


def test_without_kept_rates_it_is_measured_and_kept(tmp_path: Path) -> None:
    model, x = subject()
    with torch.device("meta"):
        plan = zinf_compile.plan(model, x, nvme=tmp_path, device_memory="48MiB")
    found = find_measured(str(tmp_path), this_machine.DTYPES)
    assert found is not None
    assert plan.hardware.flops == found.flops
    assert plan.hardware.routes == found.routes
    capacity = plan.tier(Tier.HOST).capacity
    assert capacity is not None
    assert 0 < capacity <= free_memory()


def test_the_current_folder_is_on_the_disk_that_is_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keep_measured(KEPT, str(tmp_path))
    plan = zinf_compile.plan(*subject())
    assert plan.hardware.name == "kept"
    assert plan.tier(Tier.NVME).capacity is not None


def test_a_disk_that_is_full_is_no_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(nvme: str, *, takes_o_direct: bool) -> Machine:
        return replace(inspect_machine(nvme, takes_o_direct=takes_o_direct), free_disk_nbytes=0)

    monkeypatch.setattr(this_machine, "inspect_machine", full)
    plan = zinf_compile.plan(*subject(), nvme=tmp_path, device_memory="48MiB", host_memory="64MiB")
    assert not any(Tier.NVME in route.name.split() for route in plan.hardware.routes)
    assert plan.tier(Tier.NVME).predicted_peak == 0


def test_a_folder_of_this_machine_and_other_hardware_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nvme='.*' is a folder of this machine, and hardware says to plan for another"
    ):
        zinf_compile.plan(*subject(), hardware="h200", nvme=tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        zinf_compile.plan(*subject(), nvme=tmp_path / "absent")
