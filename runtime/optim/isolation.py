"""Copies of what an optimizer keeps beside parameters and their state, so that shadows and trials leave it as it was.

A copy has containers, tensors and plain objects of its own; what was one object is one object in the copy. Code, modules,
parameters and what cannot be copied are shared.
"""

import functools
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.params.home import HomeTensor

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_LARGE_NBYTES = 2**20  # larger tensors are shared, and their versions watched
_MOST_OBJECTS = 5000  # of one copy: a trainer that an optimizer refers to is not copied for every chunk
_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, nn.Module, Optimizer)


class Isolation:
    """One copy of several values that may refer to each other."""

    def __init__(self, generators: dict[int, torch.Generator] | None = None) -> None:
        """Random generators are shared; or copied, each once for all copies with these ``generators``."""
        self._generators = generators
        self._copies: dict[int, tuple[object, Any]] = {}  # by the id of what was copied, which is kept alive
        self._watched: list[tuple[Tensor, int]] = []  # large tensors that are shared, with their versions

    def know(self, value: object, copy: object) -> None:
        """Register ``copy`` as the copy of ``value``."""
        self._copies[id(value)] = (value, copy)

    def is_copy(self, copy: object, value: object) -> bool:
        """Return whether ``copy`` is the very object that ``value`` was copied to."""
        return self._copies.get(id(value), (None, None))[1] is copy

    def check_shared(self) -> None:
        """Raise UnsupportedError if somebody changed a large tensor that is shared."""
        for tensor, version in self._watched:
            if tensor._version != version:
                raise UnsupportedError(
                    f"an optimizer changed a tensor of {tuple(tensor.shape)}, which it keeps in its attributes or its "
                    "groups, in place: it is too large to be copied for every update; keep it in the state of a parameter"
                )

    def copy(self, value: Any) -> Any:
        """Return the copy of a value."""
        kind = type(value)
        if kind in _ATOMS or (isinstance(value, _SHARED) and id(value) not in self._copies):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if isinstance(value, torch.Generator):
            return self._copy_generator(value)
        if len(self._copies) > _MOST_OBJECTS:
            return value
        if kind in (list, deque, set, dict, OrderedDict, defaultdict):
            return self._copy_container(value)
        if isinstance(value, tuple):
            parts = [self.copy(part) for part in value]
            return value._make(parts) if hasattr(value, "_make") else tuple(parts)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copy(value.__self__))
        if kind is functools.partial:
            return functools.partial(self.copy(value.func), *self.copy(value.args), **self.copy(dict(value.keywords)))
        return self._copy_object(value)

    def _copy_tensor(self, value: Tensor) -> Tensor:
        if isinstance(value, nn.Parameter | HomeTensor):
            return value
        if value.nbytes > _LARGE_NBYTES:
            self._watched.append((value, value._version))
            return value
        copy = value.detach().clone().requires_grad_(value.requires_grad)
        self.know(value, copy)
        return copy

    def _copy_generator(self, value: torch.Generator) -> torch.Generator:
        if self._generators is None:
            return value
        if id(value) not in self._generators:
            self._generators[id(value)] = value.clone_state()
        return self._generators[id(value)]

    def _copy_container(self, value: Any) -> Any:
        copy: Any
        if isinstance(value, dict):
            copy = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
            self.know(value, copy)
            copy.update((self.copy(key), self.copy(each)) for key, each in value.items())
        elif isinstance(value, set):
            copy = {self.copy(each) for each in value}
            self.know(value, copy)
        else:
            copy = deque(maxlen=value.maxlen) if isinstance(value, deque) else []
            self.know(value, copy)
            copy.extend(map(self.copy, value))
        return copy

    def _copy_object(self, value: Any) -> Any:
        """Copy an instance of a plain Python class, which has nothing but attributes."""
        kind: Any = type(value)
        is_plain = kind.__new__ is object.__new__ and kind.__reduce_ex__ is object.__reduce_ex__
        if not is_plain or kind.__reduce__ is not object.__reduce__ or not hasattr(value, "__dict__"):
            return value
        copy = object.__new__(kind)
        self.know(value, copy)
        copy.__dict__.update((name, self.copy(each)) for name, each in value.__dict__.items())
        return copy
