"""How much slower is training out of core than training with all the memory, and does it stay within its budgets?

    python -m benchmarks.out_of_core --nvme DIR [--layers 12 --hidden 1792] [--tokens 2048] [--rounds 5] [--sweep]
    python -m benchmarks.out_of_core --nvme DIR --tokens 16384 --accumulate 8 --only time
    python -m benchmarks.out_of_core --nvme DIR --peer python-of-an-environment-with-deepspeed

Prints one JSON line per question:

``memory``   peak anonymous RSS of a fresh process that trains out of core, above that of the interpreter with torch
             imported, beside the two budgets it was given (an eighth of the model states together); and the bytes that
             a step moves over the disk, as the kernel counts them, over what the plan says.
``time``     seconds per step out of core over plain PyTorch in memory: the same model, dtypes, recompute and fused AdamW,
             in one process, in alternating turns of three steps, after the first four, in which plans may be made again.
             A turn out of core begins and ends with an optimizer step in flight; waiting for it between turns is not
             timed. ``floor`` is the larger of in-memory time and the bytes moved over what the disk reads and writes per
             second, both at once, measured before the first step; ``ratio_to_floor`` is the step out of core over that.
             ``disk_over_compute`` says how much of the step the disk needs: far below 1 a ratio says nothing of overlap.
             ``stalled_seconds`` is how long compute waits
             in a step. With ``--accumulate``, a step in memory accumulates the gradients of so many parts of the batch.
             Out of core it takes the batch whole, in one forward and backward, and, in the same turns, accumulates as
             well (``accumulated``).
``discard``  seconds of a step that drops its updates ahead, over a step of the same model without any; only with ``--only
             discard``. Measured in pairs of steps from rest to rest, since what was dropped is updated beside the next.
``peer``     the same training by DeepSpeed ZeRO-3 with parameters and optimizer on NVMe, run by ``benchmarks/peers``.
"""

import argparse
import contextlib
import importlib.util
import json
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from benchmarks.json_lines import command_line
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Plan

if TYPE_CHECKING:
    from zinf_compile.runtime.store.store import Store

_ROOT = Path(__file__).resolve().parents[1]
_STATE_BYTES = (
    18  # per parameter: fp32 master, two fp32 moments, bf16 copy, bf16 gradient, and 2 more for an fp32 gradient
)
_BUDGET_SHARE = 8  # device and host budgets together are an eighth of the model states
_HOST_SHARE = 0.25  # of both budgets
_SAMPLE_SECONDS = 0.005
_STEPS_A_TURN = 3
_DISK_BLOCK, _DISK_BLOCKS = 4 * 2**20, 512  # of the file that is read and written to measure the disk
_FIRST_STEPS = 4  # capture, first touch of optimizer state, and a plan made again by what was measured


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training problem. ``reserve`` is the share of the device budget left to Python and compiled graphs."""

    layers: int
    hidden: int
    seq: int
    batch: int
    nvme: str
    threads: int
    reserve: int
    budget_share: float
    step: str  # "overlapped", "synchronous" or "in_backward"
    dtype: str  # of compute: "bfloat16", with float32 master copies, or "float32", for CPUs without the other
    clip: float | None  # the norm to which gradients are clipped in each step
    speculate: bool  # whether updates may begin ahead of the step
    disk_rate: float | None  # bytes per second of a disk that is simulated, with files in memory
    state_dtype: str | None  # of optimizer state: how it is stored in fewer bits
    accumulate: int = 1  # parts of the batch whose gradients are accumulated in memory
    both: bool = False  # also measure, in the same turns, steps without updates ahead of them

    @property
    def tokens(self) -> int:
        return self.seq * self.batch


def load_gpt() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt", _ROOT / "examples" / "gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt"] = module
    spec.loader.exec_module(module)
    return module


def read_status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def disk_bytes() -> tuple[int, int]:
    """Return the bytes this process has read from and written to storage, as the kernel counts them."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


