"""The part of the race detector for a fake device: streams, events, and what compute and updates write there."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.fake_device import FakeDevice, FakeEvent, FakeStream
from zinf_compile.ir.copies import GRADIENT, RowCode
from zinf_compile.runtime.execute.executor import Executor
from zinf_compile.runtime.storage.row_memory import decode_in_place
from zinf_compile.runtime.transfer.device_updates import DeviceUpdates
from zinf_compile.runtime.transfer.link import CopyWatcher

if TYPE_CHECKING:
    from tests.support.races import Races, Replace


def touch_tensor_of(races: "Races", tensor: Tensor, what: str, *, write: bool) -> None:
    """Record an access of the caller to a tensor's bytes."""
    with torch._C.DisableTorchFunctionSubclass():
        races.touch("memory", tensor.data_ptr(), tensor.numel() * tensor.itemsize, what, write=write)


class _Outputs(TorchDispatchMode):
    """Records the memory that compute ops allocate and write, which may be reused memory, and what they read in place."""

    def __init__(self, races: "Races", device: FakeDevice) -> None:
        super().__init__()
        self._races, self._device = races, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._device.memory.integrated:
            for given in tree_leaves((args, kwargs)):
                if isinstance(given, Tensor) and self._device.own_memory.is_in_place(given):
                    with self._races.acting(self._device.compute):
                        touch_tensor_of(self._races, given, "compute, reading in place", write=False)
        if func.namespace == "zinf":  # their bodies query autograd and must run outside of the mode
            with ExitStack() as stack:
                for key in _AUTOGRAD:
                    was = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
                    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
                    stack.callback(torch._C._dispatch_tls_set_dispatch_key_excluded, key, was)
                return func(*args, **(kwargs or {}))
        outputs = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not any(result.alias_info for result in func._schema.returns):
            with self._races.acting(self._device.compute):
                for output in outputs if isinstance(outputs, tuple | list) else [outputs]:
                    if isinstance(output, Tensor) and output.numel() > _SMALL:
                        touch_tensor_of(self._races, output, "compute, at a new value", write=True)
        return outputs


_AUTOGRAD = [torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther]
_SMALL = 16  # elements; small tensors such as tickets are not on the device


def touch_decoded(races: "Races", code: RowCode, memory: Tensor, first: int, values: Tensor, *scratch: Tensor) -> None:
    """Record what decoding rows reads and writes."""
    touch_tensor_of(races, memory[first:], "rows that are decoded", write=False)
    for each in (values, *scratch):
        touch_tensor_of(races, each, "what rows are decoded to", write=True)


def watch_streams(races: "Races", replace: "Replace") -> None:
    """Follow what is enqueued on streams, and what waits for their events."""
    waiting = threading.local()

    def copy(original: Any) -> Any:
        def call(stream: FakeStream, source: Tensor, destination: Tensor) -> None:
            with races.acting(stream):
                touch_tensor_of(races, source, f"the {stream.name} stream, reading", write=False)
                touch_tensor_of(races, destination, f"the {stream.name} stream, writing", write=True)
            original(stream, source, destination)

        return call

    def record(original: Any) -> Any:
        def call(stream: FakeStream, *, timed: bool = False) -> FakeEvent:
            event: FakeEvent = original(stream, timed=timed)
            if stream.runs:
                return event
            with races.acting(stream):
                races.publish(event)
            return event

        return call

    def stream_wait(original: Any) -> Any:
        def call(stream: FakeStream, event: FakeEvent) -> None:
            def observe() -> None:
                if not stream.runs:
                    with races.acting(stream):
                        races.observe(event)

            if not event.stream.runs:
                observe()
            waiting.by_stream = True  # a stream's wait does not order the thread that enqueued it
            try:
                original(stream, event)
            finally:
                waiting.by_stream = False
            if event.stream.runs:  # the compute stream has waited now
                observe()

        return call

    def event_wait(original: Any) -> Any:
        def call(event: FakeEvent) -> None:
            original(event)
            is_stream = threading.current_thread().name.startswith("fake-") or getattr(waiting, "by_stream", False)
            if not is_stream:
                races.observe(event)

        return call

    def has_happened(original: Any) -> Any:
        def call(event: FakeEvent) -> bool:
            is_there: bool = original(event)
            if is_there and not getattr(waiting, "by_stream", False):
                races.observe(event)
            return is_there

        return call

    def forget_landed(original: Any) -> Any:
        """That a copy has landed by now is chance, and orders nothing that its caller does next."""

        def call(watcher: CopyWatcher) -> None:
            waiting.by_stream = True
            try:
                original(watcher)
            finally:
                waiting.by_stream = False

        return call

    # What runs on a stream is known when it runs, and so are the events it waits for and those that follow it.

    def run_on_stream(original: Any) -> Any:
        def call(stream: FakeStream, work: Callable[[], None]) -> None:
            if not stream.runs:
                assert isinstance(work, partial)
                assert work.func is decode_in_place
                with races.acting(stream):
                    touch_decoded(races, *work.args)
                original(stream, work)
                return
            clock = races.fork()

            def act() -> None:
                with races.acting(stream):
                    races.join(clock)
                    work()

            original(stream, act)

        return call

    def wait_now(original: Any) -> Any:
        def call(stream: FakeStream, event: FakeEvent) -> None:
            original(stream, event)
            if stream.runs:
                with races.acting(stream):
                    races.observe(event)

        return call

    def reach(original: Any) -> Any:
        def call(stream: FakeStream, event: FakeEvent) -> None:
            if stream.runs:
                with races.acting(stream):
                    races.publish(event)
            original(stream, event)

        return call

    def run(original: Any) -> Any:
        def call(executor: Executor, inputs: Any) -> Any:
            device = executor._store.device
            if not isinstance(device, FakeDevice):
                return original(executor, inputs)
            with _Outputs(races, device):
                return original(executor, inputs)

        return call

    def update(original: Any) -> Any:
        def call(
            updates: DeviceUpdates,
            name: str,
            host: Any,
            form: Any,
            written: Any,
            change: Any,
            *,
            here: Any,
            before: Any,
            in_place: Any = (),
        ) -> Any:
            device = updates._device
            assert isinstance(device, FakeDevice)

            def touch_and_change(there: Any) -> Any:
                with races.acting(device.update):
                    for key, tensor in there.items():
                        where = " that lives there" if key in here else ""
                        what = f"the update on the device, at its {key.label}{where}"
                        is_written = key != GRADIENT and (key in here or key in written)
                        touch_tensor_of(races, tensor, what, write=is_written)
                return change(there)

            order = {"here": here, "before": before, "in_place": in_place}
            return original(updates, name, host, form, written, touch_and_change, **order)

        return call

    replace(FakeStream, "_copy", copy)
    replace(FakeStream, "record", record)
    replace(FakeStream, "wait", stream_wait)
    replace(FakeStream, "run", run_on_stream)
    replace(FakeStream, "_wait", wait_now)
    replace(FakeStream, "_reach", reach)
    replace(FakeEvent, "wait", event_wait)
    replace(FakeEvent, "has_happened", has_happened)
    replace(CopyWatcher, "forget_landed", forget_landed)
    replace(Executor, "_call", run)
    replace(DeviceUpdates, "run", update)
