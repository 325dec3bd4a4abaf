"""Question: what does one optimizer step cost, and where does its time go?

``kernel``: our compiled AdamW over one chunk in RAM, against torch's fused kernel on float32 gradients, and against what
the streamed step does without a compiled kernel (widen the gradient, update, round to the compute copy). The sides
alternate, each on its own memory; a line has the median over rounds, and the best.

``step``: the streamed AdamW step of a model in a store, against two lower bounds measured in the same rounds. ``update``
is the compiled kernel over plain tensors of the same sizes. ``disk``, for states on nvme, is four threads that only call
the engine with the blocks of the streamed step, in its mix of reads and writes. ``ratio`` is the longer of the bounds
over the seconds of the step; its target is at least 0.9. Bytes are as counted by the operating system. With
``--state-dtype`` moments are kept in codes, which ``update`` decodes and encodes.

    python -m benchmarks.optimizer_step --only kernel
    python -m benchmarks.optimizer_step --only step --nvme DIR [--state-dtype int8]

print one JSON line per case. Rates are 10^9 parameters per second.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

import zinf_compile
from benchmarks.io import NUM_THREADS
from benchmarks.json_lines import command_line
from benchmarks.out_of_core import disk_bytes
from zinf_compile.ir.copies import Code, low_halves_nbytes
from zinf_compile.runtime.optim.fused_adamw import Kernel, find_kernel
from zinf_compile.runtime.optim.shadow import shadow_step
from zinf_compile.runtime.storage.nvme.posix import PosixEngine
from zinf_compile.runtime.storage.staging import StagingPool

_MIB = 2**20
_CHUNKS_BEHIND = 3  # as in the streamed step: a write of what is being read waits for that

Answer = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings shared by all measurements."""

    threads: tuple[int, ...]
    rounds: int
    elements: int
    layers: int
    width: int
    nvme: str
    code: Code | None  # of moments

    @property
    def chunk_blocks(self) -> tuple[int, ...]:
        """The bytes of 2^20 parameters: what bfloat16 lacks of a master copy, moments, and bfloat16."""
        moment = 4 * _MIB if self.code is None else self.code.nbytes(_MIB)
        return (low_halves_nbytes(_MIB), moment, moment, 2 * _MIB)


def measure_kernel(settings: Settings) -> Iterator[Answer]:
    """Yield one answer per number of threads, AdamW variant and pair of dtypes."""
    for threads in settings.threads:
        torch.set_num_threads(threads)
        for fused in (True, False):
            for narrow in (torch.bfloat16, None):
                case = {
                    "question": "kernel",
                    "elements": settings.elements,
                    "threads": threads,
                    "adamw": "fused" if fused else "default",
                    "gradient": str(narrow or torch.float32).removeprefix("torch."),
                    "compute_copy": narrow is not None,
                }
                rates = _compare(_make_sides(settings.elements, threads, fused=fused, narrow=narrow), settings)
                yield {**case, **rates, "ratio": rates["compiled"] / rates["torch"]}


def _make_sides(size: int, threads: int, *, fused: bool, narrow: torch.dtype | None) -> dict[str, Callable[[], Any]]:
    """Return functions that update a chunk by the compiled kernel and by torch, each on its own memory."""
    optimizer = torch.optim.AdamW([torch.zeros(1)], fused=fused)
    (group,) = optimizer.param_groups
    gradient = torch.randn(size).to(narrow or torch.float32)
    kernel = _find_kernel(optimizer, gradient.dtype, narrow)

    def make_memory() -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
        moments = {key: torch.zeros(size) for key in ("exp_avg", "exp_avg_sq")}
        return torch.randn(size), None if narrow is None else torch.empty(size, dtype=narrow), moments

    master, compute, state = make_memory()
    plain, plain_compute, plain_state = make_memory()
    plain_state["step"] = torch.zeros(())

    def run_compiled() -> None:
        nonlocal state
        state = kernel.update(group, state, master, gradient, compute, num_threads=threads)

    def run_torch() -> None:
        shadow_step(optimizer, group, plain.detach(), gradient.to(plain.dtype), plain_state)
        if plain_compute is not None:
            plain_compute.copy_(plain)

    return {"compiled": run_compiled, "torch": run_torch}


