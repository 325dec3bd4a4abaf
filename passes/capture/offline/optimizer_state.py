"""The state that an optimizer keeps per parameter, found by its first step on a small parameter of the same kind."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from zinf_compile.ir.copies import Encoding, Granularity, StateSpec
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import dtype_name

MakeOptimizer = Callable[[Iterable[Parameter]], Optimizer]

# Sizes of the small parameter, all different: the size of a state's dimension identifies the parameter's dimension.
_PROBE_SIZES = (5, 7, 3, 2, 4, 6)


class _Kind(NamedTuple):
    """A state tensor, whatever the sizes of the parameter: a size is a number, or the dimension it follows as text."""

    name: str
    dtype: str
    sizes: tuple[int | str, ...]


class StatesOfOptimizer:
    """The state that an optimizer keeps of parameters, by their shapes and dtypes."""

    def __init__(self, make_optimizer: MakeOptimizer, *, check: Callable[[Optimizer], None]) -> None:
        """``check`` raises for an optimizer that is not supported."""
        self._make, self._check = make_optimizer, check
        self._kinds = functools.cache(self._find_kinds)

    def of(self, parameter: Tensor) -> tuple[StateSpec, ...]:
        """Return the state of a parameter of this shape and dtype; step counts are left out.

        ConfigError if the optimizer cannot be created, or does not accept such a parameter.
        """
        shape = tuple(parameter.shape) or (1,)
        return tuple(
            StateSpec(
                name=kind.name,
                shape=tuple(size if isinstance(size, int) else shape[int(size)] for size in kind.sizes),
                encoding=Encoding(dtype=kind.dtype),
                granularity=_granularity(kind.sizes, len(shape)),
            )
            for kind in self._kinds(len(shape), parameter.dtype)
        )

    def _find_kinds(self, num_dims: int, dtype: torch.dtype) -> tuple[_Kind, ...]:
        sizes = _PROBE_SIZES[:num_dims]
        with torch.device("cpu"):  # even if the caller's default device is meta, where steps cannot be counted
            probe = Parameter(torch.ones(sizes, dtype=dtype))
            probe.grad = torch.ones_like(probe)
            optimizer = self._make_checked(probe)
            self._check(optimizer)
            optimizer.step()
        return tuple(
            _Kind(
                name=str(name),
                dtype=dtype_name(value.dtype),
                sizes=tuple(str(sizes.index(size)) if size in sizes else size for size in value.shape),
            )
            for name, value in optimizer.state[probe].items()
            if isinstance(value, Tensor) and value.dim() > 0
        )

    def _make_checked(self, probe: Parameter) -> Optimizer:
        try:
            optimizer = self._make([probe])
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"optimizer={self._make!r} cannot be created for a parameter of {probe.dim()} dimensions: {error}; give a "
                "class of torch.optim, or a function that takes parameters and returns an optimizer"
            ) from error
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer={self._make!r} returned {type(optimizer).__name__}; give a class of torch.optim, or a function "
                "that takes parameters and returns an optimizer"
            )
        return optimizer


def _granularity(sizes: Sequence[int | str], num_dims: int) -> Granularity:
    if list(sizes) == [str(dim) for dim in range(num_dims)]:
        return Granularity.ELEMENT
    return Granularity.ROW if sizes[0] == "0" else Granularity.MATRIX
