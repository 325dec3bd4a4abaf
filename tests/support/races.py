"""A happens-before race detector for the runtime: which actor accesses which bytes, and what orders the accesses.

Compute, every task of a thread pool and every collective between ranks are actors with vector clocks. A synchronisation
(a submission, a finished future, a returned staging buffer) carries the clock of the actor that did it to the actor that
continues after it. Two actors that access the same bytes of memory or of the file, at least one of them writing, race
unless a chain of synchronisations orders them, even if they happened to run one after the other.
"""

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from tests.support.fake_device import FakeDevice, FakeStream
from tests.support.stream_races import touch_decoded, touch_tensor_of, watch_streams
from zinf_compile.ir.copies import GRADIENT, CopyKey
from zinf_compile.runtime.device.cpu import CpuBlock
from zinf_compile.runtime.optim import optimizer
from zinf_compile.runtime.optim.backward_step import JobFeed
from zinf_compile.runtime.optim.chunk_reads import ChunkReads
from zinf_compile.runtime.optim.step_chunks import Chunk
from zinf_compile.runtime.ranks.ranks import Collective, Ranks
from zinf_compile.runtime.ranks.reductions import Reductions
from zinf_compile.runtime.storage import futures
from zinf_compile.runtime.storage.arena import Arena
from zinf_compile.runtime.storage.staging import StagingPool
from zinf_compile.runtime.transfer import in_flight, transfers
from zinf_compile.runtime.transfer.gpu_direct import KvikioReads
from zinf_compile.runtime.transfer.io_pool import IOPool
from zinf_compile.runtime.transfer.tensor_io import TensorIO
from zinf_compile.runtime.transfer.transfers import Transfers

_PAGE = 4096
Clock = np.ndarray[tuple[int], np.dtype[np.int32]]  # indexed by actor: the latest moment of that actor that is known
_UNKNOWING: Clock = np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class Access:
    """Bytes [start, stop) that an actor accessed at a moment of its own clock."""

    start: int
    stop: int
    actor: int
    moment: int
    is_write: bool
    what: str


