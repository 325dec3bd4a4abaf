"""Config: what the user asked for, parsed and checked once. Sizes become bytes here and nowhere else."""

import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path

from zinf_compile.ir.copies import Code
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import StepTiming, dtype_name
from zinf_compile.ir.hardware import MemorySpace

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")
LEAST_TILE = 64 * 2**10  # bytes of a parameter: what is smaller is gathered whole
DEFAULT_COMPUTE = "inductor"
MEASURED = "auto"
DEFAULT_RESERVE: int | str = MEASURED
LEAST_MEASURED = 256 * 2**20  # of both budgets together: below this the reserve would be most of them
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_COMPUTE_DTYPES = ("float32", "bfloat16", "float16", "float64")


def parse_size(size: int | str, *, option: str) -> int:
    """Return a size in bytes from an int or a string such as ``"8GiB"`` or ``"1.5 GB"``; ConfigError otherwise."""
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ConfigError(f"{option}={size!r} is not a size; give bytes as an int or a string such as '8GiB'")
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        units = {unit.lower(): factor for unit, factor in _UNITS.items()}
        if match is None or match["unit"].lower() not in units:
            raise ConfigError(
                f"{option}={size!r} is not a size; write a number and one of {', '.join(u for u in _UNITS if u)}, "
                "for example '8GiB'"
            )
        size = int(float(match["number"]) * units[match["unit"].lower()])
    if size < 0:
        raise ConfigError(f"{option}={size} is negative; a budget is a number of bytes, 0 or more")
    return size


