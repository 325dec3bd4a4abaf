"""The skeleton of a model: the same modules over fake CPU tensors, whose parameters are read as gathers.

Like an optimized model but without a store: Dynamo captures the same graphs from both.
"""

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.eval_frame import skip_code
from torch._subclasses import FakeTensorMode
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.ir.ops import make_anchor


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A model over fake tensors; ``param_names`` maps the ids in its gathers to names of parameters."""

    module: Module
    param_names: dict[int, str]


def make_skeleton(
    model: Module,
    fake_mode: FakeTensorMode,
    *,
    compute_dtype: str | None,
    without: Iterable[Module] = (),
    edit: Callable[[Module], None] | None = None,
) -> Skeleton:
    """Return the skeleton of a model that has values, is on meta, or has fake tensors; the model is not changed.

    ``edit`` may change the copy before its parameters become gathers. The modules ``without``, which must not share
    parameters with others, are replaced by empty ones for it to remove. Raises UnsupportedError for a model that cannot
    be copied.
    """
    with fake_mode, _CopyAsFake():
        try:
            # Parameter.__deepcopy__ cannot be intercepted, so parameters are copied in advance.
            memo: dict[int, Any] = {id(module): Module() for module in without}
            memo |= {id(parameter): as_fake(parameter) for parameter in _parameters(model, memo)}
            copied = copy.deepcopy(model, memo)
        except (TypeError, RuntimeError) as error:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be copied: {error}; planning copies modules (without their values), so keep "
                "objects that cannot be copied out of them"
            ) from error
        if edit is not None:
            edit(copied)
        anchors = {trainable: make_anchor(requires_grad=trainable) for trainable in (True, False)}
    ids = {id(parameter): index for index, parameter in enumerate(copied.parameters())}
    for module in copied.modules():
        getters = {
            name: _getter(ids[id(parameter)], parameter, anchors[parameter.requires_grad], compute_dtype)
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        if getters:
            _give_getters(module, getters)
    return Skeleton(module=copied, param_names=dict(enumerate(name for name, _ in copied.named_parameters())))


def _parameters(module: Module, without: Container[int]) -> Iterator[Parameter]:
    """Yield the parameters of a module that are not only in modules with these ids."""
    if id(module) not in without:
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _parameters(child, without)


class _CopyAsFake(TorchFunctionMode):
    """In a fake mode: ``copy.deepcopy`` of a tensor gives a fake CPU tensor with the same shape and strides."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = as_fake(tensor)
        return memo[id(tensor)]


def as_fake(tensor: Tensor) -> Tensor:
    """In a fake mode: return a fake CPU tensor or parameter like ``tensor``, whose values are not read."""
    with torch._C.DisableTorchFunction():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, Parameter):
            return Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _give_getters(module: Module, getters: Mapping[str, Callable[[Module], Tensor]]) -> None:
    """Give a module a subclass of its own class, with the same names, whose properties are these."""
    cls = type(module)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass: Any = type(cls)
    module.__class__ = metaclass(
        cls.__name__, (cls,), {**names, **{name: property(get) for name, get in getters.items()}}
    )


def _getter(param: int, parameter: Parameter, anchor: Tensor, compute_dtype: str | None) -> Callable[[Module], Tensor]:
    shape, device = tuple(parameter.shape), torch.device("cpu")
    dtype = getattr(torch, compute_dtype) if compute_dtype and parameter.is_floating_point() else parameter.dtype

    def get(self: Module) -> Tensor:
        gathered: Tensor = torch.ops.zinf.gather(anchor, param, shape, dtype, device)
        return gathered

    skip_code(get.__code__)  # after a graph break Dynamo would compile it separately; it is still traced through
    return get
