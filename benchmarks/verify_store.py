"""Question: what does ``verify_store`` cost?

``checksum``: the rate of one thread, over blocks of the size that the store moves in one call and over single sectors, for
each installed library: xxh3 (which ``verify_store`` uses), CRC-32C of google-crc32c, which needs a copy as ``bytes``, and
CRC-32 of zlib.

``step``: two models in one process take alternating steps (A B A B), one of them with ``verify_store``. ``ratio`` is the
median, over rounds, of the seconds of a step with it over those without.

    python -m benchmarks.verify_store --nvme DIR

prints one JSON line per case.
"""

import argparse
import importlib
import os
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zinf_compile
from benchmarks.json_lines import JsonLines
from benchmarks.out_of_core import disk_bytes

CALL_BYTES, SECTOR_BYTES = 4 << 20, 4096
BUFFER_BYTES = 256 << 20


def checksums() -> dict[str, Callable[[memoryview], object]]:
    """Return the checksum function of each installed library."""
    found: dict[str, Callable[[memoryview], object]] = {"zlib CRC-32": zlib.crc32}
    for library in ("xxhash", "google_crc32c"):
        try:
            module: Any = importlib.import_module(library)
        except ImportError:
            continue
        if library == "xxhash":
            found["xxh3"] = module.xxh3_64_intdigest
        else:
            found["CRC-32C"] = lambda view, value=module.value: value(bytes(view))
    return found


def bytes_per_second(checksum: Callable[[memoryview], object], buffer: memoryview, piece: int) -> float:
    """Return the rate of one thread over a buffer larger than the CPU caches."""
    start = time.perf_counter()
    for at in range(0, len(buffer), piece):
        checksum(buffer[at : at + piece])
    return len(buffer) / (time.perf_counter() - start)


def make_model(features: int, num_layers: int) -> nn.Module:
    """Return layers with little compute per byte moved, so that the cost of checksums is visible."""
    torch.manual_seed(0)
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(features, features), nn.Tanh())]
    return nn.Sequential(*layers)


class Training:
    """One model that trains out of core."""

    def __init__(self, arguments: argparse.Namespace, *, verify_store: bool, rows: int) -> None:
        self.model = zinf_compile.optimize(
            make_model(arguments.features, arguments.layers),
            device_memory="96MiB",
            host_memory="64MiB",
            nvme=arguments.nvme,
            compute="aten",
            verify_store=verify_store,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(rows, arguments.features)

    def step(self) -> float:
        """Take a step and wait until it is stored; return its seconds."""
        start = time.perf_counter()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        zinf_compile.synchronize(self.model)
        return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", required=True, help="folder on the disk")
    parser.add_argument("--features", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="append the lines to a file, not to standard output")
    arguments = parser.parse_args()
    lines = JsonLines("verify_store", arguments.json)
    buffer = memoryview(bytearray(os.urandom(BUFFER_BYTES)))
    for name, checksum in checksums().items():
        for piece in (CALL_BYTES, SECTOR_BYTES):
            rates = sorted(bytes_per_second(checksum, buffer, piece) for _ in range(arguments.rounds))
            gb = statistics.median(rates) / 1e9
            lines.note({"case": "checksum", "library": name, "bytes": piece, "gb_per_s": round(gb, 2)})
    for rows in (64, 1024):
        plain, checked = (Training(arguments, verify_store=verified, rows=rows) for verified in (False, True))
        for training in (plain, checked):
            training.step(), training.step()
        before = disk_bytes()
        pairs = [(plain.step(), checked.step()) for _ in range(arguments.rounds)]
        moved = [(now - then) / (2 * arguments.rounds) for now, then in zip(disk_bytes(), before, strict=True)]
        lines.note(
            {
                "case": "step",
                "rows": rows,
                "seconds_without": round(statistics.median(one for one, _ in pairs), 3),
                "seconds_with": round(statistics.median(other for _, other in pairs), 3),
                "ratio": round(statistics.median(other / one for one, other in pairs), 3),
                "ratios": [round(other / one, 3) for one, other in pairs],
                "gb_read_per_step": round(moved[0] / 1e9, 2),
                "gb_written_per_step": round(moved[1] / 1e9, 2),
            }
        )
        for training in (plain, checked):
            zinf_compile.close(training.model)


if __name__ == "__main__":
    main()