def free_memory() -> int:
    """Return the bytes of RAM this process may still take: the smaller of the machine's and the cgroup's."""
    with open("/proc/meminfo") as meminfo:
        amounts = dict(line.split(":", 1) for line in meminfo)
    free = int(amounts["MemAvailable"].split()[0]) * 1024
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),  # cgroup v2
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),  # v1
    ):
        try:
            limit, usage = Path(limit_file).read_text().strip(), Path(usage_file).read_text().strip()
        except OSError:
            continue
        if limit != "max":
            free = min(free, max(0, int(limit) - int(usage)))
    return free


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevice:
    """What budgets depend on of a device that exists."""

    memory: MemorySpace
    largest_budget: int  # that fits in its free memory, beside what an allocator loses
    libraries_nbytes: int = 0  # of its memory, that libraries under PyTorch take once and keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The options of ``optimize`` after parsing; every budget in bytes."""

    device_memory: int
    host_memory: int
    nvme: str | None  # folder of the store file; None: there is no nvme tier
    nvme_memory: int | None  # None: what the disk has free
    device: str = "cpu"  # that computes, as torch writes it
    compute_dtype: str | None = None  # None: compute in each parameter's own dtype
    compute: str = DEFAULT_COMPUTE  # "inductor": blocks are compiled, where there is a compiler; "aten": op by op
    reserve_memory: int = 0  # share of device_memory left to Python, compiled graphs and the system's allocator
    measures_reserve: bool = field(default=False, metadata={"is_option": False})  # it follows from what was measured
    prefetch_memory: int | None = None  # bytes read ahead of compute, at most; None: the planner's choice
    tile_memory: int | None = None  # larger parameters are gathered by tiles; None: only where needed to fit
    tiles: tuple[tuple[str, int], ...] | None = ()  # in how many tiles some parameters are gathered; None: never any
    micro_batches: int | None = None  # that a block computes one after another; None: as many as it takes to fit
    recompute: bool | None = None  # None: none, single values or blocks, as is fastest; True: blocks; False: never
    # Whether tensor-parallel ranks divide activations that all of them have, if some leave the device. None: those that
    # follow from results of collectives; True: also from equal inputs and parameters.
    partition_activations: bool | None = None
    overlap_step: bool = True  # False: step() returns when every update is home
    step_in_backward: bool = False  # True: update a parameter as soon as its gradient is complete
    # Whether updates begin in backward, ahead of step(), and are written to shadows until it. None: where that is faster.
    speculate: bool | None = None
    update_on: str | None = (
        None  # "host" or "device", which has memory of its own; None: what keeps bits, or is fastest
    )
    state_dtype: Code | None = None  # how optimizer state is encoded in fewer bits; None: it is exact
    exact_state: tuple[str, ...] = ()  # patterns of names of parameters whose state is exact all the same
    frozen_dtype: str | None = None  # "int8": how frozen weights of linear layers are stored; None: they are exact
    exact_frozen: tuple[str, ...] = ()  # patterns of names of those that are exact all the same
    nvme_write_budget: int | None = None  # bytes per day; None: plans write whatever makes steps short
    # Whether of experts only those that have rows are gathered, once that is known. None: where that is faster.
    gather_by_expert: bool | None = None
    remake_plan: bool = True  # False: plans stay as they were made, whatever the first steps measure
    verify_store: bool = False  # True: keep checksums of what is on nvme, and check whatever is read
    stage: int = 3  # of ZeRO: 3 divides parameters, gradients and states; 2 keeps compute copies; 1 reduces once a step
    schedule: str | None = (
        None  # "rounds": ranks have stages of the model, and compute them for all; None: ZeRO's stage
    )
    reduce: str = "ordered"  # how gradients of several ranks are added: in the order of ranks, or "fast"
    gradient_divide_factor: float | None = None  # of the sum over ranks; None: their number
    capture: bool = True  # False: run the model's own forward eagerly, gathering as it goes

    unified: bool = field(
        default=True, metadata={"is_option": False}
    )  # the device computes in host memory; follows from it, or from the hardware that is planned for
    integrated: bool = field(default=False, metadata={"is_option": False})  # see MemorySpace
    # Bytes of staging beyond its usual share: see ``with_staging_for``.
    more_staging: int = field(default=0, metadata={"is_option": False})

    @property
    def memory(self) -> MemorySpace:
        """Return the memory that the device computes in."""
        return MemorySpace(unified=self.unified, integrated=self.integrated)

    @property
    def staging_memory(self) -> int:
        """Return the share of host memory for staging buffers: half, but no more than is useful to keep a disk busy.

        More where whole tensors are updated.
        """
        return min(self.host_memory // 2, _MAX_STAGING) + self.more_staging

    def with_staging_for(self, nbytes: int) -> "Config":
        """Return options with staging of at least ``nbytes``, or as many as leave a sixteenth of host memory to homes."""
        most = self.host_memory - self.host_memory // 16
        missing = max(0, min(nbytes, most) - self.staging_memory)
        return replace(self, more_staging=self.more_staging + missing)

    @property
    def step_timing(self) -> StepTiming:
        """Return when the updates of an optimizer step run."""
        if self.step_in_backward:
            return StepTiming.IN_BACKWARD
        return StepTiming.OVERLAPPED if self.overlap_step else StepTiming.SYNCHRONOUS

    def state_code_of(self, parameter: str) -> Code | None:
        """Return how the optimizer state of a parameter is encoded, where it can be; None: it is exact."""
        return None if any(fnmatchcase(parameter, pattern) for pattern in self.exact_state) else self.state_dtype

    def encodes_frozen(self, parameter: str) -> bool:
        """Return whether a frozen weight of a linear layer is stored in fewer bits, where it can be."""
        is_exact = any(fnmatchcase(parameter, pattern) for pattern in self.exact_frozen)
        return self.frozen_dtype is not None and not is_exact

    def check_exact(self, parameters: Collection[str]) -> None:
        """Raise ConfigError for a pattern of ``exact_state`` or ``exact_frozen`` that no name of a parameter matches."""
        for option, patterns in (("exact_state", self.exact_state), ("exact_frozen", self.exact_frozen)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in parameters):
                    near = difflib.get_close_matches(pattern, parameters, n=1, cutoff=0.5)
                    hint = (
                        f"did you mean {near[0]!r}?" if near else "a pattern such as '*embed*' matches a part of a name"
                    )
                    raise ConfigError(f"{option}={pattern!r} matches no parameter of the model; {hint}")


OPTIONS = frozenset(each.name for each in fields(Config) if each.metadata.get("is_option", True))
_MAX_STAGING = 192 * 2**20  # bandwidth times latency of a fast disk is far below; more only delays write-back


def make_config(
    options: Mapping[str, object],
    *,
    memory: MemorySpace | None = None,
    find_device: Callable[[str], FoundDevice] | None = None,
) -> Config:
    """Return a Config from the keyword options of ``optimize``; ConfigError names what is wrong and the nearest name.

    ``memory`` is that of hardware that is only planned for; None means that of ``device``.
    ``find_device`` is asked about a GPU; without it a GPU has memory of its own, and needs a stated budget.
    """
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(sorted(OPTIONS))}"
            raise ConfigError(f"unknown option {name!r}; {hint}")
    given = {name: option for name, option in options.items() if option is not None}
    reserve = given.get("reserve_memory", DEFAULT_RESERVE)
    given["reserve_memory"] = 0 if reserve == MEASURED else reserve
    sizes = {
        name: parse_size(given[name], option=name)  # type: ignore[arg-type]  # parse_size checks the type itself
        for name in ("device_memory", "host_memory", "nvme_memory", "prefetch_memory", "reserve_memory", "tile_memory")
        if name in given
    }
    device = _check_device(given.get("device", "cpu"))
    found = find_device(device) if find_device is not None and memory is None and device != "cpu" else None
    if memory is None:
        memory = MemorySpace(unified=device == "cpu") if found is None else found.memory
    unified = memory.unified
    if not memory.is_in_ram and "device_memory" not in sizes:
        if found is None:
            raise ConfigError(f"device={device!r} needs a budget here; give device_memory, such as '8GiB'")
        sizes["device_memory"] = found.largest_budget
    is_device_stated = "device_memory" in given or not memory.is_in_ram
    # Without a stated budget the two RAM tiers share what is free, leaving a fifth for Python, torch and the page cache.
    free = free_memory() * 4 // 5 if "device_memory" not in sizes or "host_memory" not in sizes else 0
    on_device = sizes.get("device_memory", 0) if memory.is_in_ram else 0
    left = max(0, free - on_device - sizes.get("host_memory", 0))
    if "device_memory" not in sizes:
        sizes["device_memory"] = left if "host_memory" in sizes else left // 2
    if "host_memory" not in sizes:
        sizes["host_memory"] = left - (0 if is_device_stated else left // 2)
    if reserve == MEASURED and found is not None and sizes["device_memory"] >= LEAST_MEASURED:
        sizes["reserve_memory"] = found.libraries_nbytes
    stage, state_dtype = _check_stage(given.get("stage", 3)), _check_state_dtype(given.get("state_dtype"))
    frozen_dtype = _check_frozen_dtype(given.get("frozen_dtype"))
    if stage == 1 and given.get("step_in_backward") is True:
        raise ConfigError(
            "stage=1 reduces gradients once per step, and step_in_backward=True updates parameters before that; say stage=2"
        )
    return Config(
        device_memory=sizes["device_memory"],
        host_memory=sizes["host_memory"],
        nvme=_check_folder(given.get("nvme")),
        nvme_memory=sizes.get("nvme_memory"),
        device=device,
        compute_dtype=_check_dtype(given.get("compute_dtype")),
        compute=_check_compute(given.get("compute", DEFAULT_COMPUTE)),
        reserve_memory=sizes["reserve_memory"],
        measures_reserve=(
            reserve == MEASURED
            and unified  # a device with memory of its own holds nothing of Python
            and sizes["device_memory"] + sizes["host_memory"] >= LEAST_MEASURED
        ),
        prefetch_memory=sizes.get("prefetch_memory"),
        tile_memory=_check_tile_memory(sizes.get("tile_memory")),
        tiles=_check_tiles(given.get("tiles", {})),
        micro_batches=_check_micro_batches(given),
        recompute=_check_bool(given.get("recompute"), option="recompute"),
        partition_activations=_check_bool(given.get("partition_activations"), option="partition_activations"),
        overlap_step=_check_bool(given.get("overlap_step"), option="overlap_step") is not False,
        step_in_backward=_check_bool(given.get("step_in_backward"), option="step_in_backward") is True,
        speculate=_check_speculate(given),
        update_on=_check_update_on(given.get("update_on"), unified=unified),
        state_dtype=state_dtype,
        exact_state=_check_exact(given, "exact_state", "state_dtype", is_encoded=state_dtype is not None),
        frozen_dtype=frozen_dtype,
        exact_frozen=_check_exact(given, "exact_frozen", "frozen_dtype", is_encoded=frozen_dtype is not None),
        nvme_write_budget=_check_write_budget(given.get("nvme_write_budget")),
        gather_by_expert=_check_bool(given.get("gather_by_expert"), option="gather_by_expert"),
        remake_plan=_check_bool(given.get("remake_plan"), option="remake_plan") is not False,
        verify_store=_check_bool(given.get("verify_store"), option="verify_store") is True,
        stage=stage,
        schedule=_check_schedule(given.get("schedule")),
        reduce=_check_reduce(given.get("reduce", "ordered")),
        gradient_divide_factor=_check_factor(given.get("gradient_divide_factor")),
        capture=_check_bool(given.get("capture"), option="capture") is not False,
        unified=unified,
        integrated=memory.integrated,
    )


def _check_speculate(given: Mapping[str, object]) -> bool | None:
    option = given.get("speculate", "auto")
    if option in ("auto", None):
        speculate = None
    elif isinstance(option, bool):
        speculate = option
    else:
        raise ConfigError(f"speculate={option!r} is neither True, False nor 'auto'")
    if speculate:
        others = {"overlap_step": False, "step_in_backward": True, "capture": False}
        refused = [f"{name}={value}" for name, value in others.items() if given.get(name) is value]
        if given.get("stage") == 1:
            refused.append("stage=1, which reduces gradients at step()")
        if refused:
            raise ConfigError(
                f"speculate=True begins updates in backward, ahead of step(), which does not go with {refused[0]}; "
                "leave one of them out"
            )
    return speculate


def _check_write_budget(budget: object) -> int | None:
    if budget is None:
        return None
    size = budget
    if isinstance(budget, str):
        size, slash, time = budget.partition("/")
        if not slash or time.strip() != "day":
            raise ConfigError(f"nvme_write_budget={budget!r} is not bytes per day; write it like '2TB/day'")
    return parse_size(size, option="nvme_write_budget")  # type: ignore[arg-type]  # parse_size checks the type itself


def _check_device(device: object) -> str:
    name = str(device)
    if _DEVICE.fullmatch(name) is None:
        raise ConfigError(f"device={name!r} is neither the CPU nor an NVIDIA GPU; say 'cpu', 'cuda' or 'cuda:1'")
    return name


def _check_folder(folder: object) -> str | None:
    if folder is None:
        return None
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"nvme={folder!r} is not a path; give a folder on a local disk")
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"nvme='{path}' is not a folder; create it first, on a local disk")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"nvme='{path}' cannot be written by this user; choose another folder or change its mode")
    return str(path)


