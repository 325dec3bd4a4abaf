"""``save``: writes a model and its optimizer to a folder, in constant memory; a crash leaves an intact checkpoint."""

import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from zinf_compile.checkpoint.arguments import check_arguments, file_staging, resting
from zinf_compile.checkpoint.checkpoint_folder import (
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
from zinf_compile.checkpoint.match import group_names, state_name
from zinf_compile.checkpoint.objects import collect_objects, dump_objects, ranks_of
from zinf_compile.checkpoint.on_ranks import Written, combine, create_file, write_rows
from zinf_compile.ir.errors import CapacityError, ZinfError
from zinf_compile.ir.glossary import dtype_name, format_bytes
from zinf_compile.runtime.model.model_state import (
    HomedTensor,
    gradient_tensors,
    model_tensors,
    state_tensors,
    stores_of,
    tied_names,
)
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.ranks.ranks import Ranks
from zinf_compile.runtime.storage.file_stream import FileWriter
from zinf_compile.runtime.storage.safetensors_file import SafetensorsLayout, lay_out
from zinf_compile.runtime.storage.staging import StagingPool
from zinf_compile.runtime.transfer.slot_stream import write_slot


@without_interrupts
def save(
    folder: str | os.PathLike[str], model: Module, optimizer: Optimizer | None = None, *, extra: object = None
) -> None:
    """Save everything that training needs to continue bitwise; ``load`` accepts it under any budgets, or without any.

    Saved are parameters, persistent buffers, pending gradients, the optimizer's state and options, torch's CPU random
    state, and ``extra``: anything made of numbers, strings, tensors, lists, tuples and dicts, such as a scheduler's
    ``state_dict()``. An existing checkpoint in ``folder`` is replaced at the very end, so that a crash at any time
    leaves one of the two intact; until then both take space. Returns when everything is on disk.

    Raises ConfigError for arguments that cannot be saved, CapacityError if the disk is too small, and StoreError if a
    write fails or the model was stopped by an earlier error. The checkpoint in ``folder`` is not changed then.
    """
    folder, model = Path(folder), check_arguments(model, optimizer)
    groups = group_names(model, optimizer)
    with resting(stores_of(model)) as stores:
        for store in stores:
            store.check_usable()
        files = _collect_tensors(model, optimizer)
        layouts = {
            # As safetensors.torch.save_model says it.
            file: lay_out(
                {name: _form(tensor) for name, tensor in tensors.items()},
                metadata=(file == MODEL and tied_names(model)) or None,
            )
            for file, tensors in files.items()
            if tensors or file == MODEL
        }
        objects = dump_objects(collect_objects(model, optimizer, extra))
        if not (ranks := ranks_of(model)).is_alone:
            name = None if optimizer is None else type(optimizer).__qualname__
            _save_on_ranks(ranks, folder, files, layouts, objects, partial(Manifest, optimizer=name, groups=groups))
            return
        make_folder(folder)
        with locked(folder, exclusive=True):
            before = read_manifest(folder)
            try:
                data = make_data_folder(folder, before)
                check_room(folder, sum(layout.nbytes for layout in layouts.values()) + len(objects))
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
                with suppress(ZinfError):  # leftovers are removed by the next save
                    if read_manifest(folder) == before:  # otherwise the rename may or may not be on disk: keep both
                        remove_leftovers(folder, before)
                raise
            remove_leftovers(folder, manifest)


def _form(tensor: HomedTensor) -> Tensor:
    """Return a tensor of the shape and dtype that a file has of another one, without memory."""
    if (coded := tensor.slot.coded) is None:
        return torch.empty(tensor.shape, dtype=tensor.slot.dtype, device="meta")
    return torch.empty(coded.code.pages_shape(coded.slice.num_elements), dtype=torch.uint8, device="meta")


def _describe(file: str, name: str, tensor: HomedTensor, crc32: int) -> SavedTensor:
    dtype, shape = dtype_name(tensor.slot.dtype), tuple(tensor.shape)
    return SavedTensor(file=file, name=name, dtype=dtype, shape=shape, crc32=crc32, code=tensor.slot.code)


def _save_on_ranks(
    ranks: Ranks,
    folder: Path,
    files: Mapping[str, dict[str, HomedTensor]],
    layouts: Mapping[str, SafetensorsLayout],
    objects: bytes,
    make_manifest: Callable[..., Manifest],
) -> None:
    """Save what several ranks have: rank 0 makes the folder and publishes it, and each rank writes its rows."""
    before: list[Manifest | None] = []
    is_first = ranks.mesh_rank == 0
    with ExitStack() as stack:

        def begin() -> str:
            make_folder(folder)
            stack.enter_context(locked(folder, exclusive=True))
            before.append(read_manifest(folder))
            data = make_data_folder(folder, before[0])
            check_room(folder, sum(layout.nbytes for layout in layouts.values()) + len(objects))
            for file, layout in layouts.items():
                create_file(data / file, layout)
            return data.name

        def write() -> list[list[Written]]:
            return [write_rows(folder / name / file, layout, files[file], ranks) for file, layout in layouts.items()]

        def end() -> None:
            write_file(folder / name / OBJECTS, objects)
            columns = [zip(*of_file, strict=True) for of_file in zip(*everywhere, strict=True)]
            saved = [
                _describe(file, span.name, files[file][span.name], combine(parts))
                for (file, layout), column in zip(layouts.items(), columns, strict=True)
                for span, parts in zip(layout.spans, column, strict=True)
            ]
            publish(folder, make_manifest(data_folder=name, objects_crc32=zlib.crc32(objects), tensors=tuple(saved)))

        try:
            begun = ranks.do_alike("beginning a checkpoint", begin if is_first else str)
            name = ranks.exchange("the folder of a checkpoint", begun)[0]
            everywhere = ranks.exchange("checksums", ranks.do_alike("writing a checkpoint", write))
            ranks.do_alike("publishing a checkpoint", end if is_first else type(None))
        except BaseException:
            with suppress(ZinfError):
                if before and read_manifest(folder) == before[0]:
                    remove_leftovers(folder, before[0])
            raise
        if is_first:
            remove_leftovers(folder, read_manifest(folder))


def _collect_tensors(model: Module, optimizer: Optimizer | None) -> dict[str, dict[str, HomedTensor]]:
    """Return the tensors of each file by name."""
    states = {
        state_name(name, key): tensor
        for name, parameter in model.named_parameters()
        if optimizer is not None
        for key, tensor in state_tensors(optimizer, parameter).items()
    }
    return {MODEL: model_tensors(model), OPTIMIZER: states, GRADIENTS: gradient_tensors(model)}


def check_room(folder: Path, needed: int) -> None:
    """Raise CapacityError if the disk of a folder has less free space than a checkpoint takes."""
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
            checksum = write_slot(writer, tensor.slot, tensor.tensor_io)
            saved.append(_describe(file, span.name, tensor, checksum))
        writer.finish()
    return saved
