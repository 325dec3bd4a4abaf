"""The header of safetensors files, against the library that defines the format."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from zinf_compile.ir.errors import CheckpointError, UnsupportedError
from zinf_compile.runtime.storage.safetensors_file import lay_out, read_layout

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "weight": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "half": torch.arange(7, dtype=torch.bfloat16),
    "step": torch.tensor(3.0),
    "none": torch.empty(0, 4),
    "count": torch.tensor([2**40]),
    "größe": torch.ones(2, dtype=torch.float64),
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_library_reads_what_we_lay_out(tmp_path: Path) -> None:
    layout = lay_out(TENSORS)
    content = bytearray(layout.header.ljust(layout.nbytes))
    for span in layout.spans:
        content[span.start : span.start + span.nbytes] = raw(TENSORS[span.name])
        assert span.start % span.dtype.itemsize == 0
    assert layout.spans[0].start % 4096 == 0
    path = tmp_path / "ours.safetensors"
    path.write_bytes(content)
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
    assert read_layout(path) == layout


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    content = path.read_bytes()
    layout = read_layout(path)
    assert {span.name for span in layout.spans} == TENSORS.keys()
    for span in layout.spans:
        assert (span.dtype, span.shape) == (TENSORS[span.name].dtype, tuple(TENSORS[span.name].shape))
        assert content[span.start : span.start + span.nbytes] == raw(TENSORS[span.name])


def test_a_dtype_the_format_does_not_have() -> None:
    with pytest.raises(UnsupportedError, match=r"^'z' is torch\.complex128, which safetensors files do not hold"):
        lay_out({"z": torch.ones(1, dtype=torch.complex128)})


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(offsets=(0, 12))}, "do not follow"),
        ({"a": entry(offsets=(4, 12))}, "do not follow"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, "do not follow"),
        ({"a": entry(shape=(3,), offsets=(0, 12))}, "it should have"),
        ({"a": entry(dtype="F33")}, "F33"),
        ({"a": entry(shape=3)}, "its header cannot be read"),
        ({"a": 3}, "'a' is not an object"),
        ([3], "its header cannot be read"),
    ],
)
def test_headers_that_make_no_sense(header: object, message: str, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_layout(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"1234", b"\xff" * 8, b"\x08" + bytes(7) + b"not json", b"\x02" + bytes(7) + b"{}x"]
)
def test_files_that_are_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is damaged"):
        read_layout(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x\.safetensors cannot be read: No such file or directory"):
        read_layout(tmp_path / "x.safetensors")