def _check_dtype(dtype: object) -> str | None:
    if dtype is None:
        return None
    name = dtype_name(dtype)
    if name not in _COMPUTE_DTYPES:
        raise ConfigError(
            f"compute_dtype={dtype!r} is not supported; use one of torch.{', torch.'.join(_COMPUTE_DTYPES)}"
        )
    return name


def _check_state_dtype(dtype: object) -> Code | None:
    if dtype is None or (name := dtype_name(dtype)) == "float32":
        return None
    if name not in set(Code):
        raise ConfigError(
            f"state_dtype={dtype!r} is no encoding of optimizer state; say 'int8' or 'bfloat16', or leave it out for exact "
            "state"
        )
    return Code(name)


def _check_frozen_dtype(dtype: object) -> str | None:
    if dtype is None:
        return None
    name = dtype_name(dtype)
    if name != "int8":
        raise ConfigError(
            f"frozen_dtype={dtype!r} is no encoding of frozen weights; say 'int8', or leave it out for exact weights"
        )
    return name


def _check_exact(given: Mapping[str, object], option: str, needs: str, *, is_encoded: bool) -> tuple[str, ...]:
    patterns = given.get(option, ())
    listed = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(listed, list | tuple | set | frozenset) or not all(
        isinstance(each, str) and each for each in listed
    ):
        raise ConfigError(
            f"{option}={patterns!r} is no name of a parameter; give names, or patterns such as '*embed*', as a string or "
            "a list of strings"
        )
    if listed and not is_encoded:
        kind = "all state is" if option == "exact_state" else "all weights are"
        raise ConfigError(f"{option}={patterns!r} without {needs}: {kind} exact; leave it out")
    return tuple(sorted(listed) if isinstance(listed, set | frozenset) else listed)