def _find_kernel(optimizer: torch.optim.Optimizer, gradient: torch.dtype, compute: torch.dtype | None) -> Kernel:
    (group,) = optimizer.param_groups
    kernel = find_kernel(optimizer, group, master_dtype=torch.float32, gradient_dtype=gradient, compute_dtype=compute)
    if kernel is None:
        sys.exit("there is no compiled kernel here; the log says why")
    return kernel


def _compare(sides: dict[str, Callable[[], Any]], settings: Settings) -> dict[str, float]:
    """Return the rate of each side, the median and the best over alternating rounds."""
    seconds = _take_turns(sides, settings.rounds)
    rate = settings.elements / 1e9
    return {name: rate / statistics.median(taken) for name, taken in seconds.items()} | {
        f"{name}_best": rate / min(taken) for name, taken in seconds.items()
    }


def _take_turns(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each side in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_index in range(rounds + 2):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if round_index >= 2:  # the first rounds fault the memory in
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure_step(settings: Settings) -> Iterator[Answer]:
    """Yield one answer for states on nvme, and one for states on the host."""
    threads = max(settings.threads)
    torch.set_num_threads(threads)
    for home in ("nvme", "host"):
        update = _make_update(settings, threads)  # before the model: memory held by then counts for no tier
        model, optimizer = _train_once(settings, home)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            zinf_compile.synchronize(model)

        sides: dict[str, Callable[[], Any]] = {"step": step, "update": update}
        moved: Answer = {}
        if home == "nvme":
            before = disk_bytes()
            step()
            read, written = (last - first for first, last in zip(before, disk_bytes(), strict=True))
            sides["disk"] = _make_disk_side(settings, read, written)
            moved = {
                "read_bytes": read,
                "written_bytes": written,
                "bytes_per_parameter": (read + written) / num_parameters,
            }
        seconds = _take_turns(sides, settings.rounds)
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        ratios = [max(bounds) / taken for taken, *bounds in zip(*seconds.values(), strict=True)]
        yield {
            "question": "step",
            "states_on": home,
            "num_parameters": num_parameters,
            "threads": threads,
            "state_dtype": settings.code,
            **moved,
            **{f"{name}_seconds": taken for name, taken in medians.items()},
            **{f"{name}_seconds_best": min(taken) for name, taken in seconds.items()},
            "parameters_per_second": num_parameters / medians["step"],
            "ratio": max(taken for name, taken in medians.items() if name != "step") / medians["step"],
            "ratio_of_rounds": statistics.median(ratios),
        }
        zinf_compile.close(model)


class _Layer(nn.Linear):
    """A linear layer that keeps the variance: of many plain ones, the squares of gradients would be denormal, and slow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3**0.5


def _train_once(settings: Settings, home: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model whose states are at ``home``, with gradients, and an optimizer that has stepped once."""
    with torch.device("meta"):
        model = nn.Sequential(*(_Layer(settings.width, settings.width, bias=False) for _ in range(settings.layers)))
    one = settings.width**2
    # Staging of 96 MiB is enough for full chunks. The rest of host_memory is for homes.
    host = 2 * 96 * 2**20 if home == "nvme" else 18 * one * settings.layers + 2 * 192 * 2**20
    zinf_compile.optimize(
        model,
        init="reset",
        compute="aten",
        compute_dtype=torch.bfloat16,
        device_memory=32 * one,
        host_memory=host,
        reserve_memory=0,  # where homes are is the question, not what the process takes
        nvme=settings.nvme,
        state_dtype=None if settings.code is None else str(settings.code),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model(torch.randn(32, settings.width, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    zinf_compile.synchronize(model)
    return model, optimizer


def _make_update(settings: Settings, threads: int) -> Callable[[], None]:
    """Return the compiled update of tensors in RAM, one per parameter of the model."""
    optimizer = torch.optim.AdamW([torch.zeros(1)], fused=True)
    (group,) = optimizer.param_groups
    kernel = _find_kernel(optimizer, torch.bfloat16, torch.bfloat16)
    size = settings.width**2
    # Of zeros int8 codes are made in less time than of other values.
    parameters = [
        (torch.ones(size), torch.randn(size).to(torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16))
        for _ in range(settings.layers)
    ]
    states: list[dict[str, Any]] = [{"exp_avg": torch.zeros(size), "exp_avg_sq": torch.zeros(size)} for _ in parameters]
    if settings.code is not None:
        return _make_coded_update(settings.code, kernel, group, parameters, threads)

    def update() -> None:
        for index, (master, gradient, compute) in enumerate(parameters):
            states[index] = kernel.update(group, states[index], master, gradient, compute, num_threads=threads)

    return update


def _make_coded_update(
    code: Code,
    kernel: Kernel,
    group: dict[str, Any],
    parameters: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    threads: int,
) -> Callable[[], None]:
    """Return the compiled update with moments in codes."""
    names, size = ("exp_avg", "exp_avg_sq"), parameters[0][0].numel()
    pages = [{name: torch.empty(code.nbytes(size), dtype=torch.uint8) for name in names} for _ in parameters]
    seeds, num_steps = dict.fromkeys(names, 0), 0

    def update() -> None:
        nonlocal num_steps
        for tensors, states in zip(parameters, pages, strict=True):
            step = num_steps or None
            kernel.update_coded(group, step, states, code, *tensors, first=0, seeds=seeds, num_threads=threads)
        num_steps += 1

    return update


def _make_disk_side(settings: Settings, read: int, written: int) -> Callable[[], None]:
    """Return a function that only moves the bytes of a step through an engine, in the block sizes of its chunks."""
    engine = PosixEngine(settings.nvme)
    chunk_blocks = settings.chunk_blocks
    num_chunks = -(-max(read, written) // sum(chunk_blocks))
    engine.reserve(num_chunks * sum(chunk_blocks))
    blocks = [
        (chunk * sum(chunk_blocks) + sum(chunk_blocks[:index]), nbytes)
        for chunk in range(num_chunks)
        for index, nbytes in enumerate(chunk_blocks)
    ]
    pool = StagingPool(NUM_THREADS * max(chunk_blocks))

    def move(reads_until: int, writes_until: int) -> None:
        """Alternate reads and writes of blocks, each from the start of the file to an offset; writes are chunks behind."""
        behind = _CHUNKS_BEHIND * len(chunk_blocks)
        reads = [(engine.read, *block) for block in blocks if sum(block) <= reads_until] + [None] * behind
        writes = [None] * behind + [(engine.write, *block) for block in blocks if sum(block) <= writes_until]
        calls = (call for pair in zip_longest(reads, writes) for call in pair if call is not None)
        lock = threading.Lock()

        def work() -> None:
            with pool.lease(max(chunk_blocks)) as lease:
                while True:
                    with lock:
                        following = next(calls, None)
                    if following is None:
                        return
                    call, offset, nbytes = following
                    call(offset, lease.view[:nbytes])

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            for future in [threads.submit(work) for _ in range(NUM_THREADS)]:
                future.result()

    move(0, engine.nbytes)  # write first: reads of unwritten extents do not reach the disk
    return partial(move, read, written)


QUESTIONS: dict[str, Callable[[Settings], Iterator[Answer]]] = {"kernel": measure_kernel, "step": measure_step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(QUESTIONS), help="one question instead of all")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--rounds", type=int, help="default: 60 for a chunk, 9 for a whole step")
    parser.add_argument("--elements", type=int, default=2**20, help="of the chunk")
    parser.add_argument("--layers", type=int, default=32, help="of the model that steps")
    parser.add_argument("--width", type=int, default=2048, help="of a layer, which has width * width parameters")
    parser.add_argument("--nvme", default=".", help="folder on a local disk")
    parser.add_argument("--state-dtype", choices=tuple(Code), type=Code, help="of moments, in a whole step")
    args = parser.parse_args()
    command = command_line("optimizer_step")
    for name in QUESTIONS if args.only is None else (args.only,):
        settings = Settings(
            threads=tuple(args.threads),
            rounds=args.rounds or (9 if name == "step" else 60),
            elements=args.elements,
            layers=args.layers,
            width=args.width,
            nvme=args.nvme,
            code=args.state_dtype,
        )
        for answer in QUESTIONS[name](settings):
            print(json.dumps({"command": command, **answer}), flush=True)


if __name__ == "__main__":
    main()
