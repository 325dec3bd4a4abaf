"""`--optimizer NAME`: any class of torch.optim that trains a model within budgets."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zinf_compile.ir.errors import ConfigError
from zinf_compile.runtime.optim.supported import check_supported

_CLASSES = {
    name.lower(): item
    for name, item in vars(torch.optim).items()
    if isinstance(item, type) and issubclass(item, Optimizer) and item is not Optimizer
}
_FUSED = (torch.optim.Adam, torch.optim.AdamW)  # several times faster than the default in plain PyTorch


def find_optimizer(name: str, lr: float) -> type[Optimizer]:
    """Return a class of torch.optim by its name, in upper or lower case.

    ConfigError for an unknown name or an invalid learning rate, UnsupportedError for an optimizer that cannot be
    streamed.
    """
    found = _CLASSES.get(name.lower())
    if found is None:
        names = ", ".join(item.__name__ for item in _CLASSES.values())
        raise ConfigError(f"--optimizer {name} is not in torch.optim; choose one of {names}")
    check_supported(make_optimizer(found, [nn.Parameter(torch.zeros(2, 2))], lr))
    return found


def make_optimizer(kind: type[Optimizer], parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """Return an optimizer with the defaults of its class; ConfigError for an invalid rate or shapes it does not accept."""
    make: Callable[..., Optimizer] = kind  # every class of torch.optim has a learning rate, but not their base class
    try:
        return make(parameters, lr=lr, **({"fused": True} if kind in _FUSED else {}))
    except ValueError as error:
        if "learning rate" in str(error).lower():
            raise ConfigError(f"{kind.__name__} with --lr {lr}: {error}; change --lr") from error
        raise ConfigError(f"{kind.__name__} cannot train this model: {error}; choose another --optimizer") from error


def measure_state(kind: type[Optimizer], lr: float) -> int:
    """Return the bytes of optimizer state per fp32 element of a large matrix, rounded."""
    matrix = nn.Parameter(torch.ones(128, 128))
    optimizer = make_optimizer(kind, [matrix], lr)
    matrix.grad = torch.ones_like(matrix)
    optimizer.step()
    tensors = [value for value in optimizer.state[matrix].values() if isinstance(value, Tensor)]
    return round(sum(tensor.nbytes for tensor in tensors) / matrix.numel())