def _check_tile_memory(nbytes: int | None) -> int | None:
    if nbytes is not None and nbytes < LEAST_TILE:
        raise ConfigError(
            f"tile_memory={nbytes} is less than the {LEAST_TILE} bytes below which a transfer costs more in latency than "
            "its bytes do; give that or more"
        )
    return nbytes


def _check_tiles(tiles: object) -> tuple[tuple[str, int], ...] | None:
    if tiles is False:
        return None
    if not isinstance(tiles, Mapping):
        raise ConfigError(
            f"tiles={tiles!r} is neither a dictionary nor False; give a number of tiles by the parameter's name, or False "
            "to have none"
        )
    for name, given in tiles.items():
        dim, count = given if isinstance(given, tuple) and len(given) == 2 else (0, given)
        if not isinstance(name, str) or isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"tiles={{{name!r}: {given!r}}} is not a number of tiles, 1 or more, by a parameter's name"
            )
        if dim != 0:
            raise ConfigError(
                f"tiles={{{name!r}: {given!r}}} asks for tiles along dimension {dim}; a parameter is gathered by parts of "
                f"its dimension 0, whose rows lie side by side: say {{{name!r}: {count}}}"
            )
    return tuple(sorted((name, given[1] if isinstance(given, tuple) else given) for name, given in tiles.items()))


