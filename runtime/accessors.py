"""Accessors: what makes ``self.weight`` in a module's own code a gather, while the module stays what it was.

Every module with parameters gets a subclass of its own class, with the same names, whose properties give::

    under capture                 zinf::gather(anchor, param, shape, dtype, device)
    in an eager forward           the gathered value, with the parameter as autograd leaf
    anywhere else                 the registered home tensor, for people to look at and write to
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from zinf_compile.errors import ConfigError, UnsupportedError, ZinfError
from zinf_compile.runtime.home import EagerGather
from zinf_compile.runtime.saved_tensors import GATHERED, repack_gathered
from zinf_compile.runtime.slots import StoredParameter, record_of


class Forward:
    """Whether an eager forward of the model is running, and where its parameters are."""

    def __init__(self, device: torch.device | None = None) -> None:
        """``device`` is where inputs have to be; None where nobody can tell, as all is one memory."""
        self.depth = 0
        self._device = device
        self.sites: list[tuple[Module, str, StoredParameter]] = []  # where each stored parameter is registered

    @property
    def is_computing(self) -> bool:
        """Return whether parameters are read to compute with: in a forward, or in a part of it that backward runs again.

        Backward runs checkpoints again with gradients enabled, and hooks, which look at parameters, without.
        """
        return self.depth > 0 or (torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled())

    def explain(self, error: Exception, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ConfigError in place of an error, if the model was called with a tensor on another device than computes."""
        if self._device is None or self.depth > 0:
            return
        for where, value in (*((f"argument {number}", arg) for number, arg in enumerate(args)), *kwargs.items()):
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor) and tensor.device != self._device and tensor.dim() > 0:
                    raise ConfigError(
                        f"{where} of {name} is on {tensor.device}, and the model computes on {self._device}; move it there "
                        f"with .to('{self._device}') before the call"
                    ) from error

    @property
    def is_swapped(self) -> bool:
        """Return whether somebody put other tensors where stored parameters were, as ``functional_call`` does."""
        return any(module._parameters.get(name) is not record.parameter for module, name, record in self.sites)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Mark an eager forward. In the outermost one, saved gathered weights are packed to their id, not kept.

        Not so inside a backward: there a checkpoint runs modules again, and must itself see all that they save.
        """
        self.depth += 1
        try:
            if self.depth == 1 and torch._C._current_graph_task_id() == -1:
                with repack_gathered():
                    yield
            else:
                yield
        finally:
            self.depth -= 1


def install_accessors(model: Module, forward: Forward) -> None:
    """Give every module below ``model`` whose parameters are in a store its accessors."""
    # After a graph break Dynamo would compile these frames by themselves, one specialisation per module. They are still
    # traced through when a module that calls them is captured.
    for function in (_specialise, _accessor):
        for code in function.__code__.co_consts:
            if isinstance(code, CodeType):
                skip_code(code)
    for path, module in model.named_modules():
        records = {
            name: record
            for name, parameter in module._parameters.items()
            if parameter is not None and (record := record_of(parameter)) is not None
        }
        forward.sites += [(module, name, record) for name, record in records.items()]
        if records or module is model:
            module.__class__ = _specialise(type(module), path, records, forward)


def move_buffers(model: Module, device: torch.device) -> None:
    """Move a model's buffers to the device that computes. Parameters stay where they are."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def is_optimized(module: Module) -> bool:
    """Return whether accessors were installed on a module."""
    return hasattr(type(module), "_zinf_optimized")


