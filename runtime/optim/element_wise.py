"""Finds out whether an update is element-wise, so that a tensor can be cut anywhere.

The update runs once on a small matrix while every op is intercepted. Tensors derived from the parameter, its gradient
or its state are tracked. Ops on them must compute each element of the result from the same element of their inputs. The
update must not read shapes, single elements or raw memory, and must not use random numbers. It then runs again on flat
halves of the same numbers, and must give the same bits.

Branches on a step count are taken for the current count, so the answer is valid for one update only.
"""

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.process.random_state import keeping_random_state

Update = Callable[
    [Tensor, Tensor, dict[str, Any]], dict[str, Any]
]  # parameter (in place), gradient, state -> new state

# Halves that end where no kernel has a remainder: those of torch's fused kernels round otherwise.
_SHAPE, _NUM_ELEMENTS = (4, 32), 128

# Every element of the result is an element of an input, or a constant. These ops lack the tag "pointwise".
_COPIES = frozenset(
    {
        *("copy", "_to_copy", "detach", "alias", "lift_fresh", "zero", "fill"),
        *("zeros_like", "ones_like", "empty_like", "full_like"),
    }
)
_FUSED = frozenset({"_fused_sgd", "_fused_adam", "_fused_adamw", "_fused_adagrad"})
_REDUCING_NAMESAKES = frozenset({"max", "min"})  # _foreach_max reduces, while one overload of max is pointwise

# What reveals a tensor's shape, or gives access to its elements without an op.
_REVEALING = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "nbytes")),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__),
        *(Tensor.is_contiguous, Tensor.storage_offset, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage),
        *(Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, torch.numel),
    }
)
# What a user's code may raise for a tensor that it does not expect.
SURPRISES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)


def find_odd_state(state: Mapping[str, Any], shape: torch.Size) -> str | None:
    """Return, as an obstacle, that state of a parameter of this shape has another one; None if all of it has not."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() != 1 and value.shape != shape:
            return f"its state '{key}' has neither one element nor the parameter's shape"
    return None


def find_obstacle(
    update: Update, *, dtype: torch.dtype, per_element: Mapping[str, torch.dtype], scalars: Mapping[str, Any]
) -> str | None:
    """Return why ``update`` may not be given parts of a tensor; None if it may.

    ``per_element`` and ``scalars`` are the entries of the state it starts from: tensors of the parameter's shape, by
    dtype, and everything else.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(dtype: torch.dtype) -> Tensor:
        return torch.rand(_SHAPE, generator=generator).to(dtype)  # positive, as second moments are

    parameter, gradient = draw(dtype) - 0.5, draw(dtype) - 0.5
    tensors = {key: draw(each) for key, each in per_element.items()}
    halves = [(start, start + _NUM_ELEMENTS // 2) for start in (0, _NUM_ELEMENTS // 2)]
    cuts = [(_cut(parameter, half), _cut(gradient, half), _cut_all(tensors, half)) for half in halves]
    watch = _Watch([parameter, gradient, *tensors.values()])
    try:
        with keeping_random_state():
            with watch, _ShapeWatch(watch):
                whole = _run(update, parameter, gradient, tensors, scalars)
            if watch.obstacle is not None:
                return watch.obstacle
            parts = [_run(update, *cut, scalars) for cut in cuts]
    except UnsupportedError:
        raise
    except SURPRISES as error:
        return f"its update of a small tensor raised {type(error).__name__}: {error}"
    if not all(_is_part(whole, part, half) for part, half in zip(parts, halves, strict=True)):
        return "it gives other bits for parts of a tensor"
    return None


def _cut(tensor: Tensor, half: tuple[int, int]) -> Tensor:
    return tensor.reshape(-1)[slice(*half)].clone()


def _cut_all(tensors: Mapping[str, Tensor], half: tuple[int, int]) -> dict[str, Tensor]:
    return {key: _cut(tensor, half) for key, tensor in tensors.items()}


def _run(
    update: Update, parameter: Tensor, gradient: Tensor, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]
) -> dict[str, Any]:
    """Update ``parameter`` in place; return the new state, and the parameter in it under a key of its own."""
    state = {
        key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in scalars.items()
    }
    return {**update(parameter, gradient, {**state, **tensors}), _PARAMETER: parameter.detach()}


_PARAMETER = "the parameter itself"


def _is_part(whole: Mapping[str, Any], part: Mapping[str, Any], half: tuple[int, int]) -> bool:
    """Return whether ``part`` is what ``whole`` holds for its elements, bit for bit, and the same in everything else."""
    if whole.keys() != part.keys():
        return False
    return all(
        is_same_value(
            value.detach().reshape(-1)[slice(*half)] if isinstance(value, Tensor) and value.shape == _SHAPE else value,
            part[key],
        )
        for key, value in whole.items()
    )


def is_same_value(left: object, right: object) -> bool:
    """Return whether two entries of a state are the same: tensors bit for bit, where every NaN is the same.

    Containers and plain objects are compared entry by entry.
    """
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        left, right = (left, right) if left.device == right.device else (left.cpu(), right.cpu())
        return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num())
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Generator) and isinstance(right, torch.Generator):
        return torch.equal(left.get_state(), right.get_state())
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(is_same_value(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple | deque) and isinstance(right, list | tuple | deque):
        return len(left) == len(right) and all(map(is_same_value, left, right))
    if isinstance(left, MethodType) and isinstance(right, MethodType):
        return left.__func__ is right.__func__
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right):
        return True
    if type(left).__eq__ is object.__eq__ and hasattr(left, "__dict__"):
        return is_same_value(left.__dict__, right.__dict__)
    return bool(left == right)


class _Watch(TorchDispatchMode):
    """Follows what is derived from some tensors, and notes the first op that is not element-wise."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no annotations
        self.obstacle: str | None = None
        self._followed = list(tensors)  # kept alive: an address must not be given out again
        self._addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def follows(self, tensor: Tensor) -> bool:
        """Return whether a tensor is, or was derived from, the parameter, its gradient or its state."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def note(self, obstacle: str) -> None:
        """Keep the first obstacle."""
        self.obstacle = self.obstacle or obstacle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and follow its results."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.note(f"it draws random numbers ({func})")
        is_followed = any(self.follows(tensor) for tensor in inputs)
        if is_followed and not _is_element_by_element(func):
            self.note(f"it calls {func}")
        if is_followed and not all(self.follows(tensor) or tensor.numel() == 1 for tensor in inputs):
            self.note(f"it calls {func} with a tensor that is not its parameter's")
        result = func(*args, **(kwargs or {}))
        if is_followed:
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self._followed += outputs
            self._addresses |= {tensor.untyped_storage().data_ptr() for tensor in outputs}
        return result


class _ShapeWatch(TorchFunctionMode):
    """Notes reads of a followed tensor's shape or memory, which no op shows."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        if func in _REVEALING and isinstance(args[0], Tensor) and self._watch.follows(args[0]):
            self._watch.note(f"it looks at the {_name(func)} of a tensor")
        return func(*args, **(kwargs or {}))


def _name(func: Any) -> str:
    return str(func.__self__.__name__ if func.__name__ == "__get__" else func.__name__)


def _is_element_by_element(func: Any) -> bool:
    namespace, name = func._schema.name.split("::")
    if namespace != "aten":
        return False
    if torch.Tag.pointwise in func.tags:
        return True
    plain = name.removeprefix("_foreach_").rstrip("_")
    if plain in _COPIES or plain in _FUSED:
        return True
    if not name.startswith("_foreach_") or plain in _REDUCING_NAMESAKES:
        return False
    packet = getattr(torch.ops.aten, plain, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )
