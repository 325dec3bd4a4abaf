"""Question: what does the loss of a language model cost if the full logits are never materialised?

Forward and backward of ``cross_entropy(linear(hidden, weight), target)`` in plain PyTorch against
``linear_cross_entropy``, in one pass and with recomputed logits, in one process, in alternating rounds (A B A B). The
floor is the time of the three matrix products that every variant needs, over the same tiles of rows. Peaks are memory
above what the process held before; ``activations`` excludes the gradients, which every variant returns.

    python -m benchmarks.linear_loss --dtype bfloat16 --hidden 1024

prints JSON. Targets: at most 1/8 of plain PyTorch's activations, at most 1.1 times its seconds.
"""

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from zinf_compile.passes.transforms.tiling.linear_loss import linear_cross_entropy
from zinf_compile.runtime.execute.op_bodies import register


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One forward and backward."""

    seconds: float
    peak_nbytes: int
    loss: float
    gradients: tuple[Tensor, ...]


def read_status(field: str) -> int:
    """Return a size in bytes from /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def measure(make_loss: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Measured:
    """Run forward and backward once; the peak is the kernel's VmHWM."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current RSS
    before, start = read_status("VmRSS"), time.perf_counter()
    loss = make_loss()
    gradients = torch.autograd.grad(loss, leaves)
    seconds = time.perf_counter() - start
    peak = read_status("VmHWM") - before
    return Measured(seconds=seconds, peak_nbytes=peak, loss=loss.item(), gradients=gradients)


def measure_floor(hidden: Tensor, weight: Tensor, tile_rows: int) -> float:
    """Return the seconds of the three matrix products, tile by tile, into preallocated memory."""
    hidden, weight = hidden.detach(), weight.detach()
    logits = hidden.new_zeros(tile_rows, weight.shape[0])
    of_weight = torch.zeros_like(weight)
    of_hidden = torch.zeros_like(hidden)
    start = time.perf_counter()
    for tile, result in zip(hidden.split(tile_rows), of_hidden.split(tile_rows), strict=True):
        torch.mm(tile, weight.t(), out=logits)
        torch.mm(logits, weight, out=result)
        of_weight.addmm_(logits.t(), tile)
    return time.perf_counter() - start


def distance(measured: Tensor, reference: Tensor) -> float:
    """Return the relative error of a tensor."""
    return (
        torch.linalg.vector_norm((measured - reference).float()) / torch.linalg.vector_norm(reference.float())
    ).item()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--classes", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    register()
    dtype = getattr(torch, arguments.dtype)
    hidden = torch.randn(arguments.rows, arguments.hidden).to(dtype).requires_grad_()
    weight = torch.randn(arguments.classes, arguments.hidden).mul_(0.02).to(dtype).requires_grad_()
    target = torch.randint(0, arguments.classes, (arguments.rows,))
    losses: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: F.cross_entropy(F.linear(hidden, weight), target),
        "one_pass": lambda: linear_cross_entropy(hidden, weight, target, one_pass=True),
        "logits_again": lambda: linear_cross_entropy(hidden, weight, target, one_pass=False),
    }
    rounds: dict[str, list[Measured]] = {name: [] for name in losses}
    distances: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        reference: tuple[Tensor, ...] = ()
        for name, make_loss in losses.items():
            measured = measure(make_loss, (hidden, weight))
            reference = reference or measured.gradients
            pairs = zip(measured.gradients, reference, strict=True)
            distances[name] = [round(distance(ours, theirs), 6) for ours, theirs in pairs]
            rounds[name].append(replace(measured, gradients=()))
            del measured
    gradients = (hidden.nbytes + weight.nbytes) / 2**30
    line: dict[str, object] = {"dtype": arguments.dtype, "hidden": arguments.hidden, "classes": arguments.classes}
    line["floor_seconds"] = round(measure_floor(hidden, weight, -(-arguments.rows // 8)), 2)
    for name, values in rounds.items():
        peak = max(value.peak_nbytes for value in values) / 2**30
        pairs = zip(values, rounds["plain"], strict=True)
        line[name] = {
            "seconds": [round(value.seconds, 2) for value in values],
            "seconds_ratio": round(statistics.median(ours.seconds / theirs.seconds for ours, theirs in pairs), 3),
            "peak_gib": round(peak, 3),
            "activations_gib": round(peak - gradients, 3),
            "loss": round(values[-1].loss, 4),
            "gradient_distances": distances[name],
        }
    print(json.dumps(line, indent=2), flush=True)


if __name__ == "__main__":
    main()
