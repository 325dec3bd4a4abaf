"""Run a lowered graph: refuse what cannot run, measure it, and leave nothing in flight when it fails."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from zinf_compile.errors import CapacityError, StoreError
from zinf_compile.runtime.slots import StoredParameter
from zinf_compile.runtime.store import Store
from zinf_compile.terms import Phase


class Executor:
    """A lowered forward or backward graph as a callable that takes its inputs in one list."""

    def __init__(
        self,
        store: Store,
        run: Callable[[list[Any]], Sequence[Any]],
        phase: Phase,
        *,
        prepare: Callable[[list[Any]], int],
        records: Callable[[], Iterable[StoredParameter]],
    ) -> None:
        """``prepare`` is called before each run with its inputs, and returns the arena bytes the graph needs; ``records``
        returns what it reads."""
        self._store = store
        self._run = run
        self._phase = phase
        self._prepare = prepare
        self._records = records

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph. An I/O error closes the store; after any error no transfer is left in flight."""
        with self._store.lock:
            return self._call(inputs)

    def _call(self, inputs: list[Any]) -> Sequence[Any]:
        store = self._store
        store.check_usable()
        store.follow_compute()
        if self._phase is Phase.FORWARD:
            store.refresh_stale()
        else:
            self._check_not_updated()
        arena_nbytes = self._prepare(inputs)  # raises for inputs too large for the budgets: nothing has run by then
        if self._phase is Phase.FORWARD:
            for record in self._records():
                record.forward_update_count = record.update_count
        store.begin_memory()
        store.arena.reserve(arena_nbytes)
        stream = None if store.device is None else store.device.compute
        with store.meter.phase(self._phase, stream):
            try:
                return self._run(inputs)
            except StoreError as error:
                store.transfers.abandon_gathers()
                store.fail(error)
                raise
            except torch.OutOfMemoryError as error:
                self._abandon()
                raise CapacityError(
                    f"an op of the {self._phase} needs more of the device than the plan counts for it, or others have taken "
                    f"of it: {str(error).splitlines()[0]}; lower device_memory, so that the plan leaves more of it free, or "
                    f"raise reserve_memory"
                ) from error
            except BaseException:
                self._abandon()
                raise
            finally:
                store.ram.end()

    def _abandon(self) -> None:
        """Leave nothing in flight."""
        self._store.transfers.abandon_gathers()
        with suppress(StoreError), self._store.failing_on_error():
            self._store.transfers.wait_writes()

    def _check_not_updated(self) -> None:
        for record in self._records():
            if record.forward_update_count != record.update_count:
                raise RuntimeError(
                    f"parameter '{record.name}' was modified by an optimizer step between forward and backward of this "
                    "model; call backward() before step()"
                )
