"""Which optimizers can be streamed: the others are refused by name, before anything is updated."""

import weakref
from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.optim.block_wise import find_unsupported, is_block_wise
from zinf_compile.runtime.optim.coupling import find_coupling
from zinf_compile.runtime.optim.overrides import register_overrides
from zinf_compile.runtime.optim.shadow import is_known

_REFUSED: Mapping[type[Optimizer], str] = {
    torch.optim.LBFGS: "it needs all parameters at once and keeps a history of them",
    torch.optim.SparseAdam: "it needs sparse gradients, which a store does not hold",
}
# Optimizers that were checked, with the number of parameters in each of their groups at that time.
_asked: weakref.WeakKeyDictionary[Optimizer, tuple[int, ...]] = weakref.WeakKeyDictionary()


def check_supported(optimizer: Optimizer) -> None:
    """Raise UnsupportedError for an optimizer that cannot be streamed."""
    name = type(optimizer).__name__
    for refused, reason in _REFUSED.items():
        if isinstance(optimizer, refused):
            raise UnsupportedError(
                f"{name} is not supported by zinf_compile: {reason}; "
                "use AdamW, or another optimizer that updates one parameter at a time"
            )
    if is_block_wise(optimizer):
        if (unsupported := find_unsupported(optimizer)) is not None:
            raise UnsupportedError(f"torchao's {name} is not supported by zinf_compile so: {unsupported}")
    elif any(cls.__module__.split(".")[0] == "torchao" for cls in type(optimizer).__mro__):
        raise UnsupportedError(
            f"{name}, which is torchao's or derived from one of torchao's, is not supported by zinf_compile; use AdamW8bit, "
            "AdamW4bit or AdamWFp8 of torchao.optim, or one of its Adam variants, or torch.optim.AdamW, whose states the "
            "store keeps out of memory"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError(
            f"{name}(differentiable=True) is not supported by zinf_compile: updates in the store are not recorded "
            "by autograd; say differentiable=False"
        )
    sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
    if is_known(optimizer) or _asked.get(optimizer) == sizes:
        return
    register_overrides(optimizer)
    coupling = find_coupling(optimizer)
    if coupling is not None:
        raise UnsupportedError(
            f"{name} is not supported by zinf_compile: {coupling}, and each is updated by itself; "
            "keep what belongs to one in its state, and do what needs all gradients before step(), as "
            "torch.nn.utils.clip_grad_norm_ does"
        )
    _asked[optimizer] = sizes
