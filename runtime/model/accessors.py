"""Accessors: they make ``self.weight`` in a module's own code a gather; everything else of the module stays the same.

Every module with parameters gets a subclass of its own class, with the same names, whose properties give::

    under capture                 zinf::gather(anchor, param, shape, dtype, device)
    in an eager forward           the gathered value, with the parameter as autograd leaf
    anywhere else                 the registered home tensor, for users to read and write
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import WRAPPER_ASSIGNMENTS
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

from zinf_compile.ir.errors import ConfigError, NotCapturedError, UnsupportedError, ZinfError
from zinf_compile.runtime.execute.saved_tensors import GATHERED, repack_gathered
from zinf_compile.runtime.observe.progress import timed
from zinf_compile.runtime.params.home import EagerGather, GatherOfLeaf, TransformedGather, WholeLeaf
from zinf_compile.runtime.params.records import StoredParameter, record_of
from zinf_compile.runtime.params.remote import RemoteParameter
from zinf_compile.runtime.process.call_stack import with_room_for_calls
from zinf_compile.runtime.process.garbage import fewer_collections
from zinf_compile.runtime.process.interrupts import interruptible, uninterrupted
from zinf_compile.runtime.storage.slots import local_of

_GATHERED_WEIGHTS = "_zinf_gathered_weights"  # of an RNN, while its forward runs
_DO_BEFORE = "prune, reparametrize or replace parameters before zinf_compile.optimize(model)"


class Forward:
    """Whether an eager forward of the model is running, and where its parameters are."""

    def __init__(self, device: torch.device) -> None:
        """``device`` is what computes, where inputs have to be."""
        self.depth = 0
        self.to_capture: str | None = None  # the model's name, until its first captured call has returned
        self.check: Callable[[], None] | None = None  # raises if modules cannot read, by themselves, what is stored
        self._device = device
        self.leaves: dict[int, Tensor] = {}  # of the eager forward that runs, by parameter: see WholeLeaf
        self.sites: list[tuple[Module, str, StoredParameter]] = []  # where each stored parameter is registered

    @property
    def is_computing(self) -> bool:
        """Return whether parameters are read for compute: in a forward, or in a part of it that backward recomputes.

        Backward recomputes checkpoints with gradients enabled, and runs hooks, which may read parameters, without.
        """
        return self.depth > 0 or (torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled())

    def explain(self, error: Exception, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ConfigError in place of an error if the model was called with a tensor on another device."""
        if self.depth > 0:
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
        """Return whether other tensors are registered in place of stored parameters, as ``functional_call`` does."""
        return any(module._parameters.get(name) is not record.parameter for module, name, record in self.sites)

    @property
    def is_foreign_to_capture(self) -> bool:
        """Return whether this call has to run eagerly: graphs know our own parameters only, no ``torch.func`` transform."""
        return torch._C._are_functorch_transforms_active() or self.is_swapped

    def put_back(self) -> None:
        """Register stored parameters again that were removed from their modules, in their old order."""
        removed = {id(module): module for module, name, _ in self.sites if name not in module._parameters}
        for module in removed.values():
            own = {name: record.parameter for site, name, record in self.sites if site is module}
            left = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({**own, **left})

    @contextmanager
    def first_call(self) -> Iterator[None]:
        """Log that a model is captured, and how long its first call took."""
        name, self.to_capture = self.to_capture, None
        try:
            with timed(f"capturing {name}", f"first call of {name} done"), fewer_collections():
                yield
        except BaseException:
            self.to_capture = name
            raise

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Mark an eager forward. In the outermost one, gathered weights that autograd saves are packed to their id.

        Not inside a backward: there activation checkpointing recomputes modules, and its own hooks must see what they save.
        """
        if self.depth == 0 and self.check is not None:
            self.check()
        self.depth += 1
        try:
            # torch.func transforms do not support saved-tensor hooks: there weights are kept until backward.
            is_transformed = torch._C._are_functorch_transforms_active()
            if self.depth == 1 and torch._C._current_graph_task_id() == -1 and not is_transformed:
                with repack_gathered():
                    yield
            else:
                yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                self.leaves.clear()


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
        remote = {name: each for name, each in module._parameters.items() if isinstance(each, RemoteParameter)}
        forward.sites += [(module, name, record) for name, record in records.items()]
        if records or remote or module is model:
            module.__class__ = _specialise(type(module), path, records, remote, forward)
    if isinstance(own := type(model).forward, FunctionType):
        type(model).forward = with_own_code(own)


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same, with a code object of its own.

    Dynamo compiles one code object for at most 8 models, dropped ones included, and runs it eagerly from then on.
    """
    assert isinstance(function, FunctionType)
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    own.__dict__.update(function.__dict__)
    for name in WRAPPER_ASSIGNMENTS:
        setattr(own, name, getattr(function, name))
    return own


