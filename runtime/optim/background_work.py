"""Work of optimizers over parameters in a store: threads read copies of state from home, compute, and write results home.

What one piece of work takes at once is leased of staging: what it reads, what it returns, and as much as its ops allocate.
So it counts on the host tier. It leaves half of staging to what a step moves, and is left to the step that wants its
results where the rest is too small::

    step 10     copies go home, as new state of slots that updates leave alone
    threads     copies, from home -> one lease: [read | results | allocated by ops] -> results, home, in slots of their own
    step 11     results, from home -> memory, before the update of their parameter is read
"""

import math
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.ir.copies import state_key
from zinf_compile.ir.errors import CapacityError, StoreError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.optim.periodic import Call, Periodic, Spec, State
from zinf_compile.runtime.optim.step_jobs import LEAST_OWN_SHAPE, Job, free_slot
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.process.background import background_calls
from zinf_compile.runtime.process.waiting import wait_future
from zinf_compile.runtime.storage.engine import whole_sectors
from zinf_compile.runtime.storage.futures import wait_all
from zinf_compile.runtime.storage.slots import Slot
from zinf_compile.runtime.store.store import Store

Sources = Mapping[str, Slot | Tensor]  # copies at home, and small ones in memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Begun:
    """What threads compute, or have computed."""

    optimizer: weakref.ref[Optimizer]
    sources: Sources
    versions: tuple[int, ...]  # of the sources
    results: Mapping[str, Slot]  # where large ones go
    future: "Future[Mapping[str, Tensor] | None]"  # small results, when all are there; None if there was no room


