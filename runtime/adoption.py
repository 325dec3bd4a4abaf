"""Adoption: parameters get slots in the store, their values move home, and the parameters show them from then on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from zinf_compile.facts import ParameterFact
from zinf_compile.plans import Placement
from zinf_compile.runtime.gradients import take_gradient_home
from zinf_compile.runtime.home import HomeParameter
from zinf_compile.runtime.numbers import new_id
from zinf_compile.runtime.ram import return_freed_memory
from zinf_compile.runtime.slots import RECORD, Seat, Slot, StoredParameter, give_memory, torch_dtype
from zinf_compile.runtime.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameter:
    """A parameter to adopt, with its facts."""

    parameter: Parameter
    fact: ParameterFact


def adopt_parameters(
    store: Store,
    parameters: Sequence[NamedParameter],
    placements: Sequence[Placement],
    *,
    as_home: bool,
    with_values: bool = True,
) -> None:
    """Move parameters home, one at a time, freeing what they occupied.

    Reserves the disk space of all of them first, so that a disk too small is an error before anything has moved.
    With ``as_home`` they become ``HomeParameter``; else they keep their class. Without ``with_values`` nothing moves:
    somebody else writes the first values. Parameters on meta have none, and get memory.
    """
    homes = {placement.parameter: placement for placement in placements}
    store.reserve(placements)
    store.memory.announce(placements, store.staging.capacity)
    compute = {}
    for item in parameters:  # compute copies first and in module order, so that a block's are one read
        name, dtype = item.fact.name, torch_dtype(item.fact.compute_dtype)
        compute[name] = store.new_slot(name, item.parameter.shape, dtype, homes[name].compute)
    with store.failing_on_error():
        for item in parameters:
            name = item.fact.name
            _adopt(store, item, homes[name], compute[name], as_home=as_home, with_value=with_values)
        store.transfers.wait_writes()
    return_freed_memory()


def _adopt(
    store: Store, item: NamedParameter, placement: Placement, compute: Slot, *, as_home: bool, with_value: bool
) -> None:
    parameter, fact = item.parameter, item.fact
    master, gradient = compute, None
    if fact.has_compute_copy and fact.trainable:
        master = store.new_slot(f"{fact.name} (master copy)", parameter.shape, parameter.dtype, placement.master)
        if with_value:
            store.transfers.write_value(master, parameter.data)
    if fact.trainable:
        gradient = store.new_slot(f"{fact.name} (gradient)", parameter.shape, compute.tensor.dtype, placement.gradient)
    if with_value:
        store.transfers.write_value(compute, parameter.data)
    record = StoredParameter(
        param=new_id(),
        name=fact.name,
        parameter=parameter,
        store=store,
        compute=compute,
        master=master,
        gradient=None,
        seat=Seat(store.frozen_anchor),
        dtype=compute.tensor.dtype,
    )
    if parameter.is_meta:
        give_memory(parameter, master.tensor)
    setattr(parameter, RECORD, record)
    if gradient is not None:
        train_parameter(record, master, gradient)
    else:
        parameter.data = compute.tensor  # of a frozen parameter that is all there is, in its dtype
        record.synced_version = record.version
    if as_home:
        parameter.__class__ = HomeParameter
    store.add(record, fact, placement)


def train_parameter(record: StoredParameter, master: Slot, gradient: Slot) -> None:
    """Give a record the slots that training needs, and let its parameter show them."""
    parameter = record.parameter
    record.master, record.gradient, record.seat.anchor = master, gradient, record.store.anchor
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = master.tensor
        parameter.requires_grad_(True)
        if gradient.tensor.dtype != parameter.dtype:
            parameter.grad_dtype = gradient.tensor.dtype
        parameter.register_post_accumulate_grad_hook(take_gradient_home)
    record.synced_version = record.version
