"""The folder of a checkpoint: one manifest, which names one data folder. A save makes another one and then renames.

manifest.json                 what is where, with checksums; renaming it completes a save
data-7/                       the data folder that the manifest names
    model.safetensors             parameters and buffers
    optimizer.safetensors         optimizer state; what is stored in codes as pages of these
    gradients.safetensors         pending gradients
    objects.pt                    everything that is not a tensor of the model or its optimizer
    .zinf-made-this               marks the folder as made by a save
data-8/                       from a save in progress, or one that was killed
    manifest.json                 before its rename
.zinf-saving.json             lists the data folders of that save, so that the next save can remove them

Nothing else in the folder is touched, whatever its name; links are not followed.
"""

import errno
import fcntl
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zinf_compile.checkpoint.own_folder import identity_of, make_own_folder, mark, new_identity, remove_own_folder
from zinf_compile.ir.copies import AnyCode, Blocks, code_of_name
from zinf_compile.ir.errors import CheckpointError, ConfigError, StoreError
from zinf_compile.ir.user_files import read_regular

MODEL, OPTIMIZER, GRADIENTS = "model.safetensors", "optimizer.safetensors", "gradients.safetensors"
OBJECTS = "objects.pt"
_VERSION, _VERSION_WITH_CODES = 1, 2
_CHECKSUM = "manifest_crc32"  # checksum of everything else in the manifest
_MANIFEST, _SAVING = "manifest.json", ".zinf-saving.json"
_MOST_NBYTES = 4096  # limit of the file that lists a save's folders
_OUR_FILES = (MODEL, OPTIMIZER, GRADIENTS, OBJECTS, _MANIFEST)  # of a data folder
_DATA_FOLDER = re.compile(r"data-(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor in a file of the data folder."""

    file: str
    name: str
    dtype: str  # of its values: "float32"
    shape: tuple[int, ...]
    crc32: int  # of its bytes
    code: AnyCode | None = None  # in which the file has it, in place of its values

    @property
    def form(self) -> tuple[str, tuple[int, ...]]:
        """Return the dtype and the shape of the tensor in the file: its values, or a row for each page of codes."""
        return (
            (self.dtype, self.shape) if self.code is None else ("uint8", self.code.pages_shape(math.prod(self.shape)))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    data_folder: str
    objects_crc32: int
    optimizer: str | None  # its class
    groups: tuple[tuple[str, ...], ...]  # the parameters of each of its groups, in order
    tensors: tuple[SavedTensor, ...]  # of each file in the order of its bytes

    def dump(self) -> str:
        """Return it as JSON, one line per tensor."""
        tensors = [_entry(tensor) for tensor in self.tensors]
        has_codes = any(tensor.code is not None for tensor in self.tensors)
        version = _VERSION_WITH_CODES if has_codes else _VERSION
        document = {"version": version, **asdict(self), "tensors": tensors}
        head = {key: value for key, value in document.items() if key != "tensors"} | {_CHECKSUM: _checksum(document)}
        lines = ",\n".join(f"  {json.dumps(tensor, ensure_ascii=False)}" for tensor in tensors)
        text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
        return f'{text},\n "tensors": [\n{lines}\n ]\n}}\n'


def _entry(tensor: SavedTensor) -> dict[str, Any]:
    """Return a tensor as the manifest has it: without a code where it has none, as before there were any."""
    entry = {**asdict(tensor), "code": None if tensor.code is None else str(tensor.code)}
    return {key: value for key, value in entry.items() if value is not None}


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if there is no checkpoint. CheckpointError if it is damaged."""
    path = folder / _MANIFEST
    try:
        text = read_regular(path, follow=False).decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; load another checkpoint") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged ({error}); load another checkpoint") from error
    damaged = f"{path} is damaged ({{}}); load another checkpoint"
    try:
        fields = json.loads(text)
        checksum = fields.pop(_CHECKSUM, None)
        if checksum is not None and checksum != _checksum(fields):  # older manifests have none
            raise ValueError("its checksum is wrong")
        version = fields.pop("version")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(damaged.format(error)) from error
    if version not in (_VERSION, _VERSION_WITH_CODES):
        raise CheckpointError(
            f"{path} is of version {version}, and this zinf_compile reads versions {_VERSION} and {_VERSION_WITH_CODES}; "
            "use the one that wrote it"
        )
    try:
        return _parse_manifest(fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(damaged.format(error)) from error


def _parse_manifest(fields: dict[str, Any]) -> Manifest:
    tensors = tuple(_parse_tensor(entry) for entry in fields.pop("tensors"))
    groups = tuple(map(tuple, fields.pop("groups")))
    manifest = Manifest(tensors=tensors, groups=groups, **fields)
    if not _DATA_FOLDER.fullmatch(manifest.data_folder):
        raise ValueError(f"{manifest.data_folder!r} is no data folder")
    names = [name for group in groups for name in group]
    names += [text for tensor in tensors for text in (tensor.file, tensor.name, tensor.dtype)]
    numbers = [manifest.objects_crc32, *(tensor.crc32 for tensor in tensors)]
    numbers += [size for tensor in tensors for size in tensor.shape]
    if not all(isinstance(name, str) for name in [*names, manifest.optimizer or ""]):
        raise ValueError("a name in it is no text")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a size or a checksum in it is no whole number")
    return manifest


def _parse_tensor(entry: dict[str, Any]) -> SavedTensor:
    code = code_of_name(entry["code"]) if "code" in entry else None
    if code is not None and not isinstance(code, Blocks) and entry["dtype"] != "float32":
        raise ValueError(f"{entry['dtype']} values have no codes")
    return SavedTensor(**{**entry, "shape": tuple(entry["shape"]), "code": code})


def _checksum(document: Mapping[str, Any]) -> int:
    """Return the checksum of a manifest's content, independent of its formatting."""
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


@contextmanager
def locked(folder: Path, *, exclusive: bool) -> Iterator[None]:
    """Lock a folder against saves of other processes, and with ``exclusive`` against loads; ConfigError if it is in use."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"'{folder}' is being saved to or loaded from by somebody else; wait, or use another folder"
            ) from error
        except OSError as error:  # some network filesystems have no locks
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise StoreError(f"locking '{folder}' failed: {error.strerror or error}") from error
        yield
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create the folder of a checkpoint durably, if it does not exist; ConfigError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sync(folder.parent)
    except OSError as error:
        raise ConfigError(f"cannot save to '{folder}': {error.strerror}; give a folder that can be written") from error


def make_data_folder(folder: Path, manifest: Manifest | None) -> Path:
    """Create the data folder of a save, under an unused name, after removing what killed saves left behind."""
    with _storing(folder):
        _remove_leftovers(folder, manifest)
        number = int(_DATA_FOLDER.fullmatch(manifest.data_folder)[1]) if manifest is not None else 0  # type: ignore[index]
        free = (folder / f"data-{number}" for number in itertools.count(number + 1))
        data = next(path for path in free if not os.path.lexists(path))
        own = {data.name: new_identity()}
        if manifest is not None and (before := _identity(folder / manifest.data_folder)) is not None:
            own[manifest.data_folder] = before
        _write_file(
            folder / _SAVING, json.dumps(own).encode()
        )  # before the folder, or a kill would leave one that is not listed
        make_own_folder(data, own[data.name])
        return data


def _identity(data: Path) -> str | None:
    """Return the identity of the data folder that a manifest names; a folder of an old version gets a marker now."""
    if data.is_symlink() or not data.is_dir():
        return None
    if (found := identity_of(data)) is None:
        found = new_identity()
        with suppress(FileExistsError):  # an unreadable marker: keep this folder
            mark(data, found)
    return found


def publish(folder: Path, manifest: Manifest) -> None:
    """Atomically make a data folder, whose files are on disk, the checkpoint."""
    with _storing(folder):
        new = folder / manifest.data_folder / _MANIFEST
        _write_file(new, manifest.dump().encode())
        _sync(folder / manifest.data_folder)
        os.replace(new, folder / _MANIFEST)
        _sync(folder)


def remove_leftovers(folder: Path, manifest: Manifest | None) -> None:
    """Remove data folders of earlier saves, except the manifest's. Other files and folders are not touched."""
    with _storing(folder):
        _remove_leftovers(folder, manifest)


def _remove_leftovers(folder: Path, manifest: Manifest | None) -> None:
    try:
        own = json.loads(read_regular(folder / _SAVING, follow=False, most=_MOST_NBYTES))
    except FileNotFoundError:
        return
    except ValueError:
        own = {}  # the save was killed while writing it, before there was a folder
    for name, identity in own.items() if isinstance(own, dict) else ():
        if not _DATA_FOLDER.fullmatch(name) or not isinstance(identity, str):
            continue
        if manifest is None or name != manifest.data_folder:
            remove_own_folder(folder / name, identity, _OUR_FILES)
    os.unlink(folder / _SAVING)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file, and block until it is on disk."""
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
        raise StoreError(f"saving to '{error.filename or folder}' failed: {error.strerror or error}") from error
