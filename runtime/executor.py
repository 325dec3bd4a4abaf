"""Run a lowered graph: refuse what cannot run, measure it, and leave nothing in flight when it fails."""

from collections.abc import Callable, Sequence
from typing import Any

from zinf_compile.errors import StoreError
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
        prepare: Callable[[], int],
    ) -> None:
        """``prepare`` is called before each run and returns the arena bytes the graph needs."""
        self._store = store
        self._run = run
        self._phase = phase
        self._prepare = prepare

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph. An I/O error closes the store; after any error no transfer is left in flight."""
        store = self._store
        store.check_usable()
        if self._phase is Phase.FORWARD:
            store.refresh_stale()
            store.forward_update_count = store.update_count
        elif store.forward_update_count != store.update_count:
            raise RuntimeError(
                "the parameters were modified by an optimizer step between forward and backward of this model; "
                "call backward() before step()"
            )
        arena_nbytes = self._prepare()
        store.begin_memory()
        store.arena.reserve(arena_nbytes)
        with store.meter.phase(self._phase):
            try:
                return self._run(inputs)
            except StoreError as error:
                store.transfers.abandon_gathers()
                store.fail(error)
                raise
            except BaseException:
                store.transfers.abandon_gathers()
                raise
