"""Weight files: pieces are read in file order and written to the right place, for every dtype and home."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zinf_compile
from zinf_compile.ir.errors import CheckpointError, ConfigError
from zinf_compile.runtime.storage.safetensors_file import read_layout
from zinf_compile.weights import weight_files
from zinf_compile.weights.weight_files import find_tensors, read_tensors, write_file

PIECE = 4096  # the smallest piece in which full values are written


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "_PIECE_ELEMENTS", PIECE)


def test_pieces_of_several_files(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3 * PIECE + 5), "b": torch.arange(7, dtype=torch.int64), "c": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "1.safetensors")
    save_file({"d": torch.randn(2, PIECE).bfloat16(), "e": torch.tensor(True)}, tmp_path / "2.safetensors")
    tensors |= load_file(tmp_path / "2.safetensors")
    found = find_tensors([tmp_path / "2.safetensors", tmp_path / "1.safetensors"])
    assert {name: (each.span.dtype, each.span.shape) for name, each in found.items()} == {
        name: (value.dtype, value.shape) for name, value in tensors.items()
    }
    read: dict[str, list[torch.Tensor]] = {name: [] for name in tensors}
    order = []
    for piece in read_tensors(found.values()):
        assert piece.first == sum(len(earlier) for earlier in read[piece.name])
        assert len(piece.values) <= PIECE
        read[piece.name].append(piece.values.clone())
        order.append((found[piece.name].path.name, found[piece.name].span.start, piece.first))
    assert order == sorted(order)
    assert [len(read[name]) for name in "abcde"] == [4, 1, 0, 2, 1]
    for name, pieces in read.items():
        assert torch.equal(torch.cat([torch.empty(0, dtype=tensors[name].dtype), *pieces]), tensors[name].reshape(-1))


@pytest.mark.parametrize("kind", ["above", "absolute", "link", "dangling"])
def test_an_index_leads_nowhere_else(tmp_path: Path, kind: str) -> None:
    """Files named by an index must be in its folder, after resolving links. Files that the user lists may be anywhere."""
    outside, folder = tmp_path / "x.safetensors", tmp_path / "model"
    save_file({"a": torch.zeros(1)}, outside)
    folder.mkdir()
    (folder / "link.safetensors").symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    named = {"above": "../x.safetensors", "absolute": str(outside)}.get(kind, "link.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": named}}))
    with pytest.raises(CheckpointError, match=r"index\.json leads to '.*', which lies outside of its folder"):
        find_tensors(folder)
    assert find_tensors([outside]).keys() == {"a"}


def test_the_cache_of_huggingface_hub(tmp_path: Path) -> None:
    """Only in this cache may files be links to a sibling folder."""
    (tmp_path / "blobs").mkdir()
    folder = tmp_path / "snapshots" / "main"
    folder.mkdir(parents=True)
    save_file({"a": torch.zeros(1)}, tmp_path / "blobs" / "0")
    (folder / "x.safetensors").symlink_to("../../blobs/0")
    (tmp_path / "blobs" / "1").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    (folder / "model.safetensors.index.json").symlink_to("../../blobs/1")
    assert find_tensors(folder).keys() == {"a"}
    (tmp_path / "blobs").rename(tmp_path / "others")
    (folder / "x.safetensors").unlink()
    (folder / "x.safetensors").symlink_to("../../others/0")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(CheckpointError, match="lies outside of its folder"):
        find_tensors(folder)


def test_other_things_than_files(tmp_path: Path) -> None:
    """They are rejected, and a FIFO without a writer does not block."""
    os.mkfifo(tmp_path / "fifo.safetensors")
    os.mkfifo(tmp_path / "index.json")
    with pytest.raises(ConfigError, match=r"there is no file or folder '.*fifo\.safetensors'"):
        find_tensors([tmp_path / "fifo.safetensors"])
    with pytest.raises(CheckpointError, match="it is a FIFO, not a regular file"):
        read_layout(tmp_path / "fifo.safetensors")
    with pytest.raises(ConfigError, match="it is a FIFO, not a regular file"):
        find_tensors(tmp_path / "index.json")


def test_written_files_are_read_by_the_library(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5).bfloat16(), "b": torch.randn(3, 2), "c": torch.tensor([True]), "d": torch.empty(0)}
    write_file(tmp_path / "x.safetensors", tensors, lambda name: tensors[name].reshape(-1).split(2))
    again = load_file(tmp_path / "x.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], value) and again[name].shape == value.shape for name, value in tensors.items())


@pytest.mark.parametrize("tiny", [True, False], ids=["nvme", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pieces_make_whole_parameters(
    optimize: Callable[..., nn.Module], tmp_path: Path, tiny: bool, dtype: torch.dtype
) -> None:
    """Checks both copies of each parameter: the master copy directly, the compute copy by a forward."""
    plain = nn.Sequential(nn.Linear(201, 203), nn.Linear(203, 201).requires_grad_(False))
    zinf_compile.export(plain, tmp_path / "weights", dtype=dtype)
    plain.load_state_dict(load_file(tmp_path / "weights" / "model.safetensors"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(201, 203), nn.Linear(203, 201).requires_grad_(False))
    small = {"host_memory": "640KiB"} if tiny else {}
    optimize(model, init=tmp_path / "weights", tiny=tiny, compute_dtype=torch.bfloat16, **small)
    assert torch.equal(model[0].weight, plain[0].weight)
    assert torch.equal(model[1].weight, plain[1].weight.bfloat16())
    x = torch.linspace(-1, 1, 201).bfloat16()
    assert torch.equal(model(x), plain.bfloat16()(x))