class StreamedWork:
    """The work of all optimizers over the parameters of one store."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)
        self._begun: dict[tuple[int, str], _Begun] = {}  # by the number of the parameter, and the method

    def begin(self, job: Job) -> None:
        """Begin what the update of a parameter has begun, whose copies are at home."""
        calls, job.work.begun = job.work.begun, []
        for call in calls:
            self._begin(job, call)

    def _begin(self, job: Job, call: Call) -> None:
        store, record = self._open_store(), job.record
        for gone in [number for number, begun in self._begun.items() if begun.optimizer() is None]:
            self._forget(gone)
        self._forget((record.param, call.method.name))
        sources = _sources(record, job.real_optimizer.state[record.parameter], call.method)
        assert call.specs is not None
        results: dict[str, Slot] = {}
        try:
            for key, spec in call.specs.items():
                if spec.shape.numel() >= LEAST_OWN_SHAPE:
                    results[key] = _result_slot(store, record, call.method, key, spec)
        except StoreError:  # the disk is full: it is left to the step that wants it
            for slot in results.values():
                free_slot(store, slot)
            return
        call = call._replace(optimizer=job.optimizer)
        whole = partial(_compute, self._store, call, sources, results, job.work_growth)
        self._begun[record.param, call.method.name] = _Begun(
            optimizer=weakref.ref(job.real_optimizer),
            sources=sources,
            versions=_versions(sources),
            results=results,
            future=background_calls().submit(whole),
        )

    def prepare(self, job: Job) -> None:
        """Give an update the results that it is to adopt, in memory; blocks. No chunk may hold staging meanwhile.

        RuntimeError with a sentence if computing them has failed.
        """
        for method in job.due.adopts:
            job.work.ready[method.name] = self._results(job, method)

    def _results(self, job: Job, method: Periodic) -> dict[str, Tensor]:
        store, record = self._open_store(), job.record
        call = Call(method, job.optimizer, None)
        sources = _sources(record, job.real_optimizer.state[record.parameter], method)
        begun = self._begun.get((record.param, method.name))
        if begun is not None and _is_of(begun, job.real_optimizer, sources):
            with store.meter.stall(f"{method.name} of {record.name}"):
                try:
                    small = call.wait(begun.future)
                except RuntimeError:
                    self.drop()  # others may have failed too: a step that is taken again computes all of them again
                    raise
            if small is not None:
                results = {**small, **{key: _read(store, slot) for key, slot in begun.results.items()}}
                self._forget((record.param, method.name))
                return results
        self._forget((record.param, method.name))
        given = {key: _read(store, source) for key, source in sources.items()}
        with store.meter.stall(f"{method.name} of {record.name}"):
            # On a thread too, whose ops have one thread as those of all others have: bits may depend on that.
            computed = background_calls().submit(partial(call.compute_apart, given))
            return call.wait(computed)

    def forget(self, slot: Slot) -> None:
        """Let what was computed from a slot be computed again: it gets another value."""
        for key in [key for key, begun in self._begun.items() if slot in begun.sources.values()]:
            self._forget(key)

    def drop(self) -> None:
        """Forget all of it. Waits for what runs."""
        for key in list(self._begun):
            self._begun[key].future.cancel()
        for key in list(self._begun):
            self._forget(key)

    def wait(self) -> None:
        """Block until nothing of it runs or waits."""
        for begun in self._begun.values():
            wait_future(begun.future, "an optimizer's work in the background")

    def _forget(self, key: tuple[int, str]) -> None:
        begun = self._begun.pop(key, None)
        if begun is None:
            return
        if not begun.future.cancel():  # it may read and write what is freed now
            wait_future(begun.future, "an optimizer's work in the background")
        for slot in begun.results.values():
            free_slot(self._open_store(), slot)

    def _open_store(self) -> Store:
        store = self._store()
        assert store is not None
        return store


def work_of(store: Store) -> StreamedWork:
    """Return the work of a store."""
    if not isinstance(store.background_work, StreamedWork):
        store.background_work = StreamedWork(store)
    return store.background_work


def _sources(record: StoredParameter, state: State, method: Periodic) -> Sources:
    slots, prefix = record.copies.states, method.pending_prefix
    return {key: slots.get(f"{prefix}{key}", value) for key, value in method.pending_of(state).items()}


def _versions(sources: Sources) -> tuple[int, ...]:
    tensors = (source.shown if isinstance(source, Slot) else source for source in sources.values())
    with torch._C.DisableTorchFunctionSubclass():  # a look at the version is not a look at the value
        return tuple(-1 if tensor is None else tensor._version for tensor in tensors)


def _is_of(begun: _Begun, optimizer: Optimizer, sources: Sources) -> bool:
    """Return whether it was computed from these copies, as they are."""
    is_same = begun.sources.keys() == sources.keys() and all(begun.sources[key] is sources[key] for key in sources)
    return begun.optimizer() is optimizer and is_same and begun.versions == _versions(sources)


def _result_slot(store: Store, record: StoredParameter, method: Periodic, key: str, spec: Spec) -> Slot:
    tier = Tier.HOST if store.config.nvme is None else Tier.NVME
    name = state_key(f"{method.name}.result.{key}")
    return store.new_slot(record.name, spec.shape, spec.dtype, tier, name, per_element=False)


def _read(store: Store, source: Slot | Tensor) -> Tensor:
    """Return a copy in memory of what lies at home."""
    if isinstance(source, Tensor):
        return source.detach().clone()
    value = torch.empty(source.tensor.shape, dtype=source.tensor.dtype)
    store.tensor_io.read_value(source, value)
    return value


def _compute(
    reference: "weakref.ref[Store]", call: Call, sources: Sources, results: Mapping[str, Slot], growth: float
) -> Mapping[str, Tensor] | None:
    """Compute from copies at home; return small results. None if the store is gone, or has no room to compute ahead."""
    store = reference()
    if store is None or not store.is_open:
        return None
    tensors = {key: source.tensor if isinstance(source, Slot) else source for key, source in sources.items()}
    moved = [*tensors.values(), *(slot.tensor for slot in results.values())]
    half = store.staging.capacity // 2
    try:
        nbytes = sum(whole_sectors(each.nbytes) for each in moved)
        nbytes += math.ceil(growth * sum(each.nbytes for each in tensors.values()))
        if nbytes > half:
            return None
        lease = store.staging.lease(nbytes, leaves=half)
    except CapacityError:
        return None
    pool = store.io_pool
    with lease:
        # Hazard: another lease, by a thread that holds this one, may wait for whoever waits for this work. So there is none.
        views = _divide(lease.view, {**tensors, **{f"result {key}": slot.tensor for key, slot in results.items()}})
        given = {key: _over(views[key], tensor) for key, tensor in tensors.items()}
        reads: list[Future[None]] = []
        for key, source in sources.items():
            if isinstance(source, Slot) and not source.in_memory:
                reads += pool.read(source, source.byte_range(source.slice.flat)[0], views[key])
            else:
                given[key].copy_(tensors[key])
        wait_all(reads, "what an optimizer computes from")
        computed = call.compute_apart(given)
        writes: list[Future[None]] = []
        for key, slot in results.items():
            if slot.in_memory:
                slot.tensor.copy_(computed[key])
            else:
                view = views[f"result {key}"]
                _over(view, slot.tensor).copy_(computed[key])
                writes += pool.write(slot, slot.byte_range(slot.slice.flat)[0], view)
        wait_all(writes, "what an optimizer has computed")
    return {key: value for key, value in computed.items() if key not in results}


def _divide(view: memoryview, tensors: Mapping[str, Tensor]) -> dict[str, memoryview]:
    """Return a part of a buffer for each of some tensors, in whole sectors."""
    parts, start = {}, 0
    for key, tensor in tensors.items():
        end = start + whole_sectors(tensor.nbytes)
        parts[key], start = view[start:end], end
    return parts


def _over(view: memoryview, like: Tensor) -> Tensor:
    if like.numel() == 0:
        return torch.empty_like(like)
    return torch.frombuffer(view, dtype=like.dtype, count=like.numel()).view(like.shape)
