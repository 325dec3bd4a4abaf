"""Give a parameter a compute copy narrower than what its model computes with, for graphs that cast every read of it."""

import torch

from zinf_compile.runtime.slot_stream import convert_slot
from zinf_compile.runtime.slots import StoredParameter


def narrow_parameter(record: StoredParameter, dtype: torch.dtype) -> None:
    """Make a compute copy of ``dtype`` beside the one copy there is, which becomes the master copy; blocks.

    The new one begins where that is at home, and takes the place of a compute copy that was apart already. StoreError if
    bytes cannot be moved.
    """
    store, master = record.store, record.master
    if record.has_compute_copy:
        wide, record.compute = record.compute, master
        store.count_home(wide.tier, -wide.nbytes)
        wide.give_back(store.layout)
    compute = store.new_slot(record.name, master.tensor.shape, dtype, master.tier)
    master.name = f"{record.name} (master copy)"
    with store.failing_on_error():
        convert_slot(master, compute, store.transfers)
        store.transfers.wait_writes()
    record.compute = compute
