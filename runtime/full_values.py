"""The values of stored parameters, written and read in pieces."""

from collections.abc import Iterator

import torch
from torch import Tensor

from zinf_compile.runtime.slots import StoredParameter


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
    record.synced_version, record.exposed = record.version, False


def read_pieces(record: StoredParameter) -> Iterator[Tensor]:
    """Yield a parameter's value as flat tensors, in order; each is valid until the next is asked for."""
    store = record.store
    store.check_usable(record)  # once its update is done
    with store.failing_on_error():
        yield from store.transfers.read_pieces(record.master)
