"""`zinf` on several ranks: starts them on this machine, or joins those that torchrun has started.

Every rank runs the whole command, and only rank 0 prints. A sentence that several ranks would end with is printed once.
"""

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from zinf_compile.ir.errors import ConfigError, RankError, ZinfError

_LOOPBACK = "127.0.0.1"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # the variables that torch.distributed needs
_STOPPED = "stopped"  # what is said after Ctrl-C
_PR_SET_PDEATHSIG = 1  # of prctl(2)


class World(NamedTuple):
    """This rank's number, and how many ranks there are."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Return whether this rank prints."""
        return self.rank == 0


def add_ranks_argument(group: argparse._ActionsContainer) -> None:
    """Declare ``--ranks``."""
    group.add_argument(
        "--ranks", type=int, metavar="N", help="start N ranks on this machine, as torchrun does (default: one process)"
    )


def must_start(given: int | None) -> bool:
    """Return whether ``--ranks`` asks for ranks that are not there yet. ConfigError for a number that makes no sense."""
    if given is None:
        return False
    if given < 1:
        raise ConfigError(f"--ranks {given} is not a positive number; pass how many processes to start")
    return given > 1 and not _is_started()


def _is_started() -> bool:
    """Return whether this process is one of several ranks already."""
    return dist.is_initialized() or all(name in os.environ for name in _TORCHRUN)


def start_ranks(number: int, words: Sequence[str]) -> int:
    """Run `zinf` with these words on so many ranks of this machine; return the exit status of the first one that failed.

    They talk over loopback and compute with one thread each, unless OMP_NUM_THREADS says otherwise. A signal to this
    process goes to all of them.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed."):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the ranks say themselves what is wrong
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=number,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_LOOPBACK}:0",
        local_addr=_LOOPBACK,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "zinf_compile.cli", *words)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        print(f"zinf {words[0]}: rank {rank} was ended by {name}, and the others with it", file=sys.stderr)
        return 128 - failure.exitcode  # as a shell says it
    except SignalException as stop:
        return 128 + stop.sigval
    return 0


@contextmanager
def as_rank(given: int | None = None) -> Iterator[World]:
    """A block in which this process is a rank of torchrun's, if it is one; ``given`` is what ``--ranks`` says.

    The block of any other process is World(0, 1). On ranks but the first one nothing is printed. A ZinfError or Ctrl-C
    with a sentence that another rank has printed becomes a silent SystemExit.
    """
    if not _is_started():
        yield World(0, 1)
        return
    with ExitStack() as stack:
        is_ours = not dist.is_initialized()
        if is_ours:
            _die_with_torchrun()
            dist.init_process_group("gloo")
        world = World(dist.get_rank(), dist.get_world_size())
        # torchrun ends ranks like that when another one has failed; temporary folders have to go then.
        before = signal.signal(signal.SIGTERM, _terminate)
        stack.callback(signal.signal, signal.SIGTERM, before)
        if not world.is_first:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            if is_ours:
                os.environ["ZINF_QUIET"] = "1"
        try:
            if given is not None and given != world.size:
                raise ConfigError(
                    f"--ranks {given}, and torchrun has started {world.size}; leave out --ranks, or run zinf without it"
                )
            yield world
        except ZinfError as error:
            if isinstance(error, RankError) and _is_stopped():
                raise SystemExit(130) from None
            if world.size > 1 and not _is_first_to_say(str(error)):
                raise SystemExit(2) from None
            raise
        except KeyboardInterrupt:
            if world.size > 1 and not _is_first_to_say(_STOPPED):
                raise SystemExit(130) from None
            raise
        if is_ours:
            dist.destroy_process_group()


def _is_first_to_say(sentence: str) -> bool:
    """Return whether no other rank has ended with this sentence."""
    for rank in range(dist.get_world_size()):
        sentence = sentence.replace(f"rank {rank} cannot go on: ", "", 1)  # each rank's own number
    mine = str(dist.get_rank())
    try:
        said: bytes = _get_default_store().compare_set(_key_of(sentence), "", mine)
    except RuntimeError:  # the store is gone: better twice than never
        return True
    return said.decode() == mine


def _is_stopped() -> bool:
    """Return whether Ctrl-C has ended another rank, or does so in the next two seconds.

    Ranks learn of Ctrl-C one after another: the last one may lose its connection to the first one before.
    """
    deadline = time.monotonic() + 2.0
    try:
        while time.monotonic() < deadline:
            if _get_default_store().check([_key_of(_STOPPED)]):
                return True
            time.sleep(0.02)
    except KeyboardInterrupt:
        if _is_first_to_say(_STOPPED):
            raise
        return True
    except RuntimeError:  # the store is gone
        pass
    return False


def _key_of(sentence: str) -> str:
    return f"zinf/said/{zlib.crc32(sentence.encode()):08x}"


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _die_with_torchrun() -> None:
    """Have the kernel end this process if torchrun is killed, which starts each rank in a session of its own."""
    if dist.is_torchelastic_launched():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