def move_buffers(model: Module, device: torch.device) -> None:
    """Move a model's buffers to the device that computes. Parameters stay where they are."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def is_optimized(module: Module) -> bool:
    """Return whether accessors were installed on a module."""
    return hasattr(type(module), "_zinf_optimized")


@with_room_for_calls
def _call_with_room(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _specialise(
    cls: type[Module],
    path: str,
    records: dict[str, StoredParameter],
    remote: dict[str, RemoteParameter],
    forward: Forward,
) -> type[Module]:
    names, of_records = frozenset((*records, *remote)), tuple(map(weakref.ref, records.values()))
    # Torch keeps every class it has seen: what a class refers to strongly would never be freed.
    alive = weakref.ref(forward)

    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return cls.__call__(self, *args, **kwargs)
        forward = alive()
        assert forward is not None
        if torch._C._get_tracing_state() is not None and not forward.is_swapped:
            raise refuse_graph(cls.__name__)
        try:
            with uninterrupted(), forward.computing(), interruptible():
                if self._compiled_call_impl is not None and forward.is_foreign_to_capture:
                    return self._call_impl(*args, **kwargs)
                if forward.to_capture is None:
                    return cls.__call__(self, *args, **kwargs)
                drawn = torch.get_rng_state()
                with forward.first_call(), suppress(NotCapturedError):
                    try:
                        return _call_with_room(cls.__call__, self, *args, **kwargs)
                    except BackendCompilerFailed as error:  # Dynamo wraps what a backend raises
                        if isinstance(error.inner_exception, NotCapturedError):
                            raise error.inner_exception from None
                        raise
                # No graph has run. What Dynamo has left to Python before the first one runs again, and draws the same.
                torch.set_rng_state(drawn)
                self._compiled_call_impl = None
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

    # ``nn.LSTM`` and its kin have a list of their weights beside the attributes. In an eager forward torch would put
    # gathered values into it, and on a GPU move them into one storage, after which their old addresses are others'.
    def forward_of_weights(self: Module, *args: Any, **kwargs: Any) -> Any:
        forward = alive()
        if forward is None or not forward.is_computing or torch.compiler.is_compiling():
            return cls.forward(self, *args, **kwargs)
        own, names = self.__dict__["_flat_weights"], self.__dict__["_flat_weights_names"]
        gathered = [None if weight is None else getattr(self, name) for name, weight in zip(names, own, strict=True)]
        self.__dict__[_GATHERED_WEIGHTS] = gathered
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            self.__dict__.pop(_GATHERED_WEIGHTS, None)

    def flat_weights(self: Module) -> list[Tensor | None]:
        weights: list[Tensor | None] = self.__dict__.get(_GATHERED_WEIGHTS) or self.__dict__["_flat_weights"]
        return weights

    def set_flat_weights(self: Module, weights: list[Tensor | None]) -> None:
        self.__dict__["_flat_weights"] = weights

    def set_attribute(self: Module, name: str, value: Tensor | Module) -> None:
        if name in names and value is not self._parameters.get(name):
            raise UnsupportedError(
                f"cannot assign to '{_join(path, name)}': it lives in a store since optimize(); write into it instead, "
                f"for example with torch.no_grad(): module.weight.copy_(value), or {_DO_BEFORE}"
            )
        cls.__setattr__(self, name, value)

    def delete_attribute(self: Module, name: str) -> None:
        if name in names:
            raise UnsupportedError(
                f"cannot delete '{_join(path, name)}': it lives in a store since optimize(); {_DO_BEFORE}"
            )
        cls.__delattr__(self, name)

    def register_parameter(self: Module, name: str, parameter: Parameter | None) -> None:
        taken = next((other for other in names if other not in self._parameters), None)
        again = next(
            (other for other in names if parameter is not None and parameter is self._parameters.get(other)), name
        )
        if taken is not None:  # torch.nn.utils.weight_norm takes it out of the dictionary before it registers others
            if (forward := alive()) is not None:
                forward.put_back()
            raise UnsupportedError(
                f"cannot replace '{_join(path, taken)}' by '{name}': it lives in a store since optimize(); {_DO_BEFORE}"
            )
        if again != name:  # torch.nn.utils.prune
            raise UnsupportedError(
                f"cannot register '{_join(path, again)}' a second time as '{name}': it lives in a store since optimize(); "
                f"{_DO_BEFORE}"
            )
        cls.register_parameter(self, name, parameter)

    def apply_everywhere(self: Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        if (
            names and function(torch.empty(0)).is_meta
        ):  # torch would register parameters without values in place of ours
            raise UnsupportedError(
                f"cannot move {path or cls.__name__} to the meta device: its parameters live in a store since optimize()"
            )
        cls._apply(self, function, recurse)
        return self

    def load_state_dict(self: Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("assign") or args[1:2] == (True,):
            raise UnsupportedError(
                f"load_state_dict(assign=True) would replace parameters of {path or cls.__name__} that live in a store "
                "since optimize(); leave assign out: values are copied, in the dtypes the parameters have"
            )
        return cls.load_state_dict(self, state_dict, *args, **kwargs)

    def save_to_state_dict(self: Module, destination: Any, prefix: str, keep_vars: bool) -> None:
        for of_record in of_records:
            if (record := of_record()) is not None:
                record.store.check_whole()
        cls._save_to_state_dict(self, destination, prefix, keep_vars)
        for name in remote:
            del destination[prefix + name]

    def load_from_state_dict(
        self: Module, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *others: Any
    ) -> None:
        given = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in remote}
        lacking: list[str] = []
        cls._load_from_state_dict(self, given, prefix, metadata, strict, lacking, *others)
        missing += (key for key in lacking if key.removeprefix(prefix) not in remote)

    def refuse_pickling(self: Module, protocol: object) -> None:
        raise UnsupportedError(
            f"an optimized {cls.__name__} cannot be pickled: its parameters live in one store; save its state_dict()"
        )

    def refuse_scripting(self: Module) -> None:  # torch.jit.script asks for what to script instead
        raise refuse_graph(cls.__name__)

    def refuse_copy(self: Module, memo: object) -> None:
        raise UnsupportedError(
            f"an optimized {cls.__name__} cannot be copied: its parameters live in one store; do what copies it, as "
            "AveragedModel and peft's modules_to_save do, before optimize(), or load its state_dict() into a new one"
        )

    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__call__": call,
        "__setattr__": set_attribute,
        "__delattr__": delete_attribute,
        "register_parameter": register_parameter,
        "_apply": apply_everywhere,
        "load_state_dict": load_state_dict,
        "_save_to_state_dict": save_to_state_dict,
        **({"_load_from_state_dict": load_from_state_dict} if remote else {}),
        "__deepcopy__": refuse_copy,
        "__reduce_ex__": refuse_pickling,
        "__prepare_scriptable__": refuse_scripting,
        "_zinf_optimized": True,
    }
    for name, record in records.items():
        namespace[name] = property(_accessor(cls.__name__, name, record, forward))
    for name, parameter in remote.items():
        namespace[name] = property(_remote_accessor(name, parameter, forward))
    if issubclass(cls, torch.nn.RNNBase):
        namespace |= {
            "forward": forward_of_weights,
            "_flat_weights": property(flat_weights, set_flat_weights),
            "_update_flat_weights": lambda self: None,
            "flatten_parameters": lambda self: None,
        }
    metaclass: Any = type(cls)
    specialised: type[Module] = metaclass(cls.__name__, (cls,), namespace)
    return specialised


def refuse_graph(model: str) -> UnsupportedError:
    """Return the error for exporting a graph: the numbers of parameters mean nothing outside this process."""
    return UnsupportedError(
        f"an optimized {model} cannot be exported, traced or scripted: its graph would hold the numbers of parameters in a "
        "store of this process, and not their values; export or trace it inside zinf_compile.full_parameters(model), or "
        "load its state_dict() into a plain model"
    )


def _is_exporting() -> bool:
    """Return ``torch.compiler.is_exporting()``, which in torch 2.11 is True wherever Dynamo traces."""
    return torch.compiler._is_exporting_flag


def _accessor(model: str, name: str, record: StoredParameter, forward: Forward) -> Callable[[Module], Tensor]:
    param, shape, device = record.param, tuple(record.shape), record.store.memory.torch_device
    dtype = record.dtype
    seat, alive, of_record = record.copies.seat, weakref.ref(forward), weakref.ref(record)
    of_whole = record.views.in_graph()

    def get(self: Module) -> Tensor:
        if torch.compiler.is_compiling():
            if _is_exporting():
                if not seat.is_held:
                    raise refuse_graph(model)
                full = self._parameters[name]
                assert full is not None
                return full
            gathered: Tensor = torch.ops.zinf.gather(seat.anchor, param, shape, dtype, device)
            return gathered if of_whole is None else of_whole(gathered)
        parameter = self._parameters.get(name)
        if parameter is None:
            raise AttributeError(f"'{model}' object has no attribute '{name}'")
        forward, record = alive(), of_record()
        assert forward is not None
        assert record is not None
        if not forward.is_computing or parameter is not record.parameter:
            return parameter
        value: Tensor = gather_eagerly(record, forward.leaves)
        return value

    return get


def _remote_accessor(name: str, parameter: RemoteParameter, forward: Forward) -> Callable[[Module], Tensor]:
    number, shape = parameter.number, tuple(parameter.shape)
    dtype, device = parameter.gathered_dtype, parameter.gathered_to
    seat, alive = parameter.seat, weakref.ref(forward)

    def get(self: Module) -> Tensor:
        if torch.compiler.is_compiling():
            gathered: Tensor = torch.ops.zinf.gather(seat.anchor, number, shape, dtype, device)
            return gathered
        forward = alive()
        assert forward is not None
        if forward.is_computing:
            raise UnsupportedError(
                f"'{parameter.path}' is on rank {parameter.rank}, and with schedule='rounds' a model is called as a whole "
                "and captured; leave schedule out to run parts of it, or to run it eagerly"
            )
        registered = self._parameters.get(name)
        assert registered is not None
        return registered

    return get


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's annotation is partial
def gather_eagerly(record: StoredParameter, leaves: dict[int, Tensor]) -> Tensor:
    """Return a parameter's gathered value outside of captured graphs, differentiable if it is trained.

    ``leaves`` are those of this forward so far, by the number of the parameter; only several ranks need them.
    """
    record.store.meter.num_eager_gathers += 1
    is_transformed = torch._C._are_functorch_transforms_active()
    if not is_transformed and (
        record.gradient.slot is None or not torch.is_grad_enabled() or not record.parameter.requires_grad
    ):
        return record.views.of_whole(record.store.gather_value(record, record.dtype))
    leaf: Tensor = record.parameter
    apply: Callable[..., Tensor] = TransformedGather.apply if is_transformed else EagerGather.apply
    if is_transformed and record.views.distribution is not None:
        raise UnsupportedError(
            f"'{record.name}' is a DTensor, and transforms of torch.func need it whole; apply them to a model that is not "
            "parallelised"
        )
    if not record.store.ranks.is_alone:
        if is_transformed:
            raise UnsupportedError(
                f"'{record.name}' is divided among {record.store.ranks.mesh_size} ranks, and transforms of torch.func need "
                "it whole; apply them inside zinf_compile.full_parameters(model)"
            )
        if record.param not in leaves:
            make_leaf: Callable[..., Tensor] = WholeLeaf.apply
            leaves[record.param] = make_leaf(record.parameter, record)
        leaf, apply = leaves[record.param], GatherOfLeaf.apply
    value = record.views.of_whole(apply(leaf, lambda: record.store.gather_value(record, record.dtype)))
    if is_transformed:
        return value
    GATHERED.note(local_of(value), record)
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
