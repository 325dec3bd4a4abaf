"""Parameters of special classes, such as quantised ones: they are not stored, and stay on the device as they are."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zinf_compile.ir.glossary import format_bytes

_DEPTH = 3  # of objects in a parameter's attributes: bitsandbytes keeps the statistics of its statistics
# What a subclass of Parameter may define and still behave as a plain one.
_HARMLESS = frozenset(
    {"__new__", "__init__", "__doc__", "__module__", "__dict__", "__weakref__", "__slots__", "__repr__"}
)


def has_own_bytes(parameter: Tensor) -> bool:
    """Return whether a parameter is more than its bytes: a subclass that changes behaviour, or wraps other tensors."""
    if type(parameter) is Parameter or isinstance(parameter, UninitializedParameter):
        return False
    if not issubclass(type(parameter), Parameter):  # a tensor subclass, which torch.nn.Parameter returns as it is
        return True
    own = (cls for cls in type(parameter).__mro__[: type(parameter).__mro__.index(Parameter)])
    return any(hasattr(Tensor, name) and name not in _HARMLESS for cls in own for name in vars(cls))


def nbytes_of(parameters: Iterable[Tensor]) -> int:
    """Return the bytes that parameters and the tensors in their attributes take, each storage once."""
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors_of(parameters)
    }
    return sum(storages.values())


def describe(parameters: Mapping[str, Tensor]) -> str:
    """Return a sentence for a reader of the report."""
    classes = ", ".join(sorted({type(parameter).__name__ for parameter in parameters.values()}))
    return (
        f"{len(parameters)} parameters of classes of their own ({classes}) stay as they are on the device, where they take "
        f"{format_bytes(nbytes_of(parameters.values()))} of what is reserved"
    )


def _tensors_of(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    for parameter in parameters:
        yield from _inner_tensors(parameter, _DEPTH)


def _inner_tensors(found: object, depth: int) -> Iterator[Tensor]:
    """Yield plain tensors that an object is, consists of, or has among its attributes."""
    if is_traceable_wrapper_subclass(found):
        names, _ = found.__tensor_flatten__()
        for name in names:
            yield from _inner_tensors(getattr(found, name), depth)
    elif isinstance(found, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            yield found
    if depth > 0 and not isinstance(found, torch.nn.Module):
        for value in getattr(found, "__dict__", {}).values():
            yield from _inner_tensors(value, depth - 1)
