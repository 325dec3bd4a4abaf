"""The profile that `zinf doctor` measured, kept in the user's cache folder for machine, torch version, threads and disk."""

import hashlib
import logging
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from zinf_compile.hardware.profile_io import load_hardware, save_hardware
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import dtype_name
from zinf_compile.ir.hardware import Hardware
from zinf_compile.runtime.native.compiled import cache_folder

_log = logging.getLogger(__name__)


def find_measured(nvme: str | None, dtypes: Iterable[torch.dtype]) -> Hardware | None:
    """Return the kept profile for a disk, if it has the rates of all ``dtypes``; else None."""
    path = measured_path(nvme)
    if not path.is_file():
        return None
    try:
        hardware = load_hardware(path)
    except ConfigError as error:
        _log.warning("the kept profile cannot be used, and the machine is measured briefly instead: %s", error)
        return None
    known = {rate.name for rate in hardware.flops}
    return hardware if all(dtype_name(dtype) in known for dtype in dtypes) else None


def keep_measured(hardware: Hardware, nvme: str | None) -> Path:
    """Keep a profile for later processes and return its file. ConfigError if the cache folder cannot be written."""
    path = measured_path(nvme)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot be made: {error.strerror}; set XDG_CACHE_HOME") from error
    save_hardware(hardware, path)
    return path


def measured_path(nvme: str | None) -> Path:
    """Return where the profile of this machine, with the disk of a folder or with none, is kept."""
    disk = None if nvme is None else Path(nvme).stat().st_dev
    machine = (platform.node(), platform.machine(), _processor(), len(os.sched_getaffinity(0)))
    key = hashlib.sha256(repr((machine, torch.__version__, torch.get_num_threads(), disk)).encode()).hexdigest()
    return cache_folder() / f"hardware-{key[:16]}.json"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
