"""The resources and limits of this machine: memory, disk, software. Looked up, not measured."""

import importlib.util
import os
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from zinf_compile.ir.config import free_memory
from zinf_compile.runtime.native.compiled import find_compiler

# The variables that set the capacities of the kernel caches of oneDNN and of torch's layer over it, and the bytes of one
# kernel of a bfloat16 matrix product in each: measured over 480 shapes with capacities of 0, 64, 256 and 1024.
_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 2**19, "LRU_CACHE_CAPACITY": 5 * 2**16}
_KEPT_KERNELS = 1024  # the default capacity of both


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Sizes in bytes; None for a limit that is not set."""

    torch_version: str
    num_cores: int
    num_threads: int
    load: float  # how many threads of all processes wanted to run, on average over the last minute
    memory_nbytes: int
    free_memory_nbytes: int  # what this process may still take
    cgroup_nbytes: int | None
    memlock_nbytes: int | None
    open_files: int | None  # the hard limit
    nvme: str  # the folder that was looked at
    takes_o_direct: bool
    free_disk_nbytes: int
    has_cuda: bool
    compiler: str | None  # for the kernel of AdamW
    has_cupy: bool
    has_transformers: bool


def inspect_machine(nvme: str, *, takes_o_direct: bool) -> Machine:
    """Return what this machine has; OSError if the folder ``nvme`` cannot be looked at."""
    disk = os.statvfs(nvme)
    return Machine(
        torch_version=torch.__version__,
        num_cores=len(os.sched_getaffinity(0)),
        num_threads=torch.get_num_threads(),
        load=os.getloadavg()[0],
        memory_nbytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        free_memory_nbytes=free_memory(),
        cgroup_nbytes=_cgroup_limit(),
        memlock_nbytes=_hard_limit(resource.RLIMIT_MEMLOCK),
        open_files=_hard_limit(resource.RLIMIT_NOFILE),
        nvme=nvme,
        takes_o_direct=takes_o_direct,
        free_disk_nbytes=disk.f_bavail * disk.f_frsize,
        has_cuda=torch.cuda.is_available(),
        compiler=find_compiler(),
        has_cupy=importlib.util.find_spec("cupy") is not None,
        has_transformers=importlib.util.find_spec("transformers") is not None,
    )


def kernel_cache_nbytes() -> int:
    """Return the bytes of the kernel caches when they are full: when the process has met more shapes than they hold."""
    given = ((os.environ.get(name, "").strip(), nbytes) for name, nbytes in _KERNEL_CACHES.items())
    return sum((int(number) if number.isdecimal() else _KEPT_KERNELS) * nbytes for number, nbytes in given)


def _hard_limit(kind: int) -> int | None:
    _, hard = resource.getrlimit(kind)
    return None if hard == resource.RLIM_INFINITY else hard


def _cgroup_limit() -> int | None:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # v2, v1
        try:
            limit = Path(file).read_text().strip()
        except OSError:
            continue
        if limit != "max" and int(limit) < 2**60:  # v1 writes a huge number where nothing is set
            return int(limit)
    return None
