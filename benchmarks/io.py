"""Question: does the engine reach the bandwidth of the disk, at the block sizes that the store uses?

Four threads of the engine against fio with four jobs (psync, O_DIRECT), or against four dd processes if fio is not
installed. Both sides move the same blocks over preallocated files of the same size. The engine has written both files
before, because reading allocated but unwritten extents does not reach the disk. Rounds alternate (A B A B), and each
side is timed from its first transfer to its last (fio by the bandwidth it reports), so start-up is not counted.

    python -m benchmarks.io --nvme /mnt/nvme --gib 2

prints one JSON line per operation and block size; ``ratio`` is the median over rounds of engine over reference, and the
target is at least 0.95. Both sides' buffers are in 2 MiB pages if the kernel supports them. On a busy machine, use more
rounds.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zinf_compile.ir.errors import ConfigError, StoreError
from zinf_compile.runtime.storage.nvme.posix import PosixEngine
from zinf_compile.runtime.storage.staging import StagingPool

NUM_THREADS = 4
BLOCK_BYTES = (1 << 20, 4 << 20, 16 << 20)
FIO_TUNABLES = "glibc.malloc.hugetlb=1"  # malloc asks for 2 MiB pages, as StagingPool does; glibc 2.35 and later
REGION_ALIGN = NUM_THREADS * max(BLOCK_BYTES)  # each thread's quarter is whole blocks of every size

Operation = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement: what both sides do."""

    operation: Operation
    block_bytes: int
    file_bytes: int
    seconds: float


def measure_engine(engine: PosixEngine, pool: StagingPool, case: Case) -> float:
    """Bytes per second of four threads, each repeating over its own quarter of the file until time is up."""
    quarter = case.file_bytes // NUM_THREADS
    ready = threading.Barrier(NUM_THREADS)
    starts, ends, moved, failures = [], [], [], []

    def work(worker: int) -> None:
        try:
            with pool.lease(case.block_bytes) as buffer:
                view = buffer.view
                view[:] = os.urandom(case.block_bytes)
                transfer = engine.read if case.operation == "read" else engine.write
                ready.wait()
                start = now = time.monotonic()
                total = 0
                while now < start + case.seconds:
                    transfer(worker * quarter + total % quarter, view)
                    total += case.block_bytes
                    now = time.monotonic()
            starts.append(start)
            ends.append(now)
            moved.append(total)
        except StoreError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(moved) / (max(ends) - min(starts))


def make_fio_command(path: Path, case: Case) -> list[str]:
    """Four fio jobs, each over its own quarter of ``path``, for the same time; buffers are not refilled."""
    quarter = case.file_bytes // NUM_THREADS
    return [
        *("fio", "--name=reference", f"--filename={path}", "--allow_file_create=0", f"--rw={case.operation}"),
        *(f"--bs={case.block_bytes}", f"--size={quarter}", f"--offset_increment={quarter}", "--ioengine=psync"),
        *(
            "--direct=1",
            f"--numjobs={NUM_THREADS}",
            "--group_reporting",
            "--time_based",
            f"--runtime={round(case.seconds * 1000)}ms",
        ),
        *("--scramble_buffers=0", "--gtod_reduce=1", "--output-format=json"),
    ]


def measure_fio(path: Path, case: Case) -> float:
    """The bandwidth that fio reports."""
    environment = {**os.environ, "GLIBC_TUNABLES": FIO_TUNABLES}
    command = make_fio_command(path, case)
    finished = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    (job,) = json.loads(finished.stdout[finished.stdout.index("{") :])["jobs"]
    return float(job[case.operation]["bw_bytes"])


def make_dd_command(path: Path, case: Case, worker: int) -> list[str]:
    """One of four dd over a quarter of ``path``."""
    num_blocks = case.file_bytes // NUM_THREADS // case.block_bytes
    place = f"skip={worker * num_blocks}" if case.operation == "read" else f"seek={worker * num_blocks}"
    source, target = (path, "/dev/null") if case.operation == "read" else ("/dev/zero", path)
    direct = "iflag=direct" if case.operation == "read" else "oflag=direct"
    return [
        *("dd", f"if={source}", f"of={target}", direct, "conv=notrunc"),
        *(f"bs={case.block_bytes}", f"count={num_blocks}", place),
    ]


