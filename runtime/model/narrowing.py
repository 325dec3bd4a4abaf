"""Give a parameter a compute copy narrower than what its model computes with, for graphs that cast every read of it."""

import torch

from zinf_compile.ir.copies import MASTER
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.store.store import Store
from zinf_compile.runtime.transfer.slot_stream import convert_slot


def narrow_parameter(store: Store, record: StoredParameter, dtype: torch.dtype) -> None:
    """Make a compute copy of ``dtype`` beside the one copy there is, which becomes the master copy; blocks.

    The new one is made on the tier of the master copy, and replaces a separate compute copy if there was one. StoreError
    if bytes cannot be moved.
    """
    store.join_master(record)
    master = record.copies.master
    if (wide := record.copies.drop_compute()) is not None:
        store.held.count_home(wide.tier, -wide.nbytes)
        wide.give_back(store.layout)
    compute = store.new_slot(record.name, record.shape, dtype, master.tier, is_whole=master.num_ranks == 1)
    master.key = MASTER
    with store.failing_on_error():
        convert_slot(master, compute, store.tensor_io)
        store.tensor_io.wait_writes()
    record.copies.narrow(compute)
