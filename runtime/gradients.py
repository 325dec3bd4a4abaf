"""Gradients that arrive: each goes home, is handed to autograd, updates its parameter at once, or is dropped."""

from functools import partial

import torch
from torch import Tensor

from zinf_compile.errors import StoreError, UnsupportedError
from zinf_compile.runtime.home_gradient import begin_gradient, note_norms, settle_gradient, show_gradient
from zinf_compile.runtime.leaves import Delivery, choose_delivery
from zinf_compile.runtime.slots import Slot, StoredParameter, record_of
from zinf_compile.runtime.tiles import StoredTile
from zinf_compile.terms import Tier


def store_gradient(stored: StoredParameter | StoredTile, grad: Tensor) -> None:
    """Start moving a gradient, or a tile of one, home, or adding it to what is there; ``wait_writes`` ends it.

    One that autograd must see is handed over instead, and one that nobody asked for dropped.
    """
    record = stored.whole
    store, slot, parameter = record.store, record.gradient, record.parameter
    store.check_usable(record)  # once its update is done
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
        if isinstance(stored, StoredTile):
            _store_tile(stored, slot, grad)
        elif parameter.grad is None:
            if store.early_step is None or not store.early_step.take(record, grad):
                _put_gradient(record, grad, Tier.DEVICE)
        elif slot.is_home_of(parameter.grad):
            store.await_gradient(record)
            on_sum = partial(note_norms, record) if store.wanted_norms else None
            store.transfers.add_value(slot, grad, Tier.DEVICE, on_sum=on_sum)
        else:  # the user put a gradient there: it is theirs, and accumulates in place as in PyTorch
            parameter.grad.add_(grad.to(parameter.grad.device, parameter.grad.dtype))


def _hand_over(stored: StoredParameter | StoredTile, grad: Tensor) -> None:
    """Keep a gradient until autograd takes it: a copy, since what a graph computed may lie in the arena."""
    record = stored.whole
    if isinstance(stored, StoredTile):
        if record.handed is None:
            record.handed = torch.zeros(record.parameter.shape, dtype=grad.dtype)
        record.handed.narrow(0, stored.first_row, stored.num_rows).add_(grad.to(record.handed.device))
    else:
        grad = grad.to(record.parameter.device)  # where autograd takes it to be
        record.handed = grad.clone() if record.handed is None else record.handed + grad


def _store_tile(tile: StoredTile, slot: Slot, grad: Tensor) -> None:
    """Start moving a tile of a gradient home, or adding it to what is there. It waits for the optimizer there."""
    record, parameter = tile.whole, tile.whole.parameter
    if parameter.grad is None:  # the first tile of a new one
        slot = begin_gradient(record)
        record.tiles_home = {}
        parameter.grad = show_gradient(record)
    elif not slot.is_home_of(parameter.grad):  # the user put a gradient there: it is theirs
        theirs = parameter.grad.narrow(0, tile.first_row, tile.num_rows)
        theirs.add_(grad.to(theirs.device, theirs.dtype))
        return
    if record.tiles_home is None or tile.first_row in record.tiles_home:
        record.store.finish(record)  # with step_in_backward too: the parameter is not updated before ``step()``
        settle_gradient(record)
        record.store.transfers.add_value(tile.rows_of(slot), grad, Tier.DEVICE)
        return
    record.store.transfers.write_value(slot, grad, Tier.DEVICE, first=tile.rows_of(slot).first_element)
    record.tiles_home[tile.first_row] = tile.num_rows
    if sum(record.tiles_home.values()) == slot.tensor.shape[0]:
        record.tiles_home = None


def take_gradient_home(parameter: Tensor) -> None:
    """After autograd accumulated into a parameter itself (outside of captured graphs), move a fresh gradient home."""
    record = record_of(parameter)
    assert record is not None
    store = record.store
    with torch._C.DisableTorchFunctionSubclass():
        grad, slot = parameter.grad, record.gradient
        if grad is None or slot is None:
            return
        if grad.layout is not torch.strided:
            parameter.grad = None
            _refuse_sparse(record, grad)
        if slot.is_home_of(grad):
            return
        store.check_usable(record)
        if store.early_step is not None and store.early_step.take(record, grad):
            parameter.grad = None
            return
        with store.failing_on_error():
            # Autograd's gradient is where the parameter is that people see.
            _put_gradient(record, grad, Tier.DEVICE if store.device is None else Tier.HOST)
            store.transfers.wait_writes()


def _refuse_sparse(record: StoredParameter, grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise UnsupportedError(
            f"the gradient of '{record.name}' is a {grad.layout} tensor, and a store keeps dense ones; build its module "
            "with sparse=False"
        )


def _put_gradient(record: StoredParameter, grad: Tensor, source: Tier) -> None:
    """Start writing a new gradient home, and show it."""
    slot = begin_gradient(record)
    if not slot.in_memory and grad.is_contiguous() and grad.dtype == slot.tensor.dtype:
        note_norms(record, grad)
    record.store.transfers.write_value(slot, grad, source)
    record.parameter.grad = show_gradient(record)
