"""Full values of stored parameters: written and read in pieces, or lent as plain tensors in memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from zinf_compile.errors import CapacityError, UnsupportedError
from zinf_compile.runtime.slots import StoredParameter, mark_lent
from zinf_compile.runtime.transfers import wait_all
from zinf_compile.terms import Tier, format_bytes

if TYPE_CHECKING:
    from zinf_compile.runtime.store import Store


class Site(NamedTuple):
    """Where a stored parameter is registered; a tied one has several sites."""

    module: Module
    name: str
    record: StoredParameter


def write_piece(record: StoredParameter, first: int, values: Tensor) -> None:
    """Start writing consecutive elements, from ``first`` on, of a parameter's value; ``end_writes`` makes them home.

    A piece that does not reach the end of the parameter begins and ends at a multiple of 4096 elements. The compute copy is
    cast from what the master copy then holds.
    """
    store = record.store
    values = values.to(record.original_dtype)
    with store.failing_on_error():
        store.transfers.write_value(record.master, values, first=first)
        if record.has_compute_copy:
            store.transfers.write_value(record.compute, values, first=first)


def end_writes(record: StoredParameter) -> None:
    """Block until what was written is home; tell autograd and the compute copy that the value is a new one."""
    with record.store.failing_on_error():
        record.store.transfers.wait_writes()
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.graph.increment_version(record.parameter)
        record.synced_version, record.exposed = record.parameter._version, False


def read_pieces(record: StoredParameter) -> Iterator[Tensor]:
    """Yield a parameter's value as flat tensors, in order; each is valid until the next is asked for."""
    store, slot = record.store, record.master
    store.finish(record)  # which may leave it torn
    store.check_usable(record)
    flat = slot.tensor.view(-1)
    step = store.transfers.piece_elements(flat.dtype)
    for start in range(0, flat.numel(), step):
        stop = min(flat.numel(), start + step)
        if slot.in_memory:
            yield flat[start:stop]
            continue
        offset, nbytes = slot.byte_range(start, stop)
        with store.staging.lease(nbytes) as lease:
            with store.failing_on_error():
                wait_all(store.transfers.read(slot, offset, lease.view))
            yield torch.frombuffer(lease.view, dtype=flat.dtype, count=stop - start)


@contextmanager
def lend_values(
    sites: Sequence[Site], *, unread: frozenset[str] = frozenset(), in_original_dtype: bool = False
) -> Iterator[dict[str, Parameter]]:
    """Put plain parameters with the full value in memory where stored ones are registered; yields them by name.

    At the end, and also when the block raises, their values are written home and the stored parameters are back: what
    was written to them stays written, as with any tensor. Their gradients are the stored ones'. Parameters named in
    ``unread`` have no value yet, and come with undefined content.
    """
    records = {site.record.name: site.record for site in sites}
    lent: dict[str, Parameter] = {}
    for name, record in records.items():
        record.store.finish(record)  # which may leave it torn
        record.store.check_usable(record)
        dtype = record.original_dtype if in_original_dtype else record.master.tensor.dtype
        value = _full_value(record, dtype, read=name not in unread)
        lent[name] = _like(record.parameter, value)
        mark_lent(lent[name], record)
    was = {name: (parameter.shape, parameter.dtype, parameter.device) for name, parameter in lent.items()}
    try:
        for record in records.values():
            record.lent = True
        for site in sites:
            site.module._parameters[site.name] = lent[site.record.name]
        yield lent
    finally:
        for site in sites:
            site.module._parameters[site.name] = site.record.parameter
        for record in records.values():
            record.lent = False
        unfit = []
        for name, record in records.items():
            parameter = lent[name]
            if (parameter.shape, parameter.dtype, parameter.device) == was[name]:
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
    lent = Parameter(value, stored.requires_grad)
    with torch._C.DisableTorchFunctionSubclass():
        if stored.grad_dtype != lent.grad_dtype:
            lent.grad_dtype = stored.grad_dtype
        lent.grad = stored.grad
    return lent


def _return_gradient(record: StoredParameter, grad: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        was = record.parameter.grad
        if grad is None or was is not None:
            record.parameter.grad = grad
            return
    record.store.store_gradient(record, grad)
    with record.store.failing_on_error():
        record.store.transfers.wait_writes()


def _full_value(record: StoredParameter, dtype: torch.dtype, *, read: bool) -> Tensor:
    """Return the whole value in memory: the home tensor itself where that is in RAM."""
    slot = record.master
    if slot.in_memory and slot.tensor.dtype == dtype:
        return slot.tensor
    value = torch.empty(slot.tensor.shape, dtype=slot.tensor.dtype)
    if read:
        with record.store.failing_on_error():
            record.store.transfers.read_value(slot, value)
    return value.to(dtype)


def check_room(store: "Store", records: Sequence[StoredParameter], what: str) -> None:
    """Raise CapacityError unless full values fit in the device budget beside what is resident; drops the arena for them.

    What is at home in RAM takes no room: it is lent as it is.
    """
    nbytes = sum(record.master.nbytes for record in records if not record.master.in_memory)
    resident, budget = store.nbytes_on(Tier.DEVICE), store.config.device_memory
    if resident + nbytes > budget:
        raise CapacityError(
            f"{what} takes {format_bytes(nbytes)} of parameters into memory at once, beside {format_bytes(resident)} that "
            f"are resident, and device_memory is {format_bytes(budget)}; take a smaller module, or raise device_memory to "
            f"{-(-(resident + nbytes) // 2**20)}MiB"
        )
    if resident + store.arena.nbytes + nbytes > budget:
        store.arena.drop()
