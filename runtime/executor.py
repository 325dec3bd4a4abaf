"""Run a lowered graph: refuse what cannot run, measure it, and leave nothing in flight when it fails."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

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
        with self._store.lock:
            return self._call(inputs)

    def _call(self, inputs: list[Any]) -> Sequence[Any]:
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
        store.begin_memory(after_capture=True)
        store.arena.reserve(arena_nbytes)
        with store.meter.phase(self._phase):
            try:
                store.sinks_gradients = self._phase is Phase.FORWARD or _is_asked_for_parameters(store)
                return self._run(inputs)
            except StoreError as error:
                store.transfers.abandon_gathers()
                store.fail(error)
                raise
            except BaseException:
                store.transfers.abandon_gathers()
                with suppress(StoreError), store.failing_on_error():
                    store.transfers.wait_writes()
                raise
            finally:
                store.sinks_gradients = True


def _is_asked_for_parameters(store: Store) -> bool:
    """Return whether the backward that runs now accumulates into leaves: ``autograd.grad(loss, x)`` does not."""
    if store.anchor is None:
        return True
    with torch.enable_grad():
        node = store.anchor.view_as(store.anchor).grad_fn
    accumulate_grad = node.next_functions[0][0] if node is not None else None
    assert accumulate_grad is not None
    try:
        return torch._C._will_engine_execute_node(accumulate_grad)
    except RuntimeError:  # it does not answer for leaves inside autograd.grad()
        return False
