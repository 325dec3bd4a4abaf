"""``save``: writes a model and its optimizer to a folder, in constant memory; a crash leaves an intact checkpoint."""

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
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
from zinf_compile.checkpoint.match import group_names, parameter_of, state_name
from zinf_compile.checkpoint.objects import Objects, collect_objects, dump_objects, join_objects
from zinf_compile.checkpoint.on_ranks import Written, combine, create_file, write_mine
from zinf_compile.ir.errors import CapacityError, ZinfError
from zinf_compile.ir.glossary import dtype_name, format_bytes
from zinf_compile.runtime.model.model_state import (
    HomedTensor,
    gradient_tensors,
    is_divided,
    model_tensors,
    ranks_of,
    state_tensors,
    stores_of,
    tied_names,
)
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.ranks.ranks import Ranks
from zinf_compile.runtime.storage.file_stream import FileWriter
from zinf_compile.runtime.storage.safetensors_file import SafetensorsLayout, lay_out
from zinf_compile.runtime.storage.slots import torch_dtype
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
        ranks = ranks_of(model)
        content = ranks.do_alike("collecting a checkpoint", partial(_collect, model, optimizer, extra))
        if not ranks.is_alone:
            content = _join(content, model, ranks)
        layouts = {
            # As safetensors.torch.save_model says it.
            file: lay_out(
                {name: _form(saved) for name, saved in tensors.items()},
                metadata=(file == MODEL and tied_names(model)) or None,
            )
            for file, tensors in content.described.items()
            if tensors or file == MODEL
        }
        objects = content.dumped
        if not ranks.is_alone:
            name = None if optimizer is None else type(optimizer).__qualname__
            _save_on_ranks(ranks, folder, content, layouts, partial(Manifest, optimizer=name, groups=groups))
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
                    saved += _write_tensors(data, file, layout, content, staging)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """What a checkpoint is to hold."""

    tensors: dict[str, dict[str, HomedTensor]]  # by file and name: what this process has of them
    described: dict[str, dict[str, SavedTensor]]  # of each file all tensors, in order; not written yet
    objects: Objects
    dumped: bytes  # the objects, as rank 0 writes them


def _collect(model: Module, optimizer: Optimizer | None, extra: object) -> _Content:
    """Return what this process has to save; what cannot be saved is refused."""
    for store in stores_of(model):
        store.check_usable()
    states = {
        state_name(name, key): tensor
        for name, parameter in model.named_parameters()
        if optimizer is not None
        for key, tensor in state_tensors(optimizer, parameter).items()
    }
    tensors = {MODEL: model_tensors(model), OPTIMIZER: states, GRADIENTS: gradient_tensors(model)}
    described = {
        file: {name: _describe(file, name, tensor) for name, tensor in of_file.items()}
        for file, of_file in tensors.items()
    }
    objects = collect_objects(model, optimizer, extra)
    return _Content(tensors=tensors, described=described, objects=objects, dumped=dump_objects(objects))


def _join(content: _Content, model: Module, ranks: Ranks) -> _Content:
    """Return what all ranks save together, with the tensors that this one writes, or has rows of."""
    in_rows = is_divided(model)

    def is_mine(file: str, tensor: HomedTensor) -> bool:
        if ranks.rank == 0 or tensor.is_divided:
            return True
        return not in_rows and (file != MODEL or tensor.record is not None)  # every rank has all buffers

    tensors = {
        file: {name: tensor for name, tensor in of_file.items() if is_mine(file, tensor)}
        for file, of_file in content.tensors.items()
    }
    described = content.described
    if not in_rows:
        given = ranks.exchange("the tensors of a checkpoint", described)
        described = {file: _in_order(model, [each[file] for each in given]) for file in described}
    objects = join_objects(content.objects, model, ranks)
    dumped = dump_objects(objects) if ranks.mesh_rank == 0 else content.dumped
    return _Content(tensors=tensors, described=described, objects=objects, dumped=dumped)


def _in_order(model: Module, given: Sequence[Mapping[str, SavedTensor]]) -> dict[str, SavedTensor]:
    """Return what each rank has of a file, in the order in which one process has it: by parameter, then buffers."""
    places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    everywhere = {name: saved for each in given for name, saved in each.items()}
    place_of = {name: places.get(parameter_of(saved.file, name), len(places)) for name, saved in everywhere.items()}
    return {name: everywhere[name] for name in sorted(everywhere, key=lambda name: place_of[name])}


def _form(saved: SavedTensor) -> Tensor:
    """Return a tensor of the shape and dtype that a file has of another one, without memory."""
    dtype, shape = saved.form
    return torch.empty(shape, dtype=torch_dtype(dtype), device="meta")


def _describe(file: str, name: str, tensor: HomedTensor) -> SavedTensor:
    dtype, shape = dtype_name(tensor.slot.dtype), tuple(tensor.shape)
    code = None if tensor.is_divided else tensor.slot.code  # pages of several ranks are not those of one process
    return SavedTensor(file=file, name=name, dtype=dtype, shape=shape, crc32=0, code=code)


def _save_on_ranks(
    ranks: Ranks,
    folder: Path,
    content: _Content,
    layouts: Mapping[str, SafetensorsLayout],
    make_manifest: Callable[..., Manifest],
) -> None:
    """Save what several ranks have: rank 0 makes the folder and publishes it, and each rank writes what it has."""
    before: list[Manifest | None] = []
    objects = content.dumped
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
            return [
                write_mine(folder / name / file, layout, content.tensors[file], ranks)
                for file, layout in layouts.items()
            ]

        def end() -> None:
            write_file(folder / name / OBJECTS, objects)
            columns = [zip(*of_file, strict=True) for of_file in zip(*everywhere, strict=True)]
            saved = [
                replace(content.described[file][span.name], crc32=combine(parts))
                for (file, layout), column in zip(layouts.items(), columns, strict=True)
                for span, parts in zip(layout.spans, column, strict=True)
            ]
            publish(folder, make_manifest(data_folder=name, objects_crc32=zlib.crc32(objects), tensors=tuple(saved)))

        def clean_up() -> None:
            remove_leftovers(folder, read_manifest(folder))
            stack.close()  # before any rank loads

        try:
            begun = ranks.do_alike("beginning a checkpoint", begin if is_first else str)
            name = ranks.exchange("the folder of a checkpoint", begun)[0]
            everywhere = ranks.exchange("checksums", ranks.do_alike("writing a checkpoint", write))
            ranks.do_alike("publishing a checkpoint", end if is_first else type(None))
        except BaseException:
            with suppress(ZinfError):
                if before and read_manifest(folder) == before[0]:
                    remove_leftovers(folder, before[0])
            stack.close()
            with suppress(ZinfError):  # unless ranks cannot go on, all of them are here
                ranks.meet("the end of a checkpoint that was not saved")
            raise
        ranks.do_alike("ending a checkpoint", clean_up if is_first else type(None))


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
    data: Path, file: str, layout: SafetensorsLayout, content: _Content, staging: StagingPool
) -> list[SavedTensor]:
    saved = []
    with FileWriter(str(data / file), layout.nbytes, staging) as writer:
        writer.write(memoryview(layout.header))
        for span in layout.spans:
            tensor = content.tensors[file][span.name]
            checksum = write_slot(writer, tensor.slot, tensor.tensor_io)
            saved.append(replace(content.described[file][span.name], crc32=checksum))
        writer.finish()
    return saved
