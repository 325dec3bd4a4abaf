"""What a model and its optimizer hold, by name: every tensor with its home."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from zinf_compile.ir.copies import AnyCode, Blocks
from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.model.quantised import components_of, quantised_tensors
from zinf_compile.runtime.optim.step_jobs import has_slot, state_slot
from zinf_compile.runtime.params.coded_state import coded_home
from zinf_compile.runtime.params.home import HomeTensor
from zinf_compile.runtime.params.home_gradient import begin_gradient, settle_gradient, show_gradient
from zinf_compile.runtime.params.records import StoredParameter, record_of
from zinf_compile.runtime.params.remote import RemoteParameter
from zinf_compile.runtime.ranks.ranks import ALONE, Ranks
from zinf_compile.runtime.storage.slots import Slot
from zinf_compile.runtime.storage.state_blocks import blocks_of, pages_of_code
from zinf_compile.runtime.store.store import Store, store_of
from zinf_compile.runtime.transfer.tensor_io import TensorIO


@dataclass(frozen=True, slots=True, kw_only=True)
class HomedTensor:
    """A tensor of the model's state with its home, and the tensor I/O that moves it."""

    slot: Slot
    tensor_io: TensorIO | None = None  # of the store that has the slot; None: a plain tensor in memory
    compute: Slot | None = None  # the compute copy that is made from it
    record: StoredParameter | None = None  # the parameter that it belongs to; None for a plain tensor
    note_filled: Callable[[], None] | None = None  # to be called once the slot has its content

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        if self.record is None and self.slot.coded is not None:
            return torch.Size(self.slot.coded.slice.sizes)
        return self.record.shape if self.record is not None and self.slot.per_element else self.slot.tensor.shape

    @property
    def is_divided(self) -> bool:
        """Return whether each of several ranks has some rows of it."""
        return self.record is not None and not self.record.store.ranks.is_alone

    @property
    def shard(self) -> Slice:
        """Return the rows that this rank has of it, or updates; only of one that is divided."""
        assert self.record is not None
        return self.record.shard


def stores_of(model: Module) -> tuple[Store, ...]:
    """Return the stores in which parameters of a model live; none for a plain model."""
    return tuple({record.store.store_id: store_of(record) for record in records_of(model)}.values())


def records_of(model: Module) -> list[StoredParameter]:
    """Return the parameters of a model that live in a store, whichever."""
    records = (record_of(parameter) for parameter in model.parameters())
    return [record for record in records if record is not None]


def ranks_of(model: Module) -> Ranks:
    """Return the ranks that train a model together."""
    return next((store.ranks.partners for store in stores_of(model)), ALONE)


def is_divided(model: Module) -> bool:
    """Return whether each of several ranks has some rows of every parameter."""
    return any(not store.ranks.is_alone for store in stores_of(model))


def records_in(store: Store, model: Module) -> list[StoredParameter]:
    """Return the parameters of a model that live in a store; it may have those of other models too."""
    return [record for record in records_of(model) if record.store is store]


def model_tensors(model: Module) -> dict[str, HomedTensor]:
    """Return every parameter and every persistent buffer by its name in ``state_dict()``; a tied one once.

    Of a quantised parameter, the tensors that it consists of. Not those that only another rank has.
    """
    tensors = {}
    quantised = quantised_tensors(model)
    stored = {address: record for store in stores_of(model) for address, record in components_of(store).items()}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, RemoteParameter):
            continue
        if name in quantised:
            for path, tensor in quantised[name].items():
                with torch._C.DisableTorchFunctionSubclass():
                    record = stored.get(tensor.data_ptr())
                    tensors[path] = _plain(path, tensor) if record is None else _homed(record)
        elif (record := record_of(parameter)) is None:
            tensors[name] = _plain(name, parameter)
        else:
            tensors[name] = _homed(record)
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                name = f"{path}.{key}" if path else key
                tensors[name] = _plain(name, buffer)
    return tensors


def tied_names(model: Module) -> dict[str, str]:
    """Return the other names of tied parameters in ``state_dict()``, each with the one that ``model_tensors`` has."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return {name: names[id(parameter)] for name, parameter in everywhere if name != names[id(parameter)]}


def modules_with_state(model: Module) -> dict[str, Module]:
    """Return the modules that have a ``get_extra_state`` of their own, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not Module.get_extra_state
    }