class Races:
    """All accesses so far, and the races among them."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.device: FakeDevice | None = None  # whose compute stream collectives run on that are on none of their own
        self.num_accesses: dict[str, int] = defaultdict(int)  # by description of the access
        self._lock = threading.RLock()
        self._actor = threading.local()
        self._num_actors = 0
        self._clocks: dict[int, Clock] = {}
        self._streams: dict[FakeStream, int] = {}
        self._carried: dict[int, tuple[object, Clock]] = {}  # by the id of the carrier, which is kept alive
        self._accesses: dict[tuple[str, int], list[Access]] = defaultdict(list)  # by space and page

    def begin(self, clock: Clock = _UNKNOWING) -> None:
        """Make the calling thread a new actor, ordered after ``clock``."""
        self._actor.number = self._new_actor(clock)

    def _new_actor(self, clock: Clock) -> int:
        with self._lock:
            number = self._num_actors
            self._num_actors += 1
            known = np.zeros(self._num_actors, np.int32)
            known[: len(clock)], known[number] = clock, 1
            self._clocks[number] = known
            return number

    @contextmanager
    def acting(self, stream: FakeStream) -> Iterator[None]:
        """Act as a stream inside: its work is ordered after all that the enqueuing actor has seen."""
        clock = self.fork()
        me = self._actor.number
        with self._lock:
            if stream not in self._streams:
                self._streams[stream] = self._new_actor(_UNKNOWING)
            self._actor.number = self._streams[stream]
            self.join(clock)
        yield
        self._actor.number = me

    @contextmanager
    def beside(self, carrier: object) -> Iterator[None]:
        """Act inside as something that the caller starts: whoever observes ``carrier`` later is ordered after it."""
        clock = self.fork()
        me = self._actor.number
        self.begin(clock)
        yield
        self.publish(carrier)
        self._actor.number = me

    def _me(self) -> int:
        if not hasattr(self._actor, "number"):
            self.begin()
        number: int = self._actor.number
        return number

    def fork(self) -> Clock:
        """Return the caller's clock, for an actor that it starts now."""
        with self._lock:
            me = self._me()
            clock = self._clocks[me].copy()
            self._clocks[me][me] += 1
            return clock

    def publish(self, carrier: object) -> None:
        """Order every later observer of ``carrier`` after all that the caller did so far."""
        with self._lock:
            _, known = self._carried.get(id(carrier), (None, _UNKNOWING))
            self._carried[id(carrier)] = carrier, _joined(known, self.fork())

    def observe(self, carrier: object) -> None:
        """Order the caller after all that published ``carrier``."""
        with self._lock:
            _, clock = self._carried.get(id(carrier), (None, _UNKNOWING))
            self.join(clock)

    def join(self, clock: Clock) -> None:
        """Order the caller after ``clock``."""
        with self._lock:
            me = self._me()
            self._clocks[me] = _joined(self._clocks[me], clock)

    def touch(self, space: str, start: int, nbytes: int, what: str, *, write: bool) -> None:
        """Record an access of the caller, and the races with earlier accesses."""
        with self._lock:
            me = self._me()
            clock = self._clocks[me]
            now = Access(start=start, stop=start + nbytes, actor=me, moment=int(clock[me]), is_write=write, what=what)
            self.num_accesses[what] += 1
            for page in range(start // _PAGE, -(-now.stop // _PAGE)):
                kept = []
                for before in self._accesses[space, page]:
                    is_disjoint = before.stop <= now.start or now.stop <= before.start
                    is_ordered = before.actor < len(clock) and clock[before.actor] >= before.moment
                    if not is_disjoint and not is_ordered and (before.is_write or write):
                        self.found.append(
                            f"{now.what} and {before.what} both touch {space} bytes "
                            f"[{max(now.start, before.start)}, {min(now.stop, before.stop)}), and nothing orders them"
                        )
                    first, last = max(before.start, page * _PAGE), min(before.stop, (page + 1) * _PAGE)
                    is_covered = write and is_ordered and now.start <= first and last <= now.stop
                    if not is_covered:  # by this write, which is ordered after it
                        kept.append(before)
                self._accesses[space, page] = [*kept, now]

    def forget(self, start: int, nbytes: int) -> None:
        """Forget accesses to memory that was freed and mapped again."""
        with self._lock:
            for page in range(start // _PAGE, -(-(start + nbytes) // _PAGE)):
                self._accesses.pop(("memory", page), None)


def _joined(one: Clock, other: Clock) -> Clock:
    """Return the element-wise maximum of two clocks. Vectorised, because there are thousands of actors and clocks."""
    longer, shorter = (one, other) if len(one) > len(other) else (other, one)
    joined = longer.copy()
    np.maximum(joined[: len(shorter)], shorter, out=joined[: len(shorter)])
    return joined


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


@contextmanager
def watching_races() -> Iterator[Races]:
    """Watch the stores that are created inside."""
    races = Races()
    with ExitStack() as stack:

        def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))

        _watch_order(races, replace)
        _watch_memory(races, replace)
        _watch_bytes(races, replace)
        _watch_collectives(races, replace)
        watch_streams(races, replace)
        yield races


Replace = Callable[[Any, str, Callable[[Any], Any]], None]


