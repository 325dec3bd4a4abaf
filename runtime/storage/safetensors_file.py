"""Safetensors files: the header, which says what bytes of a file are which tensor. Tensors themselves are not touched.

8 bytes   length of the header, little endian
header    JSON: {"layers.0.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}, ...}, then spaces
tensors   row by row, without gaps; offsets count from here
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zinf_compile.ir.errors import CheckpointError, UnsupportedError
from zinf_compile.ir.user_files import open_regular
from zinf_compile.runtime.storage.engine import whole_sectors

_DTYPES = {
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_LENGTH_NBYTES = 8
_MAX_HEADER_NBYTES = 100_000_000  # the safetensors library refuses longer ones


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpan:
    """Where a tensor lies in a file: ``nbytes`` bytes from ``start``, which counts from the beginning of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsLayout:
    """The first bytes of a file, and what follows them, in the order of the file."""

    header: bytes
    spans: tuple[TensorSpan, ...]
    nbytes: int  # of the whole file
    metadata: Mapping[str, str] = field(default_factory=dict)  # texts by name


def lay_out(tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> SafetensorsLayout:
    """Return the layout of a file that holds tensors of these names, dtypes and shapes.

    Widest elements first, so that every tensor is aligned to its elements, as the readers of this format expect. The
    tensors begin at a multiple of 4096 bytes. Raises UnsupportedError for a dtype that the format does not have.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    entries: dict[str, object] = {}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _CODES:
            raise UnsupportedError(f"'{name}' is {tensor.dtype}, which safetensors files do not hold; convert it first")
        nbytes = tensor.numel() * tensor.dtype.itemsize
        entries[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    described = entries if metadata is None else {"__metadata__": dict(metadata), **entries}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    start = whole_sectors(_LENGTH_NBYTES + len(text))
    header = (start - _LENGTH_NBYTES).to_bytes(_LENGTH_NBYTES, "little") + text.ljust(start - _LENGTH_NBYTES)
    spans = _parse_entries(entries, start)
    return SafetensorsLayout(header=header, spans=spans, nbytes=start + end, metadata=metadata or {})


def read_layout(path: str | os.PathLike[str], *, follow: bool = True) -> SafetensorsLayout:
    """Return the layout of a file, in the order of its bytes.

    Raises CheckpointError, naming the file, where it is no safetensors file or is shorter or longer than its header says,
    and, without ``follow``, where it is a symbolic link.
    """
    path = os.fspath(path)
    try:
        with os.fdopen(open_regular(path, follow=follow), "rb") as file:
            first = file.read(_LENGTH_NBYTES)
            length = int.from_bytes(first, "little")
            nbytes = os.fstat(file.fileno()).st_size
            if len(first) < _LENGTH_NBYTES or length > min(_MAX_HEADER_NBYTES, nbytes - _LENGTH_NBYTES):
                raise CheckpointError(
                    f"{path} is damaged: its header should have {length} bytes, the file has {nbytes}; use another copy"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        entries = json.loads(text)
        metadata = {str(name): str(text) for name, text in entries.pop("__metadata__", {}).items()}
        spans = _parse_entries(entries, _LENGTH_NBYTES + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header cannot be read ({error}); use another copy") from error
    end = spans[-1].start + spans[-1].nbytes if spans else _LENGTH_NBYTES + length
    if end != nbytes:
        raise CheckpointError(f"{path} is damaged: it should have {end} bytes and has {nbytes}; use another copy")
    return SafetensorsLayout(header=first + text, spans=spans, nbytes=nbytes, metadata=metadata)


def _parse_entries(entries: Mapping[str, object], start: int) -> tuple[TensorSpan, ...]:
    """Return the spans in the order of their bytes; ValueError, KeyError or TypeError for entries that make no sense."""
    spans = []
    stops = {}
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise ValueError(f"{name!r} is not an object")
        first, stops[name] = entry["data_offsets"]
        dtype, shape = _DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"])
        spans.append(TensorSpan(name=name, dtype=dtype, shape=shape, start=start + int(first)))
    spans.sort(key=lambda span: (span.start, span.nbytes))
    position = start
    for span in spans:
        if span.start != position or start + stops[span.name] != position + span.nbytes or span.nbytes < 0:
            raise ValueError(f"the bytes of {span.name!r} do not follow those of the tensor before it")
        position += span.nbytes
    return tuple(spans)
