"""What an optimizer keeps of a parameter, found by its own first step on a small parameter of the same kind."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from zinf_compile.errors import ConfigError

MakeOptimizer = Callable[[Iterable[Parameter]], Optimizer]

# Sizes of the small parameter, all different: a dimension of a state tensor tells which of the parameter's it follows.
_PROBE_SIZES = (5, 7, 3, 2, 4, 6)


class StateSizes:
    """The bytes of state that an optimizer keeps of parameters, by their shapes and dtypes."""

    def __init__(self, make_optimizer: MakeOptimizer, *, check: Callable[[Optimizer], None]) -> None:
        """``check`` raises for an optimizer that may not be used."""
        self._make, self._check = make_optimizer, check
        self._kinds = functools.cache(self._find_kinds)

    def nbytes(self, parameter: Tensor) -> int:
        """Return the bytes of state of a parameter of this shape and dtype; step counts are left out.

        ConfigError if the optimizer cannot be made, or does not take such a parameter.
        """
        shape = tuple(parameter.shape) or (1,)
        return sum(
            itemsize * math.prod(size if isinstance(size, int) else shape[int(size)] for size in sizes)
            for itemsize, sizes in self._kinds(len(shape), parameter.dtype)
        )

    def _find_kinds(self, num_dims: int, dtype: torch.dtype) -> tuple[tuple[int, tuple[Any, ...]], ...]:
        """Return itemsize and sizes of each state tensor; a size is a number, or a dimension of the parameter as text."""
        sizes = _PROBE_SIZES[:num_dims]
        with torch.device("cpu"):  # whatever the caller builds models on, of which meta has no steps to count
            probe = Parameter(torch.ones(sizes, dtype=dtype))
            probe.grad = torch.ones_like(probe)
            optimizer = self._make_checked(probe)
            self._check(optimizer)
            optimizer.step()
        return tuple(
            (value.itemsize, tuple(str(sizes.index(size)) if size in sizes else size for size in value.shape))
            for value in optimizer.state[probe].values()
            if isinstance(value, Tensor) and value.dim() > 0
        )

    def _make_checked(self, probe: Parameter) -> Optimizer:
        try:
            optimizer = self._make([probe])
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"optimizer={self._make!r} cannot be made for a parameter of {probe.dim()} dimensions: {error}; give a "
                "class of torch.optim, or a function that takes parameters and returns an optimizer"
            ) from error
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer={self._make!r} returned {type(optimizer).__name__}; give a class of torch.optim, or a function "
                "that takes parameters and returns an optimizer"
            )
        return optimizer
