"""How long does the thread that enqueues updates on a GPU take for one chunk?

    python -m benchmarks.update_overhead

Trains sixteen small layers on a fake device whose streams do nothing, with chunks so small that their arithmetic takes
no time: what is left is Python, and the launch of each op. The goal is 40 us per chunk; a chunk of 10 Mi elements of
AdamW moves for 3 ms through a link of 50 GB/s.
"""

import argparse
import statistics
import time
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from benchmarks.json_lines import JsonLines
from tests.support.fake_device import FakeDevice, FakeEvent, FakeStream, on_fake_device
from tests.support.parity import on_cuda
from zinf_compile.runtime.device.device import CopyStreams
from zinf_compile.runtime.optim.optimizer import StreamedStep

_LAYERS, _WIDTH, _CHUNK = 16, 256, 4096
_CHUNKS = _LAYERS * _WIDTH * _WIDTH // _CHUNK


class _Done(FakeEvent):
    """An event that has happened."""

    def wait(self) -> None:
        """Return at once."""


class _NoStream(FakeStream):
    """A stream that does nothing."""

    def wait(self, event: object) -> None:
        """Do not wait."""

    def record(self, *, timed: bool = False) -> _Done:
        """Return an event that has happened."""
        return _Done(self)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy nothing."""


def _make_device() -> FakeDevice:
    device = FakeDevice()
    stream = _NoStream("none", seed=0, is_compute=True)
    device.compute = device.update = stream
    device.copies = device.update_copies = CopyStreams(stream, stream)
    return device


def measure(rounds: int) -> list[float]:
    """Return the microseconds per chunk of some steps."""
    import zinf_compile

    torch.set_num_threads(1)
    found: list[float] = []
    run = StreamedStep.run

    def timed(step: StreamedStep) -> None:
        start = time.perf_counter()
        run(step)
        found.append((time.perf_counter() - start) / _CHUNKS * 1e6)

    with on_fake_device(_make_device()), on_cuda():
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)))
        budgets = {"device_memory": "3MiB", "host_memory": "1GiB"}
        options = {"compute": "aten", "compute_dtype": torch.bfloat16, "speculate": False, "overlap_step": False}
        zinf_compile.optimize(model, device="cuda", **budgets, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        store = next(model.parameters())._zinf_record.store  # type: ignore[attr-defined]
        x = torch.randn(4, _WIDTH, dtype=torch.bfloat16)
        for number in range(rounds + 2):
            model(x).sum().backward()
            if number == 1:  # what is prepared once has been
                store.device_share, store.chunk_elements = 1.0, _CHUNK
            with mock.patch.object(StreamedStep, "run", timed):
                optimizer.step()
            optimizer.zero_grad()
        zinf_compile.close(model)
    return found[2:]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the line to a file, not to standard output")
    args = parser.parse_args()
    seconds = measure(args.rounds)
    lines = JsonLines("update_overhead", args.json)
    lines.note(
        {"question": "updates", "chunks": _CHUNKS, "microseconds": seconds, "median": statistics.median(seconds)}
    )


if __name__ == "__main__":
    main()