class PeakSampler:
    """The highest anonymous RSS seen by a thread that samples it every few milliseconds."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.peak = max(self.peak, read_status("RssAnon"))

    @contextlib.contextmanager
    def running(self) -> Iterator["PeakSampler"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()


def batches(case: Case) -> Iterator[tuple[object, object]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(0, 256, (case.batch, case.seq + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build(case: Case) -> "object":
    gpt = load_gpt()
    return gpt.GPT(
        gpt.GPTConfig(vocab_size=256, layers=case.layers, hidden=case.hidden, heads=case.hidden // 64, seq=case.seq)
    )


def budgets(case: Case, num_parameters: int) -> tuple[int, int]:
    """Return the device and host budgets."""
    total = int(num_parameters * _STATE_BYTES * case.budget_share)
    host = int(total * _HOST_SHARE)
    return total - host, host


def simulate_disk(bytes_per_second: float) -> None:
    """Let reads and writes of stores take turns, and each last as long as on a disk of this rate.

    With files in memory they take hardly any time of a processor, as with a disk that reads and writes by itself.
    """
    from zinf_compile.runtime.storage.nvme.posix import PosixEngine
    from zinf_compile.runtime.store import store

    class Simulated(PosixEngine):
        """An engine whose calls end when the disk would have done them."""

        _lock = threading.Lock()
        _free_at = 0.0

        def _last_as_long(self, call: Callable[[int, memoryview], None], offset: int, buffer: memoryview) -> None:
            with Simulated._lock:
                Simulated._free_at = end = max(time.perf_counter(), Simulated._free_at) + len(buffer) / bytes_per_second
            call(offset, buffer)
            time.sleep(max(0.0, end - time.perf_counter()))

        def read(self, offset: int, buffer: memoryview) -> None:
            self._last_as_long(super().read, offset, buffer)

        def write(self, offset: int, buffer: memoryview) -> None:
            self._last_as_long(super().write, offset, buffer)

    store.PosixEngine = Simulated  # type: ignore[misc]


def measure_disk(folder: str) -> float:
    """Return the bytes per second that a disk reads and writes, both at once, past the page cache.

    Long enough that a disk which is fast for a moment, or limited by the kernel, shows what it can do for longer. Memory is
    of large pages where the system has them: a disk that takes requests of so many pieces is slower with small ones.
    """
    block = _new_block()
    path = Path(folder) / f"rate-{os.getpid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        for number in range(_DISK_BLOCKS):
            os.pwrite(descriptor, block, number * _DISK_BLOCK)
        os.fsync(descriptor)

        blocks = threading.local()

        def move(number: int) -> None:
            own = blocks.own = getattr(blocks, "own", None) or _new_block()
            if number % 2:
                os.preadv(descriptor, [own], number // 2 * _DISK_BLOCK)
            else:
                os.pwrite(descriptor, own, number // 2 * _DISK_BLOCK)

        start = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(move, range(2 * _DISK_BLOCKS)))
        os.fsync(descriptor)
        return 2 * _DISK_BLOCKS * _DISK_BLOCK / (time.perf_counter() - start)
    finally:
        os.close(descriptor)
        path.unlink()


def _new_block() -> mmap.mmap:
    block = mmap.mmap(-1, _DISK_BLOCK)
    with contextlib.suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    block.write(bytes(_DISK_BLOCK))
    return block


Step = Callable[[object, object], float]


def backward(model: Any, x: Any, y: Any, parts: int) -> float:
    """Compute the gradients of a batch in so many parts; return its loss."""
    losses = []
    for each_x, each_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
        loss = model(each_x, each_y) / parts
        loss.backward()
        losses.append(loss.item())
    return sum(losses)


def out_of_core(
    case: Case, *, accumulate: int = 1, before_step: Callable[[Any], None] | None = None
) -> tuple[Step, object]:
    """Return a training step of a model in a store, and the model. ``before_step`` is called with the optimizer."""
    import torch

    import zinf_compile

    model = build(case)
    device, host = budgets(case, sum(p.numel() for p in model.parameters()))
    if case.disk_rate is not None:
        simulate_disk(case.disk_rate)
    zinf_compile.optimize(
        model,
        device_memory=device,
        host_memory=host,
        reserve_memory=case.reserve,
        nvme=case.nvme,
        compute="aten",  # eager ops, like the reference
        compute_dtype=torch.bfloat16 if case.dtype == "bfloat16" else None,
        recompute=True,
        speculate="auto" if case.speculate else False,
        state_dtype=case.state_dtype,
        overlap_step=case.step != "synchronous",
        step_in_backward=case.step == "in_backward",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(x: object, y: object) -> float:
        loss = backward(model, x, y, accumulate)
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        if before_step is not None:
            before_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model


def in_memory(case: Case) -> Step:
    """Return a training step in plain PyTorch: a bf16 model, fp32 master copies, each block recomputed in backward.

    In float32 parameters are their own master copies.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    model = build(case)
    is_narrow = case.dtype == "bfloat16"
    masters = [p.detach().clone() for p in model.parameters()] if is_narrow else list(model.parameters())
    if is_narrow:
        model.bfloat16()
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda *args, plain=plain: checkpoint(plain, *args, use_reentrant=False)
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def step(x: object, y: object) -> float:
        loss = backward(model, x, y, case.accumulate)
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        if not is_narrow:
            optimizer.step()
            optimizer.zero_grad()
            return loss
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.float()
                parameter.grad = None
            optimizer.step()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
                master.grad = None
        return loss

    return step