def measure_dd(path: Path, case: Case) -> float:
    """All bytes divided by the longest time that one of the four dd processes reports."""
    running = [
        subprocess.Popen(
            make_dd_command(path, case, worker), stderr=subprocess.PIPE, text=True, env={**os.environ, "LC_ALL": "C"}
        )
        for worker in range(NUM_THREADS)
    ]
    seconds = []
    for child in running:
        _, reported = child.communicate()
        found = re.search(r"copied, ([0-9.e+-]+) s", reported)
        if child.returncode != 0 or found is None:
            raise StoreError(f"dd failed: {reported.strip()}")
        seconds.append(float(found.group(1)))
    return case.file_bytes / max(seconds)


def write_reference(path: Path, file_bytes: int) -> None:
    """Create a file the way the engine does: fallocate, then direct writes by four threads."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, file_bytes)
        write_all(file_bytes, lambda offset, view: os.pwritev(descriptor, [view], offset))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(file_bytes: int, write: Callable[[int, memoryview], object]) -> None:
    """Call ``write`` on every block of the file, from four threads, a quarter each."""
    quarter, block = file_bytes // NUM_THREADS, max(BLOCK_BYTES)
    pool = StagingPool(NUM_THREADS * block)

    def work(worker: int) -> None:
        with pool.lease(block) as buffer:
            buffer.view[:] = os.urandom(block)
            for offset in range(worker * quarter, (worker + 1) * quarter, block):
                write(offset, buffer.view)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def compare(engine: PosixEngine, path: Path, case: Case, num_rounds: int) -> dict[str, object]:
    """Alternate both sides for ``num_rounds``, after one warm-up round."""
    reference = "fio" if shutil.which("fio") else "dd"
    measure_reference = measure_fio if reference == "fio" else measure_dd
    command = make_fio_command(path, case) if reference == "fio" else make_dd_command(path, case, 0)
    ours, theirs = [], []
    with StagingPool(NUM_THREADS * case.block_bytes) as pool:
        for _ in range(num_rounds + 1):
            ours.append(measure_engine(engine, pool, case))
            theirs.append(measure_reference(path, case))
    del ours[0], theirs[0]
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {
        "question": "does the engine reach what the disk gives?",
        "operation": case.operation,
        "block_bytes": case.block_bytes,
        "engine_bytes_per_second": round(statistics.median(ours)),
        "reference": reference,
        "reference_bytes_per_second": round(statistics.median(theirs)),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_lowest": round(min(ratios), 4),
        "ratio_highest": round(max(ratios), 4),
        "num_rounds": num_rounds,
        "command": " ".join([f"GLIBC_TUNABLES={FIO_TUNABLES}", *command] if reference == "fio" else command),
    }


def main() -> int:
    """Print the comparison as JSON lines."""
    parser = argparse.ArgumentParser(description="does the engine reach what the disk gives?")
    parser.add_argument("--nvme", required=True, help="a folder on the disk to measure")
    parser.add_argument("--gib", type=float, default=2.0, help="size of each side's file")
    parser.add_argument("--seconds", type=float, default=1.0, help="time of one measurement (fio; dd makes one pass)")
    parser.add_argument("--rounds", type=int, default=9, help="how often both sides are measured")
    arguments = parser.parse_args()
    file_bytes = int(arguments.gib * (1 << 30)) // REGION_ALIGN * REGION_ALIGN
    if file_bytes <= 0 or arguments.rounds < 1:
        parser.error(f"--gib must be at least {REGION_ALIGN / (1 << 30)}, --rounds at least 1")
    try:
        engine = PosixEngine(arguments.nvme)
    except ConfigError as error:
        parser.error(str(error))
    with engine, tempfile.TemporaryDirectory(dir=arguments.nvme, prefix=".zinf-benchmark-") as folder:
        path = Path(folder) / "reference"
        engine.reserve(file_bytes)
        write_all(file_bytes, engine.write)
        write_reference(path, file_bytes)
        for operation in ("read", "write"):
            for block_bytes in BLOCK_BYTES:
                case = Case(
                    operation=operation, block_bytes=block_bytes, file_bytes=file_bytes, seconds=arguments.seconds
                )
                print(json.dumps(compare(engine, path, case, arguments.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