def gradient_tensors(model: Module) -> dict[str, HomedTensor]:
    """Return the gradients there are on this rank, by the names of their parameters."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, RemoteParameter):
            continue
        record = record_of(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            grad = parameter.grad
        if grad is None:
            continue
        if record is not None and record.gradient.slot is not None and record.gradient.slot.is_home_of(grad):
            settle_gradient(record)
            tensors[name] = HomedTensor(slot=record.gradient.slot, tensor_io=record.store.tensor_io, record=record)
        else:
            tensors[name] = _plain(f"the gradient of {name}", grad)
    return tensors


def gradient_dtype(parameter: Parameter) -> torch.dtype | None:
    """Return the dtype of a parameter's gradients; None for one that was frozen when its store took it."""
    record = record_of(parameter)
    if record is None:
        return parameter.dtype
    return record.gradient.slot.tensor.dtype if record.gradient.slot is not None else None


def add_gradient(parameter: Parameter) -> HomedTensor:
    """Give a parameter a gradient whose content is to be filled in; return it."""
    record = record_of(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        if record is None or record.gradient.slot is None:
            parameter.grad = torch.zeros_like(parameter)
            return _plain("a gradient", parameter.grad)
        begin_gradient(record)
        parameter.grad = show_gradient(record)
        return HomedTensor(slot=record.gradient.slot, tensor_io=record.store.tensor_io, record=record)


def remove_gradient(parameter: Parameter) -> None:
    """Leave a parameter without a gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None


def state_tensors(optimizer: Optimizer, parameter: Parameter) -> dict[str, HomedTensor]:
    """Return the tensors that an optimizer keeps for a parameter, step counts too, by their keys; none of another rank's."""
    if isinstance(parameter, RemoteParameter):
        return {}
    record = record_of(parameter)
    tensors = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor):
            continue
        slot = record.copies.states.get(key) if record is not None else None
        if (shown := coded_home(value)) is not None:
            shown.flush()
        if record is not None and slot is not None and slot.is_home_of(value):
            tensors[key] = HomedTensor(slot=slot, tensor_io=record.store.tensor_io, record=record)
        elif (code := blocks_of(value)) is not None:
            slot = _slot_of_pages(key, code, value.shape, value.dtype)
            assert slot.coded is not None
            slot.coded.encode(value, slot.tensor)
            tensors[key] = HomedTensor(slot=slot)
        else:
            tensors[key] = _plain(f"{key} of the optimizer", value)
    return tensors


def _slot_of_pages(name: str, code: Blocks, shape: torch.Size, dtype: torch.dtype) -> Slot:
    """Return a slot in memory for a tensor of torchao's that is in no store."""
    pages = torch.zeros(code.nbytes(shape.numel()), dtype=torch.uint8)
    return Slot(
        slice=Slice.of_whole(name, pages.shape),
        tier=Tier.HOST,
        tensor=pages,
        coded=pages_of_code(code, Slice.of_whole(name, shape), dtype),
    )


def add_state(
    optimizer: Optimizer,
    parameter: Parameter,
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    code: AnyCode | None = None,
) -> HomedTensor:
    """Give an optimizer a state tensor for a parameter, whose content is to be filled in; return it.

    One that has an element for every element of a stored parameter lives in its store, and so does any other large one.
    ``code`` is what the content is in; what the optimizer keeps in codes of its own stays so.
    """
    record = record_of(parameter)
    own_code = code if isinstance(code, Blocks) else None
    if record is not None and shape and has_slot(record, optimizer, torch.Size(shape)):
        slot = state_slot(record, optimizer, key, dtype, torch.Size(shape), code=own_code)
        optimizer.state[parameter][key] = HomeTensor.show(slot, record)
        return HomedTensor(slot=slot, tensor_io=record.store.tensor_io, record=record)
    if own_code is not None:
        made = _slot_of_pages(key, own_code, torch.Size(shape), dtype)

        def show() -> None:
            assert made.coded is not None
            optimizer.state[parameter][key] = made.coded.value(made.tensor)

        return HomedTensor(slot=made, note_filled=show)
    if record is None and shape == tuple(parameter.shape):
        value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    else:
        value = torch.zeros(shape, dtype=dtype)
    optimizer.state[parameter][key] = value
    return _plain(key, value)


def _homed(record: StoredParameter) -> HomedTensor:
    compute = record.copies.compute if record.copies.are_two else None
    return HomedTensor(slot=record.copies.master, tensor_io=record.store.tensor_io, compute=compute, record=record)


def _plain(name: str, tensor: Tensor) -> HomedTensor:
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"{name} is a {tensor.layout} tensor on {tensor.device}; this version saves and loads dense ones with values"
        )
    return HomedTensor(slot=Slot(slice=Slice.of_whole(name, tensor.shape), tier=Tier.HOST, tensor=tensor.detach()))
