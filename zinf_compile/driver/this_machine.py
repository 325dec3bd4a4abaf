"""This machine: its memory and disk, and its rates, which are measured once and stored."""

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zinf_compile.ir.config import Config, make_config
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware, TierSize
from zinf_compile.runtime.calibration.calibrate import measure_hardware
from zinf_compile.runtime.calibration.machine import Machine, inspect_machine
from zinf_compile.runtime.calibration.measured import find_measured, keep_measured
from zinf_compile.runtime.calibration.rank_rates import DiskRates, LinkRate, measure_disks, measure_links
from zinf_compile.runtime.execute.op_bodies import register
from zinf_compile.runtime.ranks.find_ranks import find_ranks, folder_of_rank
from zinf_compile.runtime.store.store import Store

DTYPES = (torch.float32, torch.bfloat16)
LEAST_DISK = 2**30  # free bytes that measuring a disk needs
_REPEATS = 9  # a few seconds in all
_HOST_MEMORY = "512MiB"  # half of it for staging
_BUSY_SHARE = 0.75  # of the cores in use by others: a matrix product then takes noticeably longer


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisMachine:
    """This machine's memory and disk, and its rates."""

    machine: Machine
    hardware: Hardware


def look_at_machine(folder: Path, *, again: bool = False) -> ThisMachine:
    """Return this machine with the disk of a folder. Raises ConfigError if the folder cannot be used.

    Measures for some seconds if no rates are stored, or with ``again``. Stores the rates if the disk has room to be
    measured and the machine is not busy.
    """
    register()
    nvme = str(folder.resolve())
    config = make_config({"device_memory": 0, "host_memory": _HOST_MEMORY, "nvme": nvme})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ``zinf doctor`` reports a folder that refuses O_DIRECT itself
        store = Store(config)
    try:
        engine = store.engine
        assert engine is not None
        machine = inspect_machine(nvme, takes_o_direct="O_DIRECT" in engine.describe())
        hardware = None if again else find_measured(nvme, DTYPES)
        if hardware is None and machine.free_disk_nbytes >= LEAST_DISK:
            hardware = replace(measure_hardware(store, DTYPES, repeats=_REPEATS), tiers=_tier_sizes(machine))
            if not is_busy(machine):
                keep_measured(hardware, nvme)
                keep_measured(_without_disk(hardware), None)
        elif hardware is None:
            hardware = _measure_without_disk(config)
    finally:
        store.close()
    return ThisMachine(machine=machine, hardware=hardware)


@dataclass(frozen=True, slots=True, kw_only=True)
class TheseRanks:
    """The ranks of the default process group, their links and disks."""

    nodes: tuple[str, ...]  # by rank
    links: tuple[LinkRate, ...]
    disks: DiskRates


def look_at_ranks(folder: Path) -> TheseRanks:
    """Return the rates of all ranks, which each of them measures now, with the disk of a folder of its own or of all.

    Every rank calls this, and gets the same result. ConfigError, or RankError on the others, for a folder that cannot be
    used.
    """
    register()
    ranks = find_ranks(None)
    nvme = str(Path(str(folder_of_rank(folder, ranks))).resolve())
    nodes = ranks.exchange("names of machines", os.uname().nodename)

    def open_store() -> Store:
        config = make_config({"device_memory": 0, "host_memory": _HOST_MEMORY, "nvme": nvme})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Store(config)

    store = ranks.do_alike("opening the folders of --nvme", open_store)
    try:
        links = measure_links(ranks)
        return TheseRanks(nodes=tuple(nodes), links=links, disks=measure_disks(ranks, store))
    finally:
        store.close()


def is_busy(machine: Machine) -> bool:
    """Return whether other threads use so many cores that measured rates would be too low."""
    return machine.load > _BUSY_SHARE * machine.num_cores


def _tier_sizes(machine: Machine) -> tuple[TierSize, ...]:
    """Return the sizes of the tiers. Device and host share four fifths of the free memory, since this is a CPU."""
    memory = machine.free_memory_nbytes * 4 // 5
    sizes = {Tier.DEVICE: memory // 2, Tier.HOST: memory - memory // 2, Tier.NVME: machine.free_disk_nbytes}
    return tuple(TierSize(tier=tier, nbytes=nbytes) for tier, nbytes in sizes.items())


def _measure_without_disk(config: Config) -> Hardware:
    store = Store(replace(config, nvme=None))
    try:
        return measure_hardware(store, DTYPES, repeats=_REPEATS)
    finally:
        store.close()


def _without_disk(hardware: Hardware) -> Hardware:
    return replace(
        hardware,
        routes=tuple(route for route in hardware.routes if Tier.NVME not in route.name.split()),
        tiers=tuple(size for size in hardware.tiers if size.tier is not Tier.NVME),
    )
