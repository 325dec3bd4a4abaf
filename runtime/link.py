"""The link between host memory and a device with streams: which stream copies what, and what each has to wait for.

    issue             mark = compute.record()
    bytes in host     to_device.wait(mark); to_device.copy(bytes, arena); arrived = to_device.record()
    first reader      compute.wait(arrived)

    gradient          ready = compute.record(); to_host.wait(ready); to_host.copy(gradient, staging); left = to_host.record()
    later             compute.wait(left), and only then the gradient's memory is free

Nothing waits in a circle: compute waits only for copies that have been told already, and these only for what compute was
told before.
"""

import threading
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

from torch import Tensor

from zinf_compile.errors import StoreError
from zinf_compile.runtime.device import Event, Stream, StreamDevice, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A copy to the device that was told to its stream: what compute waits for, and what is done when bytes are there."""

    event: Event
    landed: Future[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A copy from the device that was told to its stream: what compute waits for, and what is done when bytes are home."""

    event: Event
    left: Future[None]


class _Leaving(NamedTuple):
    """A tensor of the device that is copied to host memory, kept alive, and where its copy ends."""

    value: Tensor
    nbytes: int
    left: Event


class _Told(NamedTuple):
    """A copy that was told to a stream: its end, who waits for that, and its host memory, which has to live until then."""

    event: Event
    done: Future[None]
    memory: Tensor


class _Watcher:
    """A thread that waits for the copies of one stream, which end in the order in which they were told."""

    def __init__(self, name: str) -> None:
        self._told: SimpleQueue[_Told | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_started = False

    def watch(self, event: Event, memory: Tensor) -> Future[None]:
        """Return a future that is done when the stream has got to an event. Called under the lock of the stream."""
        if not self._is_started:
            self._is_started = True
            self._thread.start()
        done: Future[None] = Future()
        self._told.put(_Told(event, done, memory))
        return done

    def _run(self) -> None:
        while (told := self._told.get()) is not None:
            done = told.done
            try:
                told.event.wait()
            except RuntimeError as error:  # of CUDA: an earlier kernel failed, say
                refused = StoreError(f"a copy between host memory and the device failed: {error}")
                refused.__cause__ = error
                del told
                done.set_exception(refused)
            else:
                del told  # its memory may be wanted by whoever is waiting
                done.set_result(None)

    def close(self) -> None:
        if self._is_started:
            self._told.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()


class Link:
    """Copies both ways between host memory and one device, safe to tell from several threads."""

    def __init__(self, device: StreamDevice, *, leaving_nbytes: int = 0) -> None:
        """``leaving_nbytes`` is what tensors may take of the device that are on their way to host memory."""
        self._device = device
        self._in_lock, self._out_lock = threading.Lock(), threading.Lock()
        self._in_watcher, self._out_watcher = _Watcher("zinf-to-device"), _Watcher("zinf-to-host")
        self._leaving: deque[_Leaving] = deque()
        self._leaving_nbytes = 0
        self.leaving_limit = leaving_nbytes

    def mark(self) -> Event:
        """Return the point that compute has been told up to: what it gave up by then may be written behind it."""
        # Hazard: bytes of the arena that were released are still read by ops that compute has been told and not yet done.
        # A copy into them waits for this event, which is behind all of those.
        return self._device.compute.record()

    def bring(self, source: Tensor, destination: Tensor, *, behind: Event, timing: Timing | None = None) -> Arrival:
        """Start copying flat host bytes to flat bytes of the device, behind whoever read or wrote these."""
        stream = self._device.to_device
        with self._in_lock:  # no other thread's copy may come between a copy and its event
            stream.wait(behind)
            with nullcontext() if timing is None else timing(stream):
                stream.copy(source, destination)
            event = stream.record()
            return Arrival(event=event, landed=self._in_watcher.watch(event, source))

    @property
    def compute(self) -> Stream:
        """The stream of the model's ops."""
        return self._device.compute

    def join(self, event: Event) -> None:
        """Let compute go on behind a copy."""
        # Hazard: ops told from now on read what is copied; they must not begin before it is there.
        self._device.compute.wait(event)

    def take(
        self, source: Tensor, destination: Tensor, *, behind: Event | None = None, timing: Timing | None = None
    ) -> Departure:
        """Start copying flat bytes of the device, as compute leaves them now, or behind an event, to flat host bytes.

        Nobody may free the source before compute has been told to wait for that: ``let_go`` sees to it, or ``join``.
        """
        stream = self._device.to_host
        # Hazard: ops that make the source have been told and may not be done.
        ready = behind or self._device.compute.record()
        with self._out_lock:
            stream.wait(ready)
            with nullcontext() if timing is None else timing(stream):
                stream.copy(source, destination)
            event = stream.record()
            return Departure(event=event, left=self._out_watcher.watch(event, destination))

    def let_go(self, value: Tensor) -> None:
        """Give up a tensor of the device whose copies have been told: its memory is free once these are done.

        The memory of a tensor goes back to ops of the compute stream, which know nothing of copies. So it is held until
        compute has been told to wait for them, which happens when more than the limit is leaving.
        """
        nbytes = value.untyped_storage().nbytes()
        with self._out_lock:
            left = self._device.to_host.record()
            self._leaving.append(_Leaving(value, nbytes, left))
            self._leaving_nbytes += nbytes
            self._free_beyond(self.leaving_limit)

    def make_room(self, nbytes: int) -> None:
        """Let so many bytes more be leaving without more than the limit."""
        with self._out_lock:
            self._free_beyond(max(0, self.leaving_limit - nbytes))

    def _free_beyond(self, limit: int) -> None:
        while self._leaving_nbytes > limit and self._leaving:
            # Hazard: the memory is given to the next op of compute, which would write over it while it is being copied.
            leaving = self._leaving.popleft()
            self._device.compute.wait(leaving.left)
            self._leaving_nbytes -= leaving.nbytes

    def close(self) -> None:
        """Wait for all copies, and end the threads."""
        self._in_watcher.close()
        self._out_watcher.close()
        self._leaving.clear()
