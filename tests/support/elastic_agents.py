"""Agents of torchrun on loopback, which stand for machines: each has one rank or more. Tests kill some and start others."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 300.0  # that anything may take on a busy machine
_LOOK_SECONDS = 0.02
# An agent that is gone is missed after three times two seconds. A group that could be larger waits three more for others.
_RENDEZVOUS = "is_host=0,keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=3,join_timeout=240"


class Group(NamedTuple):
    """Ranks that trained together, and the step of the save that they began with."""

    step: int
    num_ranks: int


class ElasticAgents:
    """Agents that run a script in a folder. The test itself holds their store, so that any of them may die.

    Rank 0 of each group prints "after step 4: 2 ranks", and "step 5: ..." after each step.
    """

    def __init__(self, folder: Path, script: Sequence[str], *, most: int, ranks_each: int = 1) -> None:
        self._script = script[0]
        self._folder, self._log, self._errors = folder, folder / "log", folder / "errors"
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{most}"]
        self._command += ["--nproc-per-node", f"{ranks_each}", "--max-restarts", "3", "--local-addr", "127.0.0.1"]
        self._command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._store.port}"]
        self._command += ["--rdzv-id", "test", "--rdzv-conf", _RENDEZVOUS, *script]
        self._agents: list[subprocess.Popen[bytes]] = []
        self._ranks: set[int] = set()  # all that were ever seen

    def __enter__(self) -> "ElasticAgents":
        return self

    def __exit__(self, *_: object) -> None:
        for agent in range(len(self._agents)):
            self.kill_agent(agent)
        for pid in self._ranks:
            _kill(pid, of=self._script)

    def start(self) -> int:
        """Start an agent; return its number."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ZINF_QUIET": "1"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with open(self._log, "ab") as log, open(self._errors, "ab") as errors:
            self._agents.append(
                subprocess.Popen(self._command, cwd=self._folder, env=environment, stdout=log, stderr=errors)
            )
        return len(self._agents) - 1

    def ranks_of(self, agent: int) -> list[int]:
        """Return the process ids of the ranks of an agent."""
        pid = self._agents[agent].pid
        try:
            found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            return []
        self._ranks |= {*found}
        return found

    def kill_rank(self, agent: int, number: int = 0) -> bool:
        """Kill a rank, which its agent sees; return whether there was one."""
        ranks = self.ranks_of(agent)
        if number < len(ranks):
            os.kill(ranks[number], signal.SIGKILL)
        return number < len(ranks)

    def kill_agent(self, agent: int) -> None:
        """Kill an agent and its ranks, as when a machine is gone."""
        self._agents[agent].send_signal(signal.SIGSTOP)  # it is not to start ranks meanwhile, which would stay
        ranks = self.ranks_of(agent)
        self._agents[agent].kill()
        for pid in ranks:
            _kill(pid, of=self._script)
        self._agents[agent].wait(_SECONDS)

    def drain_agent(self, agent: int) -> None:
        """End an agent as a scheduler does that wants its machine: it ends its ranks."""
        self._agents[agent].terminate()
        self._agents[agent].wait(_SECONDS)

    def groups(self) -> list[Group]:
        """Return all groups so far, in their order."""
        return [
            Group(int(step), int(size))
            for step, size in re.findall(r"^after step (\d+): (\d+) ranks", self.text(), re.M)
        ]

    def num_steps(self) -> int:
        """Return how many steps the last group has trained."""
        return self.text().rpartition("after step ")[2].count("\nstep ")

    def text(self) -> str:
        """Return what all groups have printed."""
        return self._log.read_text() if self._log.exists() else ""

    def wait_for_group(self, num_ranks: int, *, num_steps: int, after: int = 0) -> None:
        """Wait until a group of so many ranks that is not among the first ``after`` ones has trained some steps."""

        def trains() -> bool:
            groups = self.groups()
            return len(groups) > after and groups[-1].num_ranks == num_ranks and self.num_steps() >= num_steps

        self.wait_until(trains, f"{num_ranks} ranks train {num_steps} steps after group {after}")

    def wait_until(self, is_so: Callable[[], object], what: str) -> None:
        """Wait, but not for ever."""
        deadline = time.monotonic() + _SECONDS
        while not is_so():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not so after {_SECONDS:.0f} s\n{self.text()}\n{self._tail()}")
            time.sleep(_LOOK_SECONDS)

    def finish(self, agents: Sequence[int]) -> None:
        """Wait until the script has ended everywhere. These agents must have been content with it."""
        self.wait_until(lambda: all(self._agents[each].poll() is not None for each in agents), "the script ends")
        codes = [self._agents[each].returncode for each in agents]
        assert not any(codes), f"{codes}\n{self.text()}\n{self._tail()}"

    def _tail(self) -> str:
        return self._errors.read_text()[-10_000:] if self._errors.exists() else ""


def _kill(pid: int, *, of: str) -> None:
    """Kill a process, unless the number has passed to one that runs something else."""
    with suppress(ProcessLookupError, FileNotFoundError):
        if of in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