def _watch_order(races: Races, replace: Replace) -> None:
    """Follow tasks, futures, callbacks of futures, and the feed of jobs."""

    def submit(original: Any) -> Any:
        def call(pool: ThreadPoolExecutor, task: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            clock = races.fork()

            def run() -> Any:
                races.begin(clock)
                if pool._max_workers == 1:  # a pool with one thread runs its tasks in order
                    races.observe(pool)
                try:
                    return task(*args, **kwargs)
                finally:
                    races.publish(pool)

            return original(pool, run)

        return call

    def publishing(original: Any) -> Any:
        def call(future: Future[Any], *args: Any) -> Any:
            races.publish(future)
            return original(future, *args)

        return call

    def observing(original: Any) -> Any:
        def call(future: Future[Any], *args: Any, **kwargs: Any) -> Any:
            result = original(future, *args, **kwargs)
            if result is not False:  # of ``done``
                races.observe(future)
            return result

        return call

    def add_done_callback(original: Any) -> Any:
        def call(future: Future[Any], callback: Any) -> None:
            clock = races.fork()

            def observe_and_call(done: Future[Any]) -> Any:
                races.observe(done)
                races.join(clock)  # the caller has seen the callback being added
                return callback(done)

            original(future, observe_and_call)

        return call

    def call_when_done(original: Any) -> Any:
        def call(waited: Any, then: Any) -> None:
            waited = list(waited)

            def observe_and_call(error: BaseException | None) -> None:
                for future in waited:  # the last count-down is ordered after all others
                    races.observe(future)
                then(error)

            original(waited, observe_and_call)

        return call

    def put(original: Any) -> Any:
        def call(feed: JobFeed, job: Any) -> Any:
            races.publish(feed)
            return original(feed, job)

        return call

    def take(original: Any) -> Any:
        def call(feed: JobFeed) -> Iterator[Any]:
            for job in original(feed):
                races.observe(feed)
                yield job

        return call

    def enqueue(original: Any) -> Any:
        """A thread that was submitted for one call of an I/O pool may run another, which knows nothing of the first."""

        def call(owner: IOPool, urgency: int, task: Any) -> Any:
            clock = races.fork()

            def run() -> None:
                races.begin(clock)
                task()

            return original(owner, urgency, run)

        return call

    replace(ThreadPoolExecutor, "submit", submit)
    replace(IOPool, "_enqueue", enqueue)
    for name in ("set_result", "set_exception"):
        replace(Future, name, publishing)
    for name in ("result", "exception", "done"):
        replace(Future, name, observing)
    replace(Future, "add_done_callback", add_done_callback)
    for module in (futures, optimizer, transfers, in_flight):
        replace(module, "call_when_done", call_when_done)
    replace(JobFeed, "put", put)
    replace(JobFeed, "__iter__", take)


def _watch_memory(races: Races, replace: Replace) -> None:
    """Follow staging buffers between owners, and forget accesses to memory that is mapped again."""

    def take_memory(original: Any) -> Any:
        def call(pool: StagingPool, nbytes: int) -> Any:
            idle = {id(each.memory) for each in pool._idle}
            memory = original(pool, nbytes)
            if id(memory) in idle:
                races.observe(memory)
            else:
                races.forget(_address(memoryview(memory)), len(memory))
            return memory

        return call

    def give_back(original: Any) -> Any:
        def call(pool: StagingPool, buffer: Any, **options: Any) -> None:
            if (memory := pool._leased.get(buffer)) is not None:
                races.publish(memory)
            original(pool, buffer, **options)

        return call

    def lease_holding(original: Any) -> Any:
        def call(pool: StagingPool, what: object) -> Any:
            if (buffer := original(pool, what)) is not None:
                races.observe(pool._leased[buffer])
                races.touch("memory", _address(buffer.view), buffer.nbytes, "what staging still holds", write=False)
            return buffer

        return call

    def reserve(original: Any) -> Any:
        def call(arena: Arena, nbytes: int) -> None:
            before = arena._block
            original(arena, nbytes)
            if arena._block is not before and isinstance(arena._block, CpuBlock):  # newly mapped: never accessed
                races.forget(arena._block.bytes.data_ptr(), arena.nbytes)

        return call

    replace(StagingPool, "_take_memory", take_memory)

    def start_chunk(original: Any) -> Any:
        def call(reads: ChunkReads, chunk: Chunk, *args: Any) -> None:
            original(reads, chunk, *args)
            races.publish(chunk)

        return call

    def ask_for_chunk(original: Any) -> Any:
        """The lock of chunk reads orders who asks for a chunk after the thread whose write has made room for it."""

        def call(reads: ChunkReads, chunk: Chunk) -> Any:
            result = original(reads, chunk)
            races.observe(chunk)
            return result

        return call

    replace(ChunkReads, "_start", start_chunk)
    for name in ("try_start", "start"):
        replace(ChunkReads, name, ask_for_chunk)
    replace(StagingPool, "return_", give_back)
    replace(StagingPool, "lease_holding", lease_holding)
    replace(Arena, "reserve", reserve)


def _watch_bytes(races: Races, replace: Replace) -> None:
    """Record reads and writes of the file, staging buffers, the arena, and homes in memory."""

    touch_tensor = partial(touch_tensor_of, races)

    def disk_call(original: Any) -> Any:
        def call(owner: IOPool, method: Any, name: str, offset: int, buffer: memoryview, way: Any) -> None:
            is_read = method.__name__ == "read"
            what = f"the {'read' if is_read else 'write'} of {name}"
            races.touch("file", offset, len(buffer), what, write=not is_read)
            races.touch("memory", _address(buffer), len(buffer), what, write=is_read)
            original(owner, method, name, offset, buffer, way)

        return call

    def direct_read(original: Any) -> Any:
        def call(reads: KvikioReads, offset: int, destination: Tensor) -> None:
            races.touch("file", offset, destination.numel(), "the direct read", write=False)
            touch_tensor(destination, "the direct read", write=True)
            original(reads, offset, destination)

        return call

    def copy(original: Any) -> Any:
        def call(owner: IOPool, source: list[Tensor], destination: Tensor, *rest: Any) -> None:
            touch_tensor(source[0], "a copy's source", write=False)
            touch_tensor(destination, "a copy's destination", write=True)
            original(owner, source, destination, *rest)

        return call

    def decode(original: Any) -> Any:
        def call(code: Any, memory: Tensor, first: int, values: Tensor) -> None:
            touch_decoded(races, code, memory, first, values)
            original(code, memory, first, values)

        return call

    def send_home(original: Any) -> Any:
        def call(owner: TensorIO, slot: Any, part: Any, lease: Any, *rest: Any, after: Any = None) -> None:
            if after is None:
                races.touch("memory", _address(lease.view), lease.nbytes, "what fills staging", write=True)
            original(owner, slot, part, lease, *rest, after=after)

        return call

    def chunk_tensor(original: Any) -> Any:
        def call(chunk: Chunk, key: CopyKey, slot: Any) -> Tensor:
            tensor: Tensor = original(chunk, key, slot)
            touch_tensor(tensor, f"the update, at its {key.label}", write=key != GRADIENT)
            return tensor

        return call

    def low_halves(original: Any) -> Any:
        def call(chunk: Chunk) -> Tensor:
            pages: Tensor = original(chunk)
            touch_tensor(pages, "the update, at its split master copy", write=True)
            return pages

        return call

    def held_by(owner: Transfers, ticket: int) -> None:
        offset = owner._in_flight[ticket].offset
        nbytes = owner._arena._taken[offset] - offset
        with _computing(races, owner._arena._device):
            races.touch("memory", owner._arena._reserved.bytes.data_ptr() + offset, nbytes, "compute", write=False)

    def wait_gather(original: Any) -> Any:
        def call(owner: Transfers, ticket: int) -> bool:
            is_first: bool = original(owner, ticket)
            held_by(owner, ticket)
            return is_first

        return call

    def copy_landed(original: Any) -> Any:
        def call(owner: TensorIO, slot: Any, part: Any, buffer: memoryview) -> bool:
            if is_there := original(owner, slot, part, buffer):
                races.touch("memory", _address(buffer), len(buffer), f"a copy of {slot.name} in staging", write=True)
            return is_there

        return call

    def release(original: Any) -> Any:
        def call(owner: Transfers, ticket: int) -> None:
            held_by(owner, ticket)
            original(owner, ticket)

        return call

    def strided_view(original: Any) -> Any:
        def call(arena: Arena, offset: int, *args: Any, **kwargs: Any) -> Tensor:
            view: Tensor = original(arena, offset, *args, **kwargs)
            with _computing(races, arena._device):
                touch_tensor(view, "compute, at a bound value", write=True)
            return view

        return call

    replace(IOPool, "_call", disk_call)
    replace(KvikioReads, "read", direct_read)
    replace(IOPool, "_copy", copy)
    replace(TensorIO, "send_home", send_home)
    replace(transfers, "decode_behind", decode)
    replace(TensorIO, "copy_landed", copy_landed)
    replace(Chunk, "tensor", chunk_tensor)
    replace(Chunk, "low_halves", low_halves)
    replace(Transfers, "wait_gather", wait_gather)
    replace(Transfers, "release", release)
    replace(Arena, "strided_view", strided_view)


def _watch_collectives(races: Races, replace: Replace) -> None:
    """Follow collectives between ranks: each is an actor from its start to the end of a wait for it, or on a stream."""

    def start(collective: Collective, read: Sequence[Tensor], written: Sequence[Tensor]) -> Collective:
        with ExitStack() as stack:
            if races.device is None:
                stack.enter_context(races.beside(collective))
            elif not threading.current_thread().name.startswith("fake-"):
                stack.enter_context(races.acting(races.device.compute))
            for tensor in read:
                touch_tensor_of(races, tensor, f"{collective.name}, reading", write=False)
            for tensor in written:
                touch_tensor_of(races, tensor, f"{collective.name}, writing", write=True)
        return collective

    def all_gather(original: Any) -> Any:
        def call(ranks: Ranks, name: str, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> Collective:
            return start(original(ranks, name, shards, wholes), shards, wholes)

        return call

    def reduce(original: Any) -> Any:
        def call(ranks: Ranks, name: str, value: Tensor, counts: Sequence[int], received: Tensor) -> Collective:
            return start(original(ranks, name, value, counts, received), [value], [received])

        return call

    def wait(original: Any) -> Any:
        def call(ranks: Ranks, collective: Collective, **given: Any) -> None:
            original(ranks, collective, **given)
            races.observe(collective)

        return call

    def view(original: Any) -> Any:
        def call(reductions: Reductions, buffer: str, *rest: Any) -> Tensor:
            part: Tensor = original(reductions, buffer, *rest)
            if buffer == "outgoing":
                with _computing(races, reductions._device):
                    touch_tensor_of(races, part, "what fills the buffer of gradients", write=True)
            return part

        return call

    def add_up(original: Any) -> Any:
        def call(reductions: Reductions, piece: Any) -> Tensor:
            total: Tensor = original(reductions, piece)
            touch_tensor_of(races, piece.parts, "what adds up gradients", write=True)
            return total

        return call

    def settle(original: Any) -> Any:
        def call(reductions: Reductions, piece: Any) -> Tensor:
            total: Tensor = original(reductions, piece)
            with _computing(races, reductions._device):
                touch_tensor_of(races, total, "compute, at a reduced gradient", write=False)
            return total

        return call

    replace(Ranks, "all_gather", all_gather)
    replace(Ranks, "exchange_rows", reduce)
    replace(Ranks, "reduce_rows", reduce)
    replace(Ranks, "wait", wait)
    replace(Reductions, "_view", view)
    replace(Reductions, "_add_up", add_up)
    replace(Reductions, "_settle", settle)


@contextmanager
def _computing(races: Races, device: object) -> Iterator[None]:
    """Attribute accesses inside to the compute stream of the device, if it has one."""
    if not isinstance(device, FakeDevice):
        yield
        return
    with races.acting(device.compute):
        yield
