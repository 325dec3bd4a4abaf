"""The folder of a checkpoint: one manifest, which names one data folder. A save makes another one and then renames.

manifest.json                 what is where, with checksums; its rename is what makes a save count
data-7/                       what the manifest speaks of
    model.safetensors             parameters and buffers
    optimizer.safetensors         optimizer state
    gradients.safetensors         pending gradients
    objects.pt                    everything that is not a tensor of the model or its optimizer
data-8/, manifest.json.new    of a save that is under way, or was killed: the next one removes them
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zinf_compile.errors import CheckpointError, ConfigError, StoreError

MODEL, OPTIMIZER, GRADIENTS = "model.safetensors", "optimizer.safetensors", "gradients.safetensors"
OBJECTS = "objects.pt"
_VERSION = 1
_MANIFEST, _NEW_MANIFEST = "manifest.json", "manifest.json.new"
_DATA_FOLDER = re.compile(r"data-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor in a file of the data folder."""

    file: str
    name: str
    dtype: str  # "float32"
    shape: tuple[int, ...]
    crc32: int  # of its bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    data_folder: str
    objects_crc32: int
    optimizer: str | None  # its class
    groups: tuple[tuple[str, ...], ...]  # the parameters of each of its groups, in order
    tensors: tuple[SavedTensor, ...]  # of each file in the order of its bytes

    def dump(self) -> str:
        """Return it as JSON, a line per tensor."""
        head = {key: value for key, value in asdict(self).items() if key != "tensors"}
        lines = ",\n".join(f"  {json.dumps(asdict(tensor), ensure_ascii=False)}" for tensor in self.tensors)
        text = json.dumps({"version": _VERSION, **head}, indent=1, ensure_ascii=False).removesuffix("\n}")
        return f'{text},\n "tensors": [\n{lines}\n ]\n}}\n'


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; None where there is no checkpoint. CheckpointError for one that is damaged."""
    path = folder / _MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); load another checkpoint") from error
    damaged = f"{path} is damaged ({{}}); load another checkpoint"
    try:
        fields = json.loads(text)
        version = fields.pop("version")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(damaged.format(error)) from error
    if version != _VERSION:
        raise CheckpointError(
            f"{path} is of version {version}, and this zinf_compile reads version {_VERSION}; use the one that wrote it"
        )
    try:
        return _parse_manifest(fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(damaged.format(error)) from error


def _parse_manifest(fields: dict[str, Any]) -> Manifest:
    tensors = (
        SavedTensor(**{**entry, "shape": tuple(int(size) for size in entry["shape"])})
        for entry in fields.pop("tensors")
    )
    groups = (tuple(str(name) for name in group) for group in fields.pop("groups"))
    manifest = Manifest(tensors=tuple(tensors), groups=tuple(groups), **fields)
    if not _DATA_FOLDER.fullmatch(manifest.data_folder):
        raise ValueError(f"{manifest.data_folder!r} is no data folder")
    return manifest


@contextmanager
def locked(folder: Path, *, exclusive: bool) -> Iterator[None]:
    """Keep other processes from saving to a folder, and with ``exclusive`` from loading; ConfigError if one does now."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"'{folder}' is being saved to or loaded from by somebody else; wait, or use another folder"
            ) from error
        except OSError as error:  # some network filesystems have no locks, and then nobody looks
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise StoreError(f"locking '{folder}' failed: {error.strerror}") from error
        yield
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make the folder of a checkpoint, if there is none, so that it is there after a crash; ConfigError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sync(folder.parent)
    except OSError as error:
        raise ConfigError(f"cannot save to '{folder}': {error.strerror}; give a folder that can be written") from error


def make_data_folder(folder: Path, manifest: Manifest | None) -> Path:
    """Make the data folder of a save, after removing what killed ones have left."""
    with _storing(folder):
        _remove_leftovers(folder, manifest)
        number = int(_DATA_FOLDER.fullmatch(manifest.data_folder)[1]) if manifest is not None else 0  # type: ignore[index]
        data = folder / f"data-{number + 1}"
        data.mkdir()
        return data


def publish(folder: Path, manifest: Manifest) -> None:
    """Make a data folder, whose files are on the disk, the checkpoint: either this happens or nothing does."""
    with _storing(folder):
        _sync(folder / manifest.data_folder)
        _write_file(folder / _NEW_MANIFEST, manifest.dump().encode())
        os.replace(folder / _NEW_MANIFEST, folder / _MANIFEST)
        _sync(folder)


def remove_leftovers(folder: Path, manifest: Manifest | None) -> None:
    """Remove what saves have left in a folder, but for what the manifest speaks of. Other files are not touched."""
    with _storing(folder):
        _remove_leftovers(folder, manifest)


def _remove_leftovers(folder: Path, manifest: Manifest | None) -> None:
    (folder / _NEW_MANIFEST).unlink(missing_ok=True)
    for entry in folder.iterdir():
        if _DATA_FOLDER.fullmatch(entry.name) and (manifest is None or entry.name != manifest.data_folder):
            shutil.rmtree(entry)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file, and block until it is on the disk."""
    with _storing(path.parent):
        _write_file(path, content)


def _write_file(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _storing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"saving to '{error.filename or folder}' failed: {error.strerror}") from error
