"""The values of stored parameters, written and read in pieces."""

from collections.abc import Iterator

import torch
from torch import Tensor

from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.storage.slots import elements_of


@without_interrupts
def write_piece(record: StoredParameter, first: int, values: Tensor) -> None:
    """Start writing consecutive elements, from ``first`` on, of a parameter's value; ``end_writes`` makes them home.

    A piece that does not reach the end of the parameter begins and ends at a multiple of 4096 elements. The compute copy is
    cast from what the master copy then holds.
    """
    store = record.store
    store.join_master(record)
    flat = values.to(record.original_dtype).reshape(-1)
    written = Slice.of_whole(record.name, record.shape).flat.part(first, first + flat.numel())
    if record.copies.in_place is not None:
        assert store.session is not None
        store.session.leave_weights(record, with_value=flat.numel() < record.shape.numel())
    with store.failing_on_error():
        for slot in record.copies.all[::-1]:
            if (part := written.intersect(slot.slice)) is not None:  # of several ranks each writes its rows
                store.tensor_io.write_value(slot.part(part), elements_of(flat, written, part))


def copy_rows(record: StoredParameter, first: int, values: Tensor, rows: Tensor) -> None:
    """Copy what this rank has of consecutive elements of a value, from ``first`` on, to its place among its rows, flat."""
    flat = values.reshape(-1)
    read = Slice.of_whole(record.name, record.shape).flat.part(first, first + flat.numel())
    if (part := read.intersect(record.shard)) is not None:
        elements_of(rows, record.shard, part).copy_(elements_of(flat, read, part))


@without_interrupts
def end_writes(record: StoredParameter) -> None:
    """Block until what was written is home; raise the parameter's version, and mark the compute copy as in sync."""
    with record.store.failing_on_error():
        record.store.tensor_io.wait_writes()
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.graph.increment_version(record.parameter)
    record.copies.sync(record.version)


def read_pieces(record: StoredParameter) -> Iterator[Tensor]:
    """Yield a parameter's value as flat tensors, in order; each is valid until the next is asked for."""
    store = record.store
    store.check_usable(record)  # once its update is done
    with store.failing_on_error():
        yield from (piece for _, piece in store.tensor_io.read_pieces(record.copies.master))
