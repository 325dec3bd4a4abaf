"""Question: how much larger may one operator be when it is tiled, and what does tiling cost where it is not needed?

``ladder``: the largest hidden size of an MLP (hidden to four times hidden and back) that trains within a device budget if
each weight is gathered in 1, 2, 4, .. tiles. The size is found by planning; then two steps are trained to measure the
peak. A weight grows with the square of the hidden size: at best, 4 times as many tiles allow twice the hidden size.

``time``: forward and backward of that MLP in 4 tiles against untiled, with homes on the host and room for both weights, in
one process, in alternating rounds (A B A B).

    python -m benchmarks.tiling --only ladder --device-memory 24MiB
    python -m benchmarks.tiling --only time --hidden 1024

print JSON. Targets: 8 times the hidden size at the highest factor, where a factor cuts both dimensions of a weight, as the
experiment in the ZeRO-Infinity paper (figure 6b) does: factor 16 is 256 tiles; at most 1.05 times the seconds at 4 tiles.
"""

import argparse
import json
import statistics
import time

import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Tier

_STEP = 64  # hidden sizes are multiples of it
_TOKENS = 16  # of the ladder: keeps activations small compared with weights


class Mlp(nn.Module):
    """The two linear layers of a transformer's MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of some rows."""
        return self.down(torch.relu(self.up(x))).square().mean()


def build(hidden: int, num_tiles: int, device_memory: str | int) -> Mlp:
    """Return an optimized MLP whose weights are each gathered in ``num_tiles`` tiles."""
    with torch.device("meta"):
        model = Mlp(hidden)
    tiles = {"up.weight": num_tiles, "down.weight": num_tiles}
    torch.manual_seed(0)
    return zinf_compile.optimize(
        model,
        init="reset",
        compute="aten",
        device_memory=device_memory,
        host_memory="16GiB",
        tiles=tiles,
        remake_plan=False,
    )


def does_fit(hidden: int, num_tiles: int, device_memory: str) -> bool:
    """Return whether an MLP can be planned within the budget. If not, its first call raises before anything runs."""
    model = None
    try:
        model = build(hidden, num_tiles, device_memory)
        model(torch.ones(_TOKENS, hidden))
    except CapacityError:
        return False
    finally:
        torch._dynamo.reset()
        if model is not None:
            zinf_compile.close(model)
    return True


def largest_hidden(num_tiles: int, device_memory: str, start: int) -> int:
    """Return the largest hidden size that fits, given one that does."""
    low, high = start // _STEP, 2 * start // _STEP
    while does_fit(high * _STEP, num_tiles, device_memory):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if does_fit(middle * _STEP, num_tiles, device_memory) else (low, middle)
    return low * _STEP


def train_step(hidden: int, num_tiles: int, device_memory: str) -> dict[str, object]:
    """Train for two steps; return the predicted and the measured peak of the device."""
    model = build(hidden, num_tiles, device_memory)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(_TOKENS, hidden))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tier = next(tier for tier in zinf_compile.report(model).tiers if tier.tier is Tier.DEVICE)
    zinf_compile.close(model)
    torch._dynamo.reset()
    assert losses[1] < losses[0], f"training does not lower the loss: {losses}"
    return {"predicted_mib": tier.predicted_peak / 2**20, "measured_mib": tier.measured_peak / 2**20}


def measure_ladder(device_memory: str, factors: list[int]) -> dict[str, object]:
    """Return the largest hidden size by number of tiles."""
    rungs: dict[str, object] = {}
    first = hidden = _STEP
    for num_tiles in factors:
        hidden = largest_hidden(num_tiles, device_memory, hidden)
        first = hidden if num_tiles == factors[0] else first
        peaks = train_step(hidden, num_tiles, device_memory)
        weight_mib = 16 * hidden**2 / 2**20
        rungs[str(num_tiles)] = {"hidden": hidden, "times": hidden / first, "weight_mib": weight_mib, **peaks}
        print(json.dumps({num_tiles: rungs[str(num_tiles)]}), flush=True)
    return rungs


def run_once(model: Mlp, x: Tensor) -> float:
    """Return the seconds of a forward and a backward."""
    start = time.perf_counter()
    model(x).backward()
    seconds = time.perf_counter() - start
    for parameter in model.parameters():
        parameter.grad = None
    return seconds


def measure_time(hidden: int, tokens: int, rounds: int) -> dict[str, object]:
    """Return the overhead of 4 tiles: the median of the ratios of neighbouring runs."""
    weight = 16 * hidden**2
    device_memory = 4 * weight + 40 * tokens * hidden * 4  # not all resident: both weights and a gradient are 3
    models = [build(hidden, num_tiles, device_memory) for num_tiles in (1, 4)]
    x = torch.randn(tokens, hidden)
    seconds: list[list[float]] = [[], []]
    for turn in range(rounds + 2):
        for model, found in zip(models, seconds, strict=True):
            took = run_once(model, x)
            if turn >= 2:  # the first turns capture and warm up
                found.append(took)
    moved = [sum(route.nbytes for route in zinf_compile.report(model).moved) for model in models]
    return {
        "seconds": [statistics.median(found) for found in seconds],
        "ratio": statistics.median(b / a for a, b in zip(*seconds, strict=True)),
        "moved_mib": [nbytes / 2**20 for nbytes in moved],
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("ladder", "time"))
    parser.add_argument("--device-memory", default="24MiB")
    parser.add_argument("--tiles", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    line: dict[str, object] = {}
    if arguments.only != "time":
        line["ladder"] = measure_ladder(arguments.device_memory, arguments.tiles)
    if arguments.only != "ladder":
        line["time"] = measure_time(arguments.hidden, arguments.tokens, arguments.rounds)
    print(json.dumps(line, indent=2), flush=True)


if __name__ == "__main__":
    main()
