"""What ranks that work in rounds send to each other: values between stages, and their gradients.

A send returns at once; what it reads is kept until it has arrived. A receive blocks until the message is there. Messages
have numbers, so that each finds its receiver in any order, and pass from host memory to host memory. Gloo closes a
connection if somebody stops waiting for a message: threads wait for what was sent and for what is to come, and whoever needs
it looks meanwhile whether another rank has failed. A process does not wait for these threads to exit: what a rank that has
failed did not send, they wait for until the group times out.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from zinf_compile.runtime.process.waiting import future_result, next_of
from zinf_compile.runtime.ranks.ranks import Collective, Ranks, all_gather_single, group_of


class Messages:
    """The messages of one model between its ranks, which are those of a mesh of one dimension."""

    def __init__(self, ranks: Ranks) -> None:
        assert ranks.mesh is not None
        self.ranks = ranks
        self._members: list[int] = ranks.mesh.mesh.flatten().tolist()
        self._group = group_of("messages", self._members, ranks.timeout_seconds, backend="gloo")
        # What leaves a device is sent in the order in which it leaves, whether what was sent before has arrived or not.
        self._leaving, self._sending, self._receiving = map(_Beside, ("zinf-leaving", "zinf-sends", "zinf-receives"))
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
            self._sent.append(self._leaving.run(partial(self._start_behind, behind, value, number, rank)))
        else:
            self._start(value, number, rank)

    def _start_behind(self, behind: Sequence[Future[None]], value: Tensor, number: int, rank: int) -> None:
        for copied in behind:
            future_result(copied, f"the copy of {_describe(number)} to host memory")
        self._start(value, number, rank)

    def _start(self, value: Tensor, number: int, rank: int) -> None:
        with self.ranks.raising(f"{_describe(number)} to rank {rank}"):
            work = dist.isend(_as_bytes(value), group=self._group, group_dst=rank, tag=_tag_of(number))
        self._sent.append(self._sending.run(partial(_arrive, work, value)))

    def receive(self, into: Tensor, number: int, rank: int) -> None:
        """Receive a value from another rank into a contiguous tensor; blocks. RankError if that rank has failed."""
        self.ranks.check_together()
        if into.numel() == 0:
            return
        name = f"{_describe(number)} from rank {rank}"
        with self.ranks.raising(name):
            work = dist.irecv(_as_bytes(into), group=self._group, group_src=rank, tag=_tag_of(number))
        self.ranks.wait_for_message(self._receiving.run(partial(_arrive, work, into)), name)

    def close(self) -> None:
        """Let the threads end once nothing is under way. Safe to call twice."""
        for thread in (self._leaving, self._sending, self._receiving):
            thread.close()

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


class _Beside:
    """A thread that calls one function after another, and exists from the first one on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], None]) -> Future[None]:
        """Return a future that is done when a function has been called."""
        if self._thread is None:
            self._thread = threading.Thread(target=_call_all, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
        done: Future[None] = Future()
        self._queue.put((done, call))
        return done

    def close(self) -> None:
        """Let the thread end behind what it waits for."""
        self._queue.put(None)


def _call_all(queue: "SimpleQueue[tuple[Future[None], Callable[[], None]] | None]") -> None:
    while (item := next_of(queue)) is not None:
        done, call = item
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # whoever waits for the message raises it
            done.set_exception(error)
        else:
            done.set_result(None)
        del item, done, call  # they refer to tensors


def _arrive(work: "dist.Work | None", value: Tensor) -> None:
    """Block until a message has arrived; ``value`` is kept until then."""
    assert work is not None  # this rank is in the group
    work.wait()


def _describe(number: int) -> str:
    """Return a message as text: what it is of, and its number, as in a graph."""
    return f"message {number}, a value of a forward," if number >= 0 else f"message {number}, a gradient of a backward,"


def _tag_of(number: int) -> int:
    """Return the tag of a message, which is no negative number: gradients have odd ones."""
    return 2 * number if number >= 0 else -2 * number - 1


def _as_bytes(value: Tensor) -> Tensor:
    return value.view(-1).view(torch.uint8)
