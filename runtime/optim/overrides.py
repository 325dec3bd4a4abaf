"""bitsandbytes' options of single parameters, such as 32 bits for an embedding, under shadows.

Its optimizers look options up by the identity of a parameter, which differs for a shadow's tensor, and by its place in
the groups, which does not. Options are resolved with the user's parameters, and shadows find them by place.
"""

import copy
from typing import Any

from torch.optim import Optimizer


def register_overrides(optimizer: Optimizer) -> None:
    """Do what the first step of a bitsandbytes optimizer does first, while it can see the user's parameters."""
    own: Any = optimizer
    if _has_overrides(optimizer) and not own.initialized:
        own.check_overrides()
        own.to_gpu()
        own.initialized = True


def with_overrides_by_place(optimizer: Optimizer, frozen: Optimizer) -> Optimizer:
    """Let a frozen bitsandbytes optimizer have by place what the user's one has by identity; return it."""
    if _has_overrides(optimizer):
        own: Any = optimizer
        manager: Any = copy.copy(own.mng)
        manager.index2config, manager.pid2config, manager.module_weight_config_triple = (
            dict(own.mng.index2config),
            {},
            [],
        )
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if (config := own.mng.pid2config.get(id(parameter))) is not None:
                    by_place = manager.index2config.get((index, position), {})
                    manager.index2config[index, position] = {**by_place, **config}
        frozen.mng = manager  # type: ignore[attr-defined]
    return frozen


def _has_overrides(optimizer: Optimizer) -> bool:
    return all(hasattr(optimizer, name) for name in ("mng", "check_overrides", "initialized", "to_gpu"))
