"""Give a parameter that was frozen when it was taken into the store what training it needs."""

from zinf_compile.ir.copies import GRADIENT, MASTER, Role
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Placement
from zinf_compile.runtime.model.adoption import train_parameter
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.storage.slots import torch_dtype
from zinf_compile.runtime.store.store import Store
from zinf_compile.runtime.transfer.slot_stream import convert_slot


@without_interrupts
def unfreeze_parameter(store: Store, record: StoredParameter, fact: ParameterFact, placement: Placement) -> None:
    """Make a gradient, and a master copy where there is none and compute has another dtype, at the homes of ``placement``.

    The master copy begins as the compute copy, widened. From its next gather on, captured graphs are captured again with
    its gradient. StoreError, before anything has changed, if the disk has no room.
    """
    store.reserve([placement])
    _decode_home(store, record, placement.compute)
    compute = record.copies.compute
    shape = record.shape
    master = record.copies.master
    if fact.has_compute_copy and not record.copies.are_two:
        master = store.new_slot(fact.name, shape, torch_dtype(fact.dtype), placement.master, MASTER)
        with store.failing_on_error():
            if compute.tier is Tier.NVME:
                convert_slot(compute, master, store.tensor_io)
            else:
                store.tensor_io.write_value(master, compute.elements(master.slice).view(master.tensor.shape))
            store.tensor_io.wait_writes()
    home = placement.by_role[Role.GRADIENT][0].tier
    gradient = store.new_slot(fact.name, shape, record.dtype, home, GRADIENT)
    train_parameter(store, record, master, gradient)
    store.facts[fact.name], store.placements[fact.name] = fact, placement


def _decode_home(store: Store, record: StoredParameter, tier: Tier) -> None:
    """Give a weight that is stored as rows of int8 an exact home, with the values that it has."""
    rounded = record.copies.compute
    if rounded.row_code is None:
        return
    store.refresh_one(record)
    if rounded.rows is None and rounded.tier is tier:
        rounded.stay_exact()
        return
    exact = store.new_slot(record.name, record.shape, rounded.dtype, tier)
    store.held.count_home(rounded.tier, -rounded.taken_nbytes)
    with store.failing_on_error():
        for part, piece in store.tensor_io.read_pieces(rounded):
            store.tensor_io.write_value(exact.part(part), piece)
        store.tensor_io.wait_writes()
    record.copies.replace(rounded, exact)
    record.views.move(record.parameter, record.home)
    rounded.give_back(store.layout)
