"""Storage for torch.distributed.checkpoint (DCP) that reads and writes the folders of ``save`` and ``load``.

DCP plans which rank has which part of a tensor; each rank reads or writes its parts straight at their place in the same
files that ``save`` would write. State dicts have the form ``{"model": ..., "optim": ...}``, as ``get_state_dict`` returns
them, where "optim" may also be called "optimizer"; what else they have is the ``extra`` of ``save``.
"""

import io
import itertools
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from torch.optim import Optimizer

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
from zinf_compile.checkpoint.load import StoredTensor, read_checkpoint, verify_share
from zinf_compile.checkpoint.match import split_state_name, state_name
from zinf_compile.checkpoint.objects import Objects, dump_objects
from zinf_compile.checkpoint.on_ranks import Written, checksum_of, combine, create_file, read_values, writing_at
from zinf_compile.checkpoint.save import check_room
from zinf_compile.ir.copies import Blocks
from zinf_compile.ir.errors import CheckpointError, ConfigError, UnsupportedError, ZinfError
from zinf_compile.ir.glossary import dtype_name
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.storage.safetensors_file import SafetensorsLayout, TensorSpan, lay_out, read_layout
from zinf_compile.runtime.storage.slots import torch_dtype
from zinf_compile.runtime.storage.staging import StagingPool
from zinf_compile.runtime.transfer.slot_stream import tensor_bytes

_MODEL_KEY, _OPTIMIZER_KEYS, _EXTRA_STATE = "model", ("optim", "optimizer"), "_extra_state"
_PIECE_NBYTES = 4 * 2**20  # of a read
_STAGING_NBYTES = 8 * 2**20  # of the pool through which files are read to verify them


