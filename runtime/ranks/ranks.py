"""The ranks that train one model together, as one of them sees them, and the collectives between them.

A mesh of two dimensions has *replicas* of *shard groups*, as FSDP2's HSDP. The ranks of a shard group divide everything
among them. Ranks with the same rows in other replicas keep the same values::

    mesh [[0, 1],     replica 0: ranks 0 and 1 have half of the rows each
          [2, 3]]     replica 1: ranks 2 and 3 have them again

Parameters are gathered inside a shard group. Gradients are reduced there and then between replicas. Control messages go to
all ranks.

Only the thread that computes starts collectives, in the order of the program. So every rank starts them in the same
order. Parameter gathers, gradient reductions, what passes between replicas, and control messages have a process group
each. With replicas a thread of its own reduces gradients, in the order in which the thread that computes hands them to it:
so the order of the collectives of these groups is the same everywhere too.

NCCL enqueues a collective behind what is on the current stream. To wait for it makes the stream wait that is current then,
and not the caller.
"""

import hashlib
import itertools
import math
import pickle
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager, _get_default_store

from zinf_compile.ir.errors import CapacityError, RankError, ZinfError
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.process.waiting import wait_for

T = TypeVar("T")
_LOOK = timedelta(seconds=0.2)  # between checks whether another rank has failed
_SHORT_SECONDS = 1.0  # waits shorter than that ask nobody
_SLACK = timedelta(minutes=1)  # after our timeout, which names the ranks that are missing, groups have their own
_TIMED_OUT = "Operation timed out"  # how torch.distributed says that ``wait`` returned before the work was done
# Newer versions of torch call these otherwise.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# Between two ranks on one machine a MiB takes gloo 0.8 ms alone and 2.3 ms coalesced, and each collective 0.8 ms.
_GATHERED_ALONE_NBYTES = 2**19
_MEETING_NBYTES = 160  # of the text that says what a rank is about to do: the same everywhere, so that sizes agree
_NUMBER = struct.Struct("q")
_numbers = itertools.count()  # of the groups of this process: every rank makes them in the same order


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collective:
    """A collective that was started. The tensors it reads and writes live as long as this does."""

    name: str  # of what it moves, for messages
    works: tuple["dist.Work", ...]
    tensors: tuple[Tensor, ...]


