"""Measure each case in its own process, forked from a server process that has imported everything.

Imports, the first capture and compiler look-ups take as long as a case itself. A fork inherits them and is otherwise
fresh: memory is measured from its first graph on, and memory shared with the parent counts as already held.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

# Use the fixed rates of a small machine. Measuring takes seconds, and plans must be valid whatever the rates are. With fixed
# rates each case has the same plan in every run.
_BEFORE = """
import faulthandler, gc, json, os, sys, threading, traceback
from contextlib import contextmanager, suppress

with suppress(ImportError):  # tqdm would start a monitor thread
    import tqdm
    tqdm.tqdm.monitor_interval = 0
import torch, torch._dynamo, zinf_compile
from torch._inductor.cpu_vec_isa import pick_vec_isa
from zinf_compile.ir import config
from zinf_compile.driver import session
from zinf_compile.ir.hardware import Hardware, OpKind, OpRate, Rate, make_route
from zinf_compile.runtime.calibration.op_rates import CPU_SIZES, OpRates, measure_products
from zinf_compile.runtime.device.cpu import CPU

DTYPES, TIERS = ("float32", "float64", "bfloat16"), ("device", "host", "nvme")
HARDWARE = Hardware(
    name="small",
    unified=True,
    flops=tuple(Rate(name=dtype, per_second=4e10) for dtype in DTYPES),
    attention_flops=tuple(Rate(name=dtype, per_second=1e10) for dtype in DTYPES),
    op_rates=tuple(OpRate(kind=kind, dtype=dtype, bytes_per_second=2e9) for kind in OpKind for dtype in DTYPES),
    op_overhead_seconds=2e-5,
    memory_bytes_per_second=1e10,
    routes=tuple(
        make_route(source, destination, 1e9 if "nvme" in (source, destination) else 5e9, takes_of_compute=0.5)
        for source in TIERS for destination in TIERS if source != destination
    ),
    optimizer_elements_per_second=1e8,
)
session.find_measured = lambda *_: HARDWARE
config.DEFAULT_RESERVE = 0  # budgets are about the model, unless a case says otherwise


@contextmanager
def sampled(store):
    stop = threading.Event()

    def sample():
        while not stop.wait(0.0005):
            store.held.sample()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
"""
# A fork has only the calling thread. Code that waits for another thread, such as OpenMP's, would wait forever.
_AFTER = """
def warm():
    model = zinf_compile.optimize(torch.nn.Linear(2, 2), device_memory="64MiB", host_memory="8MiB", compute="aten")
    model(torch.ones(2, 2)).sum().backward()
    zinf_compile.close(model)
    torch._dynamo.reset()
    pick_vec_isa()  # runs the compiler once, and caches the answer
    for dtype in (torch.float32, torch.float64):
        # Measuring the machine does the same. The first matrix product allocates MiBs of buffers that would distort a case.
        measure_products(OpRates(CPU, CPU_SIZES, 1), dtype)
    gc.collect()
    gc.freeze()  # imported objects stay alive, and each collection of them takes 0.2 s


def answer(line):
    faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)  # in a case that hangs; the next ones go on
    try:
        if starts_threads:
            warm()
        torch.set_num_threads(2)
        found = measure(json.loads(line))
        os.write(answers, (json.dumps(found) + "\\n").encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # never return into the parent's loop


answers = os.dup(1)
os.dup2(2, 1)  # prints go to stderr, answers to the original stdout
torch.set_num_threads(1)
# If torch is built for an accelerator, the first backward starts device threads, even without a device.
starts_threads = torch.accelerator.current_accelerator() is not None
if not starts_threads:
    warm()
for line in sys.stdin:
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in the fork"
    pid = os.fork()
    if pid == 0:
        answer(line)
    if os.waitpid(pid, 0)[1]:
        os.write(answers, b"null\\n")
"""


class Forks:
    """The server process, which forks for each case."""

    def __init__(self, process: "subprocess.Popen[str]", timeout: float) -> None:
        self._process = process
        self._timeout = timeout

    def measure(self, case: Any) -> Any:
        """Return the result of the script's ``measure`` for a case, run in its own fork."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # the process has ended and printed why
            print(json.dumps(case), file=self._process.stdin, flush=True)
        found = json.loads(self._process.stdout.readline() or "null")
        limit = f"{self._timeout:.0f} s"
        assert found is not None, f"it failed, or took {limit}, and printed why: measuring ...{str(case)[-300:]}"
        print(json.dumps(found, indent=1))
        return found


@contextmanager
def forks_of(script: str, *, timeout: float = 900) -> Iterator[Forks]:
    """Start a process for a script that defines ``measure(case)``; cases and results are JSON.

    A case may take ``timeout`` seconds. The longest takes 50 alone, and over 300 where the tests share slow cores.

    The script can use torch, zinf_compile and ``sampled(store)``, a context in which a thread keeps sampling memory.
    """
    command = [sys.executable, "-c", _BEFORE + script + _AFTER, str(timeout)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    try:
        yield Forks(process, timeout)
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()  # ends the process
        process.wait(timeout)
