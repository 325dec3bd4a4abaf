"""Adoption: parameters get slots in the store, their values move there, and they become views of these homes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.nn import Parameter

from zinf_compile.ir.copies import GRADIENT, MASTER, Role
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.plan import Placement
from zinf_compile.runtime.execute.gradients import take_gradient_home
from zinf_compile.runtime.params.copies import Copies, Seat
from zinf_compile.runtime.params.numbers import new_id
from zinf_compile.runtime.params.records import RECORD, StoredParameter, give_memory, holders_of
from zinf_compile.runtime.params.views import make_views
from zinf_compile.runtime.process.interrupts import check_interrupt, without_interrupts
from zinf_compile.runtime.process.ram import return_freed_memory
from zinf_compile.runtime.storage.nvme.weight_file import WeightSpan
from zinf_compile.runtime.storage.slots import Slot, torch_dtype
from zinf_compile.runtime.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameter:
    """A parameter to adopt, with its facts."""

    parameter: Parameter
    fact: ParameterFact


@without_interrupts
def adopt_parameters(
    store: Store,
    parameters: Sequence[NamedParameter],
    placements: Sequence[Placement],
    *,
    as_home: bool,
    with_values: bool = True,
    weights: Mapping[str, WeightSpan] = MappingProxyType({}),
) -> None:
    """Move parameters home, one at a time, freeing what they occupied.

    Reserves the disk space of all of them first, so that a disk too small is an error before anything has moved.
    With ``as_home`` they become ``HomeParameter``; else, and if they are components of quantised ones, they keep their
    class. Without ``with_values`` nothing moves: the caller writes the first values, but for copies that are in place by
    their placement: ``weights`` has those. Parameters on meta have no value, and get memory.
    """
    homes = {placement.parameter: placement for placement in placements}
    store.reserve(placements)
    store.memory.announce(placements, store.staging.capacity)
    compute = {}
    for item in parameters:  # compute copies first and in module order, so that a block's are one read
        name, dtype = item.fact.name, torch_dtype(item.fact.compute_dtype)
        is_whole, rows = homes[name].is_whole(Role.COMPUTE), item.fact.compute.rows
        span = weights[name] if homes[name].by_role[Role.COMPUTE][0].is_in_place else None
        compute[name] = store.new_slot(
            name, item.parameter.shape, dtype, homes[name].compute, is_whole=is_whole, row_code=rows, weights=span
        )
    with store.failing_on_error():
        for item in parameters:
            check_interrupt()
            name = item.fact.name
            _adopt(store, item, homes[name], compute[name], as_home=as_home, with_value=with_values)
        store.tensor_io.wait_writes()
    return_freed_memory()


def _adopt(
    store: Store, item: NamedParameter, placement: Placement, compute: Slot, *, as_home: bool, with_value: bool
) -> None:
    parameter, fact = item.parameter, item.fact
    master, gradient = compute, None
    if fact.has_compute_copy and fact.trainable:
        master = store.new_slot(fact.name, parameter.shape, parameter.dtype, placement.master, MASTER)
        if with_value:
            store.tensor_io.write_value(master, master.rows_of(parameter.data))
    if fact.trainable:
        home = placement.by_role[Role.GRADIENT][0].tier
        gradient = store.new_slot(fact.name, parameter.shape, compute.tensor.dtype, home, GRADIENT)
    if with_value:
        store.tensor_io.write_value(compute, compute.rows_of(parameter.data))
    record = StoredParameter(
        param=new_id(),
        name=fact.name,
        parameter=parameter,
        shape=parameter.shape,
        views=make_views(store.ranks, parameter),
        store=store,
        dtype=compute.tensor.dtype,
        copies=Copies(compute=compute, master=master, seat=Seat(store.frozen_anchor), weights=compute.weights),
    )
    if parameter.is_meta and store.ranks.is_alone:
        give_memory(parameter, master.tensor)
    is_component = bool(holders_of(parameter))
    record.parameter = record.views.seat(parameter, record.home, as_home=as_home and not is_component)
    setattr(record.parameter, RECORD, record)
    if gradient is not None:
        train_parameter(store, record, master, gradient)
    else:  # a frozen parameter has only the compute copy, in its dtype
        record.copies.sync(record.version)
    store.add(record, fact, placement)


def train_parameter(store: Store, record: StoredParameter, master: Slot, gradient: Slot) -> None:
    """Give a record the slots that training needs, and make its parameter a view of the master copy."""
    parameter = record.parameter
    record.copies.train(master, store.anchor)
    record.gradient.train(gradient)
    record.views.move(parameter, record.home)
    with torch._C.DisableTorchFunctionSubclass():
        parameter.requires_grad_(True)
        if gradient.tensor.dtype != parameter.dtype:
            parameter.grad_dtype = gradient.tensor.dtype
        parameter.register_post_accumulate_grad_hook(take_gradient_home)
    record.copies.sync(record.version)
