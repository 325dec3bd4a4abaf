"""Checks the arguments of ``save`` and ``load``, and keeps the stores of a model idle meanwhile."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn import Module
from torch.optim import Optimizer

from zinf_compile.ir.errors import ConfigError, StoreError
from zinf_compile.runtime.model.model_state import records_of
from zinf_compile.runtime.model.tensor_parallel import refuse_distributed
from zinf_compile.runtime.storage.staging import StagingPool
from zinf_compile.runtime.store.store import Store

_ENOUGH_STAGING = 2**18  # enough for efficient disk blocks; a store with less has hardly anything on nvme
_OWN_STAGING = 32 * 2**20  # eight blocks, if no store has a budget for them


def check_arguments(model: object, optimizer: object) -> Module:
    """Return the model, unwrapped from ``torch.compile``; ConfigError if either is not a model or optimizer.

    UnsupportedError for a model with stored DTensors.
    """
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    if not isinstance(model, Module):
        raise ConfigError(
            f"this takes a torch.nn.Module, not {type(model).__name__}; give save(folder, model, optimizer)"
        )
    refuse_distributed(records_of(model), "a checkpoint of zinf_compile")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"this takes a torch.optim.Optimizer, not {type(optimizer).__name__}; what else is to be saved goes into extra"
        )
    return model


@contextmanager
def resting(stores: Sequence[Store]) -> Iterator[Sequence[Store]]:
    """Keep stores idle in this block, with nothing in flight. StoreError if one was closed."""
    with ExitStack() as stack:
        for store in stores:
            store.check_open()
            if torch._C._current_graph_task_id() != -1:
                raise StoreError(
                    "a checkpoint cannot be saved or loaded inside of a backward, as from a signal handler or a hook; set a "
                    "flag there, and do it after the step"
                )
            stack.enter_context(store.busy("saving or loading a checkpoint"))
            with suppress(StoreError):  # from an earlier failed step; callers that care use check_usable()
                store.synchronize()
            stack.enter_context(store.staging.uncounted())  # plans do not count checkpoints
        yield stores


def file_staging(stores: Sequence[Store]) -> StagingPool:
    """Return a staging pool for file blocks: that of a store, within its host budget, if there is one."""
    pools = [store.staging for store in stores if store.staging.capacity >= _ENOUGH_STAGING]
    return pools[0] if pools else StagingPool(_ENOUGH_STAGING if stores else _OWN_STAGING)
