"""What ``save`` and ``load`` take, checked; and the stores of a model brought to rest."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from torch._dynamo.eval_frame import OptimizedModule
from torch.nn import Module
from torch.optim import Optimizer

from zinf_compile.errors import ConfigError, StoreError
from zinf_compile.runtime.staging import StagingPool
from zinf_compile.runtime.store import Store

_ENOUGH_STAGING = 2**18  # for blocks that a disk moves well; a store with less has next to nothing on nvme
_OWN_STAGING = 32 * 2**20  # eight blocks, where no store has a budget for them


def check_arguments(model: object, optimizer: object) -> Module:
    """Return the model, under a ``torch.compile`` too; ConfigError for what is no model or no optimizer."""
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    if not isinstance(model, Module):
        raise ConfigError(
            f"this takes a torch.nn.Module, not {type(model).__name__}; give save(folder, model, optimizer)"
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"this takes a torch.optim.Optimizer, not {type(optimizer).__name__}; what else is to be saved goes into extra"
        )
    return model


@contextmanager
def resting(stores: Sequence[Store]) -> Iterator[Sequence[Store]]:
    """Keep stores from running anything, with nothing in flight. StoreError for one that was closed."""
    with ExitStack() as stack:
        for store in stores:
            store.check_open()
            stack.enter_context(store.lock)
            with suppress(StoreError):  # of a step that failed before: who cares asks check_usable()
                store.synchronize()
            stack.enter_context(store.staging.uncounted())  # no plan knows of checkpoints
        yield stores


def file_staging(stores: Sequence[Store]) -> StagingPool:
    """Return the pool for the blocks of files: a store's, within its host budget, where there is one."""
    pools = [store.staging for store in stores if store.staging.capacity >= _ENOUGH_STAGING]
    return pools[0] if pools else StagingPool(_ENOUGH_STAGING if stores else _OWN_STAGING)
