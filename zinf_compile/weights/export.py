"""Exports a model as safetensors files for Hugging Face libraries, without holding it in memory."""

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from zinf_compile.checkpoint.checkpoint_folder import locked
from zinf_compile.checkpoint.on_ranks import create_file, writing_at
from zinf_compile.checkpoint.own_folder import MARKER, make_own_folder, new_identity, remove_own_folder
from zinf_compile.ir.config import parse_size
from zinf_compile.ir.errors import ConfigError, StoreError, UnsupportedError
from zinf_compile.runtime.model.model_state import is_divided, ranks_of, records_of, stores_of
from zinf_compile.runtime.model.tensor_parallel import refuse_distributed
from zinf_compile.runtime.params.full_values import read_pieces
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.ranks.ranks import Ranks
from zinf_compile.runtime.storage.safetensors_file import lay_out
from zinf_compile.runtime.transfer.slot_stream import tensor_bytes
from zinf_compile.weights.weight_files import INDEX_FILE, METADATA, SINGLE_FILE, write_file

_ASIDE = re.compile(r"\.zinf-export-([0-9a-f]{32})")
_WRITTEN = re.compile(  # files that a killed export may have left
    rf"{re.escape(SINGLE_FILE)}|model-\d+-of-\d+\.safetensors|{re.escape(INDEX_FILE)}|(generation_)?config\.json"
)


def export(
    model: Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the model's state dict to ``folder`` as safetensors.

    It writes one ``model.safetensors``, or shards of at most ``max_shard_size`` with an index; a larger tensor gets its
    own shard. Tied weights are written once. Values are the master copies, in their dtype; with ``dtype``
    floating-point tensors are converted. A model of transformers gets its ``config.json`` too. The folder is created if
    needed. Files appear in it when all are complete, the index last, and an error leaves it unchanged.

    Of ranks that work in rounds all call this, with a folder that each can reach, and each writes what it has.

    Raises ConfigError for a folder that already has weights, and for invalid options; StoreError if a read or write
    fails, or if the model was stopped by an earlier error.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype={dtype!r} is not a floating-point dtype; say torch.bfloat16, or leave it out")
    limit = parse_size(max_shard_size, option="max_shard_size")
    if limit == 0:
        raise ConfigError("max_shard_size is 0; a shard holds at least one tensor, such as '5GB'")
    refuse_distributed(records_of(model), "export")
    ranks = ranks_of(model)
    if is_divided(model):
        raise UnsupportedError(
            f"export writes whole tensors, and each of {ranks.mesh_size} ranks has some rows; save a checkpoint with "
            "zinf_compile.save, load it in one process, and export there"
        )
    sources = ranks.do_alike("collecting an export", partial(_tensors_to_write, model))
    tensors = {name: _converted(tensor, dtype) for name, tensor in sources.items()}
    if not ranks.is_alone:
        if ranks.rank > 0:  # every rank has all buffers
            tensors = {name: tensor for name, tensor in tensors.items() if isinstance(sources[name], Parameter)}
        sources = {name: sources[name] for name in tensors}
        tensors = _join(tensors, model, ranks)
    shards = _cut(tensors, limit)
    names = [
        SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    files, target = dict(zip(names, shards, strict=True)), Path(folder)

    def end(aside: Path) -> None:
        _write_configs(model, aside, dtype)
        if len(files) > 1:
            _write_index(aside / INDEX_FILE, files)
        _publish(aside, target)

    if not ranks.is_alone:
        _write_on_ranks(ranks, target, files, sources, end)
        return
    with _exporting_to(target) as aside:
        for name, shard in files.items():
            write_file(aside / name, shard, lambda tensor: _pieces(sources[tensor]))
        end(aside)


def _join(tensors: Mapping[str, Tensor], model: Module, ranks: Ranks) -> dict[str, Tensor]:
    """Return what all ranks write, in the order of the state dict, without values."""
    mine = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    given = {name: form for each in ranks.exchange("the tensors of an export", mine) for name, form in each.items()}
    modules = model.named_modules(remove_duplicate=False)
    names = (f"{path}.{key}" if path else key for path, each in modules for key in (*each._parameters, *each._buffers))
    places = {name: place for place, name in enumerate(names)}
    return {
        name: torch.empty(given[name][0], dtype=given[name][1], device="meta")
        for name in sorted(given, key=lambda name: places.get(name, len(places)))
    }


def _write_on_ranks(
    ranks: Ranks,
    target: Path,
    files: Mapping[str, Mapping[str, Tensor]],
    sources: Mapping[str, Tensor],
    end: Callable[[Path], None],
) -> None:
    """Write what several ranks have: rank 0 makes the files and publishes them, and each rank writes its tensors."""
    layouts = {name: lay_out(shard, metadata=METADATA) for name, shard in files.items()}
    is_first = ranks.mesh_rank == 0
    with ExitStack() as stack:

        def begin() -> str:
            aside = stack.enter_context(_exporting_to(target))
            for name, layout in layouts.items():
                create_file(aside / name, layout)
            return aside.name

        def write() -> None:
            for name, layout in layouts.items():
                with writing_at(aside / name) as write_at:
                    for span in layout.spans:
                        offset = span.start
                        for piece in _pieces(sources[span.name]) if span.name in sources else ():
                            view = tensor_bytes(piece.to(span.dtype).contiguous())
                            write_at(view, offset)
                            offset += len(view)

        begun = ranks.do_alike("beginning an export", begin if is_first else str)
        aside = target / ranks.exchange("the folder of an export", begun)[0]
        ranks.do_alike("writing an export", write)
        ranks.do_alike("publishing an export", partial(end, aside) if is_first else type(None))


@contextmanager
def _exporting_to(target: Path) -> Iterator[Path]:
    """Yield a folder in ``target`` to write to; without an export, nothing is left of either at the end."""
    existed = target.exists()
    _check_folder(target)
    try:
        with _making_aside(target) as aside:
            yield aside
    finally:
        if not existed:
            with suppress(OSError):  # not empty: the export is in it
                target.rmdir()


@contextmanager
def _making_aside(target: Path) -> Iterator[Path]:
    """Create a folder in ``target`` to write to, and remove it at the end, with those of earlier exports that were killed.

    Its name contains its identity, which its marker repeats; other folders are left alone.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to folder '{target}': {error.strerror}; choose another") from error
    with locked(target, exclusive=True):  # so that leftovers cannot belong to an export that is still running
        try:
            for entry in list(target.iterdir()):
                if (match := _ASIDE.fullmatch(entry.name)) is not None and not entry.is_symlink() and entry.is_dir():
                    written = [name for name in os.listdir(entry) if _WRITTEN.fullmatch(name)]
                    remove_own_folder(entry, match[1], written)
            identity = new_identity()
            aside = target / f".zinf-export-{identity}"
            make_own_folder(aside, identity)
        except OSError as error:
            raise ConfigError(f"cannot write to folder '{target}': {error.strerror}; choose another") from error
        try:
            yield aside
        finally:
            with suppress(OSError):  # leftovers are removed by the next export
                remove_own_folder(aside, identity, os.listdir(aside))  # transformers chooses some of the names


def _tensors_to_write(model: Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict by name, each once; StoreError for a model that was stopped."""
    for store in stores_of(model):
        store.check_whole()
    tied_to = (
        getattr(model, "all_tied_weights_keys", None) or {}
    )  # transformers: which names of tied weights are dropped
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    written: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in ignored:
            continue
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"'{name}' of the state dict is a {type(value).__name__}: safetensors hold tensors only"
            )
        if value.is_meta:
            raise ConfigError(
                f"'{name}' is on the meta device, so it has no value; call zinf_compile.optimize(model, init=...)"
            )
        known = written.setdefault(id(value), name)
        if known != name and known not in tied_to:
            continue
        tensors.pop(known, None)
        tensors[name], written[id(value)] = value, name
    return tensors


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=wanted, device="meta")


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    record = record_of(tensor)
    if record is not None and record.store.is_open:
        yield from read_pieces(record)
    else:
        yield tensor.detach().reshape(-1)


