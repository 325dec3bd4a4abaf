"""Give a parameter that was frozen when it was taken into the store what training it needs."""

from zinf_compile.facts import ParameterFact
from zinf_compile.plans import Placement
from zinf_compile.runtime.adoption import train_parameter
from zinf_compile.runtime.slots import StoredParameter, torch_dtype
from zinf_compile.runtime.store import Store


def thaw_parameter(store: Store, record: StoredParameter, fact: ParameterFact, placement: Placement) -> None:
    """Make a gradient, and a master copy where there is none and compute has another dtype, at the homes of ``placement``.

    The master copy begins as the compute copy, widened. From its next gather on, captured graphs are captured again with
    its gradient. StoreError, before anything has changed, if the disk has no room.
    """
    compute = record.compute
    store.reserve([placement])
    shape = compute.tensor.shape
    master = record.master
    if fact.has_compute_copy and not record.has_compute_copy:
        master = store.new_slot(f"{fact.name} (master copy)", shape, torch_dtype(fact.dtype), placement.master)
        with store.failing_on_error():
            store.transfers.write_value(master, compute.tensor)
            store.transfers.wait_writes()
    gradient = store.new_slot(f"{fact.name} (gradient)", shape, record.dtype, placement.gradient)
    train_parameter(record, master, gradient)
    store.facts[fact.name], store.placements[fact.name] = fact, placement