class Ranks:
    """The ranks of a mesh of one or two dimensions; a process that trains alone has a mesh of None.

    ``size`` and ``rank`` are those of the shard group: they say which rows this rank has. ``mesh_size`` and ``mesh_rank``
    count all ranks, replica by replica: errors and checkpoints use these numbers.
    """

    def __init__(self, mesh: DeviceMesh | None = None, *, beside: Sequence["TensorRanks"] = ()) -> None:
        """``beside`` are groups of this rank and of those that have other parts of what the user has divided."""
        self.mesh = mesh
        self.beside = tuple(beside)
        self.size = 1 if mesh is None else mesh.size(mesh.ndim - 1)
        self.rank = 0 if mesh is None else mesh.get_local_rank(mesh.ndim - 1)
        self.num_replicas = 1 if mesh is None else mesh.size() // self.size
        self.replica = 0 if mesh is None or mesh.ndim == 1 else mesh.get_local_rank(0)
        self.mesh_size = self.num_replicas * self.size
        self.mesh_rank = self.replica * self.size + self.rank
        self.failure: str | None = None  # why no collective can run any more
        self.timeout_seconds = math.inf
        self.waited_seconds = 0.0  # for collectives and control messages so far, of which a slow rank waits the least
        self._moving: tuple[dist.ProcessGroup, ...] = ()  # the groups of parameters and gradients
        self._steps: Counter[str] = Counter()  # by optimizer: of those in which ranks do not meet
        self._options: dict[str, Mapping[str, object]] = {}  # by optimizer: of its latest step
        self._step_hashes: dict[str, int] = {}  # by optimizer: of both
        self._steps_hash = 0  # of all
        # Collectives that were waited for by the thread that computes, and beside it: on every rank the same ones, in the
        # same order. And the last ones of which the others were told that this rank waits for them.
        self._num_waits, self._told_waits = {"waits": 0, "waits beside": 0}, {"waits": 0, "waits beside": 0}
        if mesh is None:
            return
        members: list[int] = mesh.mesh.flatten().tolist()  # replica by replica
        self._places = [sorted(members).index(each) for each in members]  # groups sort their ranks
        sharing = members[self.replica * self.size :][: self.size]
        seconds = _timeout_of(mesh)
        self._gathers = group_of("gathers", sharing, seconds)
        self._reductions = group_of("reductions", sharing, seconds)
        self._moving = self._gathers, self._reductions
        if self.num_replicas > 1:
            self._replicas = group_of("replicas", members[self.rank :: self.size], seconds)
            self._moving = *self._moving, self._replicas
        self._connect(members, seconds)

    def _connect(self, members: Sequence[int], timeout_seconds: float) -> None:
        """Let ranks exchange messages, and wait that long for each other."""
        self.timeout_seconds = timeout_seconds
        self._control = group_of("control", members, timeout_seconds, backend="gloo")
        self._messages = PrefixStore(f"zinf/{'-'.join(map(str, members))}/{next(_numbers)}", _get_default_store())

    @property
    def is_alone(self) -> bool:
        """Return whether this process trains the model by itself."""
        return self.mesh_size == 1

    def backend_of(self, device: torch.device) -> str | None:
        """Return the name of the backend that moves tensors of a device: "gloo" or "nccl"; None if there is none."""
        try:
            name: str = self._gathers._get_backend(device).name()
        except RuntimeError:
            return None
        return name

    def shard_of(self, whole: Slice) -> Slice:
        """Return this rank's rows of a whole parameter; a slice that is not whole is a shard already."""
        return whole.among(self.size).of_rank(self.rank) if whole.is_whole else whole

    # Collectives of parameters and gradients

    def all_gather(self, name: str, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> Collective:
        """Start gathering flat shards, of equal sizes in the shard group, into wholes of ``size`` times as many elements.

        Gloo copies what is coalesced into one tensor and out again, so only small tensors are. On a GPU it coalesces none.
        """
        self.check_together()
        group, works, together = self._gathers, [], []
        with self.raising(name):
            copies = self.backend_of(shards[0].device) == "gloo"
            for shard, whole in zip(shards, wholes, strict=True):
                if copies and (whole.nbytes >= _GATHERED_ALONE_NBYTES or whole.is_cuda):
                    works.append(all_gather_single(whole, shard, group=group, async_op=True))
                else:
                    together.append((shard, whole))
            if together:
                with _coalescing_manager(group, async_ops=True) as manager:
                    for shard, whole in together:
                        all_gather_single(whole, shard, group=group)
                works += manager.works
        return Collective(name=name, works=tuple(works), tensors=(*shards, *wholes))

    def exchange_rows(self, name: str, value: Tensor, counts: Sequence[int], received: Tensor) -> Collective:
        """Start sending to each rank its elements of a flat ``value``, so many to each, and receiving ours of all ranks.

        ``received`` has our elements of rank 0 of the shard group, then those of rank 1, and so on.
        """
        return self._send_and_receive(name, value, counts, received, [counts[self.rank]] * self.size)

    def send_to_owner(
        self, name: str, rows: Tensor, counts: Sequence[int], owner: int, whole: Tensor | None
    ) -> Collective:
        """Start sending the flat rows of each rank of the shard group, so many elements of each, to one of them.

        The owner gives a flat ``whole``, which gets them in the order of ranks; the others give None.
        """
        sent = [counts[self.rank] if rank == owner else 0 for rank in range(self.size)]
        if whole is None:
            return self._send_and_receive(name, rows, sent, rows[:0], [0] * self.size)
        return self._send_and_receive(name, rows, sent, whole, counts)

    def send_from_owner(
        self, name: str, whole: Tensor | None, counts: Sequence[int], owner: int, rows: Tensor
    ) -> Collective:
        """Start sending what ``send_to_owner`` has gathered back to where it came from."""
        received = [counts[self.rank] if rank == owner else 0 for rank in range(self.size)]
        if whole is None:
            return self._send_and_receive(name, rows[:0], [0] * self.size, rows, received)
        return self._send_and_receive(name, whole, counts, rows, received)

    def _send_and_receive(
        self, name: str, sent: Tensor, num_sent: Sequence[int], received: Tensor, num_received: Sequence[int]
    ) -> Collective:
        """Start sending and receiving flat parts, so many elements to and from each rank of the shard group."""
        self.check_together()
        with self.raising(name):
            work = dist.all_to_all_single(
                received, sent, list(num_received), list(num_sent), group=self._reductions, async_op=True
            )
        return Collective(name=name, works=(work,), tensors=(sent, received))

    def reduce_rows(self, name: str, value: Tensor, counts: Sequence[int], received: Tensor) -> Collective:
        """Start summing a flat ``value`` over the shard group, in any order, and receiving our elements of the sum."""
        self.check_together()
        with self.raising(name):
            if len(set(counts)) == 1:
                work = _reduce_scatter(received, value, group=self._reductions, async_op=True)
            else:
                parts = list(value.split(list(counts)))
                work = dist.reduce_scatter(received, parts, group=self._reductions, async_op=True)
        return Collective(name=name, works=(work,), tensors=(value, received))

    def pass_on(self, name: str, total: Tensor, sender: int) -> Collective:
        """Start sending a flat ``total`` from replica ``sender`` to the next one, which receives it in its own ``total``.

        Every replica calls this; on the others it moves nothing.
        """
        self.check_together()
        nothing, counts = total[:0], [0] * self.num_replicas
        sent, received = (nothing, counts), (nothing, counts)
        if self.replica == sender:
            sent = total, [total.numel() if each == sender + 1 else 0 for each in range(self.num_replicas)]
        elif self.replica == sender + 1:
            received = total, [total.numel() if each == sender else 0 for each in range(self.num_replicas)]
        with self.raising(name):
            work = dist.all_to_all_single(
                received[0], sent[0], received[1], sent[1], group=self._replicas, async_op=True
            )
        return Collective(name=name, works=(work,), tensors=(total,))

    def broadcast_last(self, name: str, total: Tensor) -> Collective:
        """Start copying a ``total`` from the last replica to all others."""
        self.check_together()
        with self.raising(name):
            last = self.num_replicas - 1
            work = dist.broadcast(total, group=self._replicas, group_src=last, async_op=True)
        return Collective(name=name, works=(work,), tensors=(total,))

    def sum_replicas(self, name: str, total: Tensor) -> Collective:
        """Start summing a ``total`` over replicas, in any order and in place."""
        self.check_together()
        with self.raising(name):
            work = dist.all_reduce(total, group=self._replicas, async_op=True)
        return Collective(name=name, works=(work,), tensors=(total,))

    def wait(self, collective: Collective, *, beside: bool = False) -> None:
        """Block until a collective is done. With NCCL the current stream waits instead, and the caller does not.

        ``beside``: another thread than the one that computes waits, which does not count as waiting for others.
        RankError if another rank has failed, or cannot be reached. With NCCL the next message between ranks tells that.
        """
        on_gpu = [tensor.device for tensor in collective.tensors if tensor.is_cuda]
        if on_gpu and self.backend_of(on_gpu[0]) == "nccl":
            for work in collective.works:
                work.synchronize()
            return

        def is_done() -> bool:
            for work in collective.works:
                try:
                    work.wait(_LOOK)
                except RuntimeError as error:
                    if _TIMED_OUT not in str(error):
                        raise
                    if not work.is_completed():
                        return False
                    work.wait(_LOOK)  # it was done right after the time: this returns, or raises what is wrong with it
            return True

        start = time.monotonic()
        kind = "waits beside" if beside else "waits"
        self._num_waits[kind] += 1

        def look() -> None:
            waited = time.monotonic() - start
            if waited > _SHORT_SECONDS:
                self._look_for_others(collective.name, waited, kind)

        with self.raising(collective.name), nullcontext() if beside else self.counting_wait():
            wait_for(is_done, f"rank {self.mesh_rank}, at {collective.name}", look=look)

    def wait_for_message(self, arrival: Future[None], name: str) -> None:
        """Block until a message has arrived. RankError if a rank has failed, or it does not come in time."""
        start = time.monotonic()

        def has_come() -> bool:
            try:
                error = arrival.exception(timeout=_LOOK.total_seconds())
            except TimeoutError:
                return False
            if error is not None:
                raise error
            return True

        def look() -> None:
            if (waited := time.monotonic() - start) > _SHORT_SECONDS:
                self._look_for_others(name, waited, None)

        with self.raising(name), self.counting_wait():
            wait_for(has_come, f"rank {self.mesh_rank}, at {name}", look=look)

    @contextmanager
    def counting_wait(self) -> Iterator[None]:
        """A block whose seconds are spent on waiting for others."""
        start = time.monotonic()
        yield
        self.waited_seconds += time.monotonic() - start

    # Control messages

    def meet(self, what: str) -> None:
        """Block until every rank is about to do the same, and has made as many optimizer steps, with the same options.

        RankError, on every rank, that says what each does, how many steps it has made, or which option differs, if not.
        """
        if self.is_alone:
            return
        text = what.encode()[:_MEETING_NBYTES].ljust(_MEETING_NBYTES)
        given = self._gather_now(what, text + _NUMBER.pack(self._steps_hash))
        met = [each[:_MEETING_NBYTES].decode(errors="replace").rstrip() for each in given]
        if len(set(met)) > 1:
            doing = "; ".join(
                f"{describe_ranks([rank for rank, each in enumerate(met) if each == one])}: {one}"
                for one in dict.fromkeys(met)
            )
            self._note_failure(f"ranks do different things at the same time: {doing}")
            raise RankError(
                f"{self.failure}; give every rank the same loop, and as many batches, of the same shapes (pad the last one)"
            )
        if len({each[_MEETING_NBYTES:] for each in given}) > 1:
            self._refuse_steps(self._exchange_now("numbers of steps", dict(self._steps)))
            self._refuse_options(self._exchange_now("options of optimizers", self._options))

    def count_step(self, optimizer: str) -> None:
        """Count a step in which ranks do not meet, of an optimizer in words. The next meeting compares the counts."""
        self._steps[optimizer] += 1
        self._hash_steps_of(optimizer)

    def note_options(self, optimizer: str, options: Mapping[str, object]) -> None:
        """Note the options of a step, by name, of an optimizer in words. The next meeting compares them."""
        if self._options.get(optimizer) != options:
            self._options[optimizer] = options
            self._hash_steps_of(optimizer)

    def _hash_steps_of(self, optimizer: str) -> None:
        before = self._step_hashes.get(optimizer, 0)
        noted = optimizer, self._steps[optimizer], sorted(self._options.get(optimizer, {}).items())
        self._step_hashes[optimizer] = hash_of(repr(noted).encode())
        self._steps_hash ^= before ^ self._step_hashes[optimizer]

    def _refuse_steps(self, steps: Sequence[dict[str, int]]) -> None:
        """Raise RankError if numbers of steps differ, given those of each rank."""
        different = []
        for optimizer in dict.fromkeys(each for counted in steps for each in counted):
            counts = [counted.get(optimizer, 0) for counted in steps]
            if len(set(counts)) > 1:
                of_ranks = (
                    f"{count} on {describe_ranks([rank for rank, each in enumerate(counts) if each == count])}"
                    for count in dict.fromkeys(counts)
                )
                different.append(f"steps of {optimizer}: {', '.join(of_ranks)}")
        if not different:
            return
        self._note_failure(f"ranks have made different numbers of optimizer steps ({'; '.join(different)})")
        raise RankError(
            f"{self.failure}, so their parameters do not belong together any more; call step() equally often on every rank, "
            f"and exchange what decides whether to skip one, as by torch.distributed.all_reduce; {REMEDY}"
        )

    def _refuse_options(self, noted: Sequence[Mapping[str, Mapping[str, object]]]) -> None:
        """Raise RankError if options of an optimizer differ, given those of each rank; it names the first.

        Another rank may not have noted an optimizer yet: ranks may step theirs in any order.
        """
        values: dict[tuple[str, str], dict[str, list[int]]] = {}  # the ranks with each value, by optimizer and option
        for rank, each in enumerate(noted):
            for optimizer, options in each.items():
                for name, value in options.items():
                    values.setdefault((optimizer, name), {}).setdefault(repr(value), []).append(rank)
        for (optimizer, name), ranks_of in values.items():
            if len(ranks_of) > 1:
                differing = ", ".join(f"{value} on {describe_ranks(ranks)}" for value, ranks in ranks_of.items())
                found = f"ranks have different options for a step of {optimizer}: {name} is {differing}"
                remedy = (
                    "give every rank the same, and average what a scheduler decides by (torch.distributed.all_reduce)"
                )
                if self._steps[optimizer]:  # each rank has made the step already
                    self._note_failure(found)
                    raise RankError(f"{found}, so their parameters do not belong together any more; {remedy}; {REMEDY}")
                raise RankError(f"{found}; {remedy}; nothing was updated")

    @property
    def partners(self) -> "Ranks":
        """Return the ranks that train the model together, whether they divide its parameters by rows or have some each."""
        return self

    def meet_partners(self, what: str) -> None:
        """Block until those that compute with this rank, but have other parameters, are about to do the same: see Worker."""

    def meet_beside(self, what: str) -> None:
        """Block until those that have other parts of parameters are about to do the same, as ``meet``."""
        for each in self.beside:
            each.meet(what)

    def do_alike_beside(self, what: str, call: Callable[[], T]) -> T:
        """Call what may not fit on some ranks only. If so, those with other parts raise CapacityError, with its text."""
        for each in self.beside:
            call = partial(each.do_alike, what, call)
        try:
            return call()
        except RankError as error:
            if not error.lacks_memory:
                raise
            raise CapacityError(*error.args) from error

    def exchange(self, what: str, value: T) -> list[T]:
        """Return what every rank gave, in the order of ranks. A value is pickled: keep it small."""
        if self.is_alone:
            return [value]
        self.meet(what)
        return self._exchange_now(what, value)

    def exchange_numbers(self, what: str, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Return what every rank gave: as many numbers of 64 bits on each."""
        if self.is_alone:
            return [tuple(numbers)]
        self.meet(what)
        packing = struct.Struct(f"{len(numbers)}q")
        return [packing.unpack(each) for each in self._gather_now(what, packing.pack(*numbers))]

    def largest(self, what: str, *numbers: int) -> tuple[int, ...]:
        """Return the largest of each number over all ranks."""
        if self.is_alone or not numbers:
            return numbers
        return tuple(map(max, zip(*self.exchange_numbers(what, numbers), strict=True)))

    def _exchange_now(self, what: str, value: T) -> list[T]:
        """Return what every rank gave, which are at the same point."""
        mine = pickle.dumps(value)
        most = max(_NUMBER.unpack(each)[0] for each in self._gather_now(what, _NUMBER.pack(len(mine))))
        return [pickle.loads(each) for each in self._gather_now(what, mine.ljust(most))]  # it ignores what follows

    def _gather_now(self, what: str, mine: bytes) -> list[bytes]:
        """Return what every rank gave, as many bytes on each."""
        self.check_together()
        with _outside_capture():
            sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            given = torch.empty(self.mesh_size, len(mine), dtype=torch.uint8, device="cpu")
            with self.raising(what):
                work = all_gather_single(given.view(-1), sent, group=self._control, async_op=True)
            self.wait(Collective(name=what, works=(work,), tensors=(sent, given)))
            return [given[place].numpy().tobytes() for place in self._places]

    def _receive_from_first(self, what: str, mine: bytes) -> bytes:
        """Return the bytes that rank 0 gave; the others, which give none, wait until it does."""
        (nbytes,) = _NUMBER.unpack(self._broadcast_now(what, _NUMBER.pack(len(mine))))
        return self._broadcast_now(what, mine or bytes(nbytes))

    def _broadcast_now(self, what: str, mine: bytes) -> bytes:
        """Return the bytes of rank 0, of which there are as many as of ``mine`` on every rank."""
        self.check_together()
        with _outside_capture():
            given = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            with self.raising(what):
                work = dist.broadcast(given, group=self._control, group_src=self._places[0], async_op=True)
            self.wait(Collective(name=what, works=(work,), tensors=(given,)))
            return given.numpy().tobytes()

    def do_alike(self, what: str, call: Callable[[], T]) -> T:
        """Call what may raise on some ranks only. If it does, every rank raises: its own error, or RankError with theirs."""
        with self.alike(what):
            return call()

    @contextmanager
    def alike(self, what: str) -> Iterator[None]:
        """A block of what may raise on some ranks only. If it does, every rank raises as in ``do_alike``."""
        if self.is_alone:
            yield
            return
        try:
            yield
        except ZinfError as error:
            if self.failure is None:
                lacks_memory = error.lacks_memory if isinstance(error, RankError) else isinstance(error, CapacityError)
                self.exchange(what, (describe(error), lacks_memory))
            raise
        except BaseException as error:
            self.fail(f"{what}: {describe(error)}")
            raise
        given = self.exchange(what, cast(tuple[str, bool] | None, None))
        failed = {rank: each for rank, each in enumerate(given) if each is not None}
        if failed:
            rank, (first, _) = next(iter(failed.items()))
            theirs = RankError(f"{what} failed on {describe_ranks(list(failed))}; rank {rank}: {first}")
            theirs.lacks_memory = all(lacks_memory for _, lacks_memory in failed.values())
            raise theirs

    @contextmanager
    def alike_beside(self, what: str) -> Iterator[None]:
        """A block as of ``alike``, of which those that have other parts of parameters learn, too."""
        with ExitStack() as stack:
            for each in (*self.beside, self):
                stack.enter_context(each.alike(what))
            yield

    def do_on_first(self, what: str, call: Callable[[], T]) -> T:
        """Call on rank 0 only, for which the others wait; return what it returned, pickled, on every rank.

        Its ZinfError is raised on every rank. Any other error of rank 0 is a RankError on the others, and so is a result
        that does not arrive as it was sent.
        """
        if self.is_alone:
            return call()
        self.meet(what)
        mine = self._pickle_outcome(what, call) if self.mesh_rank == 0 else b""
        outcome = self._receive_from_first(f"the end of {what} on rank 0", mine)
        hashes = self.exchange_numbers(f"the hash of {what}", [hash_of(outcome)])
        others = [rank for rank, each in enumerate(hashes) if each != hashes[0]]
        if others:
            raise self._broken(f"the result of {what} is not on {describe_ranks(others)} what rank 0 has sent")
        result, error = pickle.loads(outcome)
        try:
            if error is not None:
                raise error
            return cast(T, result)
        finally:
            del error  # its traceback has this frame: no cycle is to keep what the callers hold

    def _pickle_outcome(self, what: str, call: Callable[[], object]) -> bytes:
        """Return what a call returned, and its ZinfError, one of which is None. Other ranks hear of any other error."""
        try:
            return pickle.dumps((call(), None))
        except ZinfError as error:
            return pickle.dumps((None, error))
        except BaseException as error:
            self.fail(f"{what}: {describe(error)}")
            raise

    def share_alike(self, what: str, call: Callable[[], T]) -> list[T]:
        """Call what may raise on some ranks only; return what it returned on each, pickled, or raise as ``do_alike``."""
        if self.is_alone:
            return [call()]
        pickled = self.do_alike(what, lambda: pickle.dumps(call()))
        return [pickle.loads(each) for each in self.exchange(what, pickled)]

    # Failures

    def fail(self, why: str) -> None:
        """Tell the other ranks that this one cannot go on: those that wait for it raise RankError."""
        for each in self.beside:
            each.fail(why)
        if self.is_alone or self.failure is not None:
            return
        self._note_failure(f"rank {self.mesh_rank}: {why}")
        self._tell(f"rank {self.mesh_rank}: {why}")

    def _note_failure(self, why: str) -> None:
        """Refuse all collectives from now on, and end those that hang on a GPU. Later models get groups of their own."""
        self.failure = why
        _groups.made.clear()
        for group in self._moving:
            for device in group._device_types:
                # Without that, whatever is enqueued behind a collective would wait as long as NCCL does.
                if device.type == "cuda" and (backend := group._get_backend(device)).name() == "nccl":
                    backend.abort()

    def _tell(self, failure: str) -> None:
        """Give the other ranks a failure, unless they know of one."""
        if self.is_alone:
            return
        with suppress(RuntimeError):  # whoever holds the store is gone: the others learn of it from their connections
            self._messages.compare_set("failed", "", failure)

    def _look_for_others(self, what: str, waited: float, kind: str | None) -> None:
        """Raise RankError if a rank has failed, or has not come to the same point for too long.

        ``kind`` is that of a wait that all ranks have; None for a message, for which this one waits.
        """
        try:
            failed = self._messages.get("failed").decode() if self._messages.check(["failed"]) else None
            if kind is not None and self._told_waits[kind] != self._num_waits[kind]:
                self._told_waits[kind] = self._num_waits[kind]
                self._messages.set(f"{kind}/{self.mesh_rank}", str(self._num_waits[kind]))
            if failed is None and waited > self.timeout_seconds:
                absent = f"{what} had not come" if kind is None else self._describe_absent(what, kind)
                failed = f"{absent} after {waited:.0f} seconds"
        except RuntimeError as error:
            raise self._broken(f"the store of torch.distributed is gone ({_first_line(error)})") from error
        if failed is not None:
            raise self._broken(failed)

    def _describe_absent(self, what: str, kind: str) -> str:
        """Return which ranks have not come to ``what``, where this one waits."""
        absent = []
        for rank in range(self.mesh_size):
            key = f"{kind}/{rank}"
            if rank == self.mesh_rank:
                continue
            if not self._messages.check([key]) or int(self._messages.get(key)) < self._num_waits[kind]:
                absent.append(rank)
        return f"{describe_ranks(absent)} had not come to {what}" if absent else f"{what} did not end"

    def check_together(self) -> None:
        """Raise RankError if ranks have failed, so that a collective could wait for one for ever."""
        for each in self.beside:
            each.check_together()
        if self.failure is not None:
            raise RankError(f"the ranks of this model cannot go on: {self.failure}; {REMEDY}")

    @contextmanager
    def raising(self, name: str) -> Iterator[None]:
        """A block in which errors of torch.distributed become RankErrors, and others know of whatever else is raised."""
        try:
            yield
        except ZinfError:
            raise
        except RuntimeError as error:
            raise self._broken(f"{name} broke off, since another rank is gone ({_first_line(error)})") from error
        except BaseException as error:
            self.fail(f"{name}: {describe(error)}")
            raise

    def _broken(self, why: str) -> RankError:
        if self.failure is None:
            self._note_failure(why)
            self._tell(f"rank {self.mesh_rank}: {why}")  # some ranks have no connection to the one that is gone
        return RankError(f"rank {self.mesh_rank} cannot go on: {why}; {REMEDY}")


class TensorRanks(Ranks):
    """The ranks among which the user has divided parameters, as tensor parallelism does.

    Each has other values, and a store of its own. The user's collectives are between them; ours are messages only.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.members: list[int] = sorted(mesh.mesh.flatten().tolist())
        # Of the user's collectives in graphs.
        self.group_name: str | None = mesh.get_group().group_name if mesh.ndim == 1 else None
        self.mesh_size, self.mesh_rank = len(self.members), self.members.index(dist.get_rank())
        self._places = [*range(self.mesh_size)]
        self._connect(self.members, _timeout_of(mesh))


class Worker(Ranks):
    """A process that has its parameters for itself, and computes with others: each learns of the others' failures."""

    def __init__(self, partners: Ranks) -> None:
        super().__init__()
        self._partners = partners

    @property
    def partners(self) -> Ranks:
        """See Ranks.partners."""
        return self._partners

    def fail(self, why: str) -> None:
        """See Ranks.fail."""
        self._partners.fail(why)

    def check_together(self) -> None:
        """See Ranks.check_together."""
        self._partners.check_together()

    def meet_partners(self, what: str) -> None:
        """See Ranks.meet_partners."""
        self._partners.meet(what)


@contextmanager
def _outside_capture() -> Iterator[None]:
    """A block in which tensors are real and ops are those of C++, although AOTAutograd has a graph planned meanwhile.

    With Python's dispatcher, starting a collective holds the lock of Python, for which the threads of gloo wait.
    """
    with no_python_dispatcher(), unset_fake_temporarily():
        yield


def _timeout_of(mesh: DeviceMesh) -> float:
    """Return how long a rank waits for the others: as long as ``init_process_group`` was told."""
    assert dist.group.WORLD is not None  # a mesh has been made of it
    options = getattr(dist.group.WORLD._get_backend(torch.device(mesh.device_type)), "options", None)
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout.total_seconds()


REMEDY = "restart all ranks, as torchrun does, and load the last checkpoint"


class _Groups:
    """The process groups of this process, which each take threads and connections: models share them.

    After a failure, of which a collective may be left behind, and with another default group, models get new ones.
    """

    def __init__(self) -> None:
        self.default: object = None
        self.made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}


_groups = _Groups()


def group_of(purpose: str, members: Sequence[int], timeout_seconds: float, **options: Any) -> dist.ProcessGroup:
    """Return the group of some ranks for one kind of collectives. Every member calls this in the same order."""
    if _groups.default is not dist.group.WORLD:
        _groups.default, _groups.made = dist.group.WORLD, {}
    key = purpose, tuple(members)
    if key not in _groups.made:
        _groups.made[key] = dist.new_group(
            [*members],
            timeout=timedelta(seconds=timeout_seconds) + _SLACK,
            use_local_synchronization=True,
            group_desc=f"zinf {purpose}",
            **options,
        )
    return _groups.made[key]


def is_grouped() -> bool:
    """Return whether torch.distributed has a default group of more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def hash_of(given: bytes) -> int:
    """Return a hash of bytes, 63 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(given, digest_size=8).digest()) >> 1


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: "rank 1", "ranks 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def describe(error: BaseException) -> str:
    """Return an error with its class, since its own text may be empty."""
    return f"{type(error).__name__}: {error}"


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


ALONE = Ranks()
