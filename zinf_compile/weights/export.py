"""A model as safetensors files that Hugging Face libraries read, written without ever holding it in memory."""

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from zinf_compile.config import parse_size
from zinf_compile.errors import ConfigError, StoreError, UnsupportedError
from zinf_compile.runtime.full_values import read_pieces
from zinf_compile.runtime.slots import record_of
from zinf_compile.runtime.weight_files import INDEX_FILE, SINGLE_FILE, write_file


def export(
    model: Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the model's state dict to ``folder`` as safetensors, for ``transformers`` and everything else that reads them.

    One ``model.safetensors``, or shards of at most ``max_shard_size`` with an index; a larger tensor has a shard of its
    own. Tied weights are written once. Values are those that the optimizer updates, in their dtype; with ``dtype``
    floating-point ones are converted. A model of transformers gets its ``config.json`` too. The folder is made if needed;
    files appear in it when all are whole, the one that leads to the others last, and an error leaves it as it was.

    Raises ConfigError for a folder that has weights already, and for options that cannot be used; StoreError when a read or
    write fails.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype={dtype!r} is not a floating-point dtype; say torch.bfloat16, or leave it out")
    limit = parse_size(max_shard_size, option="max_shard_size")
    if limit == 0:
        raise ConfigError("max_shard_size is 0; a shard holds at least one tensor, such as '5GB'")
    sources = _tensors_to_write(model)
    tensors = {name: _converted(tensor, dtype) for name, tensor in sources.items()}
    target = Path(folder)
    existed = target.exists()
    _check_folder(target)
    try:
        target.mkdir(parents=True, exist_ok=True)
        aside = Path(mkdtemp(prefix=".export-", dir=target))
    except OSError as error:
        raise ConfigError(f"cannot write to folder '{target}': {error.strerror}; choose another") from error
    try:
        shards = _cut(tensors, limit)
        names = [
            SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
        for name, shard in zip(names, shards, strict=True):
            write_file(aside / name, shard, lambda tensor: _pieces(sources[tensor]))
        _write_configs(model, aside, dtype)
        if len(shards) > 1:
            _write_index(aside / INDEX_FILE, dict(zip(names, shards, strict=True)))
        _publish(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if not existed:
            with suppress(OSError):  # not empty: the export is there
                target.rmdir()


def _tensors_to_write(model: Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict by name, each once."""
    tied_to = getattr(model, "all_tied_weights_keys", None) or {}  # of transformers: which name of a tied weight goes
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
    """Return the tensors, in order, in as few shards as their order allows."""
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
    """Let transformers write what it needs to build the model again."""
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
    """Move files to where they belong: what leads a reader to the others goes last."""
    last = INDEX_FILE if (aside / INDEX_FILE).exists() else SINGLE_FILE
    moved: list[Path] = []
    try:
        for path in sorted(aside.iterdir(), key=lambda path: (path.name == last, path.name)):
            path.replace(folder / path.name)
            moved.append(folder / path.name)
    except OSError as error:
        for path in moved:
            path.unlink(missing_ok=True)
        raise StoreError(f"moving '{error.filename}' to {folder} failed: {error.strerror}") from error
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