def store_of_model(model: Any) -> "Store":
    from zinf_compile.runtime.params.records import record_of
    from zinf_compile.runtime.store.store import store_of

    record = record_of(next(model.parameters()))
    assert record is not None
    return store_of(record)


def measure_memory(case: Case, steps: int) -> dict[str, object]:
    """Train out of core in this process, which should be fresh; return its peak and the budgets."""
    import torch

    import zinf_compile

    torch.set_num_threads(case.threads)
    torch.ones(1).sum()
    base = read_status("RssAnon")
    step, model = out_of_core(case)
    num_parameters = sum(p.numel() for p in model.parameters())
    device, host = budgets(case, num_parameters)
    Path("/proc/self/clear_refs").write_text("5")
    source = batches(case)
    with PeakSampler().running() as first:  # captures and compiles
        step(*next(source))
        zinf_compile.synchronize(model)
    with PeakSampler().running() as later:
        read, written = disk_bytes()
        for _ in range(steps):
            loss = step(*next(source))
        zinf_compile.synchronize(model)
        moved = [(after - before) / steps for before, after in zip((read, written), disk_bytes(), strict=True)]
    return {
        "question": "memory",
        **describe(case, num_parameters),
        "budget_bytes": device + host,
        "device_memory": device,
        "host_memory": host,
        "base_rss_anon": base,
        "peak_rss_anon_above_base_first_step": first.peak - base,
        "peak_rss_anon_above_base": later.peak - base,
        "vm_hwm": read_status("VmHWM"),
        "within_budgets": max(first.peak, later.peak) - base <= device + host,
        "disk_read_bytes_per_step": moved[0],
        "disk_written_bytes_per_step": moved[1],
        "disk_bytes_per_parameter": sum(moved) / num_parameters,
        "counted_over_planned": [
            counted / planned
            for counted, planned in zip(moved, planned_bytes(zinf_compile.report(model).plans[0].plan), strict=True)
        ],
        "last_loss": loss,
    }


def planned_bytes(plan: Plan) -> tuple[int, int]:
    """Return the bytes that one training step reads from and writes to nvme according to the plan."""
    gathered = sum(transfer.nbytes for transfer in plan.gathers if transfer.source is Tier.NVME)
    sunk = sum(sink.nbytes for sink in plan.sinks if sink.destination is Tier.NVME)
    return gathered + plan.step.nbytes_read, sunk + plan.step.nbytes_written


