"""The link between host memory and a device: which stream copies what, and which events it waits for.

A device that shares the host's memory needs no copies: ``is_crossed`` is False, and callers copy bytes themselves if
they have to.

    issue             mark = compute.record()
    bytes in host     to_device.wait(mark); to_device.copy_all([(bytes, arena)]); arrived = to_device.record()
    first reader      compute.wait(arrived)

    gradient          ready = compute.record(); to_host.wait(ready); to_host.copy_all([(gradient, staging)])
                      left = to_host.record()
    later             compute.wait(left); only then may the gradient's memory be reused

There is no cycle: compute waits only for copies that are already enqueued, and these only for compute enqueued before
them.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from zinf_compile.ir.errors import StoreError
from zinf_compile.runtime.device.device import Device, Event, Pair, Stream, Timing, use_on_this_thread
from zinf_compile.runtime.process.waiting import join_thread, next_of


class _Leaving(NamedTuple):
    """A tensor on the device that is being copied to host memory, kept alive, and the end of its copy."""

    value: Tensor
    nbytes: int
    left: Event


class Landing(Future[None]):
    """A future that is done when copies have landed, with a StoreError if they failed.

    ``done`` asks their event. Only from a wait or a callback on does a thread wait for it: to wake that takes longer than
    to enqueue a copy.
    """

    def __init__(self, event: Event, watcher: "CopyWatcher", *, is_watched: bool) -> None:
        super().__init__()
        self.event = event
        self.is_watched = is_watched  # by the watcher's thread, which alone ends it then
        self._watcher = watcher

    def done(self) -> bool:
        """Return whether the copies have landed, or failed."""
        if super().done():
            return True
        if not self.is_watched:
            self._watcher.ask(self)
        return super().done()

    def result(self, timeout: float | None = None) -> None:
        """Wait for the copies; raise their error."""
        self._watcher.watch(self)
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the copies; return their error, or None."""
        self._watcher.watch(self)
        return super().exception(timeout)

    def add_done_callback(self, call: Callable[["Future[None]"], object]) -> None:
        """Call ``call`` when the copies have landed: at once if they have, else on the watcher's thread."""
        self._watcher.watch(self)
        super().add_done_callback(call)

    def end(self, error: RuntimeError | None = None) -> None:
        """Note that the copies have landed, or failed with an error of CUDA, for example if an earlier kernel failed."""
        if error is None:
            self.set_result(None)
        else:
            refused = StoreError(f"a copy between host memory and the device failed: {error}")
            refused.__cause__ = error
            self.set_exception(refused)

    @property
    def has_ended(self) -> bool:
        """Return whether ``end`` was called."""
        return super().done()


class EnqueuedCopy:
    """Copies to or from the device that are enqueued on their stream."""

    __slots__ = ("_watcher", "event", "is_watched", "landing", "memory")

    def __init__(self, event: Event, memory: Sequence[Tensor], watcher: "CopyWatcher") -> None:
        """``event`` is at their end, for streams to wait for; ``memory`` is kept alive until they have landed."""
        self.event, self.memory, self._watcher = event, memory, watcher
        self.landing: Landing | None = None  # made for who asks, which nobody does for most chunks of an update
        self.is_watched = False  # by the watcher's thread, which ends its landing

    @property
    def done(self) -> Future[None]:
        """A future of their end, always the same one, that costs little until it is waited for."""
        return self._watcher.landing_of(self) if self.landing is None else self.landing


