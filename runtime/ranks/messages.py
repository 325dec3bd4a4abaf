"""What ranks that work in rounds send to each other: values between stages, and their gradients.

A send returns at once; what it reads is kept until it has arrived. A receive blocks until the message is there. Messages
have numbers, so that each finds its receiver in any order. Gloo closes a connection if somebody stops waiting for a message:
threads wait for what was sent and for what is to come, and whoever needs it looks meanwhile whether another rank has
failed. Messages pass from host memory to host memory.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from zinf_compile.runtime.process.waiting import future_result
from zinf_compile.runtime.ranks.ranks import Collective, Ranks, all_gather_single, group_of


class Messages:
    """The messages of one model between its ranks, which are those of a mesh of one dimension."""

    def __init__(self, ranks: Ranks) -> None:
        assert ranks.mesh is not None
        self.ranks = ranks
        self._members: list[int] = ranks.mesh.mesh.flatten().tolist()
        self._group = group_of("messages", self._members, ranks.timeout_seconds, backend="gloo")
        purposes = ("departures", "sends", "receives")
        self._pools = tuple(ThreadPoolExecutor(1, f"zinf {purpose}") for purpose in purposes)
        self._departures, self._sends, self._receives = self._pools
        self._sent: deque[Future[None]] = deque()

    def send(self, value: Tensor, number: int, rank: int, *, behind: Sequence[Future[None]] = ()) -> None:
        """Start sending a contiguous value to another rank, once ``behind`` is done. Returns at once.

        Nobody changes the value until it has arrived.
        """
        self.ranks.check_together()
        while self._sent and self._sent[0].done():
            self.ranks.wait_for_message(self._sent.popleft(), "a message that was sent")
        if value.numel() == 0:
            return
        if behind:
            self._sent.append(self._departures.submit(self._depart_behind, behind, value, number, rank))
        else:
            self._depart(value, number, rank)

    def _depart_behind(self, behind: Sequence[Future[None]], value: Tensor, number: int, rank: int) -> None:
        for copied in behind:
            future_result(copied, f"the copy of message {number} to host memory")
        self._depart(value, number, rank)

    def _depart(self, value: Tensor, number: int, rank: int) -> None:
        with self.ranks.raising(f"message {number} to rank {rank}"):
            work = dist.isend(_as_bytes(value), group=self._group, group_dst=rank, tag=_tag_of(number))
        self._sent.append(self._sends.submit(_arrive, work, value))

    def receive(self, into: Tensor, number: int, rank: int) -> None:
        """Receive a value from another rank into a contiguous tensor; blocks. RankError if that rank has failed."""
        self.ranks.check_together()
        if into.numel() == 0:
            return
        name = f"message {number} from rank {rank}"
        with self.ranks.raising(name):
            work = dist.irecv(_as_bytes(into), group=self._group, group_src=rank, tag=_tag_of(number))
        self.ranks.wait_for_message(self._receives.submit(_arrive, work, into), name)

    def close(self) -> None:
        """Let the threads end once nothing is under way."""
        for pool in self._pools:
            pool.shutdown(wait=False)

    def share(self, what: str, mine: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return what each rank gave, in the order of ranks: tensors of the same shapes and dtypes on each."""
        shared: list[list[Tensor]] = [[] for _ in self._members]
        for tensor in mine:
            flat = _as_bytes(tensor.detach().contiguous().cpu())
            whole = flat.new_empty(len(self._members), flat.numel())
            if flat.numel():
                with self.ranks.raising(what):
                    work = all_gather_single(whole.view(-1), flat, group=self._group, async_op=True)
                self.ranks.wait(Collective(name=what, works=(work,), tensors=(flat, whole)))
            for given, part in zip(shared, whole, strict=True):
                given.append(part.view(tensor.dtype).view(tensor.shape).to(tensor.device))
        return shared


def _arrive(work: "dist.Work | None", value: Tensor) -> None:
    """Block until a message has arrived; ``value`` is kept until then."""
    assert work is not None  # this rank is in the group
    work.wait()


def _tag_of(number: int) -> int:
    """Return the tag of a message, which is no negative number: gradients have odd ones."""
    return 2 * number if number >= 0 else -2 * number - 1


def _as_bytes(value: Tensor) -> Tensor:
    return value.view(-1).view(torch.uint8)