def seconds_per_step(step: Step, turn: list[tuple[object, object]]) -> float:
    start = time.perf_counter()
    for x, y in turn:
        step(x, y)
    return (time.perf_counter() - start) / len(turn)


def measure_time(case: Case, rounds: int) -> dict[str, object]:
    """Alternate steps in memory and out of core; return medians and their ratio."""
    import torch

    import zinf_compile

    torch.set_num_threads(case.threads)
    disk_rate = case.disk_rate or measure_disk(case.nvme)
    step, model = out_of_core(case)
    plain = in_memory(case)
    num_parameters = sum(p.numel() for p in model.parameters())
    source = batches(case)
    losses = []
    others: dict[str, tuple[Step, Any]] = {}
    if case.both:
        others["without_ahead"] = out_of_core(replace(case, speculate=False))
    if case.state_dtype is not None:
        others["exact_state"] = out_of_core(replace(case, state_dtype=None))
    if case.accumulate > 1:
        others["accumulated"] = out_of_core(case, accumulate=case.accumulate)
    for number in range(_FIRST_STEPS):
        x, y = next(source)
        out = (step(x, y), *(other(x, y) for other, _ in others.values()))
        if number < 2:
            losses.append((plain(x, y), *out))
    times: dict[str, list[float]] = {"in_memory": [], "out_of_core": [], **{name: [] for name in others}}
    moved = [0, 0]
    engine = store_of_model(model).engine
    assert engine is not None

    def count_bytes() -> tuple[int, int]:
        """The kernel counts no bytes of files in memory."""
        return disk_bytes() if case.disk_rate is None else (engine.bytes_read, engine.bytes_written)

    stalled_before = sum(stall.seconds for stall in zinf_compile.report(model).stalls)
    for _ in range(rounds):
        turn = [next(source) for _ in range(_STEPS_A_TURN)]
        times["in_memory"].append(seconds_per_step(plain, turn))
        step(*next(source))  # leaves an optimizer step in flight, as in training
        before = count_bytes()
        times["out_of_core"].append(seconds_per_step(step, turn))
        moved = [total + after - first for total, first, after in zip(moved, before, count_bytes(), strict=True)]
        zinf_compile.synchronize(model)
        for name, (other, other_model) in others.items():
            other(*next(source))
            times[name].append(seconds_per_step(other, turn))
            zinf_compile.synchronize(other_model)
    read, written = (total / rounds / _STEPS_A_TURN for total in moved)
    report = zinf_compile.report(model)
    disk_seconds = (read + written) / disk_rate
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    floor = max(medians["in_memory"], disk_seconds)
    stalled = sum(stall.seconds for stall in report.stalls) - stalled_before
    if 4 * disk_seconds < medians["in_memory"]:
        print(
            f"the disk is {medians['in_memory'] / disk_seconds:.1f} times faster than compute needs it: this run says "
            "nothing about how well they overlap",
            file=sys.stderr,
        )
    result = {
        "question": "time",
        **describe(case, num_parameters),
        "in_memory_seconds": medians["in_memory"],
        "out_of_core_seconds": medians["out_of_core"],
        "ratio": medians["out_of_core"] / medians["in_memory"],
        "pairwise_ratios": [b / a for a, b in zip(times["in_memory"], times["out_of_core"], strict=True)],
        "disk_seconds": disk_seconds,
        "disk_bytes_per_second": disk_rate,
        "disk_over_compute": disk_seconds / medians["in_memory"],
        "disk_bytes_per_parameter": (read + written) / num_parameters,
        "stalled_seconds": stalled / rounds / _STEPS_A_TURN,
        "updates_ahead": None if report.ahead is None else str(report.ahead),
        "floor_seconds": floor,
        "ratio_to_floor": medians["out_of_core"] / floor,
        "notes": report.plans[0].notes,
        "phases": {item.phase: [item.predicted_seconds, item.measured_seconds] for item in report.phases},
        "first_losses": losses,
    }
    for name, (_, other_model) in others.items():
        result[f"{name}_seconds"] = medians[name]
        result[f"{name}_ratio"] = medians[name] / medians["in_memory"]
        zinf_compile.close(other_model)
    zinf_compile.close(model)
    return result


