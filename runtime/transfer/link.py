"""The link between host memory and a device: which stream copies what, and which events it waits for.

A device that shares the host's memory needs no copies: ``is_crossed`` is False, and callers copy bytes themselves if
they have to.

    issue             mark = compute.record()
    bytes in host     to_device.wait(mark); to_device.copy(bytes, arena); arrived = to_device.record()
    first reader      compute.wait(arrived)

    gradient          ready = compute.record(); to_host.wait(ready); to_host.copy(gradient, staging); left = to_host.record()
    later             compute.wait(left); only then may the gradient's memory be reused

There is no cycle: compute waits only for copies that are already enqueued, and these only for compute enqueued before
them.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from zinf_compile.ir.errors import StoreError
from zinf_compile.runtime.device.device import Device, Event, Stream, Timing, use_on_this_thread
from zinf_compile.runtime.process.waiting import join_thread, next_of


class EnqueuedCopy(NamedTuple):
    """A copy to or from the device that is enqueued on its stream."""

    event: Event  # at its end, for the compute stream to wait for
    done: Future[None]  # that costs nothing until it is waited for


class _Leaving(NamedTuple):
    """A tensor on the device that is being copied to host memory, kept alive, and the end of its copy."""

    value: Tensor
    nbytes: int
    left: Event


class Copy(NamedTuple):
    """Flat bytes to be copied, to where, and how that is timed."""

    source: Tensor
    destination: Tensor
    timing: Timing | None = None


class Landing(Future[None]):
    """A future that is done when copies have landed, with a StoreError if they failed.

    ``done`` asks their event. Only from a wait or a callback on does a thread wait for it: to wake that takes longer than
    to enqueue a copy.
    """

    def __init__(self, event: Event, memory: Sequence[Tensor], watcher: "CopyWatcher") -> None:
        """``memory`` is kept alive until the copies have landed."""
        super().__init__()
        self.event, self.memory = event, memory
        self.is_watched = False  # by the watcher's thread, which alone ends it then
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
        self.memory = ()  # first: a waiter may need it
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


class CopyWatcher:
    """Knows which copies of one stream have landed. They do in the order in which they were enqueued."""

    def __init__(self, name: str, device: torch.device, arrivals: "CopyWatcher | None" = None) -> None:
        """``arrivals`` are copies to the device that nobody may wait for, while somebody waits for what left it later."""
        self._device, self._arrivals = device, arrivals
        self._lock = threading.RLock()  # reentrant: garbage collection while it is held may ask for a copy
        self._unwatched: deque[Landing] = deque()  # in the order of the stream; keeps the memory of copies alive
        self._watched: SimpleQueue[Landing | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_started = False

    def add(self, event: Event, memory: Sequence[Tensor]) -> Landing:
        """Return the end of copies that were just enqueued, at ``event``. Called with the stream's lock held."""
        landing = Landing(event, memory, self)
        with self._lock:
            self.forget_landed()
            self._unwatched.append(landing)
        return landing

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
                first = self._unwatched.popleft() if self._unwatched else landing
                if not first.has_ended:
                    first.is_watched = True
                    self._watched.put(first)

    def _run(self) -> None:
        use_on_this_thread(self._device)
        while (copy := next_of(self._watched)) is not None:
            failed: RuntimeError | None = None
            try:
                copy.event.wait()
            except RuntimeError as error:
                failed = error
            self._let_go()
            copy.end(failed)
            del copy, failed  # and callbacks refer to what waited

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
                self.watch(self._unwatched[-1])
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

    def __init__(self, device: Device, *, leaving_nbytes: int = 0, for_updates: bool = False) -> None:
        """``leaving_nbytes`` limits the device bytes of tensors that are being copied to host memory.

        ``for_updates``: copy on the streams of updates.
        """
        self._device = device
        self._streams = device.update_copies if for_updates else device.copies
        self.is_crossed = not device.memory.unified  # whether bytes are copied between host and device
        self._in_lock, self._out_lock = threading.Lock(), threading.Lock()
        whose = "update-" if for_updates else ""
        self._arrivals = CopyWatcher(f"zinf-{whose}to-device", device.torch_device)
        self._departures = CopyWatcher(f"zinf-{whose}to-host", device.torch_device, self._arrivals)
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
        return self.bring_all([Copy(source, destination, timing)], behind=behind)

    def bring_all(self, copies: Sequence[Copy], *, behind: Event) -> EnqueuedCopy:
        """Start several such copies, one after another; what is returned is for all of them."""
        stream = self._streams.to_device
        with self._in_lock:  # no other thread's copy may come between a copy and its event
            stream.wait(behind)
            event = _enqueue(copies, stream)
            return EnqueuedCopy(event=event, done=self._arrivals.add(event, [copy.source for copy in copies]))

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
        return self.take_all([Copy(source, destination, timing)], behind=behind or self._device.compute.record())

    def take_all(self, copies: Sequence[Copy], *, behind: Event) -> EnqueuedCopy:
        """Start several such copies after an event, one after another; what is returned is for all of them."""
        stream = self._streams.to_host
        with self._out_lock:
            stream.wait(behind)
            event = self._last_left = _enqueue(copies, stream)
            return EnqueuedCopy(event=event, done=self._departures.add(event, [copy.destination for copy in copies]))

    def let_go(self, value: Tensor) -> None:
        """Free a tensor on the device once the copies that this link enqueued for it are done.

        Ops of the compute stream may get its memory, without waiting for copies. So it is kept alive until the compute
        stream waits for them, which happens when more than the limit is being copied.
        """
        nbytes = value.untyped_storage().nbytes()
        with self._out_lock:
            if self._last_left is None:  # nothing has ever been copied
                return
            self._leaving.append(_Leaving(value, nbytes, self._last_left))
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
        self._leaving.clear()


def _enqueue(copies: Sequence[Copy], stream: Stream) -> Event:
    """Enqueue copies on a stream, whose lock is held; return their end."""
    for source, destination, timing in copies:
        if timing is None:
            stream.copy(source, destination)
        else:
            with timing(stream):
                stream.copy(source, destination)
    return stream.record()
