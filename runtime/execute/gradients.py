"""Gradients of captured graphs: each is stored at home, handed to autograd, used for an update at once, or dropped."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Variable

from zinf_compile.ir.errors import StoreError, UnsupportedError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.execute.leaves import Delivery, choose_delivery
from zinf_compile.runtime.params.home_gradient import (
    add_to_gradient,
    add_unreduced,
    begin_gradient,
    note_norms,
    settle_gradient,
    show_gradient,
)
from zinf_compile.runtime.params.records import StoredParameter, record_of
from zinf_compile.runtime.params.tiles import StoredTile
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.storage.futures import wait_all
from zinf_compile.runtime.storage.slots import local_of
from zinf_compile.runtime.store.store import Store, store_of


@without_interrupts
def store_gradient(stored: StoredParameter | StoredTile, grad: Tensor, experts: Sequence[range] | None = None) -> None:
    """Start writing a gradient, or a tile of one, to its home, or adding it to the gradient there.

    Of one with ``experts`` all other rows are known to be zero. It is complete after ``wait_writes``. A gradient that
    autograd must see is handed over instead, and one that was not requested is dropped.
    """
    record = stored.whole
    store, slot = record.store, record.gradient.slot
    store.check_usable(record)  # waits for its update
    store.follow_compute()
    if slot is None:
        raise StoreError(f"a gradient arrived for '{record.name}', which is frozen")
    _refuse_sparse(record, grad)
    delivery = choose_delivery(record)
    if delivery is Delivery.AUTOGRAD:
        _hand_over(stored, grad)
    if delivery is not Delivery.HOME:
        return
    with torch.no_grad(), store.failing_on_error():
        take = (
            partial(_store_tile, stored)
            if isinstance(stored, StoredTile)
            else partial(_take_home, record, experts=experts)
        )
        if store.ranks.is_alone:
            take(grad)
        elif store.config.stage == 1 and (record.parameter.grad is None or slot.is_home_of(record.parameter.grad)):
            add_unreduced(record, grad)
        else:
            store.reductions.start(_rows_of(stored), grad, take)
            store.meter.add_collective("reduction", grad.nbytes)


def _rows_of(stored: StoredParameter | StoredTile) -> Slice:
    """Return what a gradient is of."""
    return stored.rows if isinstance(stored, StoredTile) else Slice.of_whole(stored.name, stored.shape)


def _take_home(record: StoredParameter, grad: Tensor, experts: Sequence[range] | None = None) -> None:
    """Start writing what this rank has of a gradient to its home, or adding it to the gradient there."""
    store, slot, parameter = record.store, record.gradient.slot, record.parameter
    assert slot is not None
    grad = grad.view(slot.tensor.shape)
    if parameter.grad is None:
        if store.early_step is None or not store.early_step.take(record, grad, Tier.DEVICE):
            _put_gradient(record, grad, Tier.DEVICE, experts)
            _note_arrival(record)
    elif slot.is_home_of(parameter.grad):
        add_to_gradient(record, grad)
        _note_arrival(record)
    else:  # the user set this gradient: accumulate in place, as PyTorch does
        theirs = local_of(parameter.grad)
        theirs.add_(_as_users_see(record, grad).to(theirs.device, theirs.dtype))


def _as_users_see(record: StoredParameter, grad: Tensor) -> Tensor:
    """Return a gradient on the device of the parameter that users see, for which the host waits if it is another."""
    tensor_io = record.store.tensor_io
    if not tensor_io.link.is_crossed:
        return grad
    copy = torch.empty(grad.shape, dtype=grad.dtype, device=record.parameter.device)
    wait_all(tensor_io.copy_out(grad, copy.view(-1), record.name, Tier.DEVICE), f"the gradient of {record.name}")
    return copy


def _hand_over(stored: StoredParameter | StoredTile, grad: Tensor) -> None:
    """Keep a copy of a gradient until autograd takes it; the original may be in the arena."""
    record = stored.whole
    backward = torch._C._current_graph_task_id()
    if not record.store.ranks.is_alone:
        grad = record.store.reductions.reduced(_rows_of(stored), grad)
    grad = _as_users_see(record, grad)  # as autograd expects it
    if isinstance(stored, StoredTile):
        record.gradient.hand_over_rows(backward, record.shard, stored.mine, grad)
        return
    record.gradient.hand_over(backward, grad)


def _store_tile(tile: StoredTile, grad: Tensor) -> None:
    """Start writing what this rank has of a tile of a gradient to its home, or adding it to the gradient there."""
    record, slot, parameter, rows = tile.whole, tile.whole.gradient.slot, tile.whole.parameter, tile.mine
    assert slot is not None
    grad = grad.view(rows.sizes)
    if parameter.grad is None:  # the first tile of a new gradient
        slot = begin_gradient(record)
        record.gradient.begin_tiles()
        parameter.grad = show_gradient(record)
    elif not slot.is_home_of(parameter.grad):  # the user set this gradient: accumulate in place
        theirs = local_of(parameter.grad).narrow(rows.dim, rows.start - slot.slice.start, rows.length)
        theirs.add_(_as_users_see(record, grad).to(theirs.device, theirs.dtype))
        return
    missing = record.gradient.find_missing(rows)
    there = list(rows.without(missing))  # after an interrupted backward these may be rows of other tiles
    if there:
        record.store.finish(record)  # also with step_in_backward: a tiled parameter is not updated before ``step()``
        settle_gradient(record)
    for part in there:
        record.store.tensor_io.add_value(slot.part(part), _part_of(grad, rows, part), Tier.DEVICE)
    for part in missing:
        record.store.tensor_io.write_value(slot.part(part), _part_of(grad, rows, part), Tier.DEVICE)
        record.gradient.add_rows(part)
    _note_arrival(record)


def _note_arrival(record: StoredParameter) -> None:
    """Note that a gradient has been stored or added; with the last one of a step, its update may begin."""
    record.gradient.note_arrival()
    if record.store.updates_ahead is not None:
        record.store.updates_ahead.take(record)


def _part_of(grad: Tensor, rows: Slice, part: Slice) -> Tensor:
    """Return a part of what there is of the gradient of a tile."""
    return grad if part == rows else grad.narrow(rows.dim, part.start - rows.start, part.length)


@without_interrupts
def take_gradient_home(parameter: Tensor) -> None:
    """After autograd accumulated into a parameter itself (outside of captured graphs), move a fresh gradient home."""
    record = record_of(parameter)
    assert record is not None
    store = store_of(record)
    with torch._C.DisableTorchFunctionSubclass():
        grad, slot = parameter.grad, record.gradient.slot
        if grad is None or slot is None:
            return
        if grad.layout is not torch.strided:
            parameter.grad = None
            _refuse_sparse(record, grad)
        if slot.is_home_of(grad):
            if not record.gradient.is_untouched:  # autograd has added to it in place
                record.gradient.forget_norms()
                _note_arrival(record)
            return
        store.check_usable(record)
        grad = local_of(grad)
        # Autograd's gradient is on the device of the parameter that users see.
        source = Tier.DEVICE if store.device.memory.unified else Tier.HOST
        if store.early_step is not None and store.early_step.take(record, grad, source):
            parameter.grad = None
            return
        with store.failing_on_error():
            _put_gradient(record, grad, source)
        finish_with_backward(store)
        _note_arrival(record)


def finish_with_backward(store: Store) -> None:
    """Wait for gradients on their way home at the end of the backward that runs now; at once if none does."""
    if torch._C._current_graph_task_id() == -1:
        store.finish_gradients()
    else:
        Variable._execution_engine.queue_callback(store.finish_gradients)


def _refuse_sparse(record: StoredParameter, grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise UnsupportedError(
            f"the gradient of '{record.name}' is a {grad.layout} tensor, but a store keeps dense ones; build its module "
            "with sparse=False"
        )


def _put_gradient(record: StoredParameter, grad: Tensor, source: Tier, experts: Sequence[range] | None = None) -> None:
    """Start writing a new gradient to its home, and set ``parameter.grad`` to it."""
    slot = begin_gradient(record)
    leaves_device = (
        source is Tier.DEVICE and record.store.memory.is_behind_link(Tier.DEVICE) and record.store.ranks.is_alone
    )
    if (leaves_device or not slot.in_memory) and grad.is_contiguous() and grad.dtype == slot.tensor.dtype:
        note_norms(record, grad, leaves_device=leaves_device)
    rows = None if experts is None else [slot.slice.part(each.start, each.stop) for each in experts]
    record.store.tensor_io.write_value(slot, grad, source, nonzero=rows)
    record.parameter.grad = show_gradient(record)