def measure_discard(case: Case, rounds: int) -> dict[str, object]:
    """Time two steps of which the first drops its updates ahead, and two steps of a model without any, in turns.

    A change of the learning rate between backward and step drops them, and the step behind it begins none. Each pair
    begins and ends with nothing in flight.
    """
    import torch

    import zinf_compile

    torch.set_num_threads(case.threads)
    is_dropping = False

    def change_lr(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 1 + 1e-6 * is_dropping

    step, model = out_of_core(case, before_step=change_lr)
    other, other_model = out_of_core(replace(case, speculate=False))
    source = batches(case)
    for _ in range(_FIRST_STEPS):
        x, y = next(source)
        step(x, y)
        other(x, y)
    times: dict[str, list[float]] = {"dropping": [], "without_ahead": []}

    def seconds(step: Step, model: object, pair: list[tuple[object, object]]) -> float:
        nonlocal is_dropping
        zinf_compile.synchronize(model)
        start = time.perf_counter()
        for number, batch in enumerate(pair):
            is_dropping = number == 0
            step(*batch)
        is_dropping = False
        zinf_compile.synchronize(model)
        return time.perf_counter() - start

    def count_dropped() -> int:
        ahead = zinf_compile.report(model).ahead
        if ahead is None:
            raise SystemExit("the plan begins no updates ahead, so none can be dropped: try fewer --tokens")
        return sum(count for _, count in ahead.dropped)

    num_dropped = []
    for _ in range(rounds):
        before = count_dropped()
        for _ in range(2):  # updates ahead are taken, so the pause behind the next drop is no longer than a step
            step(*next(source))
        pair = [next(source), next(source)]
        times["dropping"].append(seconds(step, model, pair))
        times["without_ahead"].append(seconds(other, other_model, pair))
        num_dropped.append(count_dropped() - before)
    if not all(num_dropped):
        raise SystemExit(f"some rounds dropped no update ahead, and measured nothing; dropped in each: {num_dropped}")
    ordinary = statistics.median(times["without_ahead"]) / 2
    longer = statistics.median(a - b for a, b in zip(times["dropping"], times["without_ahead"], strict=True))
    result = {
        "question": "discard",
        **describe(case, sum(p.numel() for p in model.parameters())),
        "dropped": num_dropped,
        "without_ahead_seconds": ordinary,
        "dropping_seconds": ordinary + longer,
        "dropping_over_without_ahead": 1 + longer / ordinary,
        "pairs": times,
    }
    for each in (model, other_model):
        zinf_compile.close(each)
    return result


def measure_peer(case: Case, python: str, rounds: int, mmap_threshold: int) -> dict[str, object]:
    """Run DeepSpeed on the same problem in its own environment and return what it printed."""
    command = [
        python, str(_ROOT / "benchmarks" / "peers" / "deepspeed_zero3.py"), "--model", str(_ROOT / "examples" / "gpt.py"),
        "--layers", str(case.layers), "--hidden", str(case.hidden), "--heads", str(case.hidden // 64), "--vocab", "256",
        "--batch", str(case.batch), "--seq", str(case.seq), "--steps", str(rounds), "--warmup", "1",
        "--nvme", str(Path(case.nvme) / "deepspeed"), "--offload", "nvme", "--gradient-checkpointing",
        "--sub-group-size", "8000000", "--mmap-threshold-bytes", str(mmap_threshold),
    ]  # fmt: skip
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {"question": "peer", **json.loads(printed.strip().splitlines()[-1])}


def describe(case: Case, num_parameters: int) -> dict[str, object]:
    return {
        "layers": case.layers,
        "hidden": case.hidden,
        "num_parameters": num_parameters,
        "tokens_per_step": case.tokens,
        "threads": case.threads,
        "model_state_bytes": num_parameters * _STATE_BYTES,
        "states_over_budgets": round(1 / case.budget_share, 3),
        "reserve_memory": case.reserve,
        "accumulate": case.accumulate,
        "step": case.step,
        "dtype": case.dtype,
        "clip": case.clip,
        "speculate": case.speculate,
        "state_dtype": case.state_dtype,
        "simulated_disk_bytes_per_second": case.disk_rate,
    }


def in_child(case: Case, question: str, rounds: int) -> dict[str, object]:
    """Answer a question in a fresh process."""
    options = {"question": question, "rounds": rounds, "case": vars(case)}
    command = [sys.executable, "-m", "benchmarks.out_of_core", "--child", json.dumps(options)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=_ROOT).stdout
    result: dict[str, object] = json.loads(printed.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", default=".", help="folder on a local disk")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1792)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument(
        "--accumulate", type=int, default=1, help="parts of the batch that a step in memory accumulates"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--reserve-mib", type=int, default=208, help="of the device budget, for Python and its graphs")
    parser.add_argument("--share", type=float, default=_BUDGET_SHARE, help="model states over both budgets together")
    parser.add_argument("--step", choices=("overlapped", "synchronous", "in_backward"), default="overlapped")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of compute")
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip gradients to this norm in each step")
    parser.add_argument(
        "--both", action="store_true", help="also measure steps without updates ahead, in the same turns"
    )
    parser.add_argument(
        "--state-dtype",
        choices=("int8", "bfloat16"),
        help="store optimizer state in fewer bits, and measure exact state in the same turns",
    )
    parser.add_argument("--no-speculate", action="store_true", help="begin no update ahead of the step")
    parser.add_argument(
        "--disk-rate",
        type=float,
        metavar="GB",
        help="simulate a disk of so many GB/s; --nvme is a folder in memory then",
    )
    parser.add_argument("--sweep", action="store_true", help="measure 512, 1024 and 4096 tokens per step as well")
    parser.add_argument("--only", choices=("memory", "time", "discard", "peer"))
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter of an environment with deepspeed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        options = json.loads(args.child)
        case = Case(**options["case"])
        measure = {"memory": measure_memory, "time": measure_time, "discard": measure_discard}[options["question"]]
        try:
            answer = measure(case, options["rounds"])
        except CapacityError as error:
            answer = {"question": options["question"], "tokens_per_step": case.tokens, "does_not_fit": str(error)}
        print(json.dumps(answer))
        return

    def case_of(tokens: int) -> Case:
        seq = min(tokens, 1024)
        return Case(
            layers=args.layers,
            hidden=args.hidden,
            seq=seq,
            batch=tokens // seq,
            nvme=str(Path(args.nvme).resolve()),
            threads=args.threads,
            reserve=args.reserve_mib * 2**20,
            budget_share=1 / args.share,
            step=args.step,
            dtype=args.dtype,
            clip=args.clip,
            accumulate=args.accumulate,
            speculate=not args.no_speculate,
            both=args.both,
            state_dtype=args.state_dtype,
            disk_rate=None if args.disk_rate is None else args.disk_rate * 1e9,
        )

    command = command_line("out_of_core")
    case = case_of(args.tokens)
    if args.only in (None, "memory"):
        print(json.dumps({"command": command, **in_child(case, "memory", 2)}), flush=True)
    if args.only in (None, "time"):
        for tokens in dict.fromkeys([args.tokens, *([512, 1024, 2048, 4096] if args.sweep else [])]):
            print(json.dumps({"command": command, **in_child(case_of(tokens), "time", args.rounds)}), flush=True)
    if args.only == "discard":
        print(json.dumps({"command": command, **in_child(case, "discard", args.rounds)}), flush=True)
    if args.peer:
        for mmap_threshold in (0, 2**20):  # DeepSpeed's fastest and smallest settings
            answer = measure_peer(case, args.peer, args.rounds, mmap_threshold)
            print(json.dumps({"command": command, "mmap_threshold": mmap_threshold, **answer}), flush=True)


if __name__ == "__main__":
    main()
