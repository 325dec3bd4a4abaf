"""Processes that tests use as ranks: started once, joined by gloo over loopback, and given one function after another.

The pool's own process holds the store of torch.distributed, as torchrun's agent does, so that any rank may die.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.support import sharing

# Imported once by a process without threads, from which ranks are forked: a rank starts in a tenth of a second.
_IMPORTED = [
    *(
        "tests.support.warm_rank",
        "tests.distributed.workloads",
        "zinf_compile.driver.session",
        "zinf_compile.runtime.execute.op_bodies",
    ),
    *("torch._dynamo", "torch._inductor.compile_fx", "torch._functorch.aot_autograd"),
    *("torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.device_mesh"),
]
_SECONDS = 420.0  # that a function may take on a busy machine; a hang is an error that shows where each rank is
_WAIT_SECONDS = 180.0  # that a rank waits for the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """What a function raised on a rank."""

    kind: str  # the name of the class
    message: str
    trace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A rank whose process ended."""

    code: int | None


class RankPool:
    """Some ranks. ``run`` calls a function of a module on all of them at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: Any = None
        self._folder = tempfile.TemporaryDirectory()  # for the stack of each rank

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = _SECONDS) -> list[Any]:
        """Return what the function returned on each rank. It must not raise on any."""
        results = self.outcomes(function, *args, seconds=seconds)
        failed = {rank: each for rank, each in enumerate(results) if isinstance(each, Raised | Died)}
        if failed:
            self.stop()
            raise AssertionError(
                "\n".join(f"rank {rank}: {getattr(each, 'trace', each)}" for rank, each in failed.items())
            )
        return results

    def outcomes(self, function: Callable[..., Any], *args: Any, seconds: float = _SECONDS) -> list[Any]:
        """Return what the function returned on each rank, or a Raised or Died in its place."""
        if not self._processes:
            self._start()
        call = pickle.dumps((function.__module__, function.__qualname__, args, sharing.is_sharing()))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        results: list[Any] = [None] * self.size
        open_ranks = dict(enumerate(self._pipes))
        deadline = time.monotonic() + seconds
        while open_ranks:
            ready = wait([*open_ranks.values()], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = [f"rank {rank}:\n{self._stack_of(rank)}" for rank in sorted(open_ranks)]
                self.stop()
                ended = [each.trace for each in results if isinstance(each, Raised)]
                hang = f"ranks {sorted(open_ranks)} hang in {function.__qualname__} for {seconds:.0f} s"
                raise AssertionError("\n".join((hang, *ended, *stacks)))
            for rank, pipe in list(open_ranks.items()):
                if pipe in ready:
                    try:
                        results[rank] = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        self._processes[rank].join()
                        results[rank] = Died(code=self._processes[rank].exitcode)
                    del open_ranks[rank]
        if any(isinstance(each, Raised | Died) for each in results):
            self.stop()  # the next function gets new processes: a group that broke off is of no use
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, self._store.port, theirs, self._folder.name), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _stack_of(self, rank: int) -> str:
        """Return where the threads of a rank are."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1.0)  # faulthandler writes it in a signal handler, and does not say when it has
        return (Path(self._folder.name) / f"{rank}").read_text()

    def stop(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=0.2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes, self._store = [], [], None


def _serve(rank: int, size: int, port: int, pipe: Connection, folder: str) -> None:
    stack = open(f"{folder}/{rank}", "w")  # noqa: SIM115  # faulthandler writes to it until the process ends
    faulthandler.register(signal.SIGUSR1, file=stack)
    faulthandler.enable()  # what a rank that crashes was doing, to the captured stderr
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "ZINF_QUIET": "1"}
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=_WAIT_SECONDS))
    gc.set_threshold(50_000, 10, 10)  # as in the process of the tests
    gc.freeze()
    with _fixed_rates():
        while True:
            try:
                module, name, args, is_sharing = pickle.loads(pipe.recv_bytes())
            except EOFError:
                os._exit(0)  # without the barriers of torch.distributed, which other ranks may not reach
            with sharing.sharing(is_sharing):
                outcome = _call(module, name, args)
            pipe.send_bytes(pickle.dumps(outcome))


@contextmanager
def _fixed_rates() -> Iterator[None]:
    """Plan with the same rates in every run. Links between ranks are timed, and then get a fixed rate too."""
    from tests.support.fixed_rates import LINK_RATE, with_fixed_rates
    from zinf_compile.driver import session
    from zinf_compile.runtime.ranks import agreement

    def fix(time_links: Any) -> Any:
        return lambda *given: LINK_RATE if time_links(*given) else 0.0

    with (
        mock.patch.object(session, "measure_hardware", with_fixed_rates),
        mock.patch.object(session, "find_measured", return_value=None),
        mock.patch.object(agreement, "_measure_links", fix(agreement._measure_links)),
        mock.patch.object(agreement, "_measure_replica_links", fix(agreement._measure_replica_links)),
    ):
        yield


def _call(module: str, name: str, args: Sequence[Any]) -> Any:
    try:
        torch._dynamo.reset()
        return getattr(importlib.import_module(module), name)(*args)
    except BaseException as error:  # noqa: BLE001  # the test decides
        return Raised(kind=type(error).__name__, message=str(error), trace=traceback.format_exc())