class CopyWatcher:
    """Knows which copies of one stream have landed. They do in the order in which they were enqueued."""

    def __init__(self, name: str, device: torch.device, arrivals: "CopyWatcher | None" = None) -> None:
        """``arrivals`` are copies to the device that nobody may wait for, while somebody waits for what left it later."""
        self._device, self._arrivals = device, arrivals
        self._lock = threading.RLock()  # reentrant: garbage collection while it is held may ask for a copy
        self._unwatched: deque[EnqueuedCopy] = deque()  # in the order of the stream; keeps the memory of copies alive
        self._watched: SimpleQueue[EnqueuedCopy | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_started = False

    def add(self, event: Event, memory: Sequence[Tensor]) -> EnqueuedCopy:
        """Return copies that were just enqueued, and end at ``event``. Called with the stream's lock held."""
        copy = EnqueuedCopy(event, memory, self)
        self.forget_landed()
        self._unwatched.append(copy)
        return copy

    def landing_of(self, copy: EnqueuedCopy) -> Landing:
        """Return the future of copies' end, made for who asks first."""
        with self._lock:
            if copy.landing is None:
                copy.landing = Landing(copy.event, self, is_watched=copy.is_watched)
            return copy.landing

    def forget_landed(self) -> None:
        """Let go of the memory of copies that have landed."""
        with self._lock:
            while self._unwatched and _is_past(self._unwatched[0].event):
                self._unwatched.popleft().memory = ()

    def ask(self, landing: Landing) -> None:
        """End a landing if its copies have landed. A watched one is left to the thread, which calls its callbacks."""
        with self._lock:
            if landing.is_watched or landing.has_ended:
                return
            try:
                if not landing.event.has_happened():
                    return
                failed = None
            except RuntimeError as error:
                failed = error
            self._let_go()
            if not landing.has_ended:  # a finalizer of what was let go may have asked
                landing.end(failed)

    def watch(self, landing: Landing) -> None:
        """Have the thread wait for a landing that is not done, and for all before it.

        Else one that is watched later would be done later than a copy behind it.
        """
        if landing.done():
            return
        with self._lock:
            if not self._is_started:
                self._is_started = True
                self._thread.start()
            while not (landing.is_watched or landing.has_ended):  # another thread may have asked meanwhile
                self._watch_one(self._unwatched.popleft() if self._unwatched else self._made_for(landing))

    def _made_for(self, landing: Landing) -> EnqueuedCopy:
        """Return what stands for copies whose memory was let go of meanwhile."""
        copy = EnqueuedCopy(landing.event, (), self)
        copy.landing = landing
        return copy

    def _watch_one(self, copy: EnqueuedCopy) -> None:
        if copy.landing is not None:
            if copy.landing.has_ended:
                return
            copy.landing.is_watched = True
        copy.is_watched = True
        self._watched.put(copy)

    def _run(self) -> None:
        use_on_this_thread(self._device)
        while (copy := next_of(self._watched)) is not None:
            failed: RuntimeError | None = None
            try:
                copy.event.wait()
            except RuntimeError as error:
                failed = error
            self._let_go()
            with self._lock:  # who asks for its landing from now on asks the event
                copy.is_watched, copy.memory, landing = False, (), copy.landing
            if landing is not None:
                landing.end(failed)
            del copy, landing, failed  # and callbacks refer to what waited

    def _let_go(self) -> None:
        """Let go of the memory of what landed before a landing that is about to end, and of what arrived for it.

        Before staging is returned from which the same chunk came, or somebody asks who holds a home.
        """
        if self._arrivals is not None:
            self._arrivals.forget_landed()
        self.forget_landed()

    def close(self) -> None:
        """Wait for all copies, and end the thread."""
        with self._lock:
            self.forget_landed()
            if self._unwatched:
                self.watch(self.landing_of(self._unwatched[-1]))
        if self._is_started:
            self._watched.put(None)
            if self._thread is not threading.current_thread():
                join_thread(self._thread, "copies between host memory and the device")


def _is_past(event: Event) -> bool:
    try:
        return event.has_happened()
    except RuntimeError:  # of CUDA: who waits for the copy hears of it
        return True


class Link:
    """Copies between host memory and one device in both directions. Thread-safe."""

    def __init__(
        self,
        device: Device,
        *,
        leaving_nbytes: int = 0,
        for_updates: bool = False,
        reads_in_place: Callable[[], bool] = lambda: False,
    ) -> None:
        """``leaving_nbytes`` limits the device bytes of tensors that are being copied to host memory.

        ``for_updates``: copy on the streams of updates. ``reads_in_place`` returns whether ops of the device reach our host
        memory where it is; it is asked each time, since pinning may be refused later.
        """
        self._device = device
        self.reads_in_place = reads_in_place
        self._streams = device.update_copies if for_updates else device.copies
        self.is_crossed = not device.memory.unified  # whether bytes are copied between host and device
        self._in_lock, self._out_lock = threading.Lock(), threading.Lock()
        whose = "update-" if for_updates else ""
        self._arrivals = CopyWatcher(f"zinf-{whose}to-device", device.torch_device)
        self._departures = CopyWatcher(f"zinf-{whose}to-host", device.torch_device, self._arrivals)
        # In place, by the stream of updates.
        self._written = CopyWatcher(f"zinf-{whose}in-place", device.torch_device, self._arrivals)
        self._last_left: Event | None = None  # the end of the last copy to host memory
        self._leaving: deque[_Leaving] = deque()
        self._leaving_nbytes = 0
        self.leaving_limit = leaving_nbytes

    def mark(self) -> Event:
        """Return the current end of the compute stream: memory freed before it may be overwritten after it."""
        # Hazard: ops that are enqueued and not yet done may still read released arena bytes. A copy into them waits for
        # this event, which comes after these ops.
        return self._device.compute.record()

    def bring(
        self, source: Tensor, destination: Tensor, *, behind: Event, timing: Timing | None = None
    ) -> EnqueuedCopy:
        """Start copying flat host bytes to flat bytes on the device, after earlier readers and writers of these bytes."""
        return self.bring_all([(source, destination)], behind=behind, timings=(timing,))

    def bring_all(self, pairs: Sequence[Pair], *, behind: Event, timings: Sequence[Timing | None] = ()) -> EnqueuedCopy:
        """Start several such copies, one after another, each with its timing; what is returned is for all of them."""
        stream = self._streams.to_device
        with self._in_lock:  # no other thread's copy may come between a copy and its event
            stream.wait(behind)
            event = _enqueue(pairs, timings, stream)
            return self._arrivals.add(event, [source for source, _ in pairs])

    def change(self, change: Callable[[], None]) -> EnqueuedCopy:
        """Enqueue ops that change what copies have brought to the device, behind these; return their end, as of a copy.

        They run on the stream of copies, so later copies come behind them. They must enqueue no copies of the link.
        """
        stream = self._streams.to_device
        with self._in_lock:
            stream.run(change)
            return self._arrivals.add(stream.record(), ())

    @property
    def compute(self) -> Stream:
        """The stream of the model's ops."""
        return self._device.compute

    def begin_thread(self) -> None:
        """Use the device on the calling thread, which is going to enqueue copies."""
        use_on_this_thread(self._device.torch_device)

    def join(self, event: Event) -> None:
        """Make the compute stream wait for a copy, or for a collective."""
        # Hazard: ops enqueued from now on read these bytes, and must not begin before it is done.
        self._device.compute.wait(event)

    def take(
        self, source: Tensor, destination: Tensor, *, behind: Event | None = None, timing: Timing | None = None
    ) -> EnqueuedCopy:
        """Start copying flat bytes on the device to flat host bytes, after the compute enqueued so far or after an event.

        The source must not be freed before the compute stream waits for the copy: use ``let_go`` or ``join``.
        """
        # Hazard: ops that compute the source may be enqueued and not yet done.
        behind = behind or self._device.compute.record()
        return self.take_all([(source, destination)], behind=behind, timings=(timing,))

    def take_all(self, pairs: Sequence[Pair], *, behind: Event, timings: Sequence[Timing | None] = ()) -> EnqueuedCopy:
        """Start several such copies after an event, one after another; what is returned is for all of them."""
        stream = self._streams.to_host
        with self._out_lock:
            stream.wait(behind)
            event = self._last_left = _enqueue(pairs, timings, stream)
            return self._departures.add(event, [destination for _, destination in pairs])

    def note_written(self, memory: Sequence[Tensor]) -> EnqueuedCopy:
        """Return what stands for writes in place, by the update stream so far, as if host memory had got copies of them."""
        with self._out_lock:
            return self._written.add(self._device.update.record(), memory)

    def rewrite(
        self, home: Tensor, change: Callable[[Tensor], object], timings: tuple[Timing | None, Timing | None]
    ) -> EnqueuedCopy:
        """Start changing flat host memory on the device: bring it there, enqueue ``change``, and take it back.

        Where the device reaches host memory it is changed there, and nothing is copied or timed.

        ``change`` runs on the stream of updates, behind the compute enqueued so far, which goes on beside it. What it reads
        must not be freed before ``let_go``. What is there counts as leaving: call ``make_room`` first. ``timings`` are those
        of the way there and of the way back.
        """
        is_in_place, update = self.reads_in_place(), self._device.update
        if is_in_place:
            there, arrived = self._device.in_place(home), self.mark()
        else:
            there = self._device.allocate([home.numel()], home.dtype)
            # Hazard: ops that had this memory before may be enqueued and not yet done.
            arrived = self.bring(home, there, behind=self.mark(), timing=timings[0]).event
        # Hazard: ``change`` reads what arrives, and what compute has enqueued by now; the copy back reads what it writes.
        update.wait(arrived)
        try:
            with self._device.updating():
                change(there)
        except BaseException:
            self._device.synchronize()  # else memory is freed to which, or from which, a copy or an op is enqueued
            raise
        if is_in_place:
            return self.note_written([home])
        left = self.take(there, home, behind=update.record(), timing=timings[1])
        self.let_go(there)
        return left

    def let_go(self, value: Tensor, *, left: Event | None = None) -> None:
        """Free a tensor on the device once the copies that this link enqueued for it are done, or after ``left``.

        Ops of the compute stream may get its memory, without waiting for copies. So it is kept alive until the compute
        stream waits for them, which happens when more than the limit is being copied.
        """
        nbytes = value.untyped_storage().nbytes()
        with self._out_lock:
            left = left or self._last_left
            if left is None:  # nothing has ever been copied
                return
            self._leaving.append(_Leaving(value, nbytes, left))
            self._leaving_nbytes += nbytes
            self._free_beyond(self.leaving_limit)

    def make_room(self, nbytes: int) -> None:
        """Free tensors until ``nbytes`` more can be copied to the host within the limit."""
        with self._out_lock:
            self._free_beyond(max(0, self.leaving_limit - nbytes))

    def _free_beyond(self, limit: int) -> None:
        while self._leaving_nbytes > limit and self._leaving:
            # Hazard: the next op of compute gets this memory, and would overwrite it while it is being copied.
            leaving = self._leaving.popleft()
            self._device.compute.wait(leaving.left)
            self._leaving_nbytes -= leaving.nbytes

    def close(self) -> None:
        """Wait for all copies, and end the threads."""
        self._arrivals.close()
        self._departures.close()
        self._written.close()
        self._leaving.clear()


def _enqueue(pairs: Sequence[Pair], timings: Sequence[Timing | None], stream: Stream) -> Event:
    """Enqueue copies on a stream, whose lock is held; return their end."""
    if any(timings):
        for pair, timing in zip(pairs, timings, strict=True):
            with nullcontext() if timing is None else timing(stream):
                stream.copy_all((pair,))
    else:
        stream.copy_all(pairs)
    return stream.record()
