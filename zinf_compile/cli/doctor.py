"""``zinf doctor``: measures this machine, and prints its limits and rates, what is missing and what that costs.

On several ranks it measures what they share instead: links between them, and disks that all of them read at once.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zinf_compile.cli.ranks import add_ranks_argument, as_rank, must_start, start_ranks
from zinf_compile.driver.this_machine import LEAST_DISK, TheseRanks, is_busy, look_at_machine, look_at_ranks
from zinf_compile.hardware.profile_io import save_hardware
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import format_bytes
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.records import to_json
from zinf_compile.runtime.calibration.machine import Machine

_LEAST_MEMORY = 512 * 2**20  # Python, torch and a captured graph
_MANY_FILES = 65536  # a lower limit on open files restricts how many parameters can be on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """Something that the machine lacks, and its cost."""

    what: str
    costs: str
    is_fatal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What ``zinf doctor --json`` prints."""

    machine: Machine
    hardware: Hardware
    lacks: tuple[Lack, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zinf doctor``."""
    parser.add_argument("--nvme", type=Path, metavar="DIR", default=Path(), help="a folder on the disk to look at")
    parser.add_argument("--again", action="store_true", help="measure, even if this machine was measured before")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the profile as a hardware file")
    add_ranks_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis and return 0; 1 if something makes training impossible. ConfigError if DIR cannot be used."""
    if must_start(args.ranks):
        _check_for_ranks(args)
        return start_ranks(args.ranks, args.words)
    with as_rank(args.ranks) as world:
        if world.size == 1:
            return _run_alone(args)
        _check_for_ranks(args)
        found = look_at_ranks(args.nvme)
        if args.json:
            print(to_json(found), end="")
        else:
            _print_ranks(found, Console())
    return 0


def _check_for_ranks(args: argparse.Namespace) -> None:
    if args.save is not None:
        raise ConfigError("--save writes the profile of one machine; leave it out, or run zinf doctor without ranks")


def _run_alone(args: argparse.Namespace) -> int:
    diagnosis = diagnose(args.nvme, again=args.again)
    if args.save is not None:
        save_hardware(diagnosis.hardware, args.save)
    if args.json:
        print(to_json(diagnosis), end="")
    else:
        _print(diagnosis, Console())
        if args.save is not None:
            print(f"profile written to {args.save}")
    return 1 if any(lack.is_fatal for lack in diagnosis.lacks) else 0


def diagnose(folder: Path, *, again: bool) -> Diagnosis:
    """Return the diagnosis. Measures for some seconds unless that was done before; results of an idle machine are saved."""
    found = look_at_machine(folder, again=again)
    return Diagnosis(machine=found.machine, hardware=found.hardware, lacks=find_lacks(found.machine, found.hardware))


def find_lacks(machine: Machine, hardware: Hardware) -> tuple[Lack, ...]:
    """Return what a machine lacks, and the cost of each, as text with numbers."""
    lacks = []
    if machine.free_memory_nbytes < _LEAST_MEMORY:
        free = format_bytes(machine.free_memory_nbytes)
        lacks.append(Lack(what="memory", costs=f"{free} are free, Python and torch alone need 512 MiB", is_fatal=True))
    if machine.free_disk_nbytes < LEAST_DISK:
        free = format_bytes(machine.free_disk_nbytes)
        costs = f"{free} are free in {machine.nvme}: nothing can be trained from there, pass --nvme with another folder"
        lacks.append(Lack(what="disk space", costs=costs, is_fatal=True))
    if is_busy(machine):
        costs = (
            f"{machine.load:.1f} threads want {machine.num_cores} cores: what is measured now is too low, and not kept"
        )
        lacks.append(Lack(what="a quiet machine", costs=costs))
    if not machine.takes_o_direct:
        costs = f"{machine.nvme} goes through the page cache: one more copy of every byte, and memory no budget counts"
        lacks.append(Lack(what="O_DIRECT", costs=costs))
    if not machine.has_cuda:
        fastest = max(hardware.flops, key=lambda rate: rate.per_second)
        costs = (
            f"computes on the CPU, at {fastest.per_second / 1e9:.0f} GFLOP/s of {fastest.name}; an H200 does 700,000"
        )
        lacks.append(Lack(what="CUDA", costs=costs))
    elif not machine.has_cupy:
        lacks.append(Lack(what="CuPy", costs="state_dtype is slower on the GPU: pip install zinf_compile[cuda]"))
    if machine.compiler is None:
        rate = hardware.optimizer_elements_per_second / 1e9
        costs = (
            f"AdamW by torch's kernels, {rate:.2f} G elements/s in float32, and three to five times slower in bfloat16"
        )
        lacks.append(Lack(what="a C++ compiler", costs=costs))
    if machine.open_files is not None and machine.open_files < _MANY_FILES:
        costs = f"{machine.open_files:,} files may be open: a model has at most about as many tensors on disk"
        lacks.append(Lack(what="open files", costs=costs))
    if machine.cgroup_nbytes is not None and machine.cgroup_nbytes < machine.memory_nbytes:
        allowed, there = format_bytes(machine.cgroup_nbytes), format_bytes(machine.memory_nbytes)
        lacks.append(Lack(what="all of the memory", costs=f"this container gets {allowed} of {there}"))
    if not machine.has_transformers:
        lacks.append(Lack(what="transformers", costs="no `zinf train hf:FOLDER`: pip install zinf_compile[hf]"))
    return tuple(lacks)


def _print(diagnosis: Diagnosis, console: Console) -> None:
    machine, hardware = diagnosis.machine, diagnosis.hardware
    limits = _table("limits", "what", "here")
    for name, nbytes in (
        ("memory", machine.memory_nbytes),
        ("free memory", machine.free_memory_nbytes),
        ("cgroup's memory", machine.cgroup_nbytes),
        ("locked memory", machine.memlock_nbytes),
        (f"free disk in {machine.nvme}", machine.free_disk_nbytes),
    ):
        limits.add_row(name, "no limit" if nbytes is None else format_bytes(nbytes))
    limits.add_row("open files", "no limit" if machine.open_files is None else f"{machine.open_files:,}")
    limits.add_row("O_DIRECT", "yes" if machine.takes_o_direct else "no")
    limits.add_row("threads, cores", f"{machine.num_threads}, {machine.num_cores}")
    tiers = _table("tiers", "tier", "size")
    for size in hardware.tiers:
        tiers.add_row(size.tier, format_bytes(size.nbytes))
    rates = _table("measured rates", "what", "rate")
    for rate in hardware.flops:
        rates.add_row(f"matrix products, {rate.name}", f"{rate.per_second / 1e9:,.0f} GFLOP/s")
    for rate in hardware.attention_flops:
        rates.add_row(f"attention, {rate.name}", f"{rate.per_second / 1e9:,.0f} GFLOP/s")
    for op_rate in hardware.op_rates:
        rates.add_row(f"{op_rate.kind} ops, {op_rate.dtype}", f"{op_rate.bytes_per_second / 1e9:.1f} GB/s")
    rates.add_row("memory copies, read and written", f"{hardware.memory_bytes_per_second / 1e9:.1f} GB/s")
    for route in hardware.routes:
        lanes = " + ".join(route.lanes)
        name = route.name if lanes == route.name else f"{route.name}, on {lanes}"
        latency = f", first byte after {route.latency_seconds * 1e6:.0f} us" if route.latency_seconds else ""
        taken = f", takes {route.takes_of_compute:.0%} of compute" if route.takes_of_compute else ""
        rates.add_row(name, f"{route.bytes_per_second / 1e9:.2f} GB/s{latency}{taken}")
    rates.add_row("AdamW", f"{hardware.optimizer_elements_per_second / 1e9:.2f} G elements")
    for table in (tiers, limits, rates):
        console.print(table)
    if diagnosis.lacks:
        lacks = _table("missing", "what", "what it costs")
        for lack in diagnosis.lacks:
            lacks.add_row(lack.what, f"[bold red]{lack.costs}[/]" if lack.is_fatal else lack.costs)
        console.print(lacks)


def _print_ranks(found: TheseRanks, console: Console) -> None:
    table = _table("measured between ranks", "what", "typical", "slowest", "together")
    for link in found.links:
        name = f"{link.collective} of {format_bytes(link.nbytes)}"
        table.add_row(name, *_typical_and_slowest(link.bytes_per_second), "")
    disks = found.disks
    for name, rates in (("disk reads, one by one", disks.alone), ("disk reads, all at once", disks.together)):
        together = "" if rates is disks.alone else _rate(sum(rates))
        table.add_row(name, *_typical_and_slowest(rates), together)
    console.print(table)
    num_ranks, nodes = len(found.nodes), len(set(found.nodes))
    slowest = _slowest(disks.together)
    print(
        f"{num_ranks} ranks on {nodes} machine{'s' if nodes > 1 else ''}; when all read, they get {disks.share:.0%} of what "
        "each gets alone"
    )
    print(
        f"slowest: rank {slowest} on {found.nodes[slowest]}, which then reads {_rate(disks.together[slowest])}; alone it "
        f"reads {_rate(disks.alone[slowest])}"
    )


def _typical_and_slowest(rates: Sequence[float]) -> tuple[str, str]:
    slowest = _slowest(rates)
    return _rate(statistics.median(rates)), f"{_rate(rates[slowest])}, rank {slowest}"


def _slowest(rates: Sequence[float]) -> int:
    return min(range(len(rates)), key=rates.__getitem__)


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column)
    return table
