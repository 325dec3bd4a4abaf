"""``save``: a model and its optimizer to a folder, in constant memory; a crash at any instant leaves a whole checkpoint."""

import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

from torch.nn import Module
from torch.optim import Optimizer

from zinf_compile.checkpoint.arguments import check_arguments, file_staging, resting
from zinf_compile.checkpoint.match import group_names, state_name
from zinf_compile.checkpoint.objects import collect_objects, dump_objects
from zinf_compile.errors import CapacityError
from zinf_compile.runtime.checkpoint_folder import (
    GRADIENTS,
    MODEL,
    OBJECTS,
    OPTIMIZER,
    Manifest,
    SavedTensor,
    locked,
    make_data_folder,
    make_folder,
    publish,
    read_manifest,
    remove_leftovers,
    write_file,
)
from zinf_compile.runtime.file_stream import FileWriter
from zinf_compile.runtime.model_state import (
    HomedTensor,
    gradient_tensors,
    model_tensors,
    state_tensors,
    stores_of,
)
from zinf_compile.runtime.safetensors_file import SafetensorsLayout, lay_out
from zinf_compile.runtime.slot_stream import write_slot
from zinf_compile.runtime.staging import StagingPool
from zinf_compile.terms import dtype_name, format_bytes


def save(
    folder: str | os.PathLike[str], model: Module, optimizer: Optimizer | None = None, *, extra: object = None
) -> None:
    """Save all that training goes on from: ``load`` then resumes bit by bit, under any budgets, or without any.

    Saved are parameters, persistent buffers, pending gradients, the optimizer's state and options, torch's CPU random
    state, and ``extra``: anything of numbers, strings, tensors, lists, tuples and dicts, such as a scheduler's
    ``state_dict()``. A checkpoint that is in ``folder`` already is replaced at the very end, so that a crash at any
    instant leaves the one or the other whole; until then both take space. Returns when all of it is on the disk.

    Raises ConfigError for arguments that cannot be saved, CapacityError for a disk too small, and StoreError for a write
    that failed, or a model that an earlier error stopped. The checkpoint in ``folder`` is then what it was.
    """
    folder, model = Path(folder), check_arguments(model, optimizer)
    groups = group_names(model, optimizer)
    with resting(stores_of(model)) as stores:
        for store in stores:
            store.check_usable()
        files = _collect_tensors(model, optimizer)
        layouts = {
            file: lay_out({name: tensor.slot.tensor for name, tensor in tensors.items()})
            for file, tensors in files.items()
            if tensors or file == MODEL
        }
        objects = dump_objects(collect_objects(model, optimizer, extra))
        make_folder(folder)
        with locked(folder, exclusive=True):
            before = read_manifest(folder)
            data = make_data_folder(folder, before)
            try:
                _check_room(folder, sum(layout.nbytes for layout in layouts.values()) + len(objects))
                staging = file_staging(stores)
                saved: list[SavedTensor] = []
                for file, layout in layouts.items():
                    saved += _write_tensors(data, file, layout, files[file], staging)
                write_file(data / OBJECTS, objects)
                manifest = Manifest(
                    data_folder=data.name,
                    objects_crc32=zlib.crc32(objects),
                    optimizer=None if optimizer is None else type(optimizer).__qualname__,
                    groups=groups,
                    tensors=tuple(saved),
                )
                publish(folder, manifest)
            except BaseException:
                if read_manifest(folder) == before:
                    shutil.rmtree(data, ignore_errors=True)  # what is left of it goes with the next save
                raise
            remove_leftovers(folder, manifest)


def _collect_tensors(model: Module, optimizer: Optimizer | None) -> dict[str, dict[str, HomedTensor]]:
    """Return the tensors of each file by name."""
    states = {
        state_name(name, key): tensor
        for name, parameter in model.named_parameters()
        if optimizer is not None
        for key, tensor in state_tensors(optimizer, parameter).items()
    }
    return {MODEL: model_tensors(model), OPTIMIZER: states, GRADIENTS: gradient_tensors(model)}


def _check_room(folder: Path, needed: int) -> None:
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise CapacityError(
            f"this checkpoint needs {format_bytes(needed)} in '{folder}', beside the one that may be there, and "
            f"{format_bytes(free)} are free; free some space, or save to another disk"
        )


def _write_tensors(
    data: Path, file: str, layout: SafetensorsLayout, tensors: Mapping[str, HomedTensor], staging: StagingPool
) -> list[SavedTensor]:
    saved = []
    with FileWriter(str(data / file), layout.nbytes, staging) as writer:
        writer.write(memoryview(layout.header))
        for span in layout.spans:
            tensor = tensors[span.name]
            checksum = write_slot(writer, tensor.slot, tensor.transfers)
            saved.append(
                SavedTensor(
                    file=file,
                    name=span.name,
                    dtype=dtype_name(span.dtype),
                    shape=span.shape,
                    crc32=checksum,
                )
            )
        writer.finish()
    return saved
