"""What ranks that work in rounds send to each other: values between stages, and their gradients.

A send returns at once; what it reads is kept until it has arrived. A receive blocks until the message is there. Messages
have numbers, so that each finds its receiver in any order. Gloo closes a connection if somebody stops waiting for a message:
two threads wait for what was sent and for what is to come, and whoever needs it looks meanwhile whether another rank has
failed.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from zinf_compile.ir.errors import StoreError
from zinf_compile.runtime.ranks.ranks import Ranks, group_of

_numbers = itertools.count()
_known: "weakref.WeakValueDictionary[int, Messages]" = weakref.WeakValueDictionary()


class Messages:
    """The messages of one model between its ranks, which are those of a mesh of one dimension."""

    def __init__(self, ranks: Ranks) -> None:
        assert ranks.mesh is not None
        self.ranks, self.number = ranks, next(_numbers)
        self.sent_nbytes = 0
        self._members: list[int] = ranks.mesh.mesh.flatten().tolist()
        self._group = group_of("messages", self._members, ranks.timeout_seconds)
        self._sending, self._receiving = (ThreadPoolExecutor(1, f"zinf {what}") for what in ("sends", "receives"))
        self._sent: deque[Future[None]] = deque()
        _known[self.number] = self

    def send(self, value: Tensor, number: int, rank: int) -> None:
        """Start sending a contiguous value, which nobody changes until it has arrived, to another rank. Returns at once."""
        self.ranks.check_together()
        while self._sent and self._sent[0].done():
            self.ranks.wait_for_message(self._sent.popleft(), "a message that was sent")
        if value.numel() == 0:
            return
        with self.ranks.raising(f"message {number} to rank {rank}"):
            work = dist.isend(_as_bytes(value), group=self._group, group_dst=rank, tag=_tag_of(number))
        self.sent_nbytes += value.nbytes
        self._sent.append(self._sending.submit(_arrive, work, value))

    def receive(self, into: Tensor, number: int, rank: int) -> None:
        """Receive a value from another rank into a contiguous tensor; blocks. RankError if that rank has failed."""
        self.ranks.check_together()
        if into.numel() == 0:
            return
        name = f"message {number} from rank {rank}"
        with self.ranks.raising(name):
            work = dist.irecv(_as_bytes(into), group=self._group, group_src=rank, tag=_tag_of(number))
        self.ranks.wait_for_message(self._receiving.submit(_arrive, work, into), name)

    def finish(self) -> None:
        """Block until everything that was sent has arrived."""
        while self._sent:
            self.ranks.wait_for_message(self._sent.popleft(), "the arrival of what was sent")

    def close(self) -> None:
        """Let the threads end once nothing is under way."""
        for pool in (self._sending, self._receiving):
            pool.shutdown(wait=False)

    def share(self, what: str, mine: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return what each rank gave, in the order of ranks: tensors of the same shapes and dtypes on each."""
        shared: list[list[Tensor]] = [[] for _ in self._members]
        for tensor in mine:
            flat = _as_bytes(tensor.detach().contiguous())
            whole = flat.new_empty(flat.numel() * len(self._members))
            if flat.numel():
                self.ranks.wait(self.ranks.all_gather(what, [flat], [whole]))
            for rank, part in enumerate(whole.chunk(len(self._members)) if flat.numel() else [flat] * len(shared)):
                shared[rank].append(part.view(tensor.dtype).view(tensor.shape))
        return shared


def find_messages(number: int) -> Messages:
    """Return the messages that an op names; StoreError after its model is gone."""
    found = _known.get(number)
    if found is None:
        raise StoreError(f"messages number {number} belong to a model that no longer exists")
    return found


def _arrive(work: "dist.Work | None", value: Tensor) -> None:
    """Block until a message has arrived; ``value`` is kept until then."""
    assert work is not None  # this rank is in the group
    work.wait()


def _tag_of(number: int) -> int:
    """Return the tag of a message, which is no negative number: gradients have odd ones."""
    return 2 * number if number >= 0 else -2 * number - 1


def _as_bytes(value: Tensor) -> Tensor:
    return value.view(-1).view(torch.uint8)
