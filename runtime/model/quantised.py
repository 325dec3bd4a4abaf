"""Parameters of special classes, such as quantised ones: the tensors that they consist of are stored as they are.

A quantised weight is an object of its library that has plain tensors: codes, scales, statistics. The large ones, its
*components*, get homes like frozen parameters. The library's own tensors, the *holders* of a component, become views of
its home. So its code finds the bytes where it left them, and captured graphs gather them. What is small stays.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zinf_compile.ir.glossary import format_bytes
from zinf_compile.runtime.params.records import StoredParameter, holders_of, record_of, set_holders
from zinf_compile.runtime.store.store import Store

_DEPTH = 3  # of objects in a parameter's attributes: bitsandbytes keeps the statistics of its statistics
LEAST_NBYTES = 4096  # of a component: a home on disk takes whole sectors
# What a subclass of Parameter may define and still behave as a plain one.
_HARMLESS = frozenset(
    {"__new__", "__init__", "__doc__", "__module__", "__dict__", "__weakref__", "__slots__", "__repr__"}
)


def has_own_bytes(parameter: Tensor) -> bool:
    """Return whether a parameter is more than its bytes: a subclass that changes behaviour, or wraps other tensors.

    Not one that is stored itself, whatever class it got for that.
    """
    is_plain = type(parameter) is Parameter or isinstance(parameter, UninitializedParameter)
    if is_plain or record_of(parameter) is not None:
        return False
    if not issubclass(type(parameter), Parameter):  # a tensor subclass, which torch.nn.Parameter returns as it is
        return True
    own = (cls for cls in type(parameter).__mro__[: type(parameter).__mro__.index(Parameter)])
    return any(hasattr(Tensor, name) and name not in _HARMLESS for cls in own for name in vars(cls))


def describe_own(parameters: Mapping[str, Tensor], names: Sequence[str]) -> str:
    """Return the beginning of a message about some parameters of special classes."""
    return (
        f"'{names[0]}' and {len(names) - 1} more parameters are no plain ones ({type(parameters[names[0]]).__name__})"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """The parameters of special classes of a model, and what of them is stored."""

    parameters: Mapping[str, Parameter]  # by name
    components: Mapping[str, Mapping[str, Parameter]]  # by name of the parameter and of the component
    kept_nbytes: int  # of what stays on the device as it is

    @property
    def stored_nbytes(self) -> int:
        """Return the bytes of all components."""
        return sum(component.nbytes for found in self.components.values() for component in found.values())

    def describe(self) -> str:
        """Return a sentence for a reader of the report."""
        classes = ", ".join(sorted({type(parameter).__name__ for parameter in self.parameters.values()}))
        what = f"{len(self.parameters)} parameters of classes of their own ({classes})"
        takes = f"where they take {format_bytes(self.kept_nbytes)} of what is reserved"
        count = sum(map(len, self.components.values()))
        if count == 0:
            return f"{what} stay as they are on the device, {takes}"
        return (
            f"{what} have tensors of their own: {count}, {format_bytes(self.stored_nbytes)}, are stored and gathered as "
            f"they are; the others stay on the device, {takes}"
        )


def find_quantised(model: Module, *, may_store: bool, but: Container[str] = ()) -> Quantised:
    """Return the parameters of special classes of a model, ``but`` for some by name.

    Without ``may_store`` they have no components.
    """
    named = ((name, parameter) for name, parameter in model.named_parameters() if name not in but)
    parameters = {name: parameter for name, parameter in named if has_own_bytes(parameter)}
    _settle_modules(model, parameters)
    inner = {name: list(_tensors_of(model, name, parameter)) for name, parameter in parameters.items()}
    holders: dict[int, dict[int, Tensor]] = {}  # all tensors over a piece of memory, once each
    for found in inner.values():
        for _, tensor in found:
            holders.setdefault(_storage_of(tensor), {})[id(tensor)] = tensor
    components: dict[str, dict[str, Parameter]] = {name: {} for name in parameters}
    stored: set[int] = set()
    for name, parameter in parameters.items() if may_store else ():
        for path, tensor in inner[name]:
            storage = _storage_of(tensor)
            own = tuple(holders[storage].values())
            if storage in stored or parameter.requires_grad or not _can_move(tensor, own):
                continue
            stored.add(storage)
            component = Parameter(tensor.detach(), requires_grad=False)
            set_holders(component, own)
            components[name][path] = component
    tensors = (tensor for found in inner.values() for _, tensor in found)
    return Quantised(
        parameters=parameters,
        components=components,
        kept_nbytes=_nbytes_of(tensor for tensor in tensors if _storage_of(tensor) not in stored),
    )


def _settle_modules(model: Module, parameters: Mapping[str, Parameter]) -> None:
    """Keep modules of bitsandbytes from giving their weights other memory in their first forward, or in evaluation."""
    for name in parameters:
        module = model.get_submodule(name.rpartition(".")[0])
        weight = module._parameters.get("weight")
        move_state = getattr(module, "init_8bit_state", None)
        if callable(move_state) and getattr(weight, "CB", None) is not None:
            move_state()  # the first forward does that otherwise, and the model would be captured a second time
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # it would pack weights anew


def components_of(store: Store) -> dict[int, StoredParameter]:
    """Return the components that a store has, by the address of their home tensors."""
    return {
        record.copies.master.tensor.data_ptr(): record
        for record in store.records.values()
        if holders_of(record.parameter)
    }


def check_in_place(store: Store) -> None:
    """Raise StoreError if a file that components lie in has changed: eager code of their library reads a mapping of it."""
    components = (record for record in store.records.values() if holders_of(record.parameter))
    slots = [slot for record in components if (slot := record.copies.in_place) is not None]
    for file in {slot.weights.file for slot in slots if slot.weights is not None}:
        file.check_unchanged()


def quantised_tensors(model: Module) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each quantised parameter by name, those that are stored too; each piece of memory once."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if has_own_bytes(parameter)}
    _settle_modules(model, parameters)
    seen: set[int] = set()
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        tensors[name] = {}
        for path, tensor in _tensors_of(model, name, parameter):
            if _storage_of(tensor) not in seen:
                seen.add(_storage_of(tensor))
                tensors[name][path] = tensor
    return tensors


class _Found(NamedTuple):
    """A plain tensor, and the attributes that lead to it."""

    path: str
    tensor: Tensor


def _tensors_of(model: Module, name: str, parameter: Parameter) -> Iterator[_Found]:
    """Yield the tensors of a quantised parameter, and those that its module keeps beside it."""
    yield from _inner_tensors(parameter, _DEPTH, name)
    path = name.rpartition(".")[0]
    state = getattr(model.get_submodule(path), "state", None)  # bitsandbytes moves those of int8 weights there
    for attribute in ("CB", "SCB"):
        if isinstance(tensor := getattr(state, attribute, None), Tensor):
            yield _Found(f"{path}.state.{attribute}" if path else f"state.{attribute}", tensor)


def _can_move(tensor: Tensor, holders: Iterable[Tensor]) -> bool:
    """Return whether a tensor is large, has its memory for itself, and whether all its holders have its form."""
    form = tensor.shape, tensor.stride(), tensor.dtype
    return (
        tensor.nbytes >= LEAST_NBYTES
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and all((holder.shape, holder.stride(), holder.dtype) == form for holder in holders)
        and not any(holder.requires_grad for holder in holders)
    )


def _storage_of(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        identity: int = tensor.untyped_storage()._cdata
        return identity


def _nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that tensors take, each storage once."""
    return sum({_storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _inner_tensors(found: object, depth: int, path: str) -> Iterator[_Found]:
    """Yield the plain tensors that an object is, consists of, or has among its attributes."""
    if is_traceable_wrapper_subclass(found):
        names, _ = found.__tensor_flatten__()
        for name in names:
            yield from _inner_tensors(getattr(found, name), depth, f"{path}.{name}")
    elif isinstance(found, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            yield _Found(path, found)
    if depth > 0 and not isinstance(found, torch.nn.Module):
        for name, value in getattr(found, "__dict__", {}).items():
            yield from _inner_tensors(value, depth - 1, f"{path}.{name}")
