"""Full parameters: plain tensors with the full values of stored ones, in memory for a while, at every site."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from zinf_compile.ir.errors import CapacityError, UnsupportedError
from zinf_compile.ir.glossary import Tier, format_bytes
from zinf_compile.runtime.execute.gradients import store_gradient
from zinf_compile.runtime.model.in_place import has_value
from zinf_compile.runtime.params.full_values import end_writes, write_piece
from zinf_compile.runtime.params.records import StoredParameter, mark_full
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.store.store import Store, store_of


class Site(NamedTuple):
    """Where a stored parameter is registered; a tied one has several sites."""

    module: Module
    name: str
    record: StoredParameter


@contextmanager
def hold_full_values(
    sites: Sequence[Site], *, unread: frozenset[str] = frozenset(), in_original_dtype: bool = False
) -> Iterator[dict[str, Parameter]]:
    """Put plain parameters with the full value in memory where stored ones are registered; yields them by name.

    At the end, and also when the block raises, their values are written home and the stored parameters are back: what
    was written to them stays written, as with any tensor. Their gradients are the stored ones'. Parameters named in
    ``unread`` have no value yet, and come with undefined content. ``in_original_dtype`` is for initialisation, which draws
    numbers on the host wherever the model computes.
    """
    records = {site.record.name: site.record for site in sites}
    full: dict[str, Parameter] = {}
    for name, record in records.items():
        record.store.check_usable(record)  # once its update is done
        dtype = record.original_dtype if in_original_dtype else record.copies.master.tensor.dtype
        value = _full_value(record, dtype, read=name not in unread, on_host=in_original_dtype)
        full[name] = _like(record.parameter, value)
        mark_full(full[name], record)
    was = {name: (parameter.shape, parameter.dtype, parameter.device) for name, parameter in full.items()}
    try:
        _register(sites, full)
        yield full
    finally:
        _write_back(sites, full, was)


@without_interrupts
def _register(sites: Sequence[Site], full: Mapping[str, Parameter]) -> None:
    for site in sites:
        site.record.copies.hold()
    for site in sites:
        site.module._parameters[site.name] = full[site.record.name]


@without_interrupts
def _write_back(
    sites: Sequence[Site],
    full: Mapping[str, Parameter],
    was: Mapping[str, tuple[torch.Size, torch.dtype, torch.device]],
) -> None:
    """Register the stored parameters again, and write the full values home. UnsupportedError for what no longer fits."""
    records = {site.record.name: site.record for site in sites}
    for site in sites:
        site.module._parameters[site.name] = site.record.parameter
    for record in records.values():
        record.copies.release()
    unfit = []
    for name, record in records.items():
        parameter = full[name]
        if (parameter.shape, parameter.dtype, parameter.device) == was[name]:
            served = record.copies.in_place
            if served is None or not has_value(store_of(record), served, parameter):
                write_piece(record, 0, parameter.detach())
                end_writes(record)
        else:
            unfit.append(name)
        _return_gradient(record, parameter.grad)
    if unfit:
        raise UnsupportedError(
            f"{', '.join(unfit)} got another shape, dtype or device inside full_parameters(), and keeps the value it "
            "had before; write into the tensor that is there"
        )


def _like(stored: Parameter, value: Tensor) -> Parameter:
    """Return a plain parameter with the gradient of a stored one, which autograd then adds to where it is."""
    full = Parameter(value, stored.requires_grad)
    with torch._C.DisableTorchFunctionSubclass():
        if stored.grad_dtype != full.grad_dtype:
            full.grad_dtype = stored.grad_dtype
        is_plain = not hasattr(stored, "full_tensor")  # ranks keep the gradients that there are: they are of shards
        if stored.grad is not None and is_plain:
            full.grad = stored.grad if stored.grad.device == full.device else stored.grad.to(full.device)
    return full


def _return_gradient(record: StoredParameter, grad: Tensor | None) -> None:
    if grad is None and not record.store.ranks.is_alone:
        return
    with torch._C.DisableTorchFunctionSubclass():
        was = record.parameter.grad
        if record.store.ranks.is_alone:
            if grad is None or (was is not None and grad.device == was.device):
                record.parameter.grad = grad
                return
            record.parameter.grad = None  # what comes from the device holds what was there too
    assert grad is not None
    store_gradient(record, grad)
    with record.store.failing_on_error():
        record.store.reductions.finish()
        record.store.tensor_io.wait_writes()


@without_interrupts
def _full_value(record: StoredParameter, dtype: torch.dtype, *, read: bool, on_host: bool) -> Tensor:
    """Return the whole value where the model computes, or on the host; on a CPU the home tensor itself if it is in RAM."""
    slot, store = record.copies.master, store_of(record)
    shape, kept = record.shape, slot.tensor.dtype
    if not store.ranks.is_alone:
        store.refresh_one(record)
        return store.full_value(shape, slot).to(dtype, copy=True) if read else torch.empty(shape, dtype=dtype)
    if store.device.memory.unified and slot.in_memory and slot.tensor.dtype == dtype:
        return slot.tensor
    value = torch.empty(shape, dtype=kept) if on_host else record.store.memory.new_value(shape, kept)
    if read:
        with record.store.failing_on_error():
            record.store.tensor_io.read_value(slot, value)
    return value.to(dtype)


def check_room(store: Store, records: Sequence[StoredParameter], what: str) -> None:
    """Raise CapacityError unless full values fit in the device budget beside what is resident; drops the arena for them.

    What is at home in RAM takes no room, on a CPU: its home tensor is used.
    """
    is_used_at_home = store.device.memory.unified and store.ranks.is_alone
    nbytes = sum(
        record.shape.numel() * record.copies.master.tensor.dtype.itemsize
        for record in records
        if not (is_used_at_home and record.copies.master.in_memory)
    )
    resident, budget = store.held.nbytes_on(Tier.DEVICE), store.config.device_memory
    if resident + nbytes > budget:
        raise CapacityError(
            f"{what} takes {format_bytes(nbytes)} of parameters into memory at once, beside {format_bytes(resident)} that "
            f"are resident, and device_memory is {format_bytes(budget)}; take a smaller module, or raise device_memory to "
            f"{-(-(resident + nbytes) // 2**20)}MiB"
        )
    if resident + store.arena.nbytes + nbytes > budget:
        store.arena.drop()