def _check_micro_batches(given: Mapping[str, object]) -> int | None:
    number = given.get("micro_batches")
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"micro_batches={number!r} is not a number of micro-batches, 1 or more")
    if number > 1 and given.get("capture") is False:
        raise ConfigError(
            f"micro_batches={number} cuts the blocks of a captured graph, and capture=False captures none; leave one out"
        )
    return number


def _check_compute(compute: object) -> str:
    if compute not in ("aten", "inductor"):
        raise ConfigError(f"compute={compute!r} is neither 'aten', op by op, nor 'inductor', compiled by blocks")
    return str(compute)


def _check_update_on(where: object, *, unified: bool) -> str | None:
    if where not in (None, "host", "device"):
        raise ConfigError(f"update_on={where!r} is neither 'host' nor 'device'")
    if where == "device" and unified:
        raise ConfigError(
            "update_on='device' needs a device with memory of its own; say device='cuda', or leave it out"
        )
    return None if where is None else str(where)


def _check_stage(stage: object) -> int:
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise ConfigError(
            f"stage={stage!r} is not a stage of ZeRO: say 3 to divide parameters, gradients and optimizer state over ranks, "
            "2 to keep whole compute copies on the device of each, 1 to also reduce gradients only once per step"
        )
    return int(stage)


def _check_schedule(schedule: object) -> str | None:
    if schedule not in (None, "rounds"):
        raise ConfigError(
            f"schedule={schedule!r} is not known; say 'rounds' to deal the stages of the model out to the ranks of one "
            "machine, or leave it out, which shards every parameter (ZeRO)"
        )
    return None if schedule is None else str(schedule)


def _check_reduce(reduce: object) -> str:
    if reduce not in ("ordered", "fast"):
        raise ConfigError(
            f"reduce={reduce!r} is neither 'ordered', which adds gradients in the order of ranks and gives the same bits "
            "every time, nor 'fast', which leaves the order to torch.distributed"
        )
    return str(reduce)


def _check_factor(factor: object) -> float | None:
    if factor is None:
        return None
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
        raise ConfigError(
            f"gradient_divide_factor={factor!r} is not a positive number; 1 adds the gradients of all ranks up, and None "
            "averages them"
        )
    return float(factor)


def _check_bool(flag: object, *, option: str) -> bool | None:
    if flag is None or isinstance(flag, bool):
        return flag
    raise ConfigError(f"{option}={flag!r} is neither True nor False")
