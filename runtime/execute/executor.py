"""Runs a lowered graph: checks that it can run, measures it, and leaves nothing in flight when it fails."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from zinf_compile.ir.errors import CapacityError, RankError, StoreError
from zinf_compile.ir.glossary import Phase
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.process.call_stack import with_room_for_calls
from zinf_compile.runtime.process.inference import outside_inference
from zinf_compile.runtime.process.interrupts import interruptible, uninterrupted
from zinf_compile.runtime.ranks.ranks import describe
from zinf_compile.runtime.store.store import Store


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
        graph: str,
        describe_run: Callable[[], str],
    ) -> None:
        """``prepare`` is called with the inputs before each run, and returns the arena bytes that the graph needs;
        ``records`` returns the parameters that it reads. What ``describe_run`` returns has to be the same on all ranks, and
        the name of the ``graph`` on those that have other parts of parameters, too, which may have other plans."""
        self._store = store
        self._run = run
        self._phase = phase
        self._prepare = prepare
        self._records = records
        self._graph = graph
        self._describe_run = describe_run

    @with_room_for_calls
    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph. An I/O error makes the store fail; after any error no transfer is left in flight."""
        # Interrupts may raise inside the graph's code. The cleanup after that is not interrupted again.
        with uninterrupted(), self._store.busy(f"a {self._phase}"):
            try:
                return self._call(inputs)
            finally:
                self._store.finish_spreads()
                self._store.ram.end()  # a limit on device memory must not outlast the run

    def _call(self, inputs: list[Any]) -> Sequence[Any]:
        store = self._store
        with outside_inference():
            try:
                self._make_ready(inputs)
            except Exception as error:  # what every rank raises that has the same part of parameters
                with suppress(RankError):  # theirs, if they raise nothing
                    store.ranks.meet_beside(f"a {self._phase} of {self._graph}, which raises {type(error).__name__}")
                raise
            except BaseException as error:  # an interrupt, of this rank only
                self._leave_ranks(error)
                raise
            store.ranks.meet_beside(f"a {self._phase} of {self._graph}")
        with store.meter.phase(self._phase, store.device.compute):
            try:
                # Some ops use the current GPU, not that of their inputs: what saves the random state for a recomputation.
                with store.device.selected(), interruptible():
                    return self._run(inputs)
            except StoreError as error:
                self._leave_ranks(error)
                store.transfers.abandon_gathers()
                store.fail(error)
                raise
            except torch.OutOfMemoryError as error:
                self._abandon(error)
                raise CapacityError(
                    f"an op of the {self._phase} needs more device memory than the plan reserves for it, or other processes "
                    f"have taken some: {str(error).splitlines()[0]}; lower device_memory, so that the plan leaves more of "
                    f"it free, or raise reserve_memory"
                ) from error
            except BaseException as error:
                self._abandon(error)
                raise

    def _make_ready(self, inputs: list[Any]) -> None:
        """Raise if the graph cannot run, and prepare everything that it needs besides its inputs."""
        store = self._store
        store.check_usable()
        store.follow_compute()
        store.ranks.meet(self._describe_run())
        if self._phase is Phase.BACKWARD:
            store.ranks.meet_partners(self._describe_run())
        if self._phase is Phase.FORWARD:
            if torch._C._current_graph_task_id() == -1:
                store.finish_gradients()  # of a backward that was broken off
            store.refresh_stale()
        else:
            self._check_not_updated()
        arena_nbytes = self._prepare(inputs)  # raises for inputs too large for the budgets, before anything has run
        if self._phase is Phase.FORWARD:
            for record in self._records():
                record.update.note_forward()
        store.held.begin_run()
        store.arena.reserve(arena_nbytes)

    def _leave_ranks(self, error: BaseException) -> None:
        """Tell other ranks that this one broke off, before anything waits for them."""
        self._store.ranks.fail(f"a {self._phase} broke off: {describe(error)}")
        with suppress(StoreError):
            self._store.reductions.abandon()

    def _abandon(self, error: BaseException) -> None:
        """Leave nothing in flight."""
        self._leave_ranks(error)
        self._store.transfers.abandon_gathers()
        with suppress(StoreError), self._store.failing_on_error():
            self._store.tensor_io.wait_writes()

    def _check_not_updated(self) -> None:
        for record in self._records():
            if record.update.is_since_forward:
                raise RuntimeError(
                    f"parameter '{record.name}' was modified by an optimizer step between forward and backward of this "
                    "model; call backward() before step()"
                )