def _specialise(cls: type[Module], path: str, records: dict[str, StoredParameter], forward: Forward) -> type[Module]:
    names = frozenset(records)
    # Torch keeps every class it has seen: what a class holds strongly would never be freed with its model.
    alive = weakref.ref(forward)

    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return cls.__call__(self, *args, **kwargs)
        forward = alive()
        assert forward is not None
        try:
            with forward.computing():
                if self._compiled_call_impl is not None and forward.is_swapped:  # the captured graphs know only our own
                    return self._call_impl(*args, **kwargs)
                return cls.__call__(self, *args, **kwargs)
        except BackendCompilerFailed as error:  # Dynamo wraps what a backend raises
            if isinstance(error.inner_exception, ZinfError):
                raise error.inner_exception from None
            raise
        except ZinfError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            forward.explain(error, cls.__name__, args, kwargs)
            raise

    def set_attribute(self: Module, name: str, value: Tensor | Module) -> None:
        if name in names and value is not self._parameters.get(name):
            raise UnsupportedError(
                f"cannot assign to '{_join(path, name)}': it lives in a store since optimize(); write into it instead, "
                "for example with torch.no_grad(): module.weight.copy_(value)"
            )
        cls.__setattr__(self, name, value)

    def delete_attribute(self: Module, name: str) -> None:
        if name in names:
            raise UnsupportedError(f"cannot delete '{_join(path, name)}': it lives in a store since optimize()")
        cls.__delattr__(self, name)

    def load_state_dict(self: Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("assign") or args[1:2] == (True,):
            raise UnsupportedError(
                f"load_state_dict(assign=True) would replace parameters of {path or cls.__name__} that live in a store "
                "since optimize(); leave assign out: values are copied, in the dtypes the parameters have"
            )
        return cls.load_state_dict(self, state_dict, *args, **kwargs)

    def refuse_pickling(self: Module, protocol: object) -> None:
        raise UnsupportedError(
            f"an optimized {cls.__name__} cannot be pickled: its parameters live in one store; save its state_dict()"
        )

    def refuse_copy(self: Module, memo: object) -> None:
        raise UnsupportedError(
            f"an optimized {cls.__name__} cannot be copied: its parameters live in one store; copy the model before "
            "optimize(), or load its state_dict() into a new one"
        )

    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__call__": call,
        "__setattr__": set_attribute,
        "__delattr__": delete_attribute,
        "load_state_dict": load_state_dict,
        "__deepcopy__": refuse_copy,
        "__reduce_ex__": refuse_pickling,
        "_zinf_optimized": True,
    }
    for name, record in records.items():
        namespace[name] = property(_accessor(name, record, forward))
    metaclass: Any = type(cls)
    specialised: type[Module] = metaclass(cls.__name__, (cls,), namespace)
    return specialised


def _accessor(name: str, record: StoredParameter, forward: Forward) -> Callable[[Module], Tensor]:
    param, shape, device = record.param, tuple(record.compute.tensor.shape), record.store.memory.torch_device
    dtype = record.dtype
    seat, alive, of_record = record.seat, weakref.ref(forward), weakref.ref(record)

    def get(self: Module) -> Tensor:
        if torch.compiler.is_compiling():
            gathered: Tensor = torch.ops.zinf.gather(seat.anchor, param, shape, dtype, device)
            return gathered
        parameter = self._parameters[name]
        assert parameter is not None
        forward, record = alive(), of_record()
        assert forward is not None
        assert record is not None
        return gather_eagerly(record) if forward.is_computing and parameter is record.parameter else parameter

    return get


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's annotation is partial
def gather_eagerly(record: StoredParameter) -> Tensor:
    """Return a parameter's gathered value outside of captured graphs, differentiable if it is trained."""
    record.store.meter.num_eager_gathers += 1
    if record.gradient is None or not torch.is_grad_enabled() or not record.parameter.requires_grad:
        return record.store.gather_value(record, record.dtype)
    apply: Callable[..., Tensor] = EagerGather.apply
    value = apply(record.parameter, lambda: record.store.gather_value(record, record.dtype))
    GATHERED.note(value, record)
    return value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def refuse_optimized(model: Module) -> None:
    """Raise ConfigError if any module below ``model`` was optimized already."""
    for path, module in model.named_modules():
        if is_optimized(module):
            raise ConfigError(
                f"{path or type(module).__name__} was optimized already; call zinf_compile.optimize once per model, or "
                "zinf_compile.close(model) and build it again"
            )