def _cut(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Split the tensors, in order, into as few shards as possible."""
    shards: list[dict[str, Tensor]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.dtype.itemsize
        if nbytes > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][name] = tensor
        room -= nbytes
    return shards


def _write_index(path: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> None:
    total = sum(tensor.numel() * tensor.dtype.itemsize for shard in shards.values() for tensor in shard.values())
    files = {name: file for file, shard in shards.items() for name in shard}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}, indent=2)
    path.write_text(f"{text}\n", encoding="utf-8")


def _write_configs(model: Module, folder: Path, dtype: torch.dtype | None) -> None:
    """Let transformers write the configuration from which it can rebuild the model."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        if dtype is not None:
            config.dtype = dtype
        config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"'{folder}' is not a folder; give one to write model files to")
    old = sorted(path.name for path in folder.glob("*.safetensors*")) if folder.exists() else []
    if old:
        raise ConfigError(
            f"'{folder}' has weights already ({', '.join(old[:3])}{', ...' if len(old) > 3 else ''}); remove them, or "
            "choose another folder: an export that fails would leave a mixture"
        )


def _publish(aside: Path, folder: Path) -> None:
    """Move files to their place, the index last. An error restores the previous files."""
    last = INDEX_FILE if (aside / INDEX_FILE).exists() else SINGLE_FILE
    files = [path for path in aside.iterdir() if path.name != MARKER]
    moved: dict[Path, Path] = {}  # and where the previous file is kept
    try:
        for path in sorted(files, key=lambda path: (path.name == last, path.name)):
            there, kept = folder / path.name, aside / f"replaced-{path.name}"
            if os.path.lexists(there):
                shutil.copy2(there, kept, follow_symlinks=False)
            path.replace(there)
            moved[there] = kept
        _sync(folder)
    except BaseException as error:
        for there, kept in moved.items():
            if os.path.lexists(kept):
                kept.replace(there)
            else:
                there.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise StoreError(f"moving '{error.filename}' to {folder} failed: {error.strerror}") from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