class CheckpointReader(StorageReader):
    """Reads a checkpoint of ``zinf_compile.save`` for ``torch.distributed.checkpoint.load``.

    So FSDP2, DDP and tensor-parallel models load it, on any mesh. All ranks verify the checksums together before anything
    is loaded. DCP raises CheckpointException, whose text has that of ours: CheckpointError for a damaged checkpoint,
    ConfigError for none.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """``folder`` is that of ``zinf_compile.save``."""
        self._folder = Path(folder)
        self._num_ranks = 1  # that verified together
        self._manifest: Manifest | None = None
        self._files: Mapping[Path, Sequence[StoredTensor]] = {}
        self._tensors: dict[str, tuple[Path, StoredTensor]] = {}  # by name in a flattened state dict
        self._objects: dict[str, object] = {}  # by that name, too: what is no tensor of a file

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from another folder, if one is given."""
        self._folder = Path(checkpoint_id or self._folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether there is a folder."""
        return Path(checkpoint_id).is_dir()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint has, once this rank has verified its share of the bytes."""
        if not self._folder.is_dir():
            raise ConfigError(f"there is no checkpoint in '{self._folder}': it is no folder; save one first")
        rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        with locked(self._folder, exclusive=False):
            self._manifest, objects, self._files = read_checkpoint(self._folder)
            verify_share(self._files, rank, self._num_ranks, StagingPool(_STAGING_NBYTES))
            tied = read_layout(self._folder / self._manifest.data_folder / MODEL, follow=False).metadata
        self._tensors = {
            name: (path, tensor)
            for path, tensors in self._files.items()
            for tensor in tensors
            for name in _names_of(tensor.saved, tied)
        }
        self._objects = dict(_named_objects(objects, self._manifest.groups))
        described: dict[str, Any] = {
            name: _describe(value.shape, value.dtype) if isinstance(value, Tensor) else BytesStorageMetadata()
            for name, value in self._objects.items()
        }
        for name, (_, tensor) in self._tensors.items():
            described[name] = _describe(tensor.saved.shape, torch_dtype(tensor.saved.dtype))
        return Metadata(state_dict_metadata=described)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are. Verify everything if not all ranks load, who would have verified a share each."""
        if len(plans) != self._num_ranks:
            with locked(self._folder, exclusive=False):
                verify_share(self._files, 0, 1, StagingPool(_STAGING_NBYTES))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank has of each tensor into it, in pieces of a few MiB or one row."""
        with locked(self._folder, exclusive=False):
            if read_manifest(self._folder) != self._manifest:
                raise CheckpointError(f"'{self._folder}' has another checkpoint than when loading began; load it again")
            for item in plan.items:
                if (stored := self._tensors.get(item.storage_index.fqn)) is not None:
                    target = planner.resolve_tensor(item).detach()
                    _read_box(*stored, item, target)
                    planner.commit_tensor(item, target)
                    continue
                value = self._objects[item.storage_index.fqn]
                if isinstance(value, Tensor):
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_narrowed(value, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
                else:
                    buffer = io.BytesIO()
                    torch.save(value, buffer)
                    buffer.seek(0)
                    planner.load_bytes(item, buffer)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _names_of(saved: SavedTensor, tied: Mapping[str, str]) -> list[str]:
    """Return the names that a tensor of a checkpoint may have in a flattened state dict; none for gradients.

    ``tied`` has the other names of parameters.
    """
    if saved.file == MODEL:
        return [f"{_MODEL_KEY}.{name}" for name in (saved.name, *(each for each in tied if tied[each] == saved.name))]
    if saved.file == GRADIENTS:
        return []
    if isinstance(saved.code, Blocks):
        raise UnsupportedError(
            f"'{saved.name}' is in torchao's codes, which torch.distributed.checkpoint cannot divide; use zinf_compile.load"
        )
    parameter, key = split_state_name(saved.name)
    return [f"{optim}.state.{parameter}.{key}" for optim in _OPTIMIZER_KEYS]


def _named_objects(objects: Objects, groups: Sequence[Sequence[str]]) -> Iterator[tuple[str, object]]:
    """Yield what is no tensor of a file, by the names that it may have in a flattened state dict."""
    for path, value in objects.modules.items():
        yield ".".join(filter(None, (_MODEL_KEY, path, _EXTRA_STATE))), value
    for optim in _OPTIMIZER_KEYS:
        for parameter, state in objects.states.items():
            yield from ((f"{optim}.state.{parameter}.{key}", value) for key, value in state.items())
        for number, (names, options) in enumerate(zip(groups, objects.options, strict=True)):
            yield f"{optim}.param_groups.{number}.params", list(names)
            for option, value in options.items():
                yield f"{optim}.param_groups.{number}.{option}", value
                yield from ((f"{optim}.param_groups.{name}.{option}", value) for name in names)
    if isinstance(objects.extra, dict):
        yield from flatten_state_dict(objects.extra)[0].items()


def _describe(shape: Sequence[int], dtype: torch.dtype) -> TensorStorageMetadata:
    size = torch.Size(shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=[chunk])


def _narrowed(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _read_box(path: Path, tensor: StoredTensor, item: ReadItem, target: Tensor) -> None:
    """Fill ``target`` with a box of a tensor in a file: some rows at a time, at least one."""
    shape, name = tensor.saved.shape, tensor.saved.name
    if target.numel() == 0:
        return
    if not shape:
        target.copy_(read_values(path, tensor.span, tensor.saved.code, Slice.of_whole(name, shape).flat).view(shape))
        return
    row, first = math.prod(shape[1:]), item.storage_offsets[0]
    at_once = max(1, _PIECE_NBYTES // (row * torch_dtype(tensor.saved.dtype).itemsize))
    flat = Slice.of_whole(name, shape).flat
    for start in range(0, item.lengths[0], at_once):
        count = min(at_once, item.lengths[0] - start)
        part = replace(flat, start=(first + start) * row, length=count * row)
        values = read_values(path, tensor.span, tensor.saved.code, part).view(count, *shape[1:])
        box = _narrowed(values, (0, *item.storage_offsets[1:]), (count, *item.lengths[1:]))
        target.narrow(0, start, count).copy_(box)


class _Place(NamedTuple):
    """Where a tensor of a state dict goes."""

    file: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """What each rank has to know of a save."""

    data_folder: str
    files: Mapping[str, SafetensorsLayout]
    places: Mapping[str, _Place]  # by name in the flattened state dict; what has none is an object


class _Part(NamedTuple):
    """What was written of a tensor: consecutive bytes with a checksum, or a box whose checksum is found by reading."""

    first: int  # byte in the tensor
    written: Written | None


class CheckpointWriter(StorageWriter):
    """Writes a checkpoint that ``zinf_compile.load`` reads, from ``torch.distributed.checkpoint.save`` or ``async_save``.

    So FSDP2, DDP and tensor-parallel models, and other meshes, save what one process of ours loads. An existing checkpoint
    is replaced at the very end. DCP raises CheckpointException, whose text has that of ours: ConfigError for a state dict
    of another form, CapacityError for a disk that is too small, StoreError for a write that fails.
    """

    def __init__(self, folder: str | os.PathLike[str], optimizer: Optimizer | None = None) -> None:
        """``folder`` is one that all ranks can reach; ``optimizer`` is the one whose state is saved, if any is."""
        self._folder = Path(folder)
        self._optimizer = None if optimizer is None else type(optimizer).__qualname__
        self._held = ExitStack()  # of the coordinator: the lock
        self._before: Manifest | None = None
        self._layout: _Layout | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write to another folder, if one is given."""
        self._folder = Path(checkpoint_id or self._folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the folder is there, or can be made."""
        path = Path(checkpoint_id)
        return path.is_dir() or not path.exists()

    def storage_meta(self) -> StorageMeta | None:
        """Return which folder is written."""
        return StorageMeta(checkpoint_id=self._folder)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Forget an earlier save that broke off."""
        self._held.close()
        self._layout = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the files, with room for what all ranks write, and say where; on the coordinator."""
        paths = {name: path for plan in plans for name, path in (plan.planner_data or {}).items()}
        places, forms = self._find_places(plans, paths)
        files = {file: lay_out(tensors) for file, tensors in forms.items() if tensors or file == MODEL}
        make_folder(self._folder)
        self._held.enter_context(locked(self._folder, exclusive=True))
        try:
            self._before = read_manifest(self._folder)
            data = make_data_folder(self._folder, self._before)
            check_room(self._folder, sum(layout.nbytes for layout in files.values()))
            for file, layout in files.items():
                create_file(data / file, layout)
        except BaseException:
            self._give_up()
            raise
        self._layout = _Layout(data_folder=data.name, files=files, places=places)
        return [replace(plan, storage_data=self._layout) for plan in plans]

    def _find_places(
        self, plans: Sequence[SavePlan], paths: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[str, _Place], dict[str, dict[str, Tensor]]]:
        """Return where the tensors of a state dict go, and those of each file, without memory."""
        places: dict[str, _Place] = {}
        forms: dict[str, dict[str, Tensor]] = {MODEL: {}, OPTIMIZER: {}}
        for item in (item for plan in plans for item in plan.items):
            path = paths.get(item.index.fqn, ())
            if not _is_known(path):
                raise ConfigError(
                    f"'{item.index.fqn}' is not in a state dict of the form {{'model': ..., 'optim': ...}}, whose parts are "
                    "those of torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer), not flattened"
                )
            if path[0] in _OPTIMIZER_KEYS and self._optimizer is None:
                raise ConfigError(
                    "the state dict has that of an optimizer; give it, CheckpointWriter(folder, optimizer), so that the "
                    "checkpoint says of what class it is"
                )
            if (place := _place_of(path)) is None or item.tensor_data is None:
                continue
            places[item.index.fqn] = place
            described = item.tensor_data
            forms[place.file][place.name] = torch.empty(described.size, dtype=described.properties.dtype, device="meta")
        if not forms[MODEL]:
            raise ConfigError(
                "the state dict has no tensor of a model; save {'model': get_model_state_dict(model), ...}"
            )
        return places, forms

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank has of each tensor to its place; the coordinator gets what is no tensor of a file."""
        done: Future[list[WriteResult]] = Future()
        try:
            done.set_result(self._write(plan, planner, plan.storage_data))
        except BaseException:
            if self._layout is not None:  # on the coordinator
                self._give_up()
            raise
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner, layout: _Layout) -> list[WriteResult]:
        spans = {(file, span.name): span for file, each in layout.files.items() for span in each.spans}
        results = []
        with ExitStack() as stack:
            writers: dict[str, Callable[[memoryview, int], None]] = {}
            for item in plan.items:
                value = planner.resolve_data(item)
                place = layout.places.get(item.index.fqn)
                if place is None:
                    results.append(WriteResult(item.index, 0, _object_in(value)))
                    continue
                assert isinstance(value, Tensor)
                if place.file not in writers:
                    path = self._folder / layout.data_folder / place.file
                    writers[place.file] = stack.enter_context(writing_at(path))
                span, local = spans[place.file, place.name], value.detach().cpu().contiguous()
                part = _write_box(writers[place.file], span.start, span.shape, item, local)
                results.append(WriteResult(item.index, local.nbytes, part))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint: the rename of its manifest; on the coordinator."""
        layout = self._layout
        assert layout is not None
        try:
            paths, data = metadata.planner_data or {}, self._folder / layout.data_folder
            parts: defaultdict[_Place, list[_Part]] = defaultdict(list)
            found: dict[str, object] = {}
            for result in itertools.chain.from_iterable(results):
                if (place := layout.places.get(result.index.fqn)) is None:
                    found[result.index.fqn] = result.storage_data
                else:
                    parts[place].append(result.storage_data)
            groups, objects = _collect(found, paths)
            content = dump_objects(objects)
            write_file(data / OBJECTS, content)
            tensors = [
                SavedTensor(
                    file=file,
                    name=span.name,
                    dtype=dtype_name(span.dtype),
                    shape=span.shape,
                    crc32=_checksum(data / file, span, parts[_Place(file, span.name)]),
                )
                for file, each in layout.files.items()
                for span in each.spans
            ]
            manifest = Manifest(
                data_folder=data.name,
                objects_crc32=zlib.crc32(content),
                optimizer=self._optimizer,
                groups=groups,
                tensors=tuple(tensors),
            )
            publish(self._folder, manifest)
        except BaseException:
            self._give_up()
            raise
        remove_leftovers(self._folder, manifest)
        self._held.close()

    def _give_up(self) -> None:
        """Remove what was written, and let others use the folder."""
        with suppress(ZinfError):  # leftovers are removed by the next save
            if read_manifest(self._folder) == self._before:
                remove_leftovers(self._folder, self._before)
        self._held.close()


def _is_known(path: Sequence[Any]) -> bool:
    """Return whether something is at a place of a state dict that a checkpoint has one for."""
    if not path:
        return False
    if path[0] == _MODEL_KEY:
        return len(path) == 2
    if path[0] not in _OPTIMIZER_KEYS:
        return True
    if path[1] == "state":
        return len(path) == 4
    return len(path) == 4 and path[1] == "param_groups" and isinstance(path[2], int)


def _place_of(path: Sequence[Any]) -> _Place | None:
    """Return where a tensor at a place of a state dict goes; None for an object."""
    if path[0] == _MODEL_KEY:
        is_object = path[1].rpartition(".")[2] == _EXTRA_STATE
        return None if is_object else _Place(MODEL, path[1])
    if path[0] in _OPTIMIZER_KEYS and path[1] == "state":
        return _Place(OPTIMIZER, state_name(path[2], path[3]))
    return None


def _object_in(value: Tensor | io.BytesIO) -> object:
    """Return what is no tensor of a file: a value that DCP has serialised, or a small tensor, as of an option."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    value.seek(0)
    return torch.load(value, weights_only=False)  # from this process, or another rank


def _write_box(
    write: Callable[[memoryview, int], None], start: int, shape: Sequence[int], item: WriteItem, local: Tensor
) -> _Part:
    """Write what a rank has of a tensor that begins at byte ``start`` of a file."""
    content, itemsize = memoryview(tensor_bytes(local.view(-1))), local.dtype.itemsize
    assert item.tensor_data is not None
    offsets = item.tensor_data.chunk.offsets if item.type is WriteItemType.SHARD else torch.Size([0] * len(shape))
    runs = list(_runs(shape, offsets, local.shape))
    done = 0
    for first, count in runs:
        nbytes = count * itemsize
        write(content[done : done + nbytes], start + first * itemsize)
        done += nbytes
    if len(runs) > 1:
        return _Part(runs[0][0] * itemsize, None)
    return _Part(runs[0][0] * itemsize if runs else 0, Written(zlib.crc32(content), len(content)))


def _runs(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the consecutive elements of a box in a tensor: the number of the first one, and how many."""
    if math.prod(lengths) == 0:
        return
    partial_dims = [dim for dim, length in enumerate(lengths) if length != shape[dim]]
    last = partial_dims[-1] if partial_dims else 0
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = math.prod(lengths[last:])
    outer = [range(offset, offset + length) for offset, length in zip(offsets[:last], lengths[:last], strict=True)]
    within = offsets[last] * strides[last] if shape else 0
    for index in itertools.product(*outer):
        yield sum(number * stride for number, stride in zip(index, strides, strict=False)) + within, count


def _checksum(path: Path, span: TensorSpan, parts: Sequence[_Part]) -> int:
    """Return the checksum of a tensor that was written: of its parts, or of what is read back if one is not consecutive."""
    written = [part.written for part in sorted(parts, key=lambda part: part.first) if part.written is not None]
    return combine(written) if len(written) == len(parts) else checksum_of(path, span)


def _collect(
    found: Mapping[str, object], paths: Mapping[str, Sequence[Any]]
) -> tuple[tuple[tuple[str, ...], ...], Objects]:
    """Return the parameters of each group, and the objects of a checkpoint, from what is no tensor of a file."""
    modules: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    extra: dict[str, object] = {}
    for name, value in found.items():
        path = paths[name]
        if path[0] == _MODEL_KEY:
            modules[path[1].removesuffix(_EXTRA_STATE).removesuffix(".")] = value
        elif path[0] not in _OPTIMIZER_KEYS:
            extra[name] = value
        elif path[1] == "state":
            states.setdefault(path[2], {})[path[3]] = value
        else:
            groups.setdefault(path[2], {})[path[3]] = value
    ordered = [groups[number] for number in sorted(groups)]
    objects = Objects(
        extra=unflatten_state_dict(extra, {name: tuple(paths[name]) for name in extra}) if extra else None,
        options=[{key: value for key, value in group.items() if key != "params"} for group in ordered],
        states=states,
        modules=modules,
        random_state=torch.get_rng_state(),
    )
    return tuple(tuple(group["params"]) for group in ordered), objects
