"""Weights in safetensors files: finds them in files and folders, and reads and writes them in pieces."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zinf_compile.ir.errors import CheckpointError, ConfigError, StoreError
from zinf_compile.ir.user_files import is_inside, open_regular, read_regular
from zinf_compile.runtime.storage.safetensors_file import TensorSpan, lay_out, read_layout
from zinf_compile.runtime.transfer.slot_stream import tensor_bytes

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"  # as Hugging Face writes it: {"weight_map": {tensor: file}}
METADATA = {"format": "pt"}  # of a file, as transformers expects it
_PIECE_ELEMENTS = 2**20  # a multiple of 4096, as pieces of full values are written

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor and the file that contains it."""

    path: Path
    span: TensorSpan


class Piece(NamedTuple):
    """Consecutive elements of a flattened tensor, starting at ``first``."""

    name: str
    first: int
    values: Tensor


def find_tensors(source: Source) -> dict[str, FileTensor]:
    """Return every tensor of a file, of a folder or its index, or of a list of files, by name. Reads only headers.

    ConfigError for missing files, CheckpointError for damaged ones and for a tensor that is in two of them.
    """
    if not isinstance(source, str | os.PathLike):
        return _merge(Path(path) for path in source)
    path = Path(source)
    if path.is_dir():
        index, single = path / INDEX_FILE, path / SINGLE_FILE
        if not index.is_file() and not single.is_file():
            raise ConfigError(
                f"{path} has neither {INDEX_FILE} nor {SINGLE_FILE}; give the files themselves, as a list"
            )
        path = index if index.is_file() else single
    return _read_index(path) if path.suffix == ".json" else _merge([path])


def _merge(paths: Iterable[Path]) -> dict[str, FileTensor]:
    found: dict[str, FileTensor] = {}
    for path in paths:
        if not path.is_file():
            raise ConfigError(
                f"there is no file or folder '{path}' to take weights from; for a model's own initialisation say 'reset'"
            )
        for span in read_layout(path).spans:
            if span.name in found:
                raise CheckpointError(
                    f"'{span.name}' is both in {found[span.name].path} and in {path}; leave out one of them"
                )
            found[span.name] = FileTensor(path=path, span=span)
    return found


def _read_index(path: Path) -> dict[str, FileTensor]:
    try:
        index = json.loads(read_regular(path).decode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; give another index, or the files as a list"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error}); use another copy") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{path} is damaged: it has no weight_map from tensors to files; use another copy")
    for file in sorted(set(files.values())):
        if not _is_beside(path, file):
            raise CheckpointError(
                f"{path} leads to {file!r}, which lies outside of its folder; if that is meant, give the files as a list"
            )
    found = _merge(path.parent / file for file in sorted(set(files.values())))
    if absent := [f"'{name}' in {file}" for name, file in files.items() if name not in found]:
        raise CheckpointError(f"{path} promises {', '.join(absent)}, which is not there; use another copy")
    return found


def _is_beside(index: Path, file: str) -> bool:
    """Return whether a file named by an index is in its folder, with links resolved, or in a huggingface_hub cache.

    There "snapshots/<revision>/model.safetensors" is a link to "blobs/<checksum>".
    """
    folder = index.parent
    if Path(file).is_absolute() or ".." in Path(file).parts or "\0" in file:
        return False
    if is_inside(folder / file, folder):
        return True
    blobs = folder.resolve().parent.parent / "blobs"
    return folder.resolve().parent.name == "snapshots" and (folder / file).resolve().parent == blobs


def read_tensors(tensors: Iterable[FileTensor]) -> Iterator[Piece]:
    """Yield all values in the order of the files; a piece is valid until the next one is requested.

    Pieces have 2^20 elements, except the last of a tensor; an empty tensor has no pieces. StoreError if a read fails.
    """
    buffer = torch.empty(0, dtype=torch.uint8)
    for tensor in sorted(tensors, key=lambda tensor: (str(tensor.path), tensor.span.start)):
        span = tensor.span
        step = _PIECE_ELEMENTS * span.dtype.itemsize
        if buffer.numel() < min(span.nbytes, step):
            buffer = torch.empty(min(span.nbytes, step), dtype=torch.uint8)
        try:
            with os.fdopen(open_regular(tensor.path), "rb", buffering=0) as file:
                for start in range(0, span.nbytes, step):
                    piece = buffer[: min(step, span.nbytes - start)]
                    _read_fully(file.fileno(), tensor, start, tensor_bytes(piece))
                    yield Piece(name=span.name, first=start // span.dtype.itemsize, values=piece.view(span.dtype))
        except OSError as error:
            raise StoreError(f"reading '{span.name}' from {tensor.path} failed: {error.strerror or error}") from error


def _read_fully(descriptor: int, tensor: FileTensor, start: int, buffer: memoryview) -> None:
    offset = tensor.span.start + start
    while buffer.nbytes:
        count = os.preadv(descriptor, [buffer], offset)
        if count == 0:
            raise OSError(f"the file ended at byte {offset}; was it cut meanwhile?")
        buffer, offset = buffer[count:], offset + count


def write_file(path: Path, tensors: Mapping[str, Tensor], values: Callable[[str], Iterable[Tensor]]) -> None:
    """Write a file of ``tensors``, of which only dtypes and shapes are used; ``values`` yields each one's flat pieces.

    Everything is on disk at the end. UnsupportedError for a dtype that the format lacks. StoreError if a write fails;
    the caller then removes the partial file.
    """
    layout = lay_out(tensors, metadata=METADATA)
    try:
        with path.open("xb") as file:
            file.write(layout.header)
            for span in layout.spans:
                for piece in values(span.name):
                    file.write(tensor_bytes(piece.to(span.dtype).contiguous()))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"writing {path} failed: {error.strerror or error}") from error
