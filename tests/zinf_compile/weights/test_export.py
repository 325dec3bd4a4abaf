"""Exports: other libraries read back the model's values, and a failed export leaves no files."""

import functools
import itertools
import json
import os
import signal
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import zinf_compile
from zinf_compile.ir.errors import ConfigError, StoreError, UnsupportedError
from zinf_compile.weights import export


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 200), nn.Linear(200, 300, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(200)
        self.register_buffer("angles", torch.ones(3), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.empty, self.scalar = nn.Parameter(torch.empty(0, 2)), nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


@pytest.fixture
def optimize(tmp_path: Path) -> Iterator[Callable[..., nn.Module]]:
    """Return ``zinf_compile.optimize`` with small budgets; its models are closed afterwards."""
    models = []

    def call(model: nn.Module, **options: object) -> nn.Module:
        budgets = {"device_memory": "8MiB", "host_memory": "512KiB", "nvme": tmp_path, "capture": False}
        models.append(zinf_compile.optimize(model, **{**budgets, **options}))
        return models[-1]

    yield call
    for model in models:
        zinf_compile.close(model)


def train(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    return model


def read(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def assert_holds(folder: Path, model: nn.Module, dtype: torch.dtype | None = None) -> None:
    found, expected = read(folder), model.state_dict()
    assert expected.keys() - found.keys() == {"head.weight"}, "tied: the first name is enough"
    for name, value in found.items():
        wanted = (
            expected[name].to(dtype) if dtype is not None and expected[name].is_floating_point() else expected[name]
        )
        assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape), name
        assert torch.equal(value, wanted), name


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("host_memory", ["1MiB", "64MiB"])
def test_one_file(
    optimize: Callable[..., nn.Module], tmp_path: Path, host_memory: str, compute_dtype: torch.dtype | None
) -> None:
    """The master copies are exported, wherever they live, not the compute copies."""
    model = train(optimize(Net(), host_memory=host_memory, compute_dtype=compute_dtype))
    zinf_compile.export(model, tmp_path / "a" / "b")
    assert os.listdir(tmp_path / "a" / "b") == ["model.safetensors"]
    assert_holds(tmp_path / "a" / "b", model)
    assert read(tmp_path / "a" / "b")["embed.weight"].dtype == torch.float32
    with safe_open(tmp_path / "a" / "b" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards(optimize: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = train(optimize(Net()))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    zinf_compile.export(model, tmp_path / "out", dtype=torch.float16, max_shard_size=2000)
    assert sorted(os.listdir(tmp_path / "out"))[-2:] == ["model.safetensors.index.json", "tokenizer.json"]
    assert_holds(tmp_path / "out", model, torch.float16)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read(tmp_path / "out").keys()
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    sizes = [
        sum(value.nbytes for value in load_file(file).values()) for file in (tmp_path / "out").glob("*.safetensors")
    ]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert len(sizes) > 2
    assert sorted(sizes)[-2] <= 2000, "only the embedding, which is larger by itself, exceeds the limit"


def test_a_plain_and_a_closed_model(optimize: Callable[..., nn.Module], tmp_path: Path) -> None:
    plain = Net()
    zinf_compile.export(plain, tmp_path / "plain")
    assert_holds(tmp_path / "plain", plain)
    model = train(optimize(Net()))
    zinf_compile.close(model)
    zinf_compile.export(model, tmp_path / "closed")
    assert_holds(tmp_path / "closed", model)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_it(optimize: Callable[..., nn.Module], tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=100,
        tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    optimize(model, init="reset")
    for dtype, size in ((None, "5GB"), (torch.bfloat16, "50KB")):
        folder = tmp_path / str(dtype)
        zinf_compile.export(model, folder, dtype=dtype, max_shard_size=size)
        again, loading_info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(loading_info.values()), loading_info
        assert type(again) is transformers.LlamaForCausalLM
        assert again.dtype == (dtype or torch.float32)
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
        for name, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], value.to(dtype)), name
        assert ("lm_head.weight" in read(folder)) != tied
    assert model.config.architectures is None, "the model's own config must not change"


def test_refusals(optimize: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = optimize(Net())
    (tmp_path / "file").write_text("")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.safetensors").write_text("")
    before = sorted(tmp_path.rglob("*"))
    calls: list[tuple[dict[str, Any], str]] = [
        ({"folder": tmp_path / "file"}, "file' is not a folder"),
        ({"folder": tmp_path / "old"}, r"has weights already \(model\.safetensors\); remove them, or choose another"),
        ({"folder": tmp_path / "file" / "below"}, "cannot write to folder"),
        ({"folder": tmp_path / "x", "dtype": torch.int8}, r"dtype=torch\.int8 is not a floating-point dtype"),
        ({"folder": tmp_path / "x", "max_shard_size": "huge"}, "max_shard_size='huge' is not a size"),
        ({"folder": tmp_path / "x", "max_shard_size": 0}, "max_shard_size is 0"),
    ]
    for arguments, message in calls:
        with pytest.raises(ConfigError, match=message):
            zinf_compile.export(model, **arguments)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="'weight' is on the meta device, so it has no value"):
        zinf_compile.export(empty, tmp_path / "x")
    odd = nn.Module()
    odd.register_buffer("z", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UnsupportedError, match=r"'z' is torch\.complex128, which safetensors files do not hold"):
        zinf_compile.export(odd, tmp_path / "x")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failure_leaves_nothing(
    optimize: Callable[..., nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = optimize(Net())
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    (tmp_path / "there" / "config.json").write_text("mine")
    model.config = types.SimpleNamespace(save_pretrained=lambda folder: (folder / "config.json").write_text("new"))
    before = sorted(tmp_path.rglob("*"))
    replace = Path.replace

    def full(path: Path, target: Path) -> Path:
        if path.name.startswith("model-00003"):
            raise OSError(28, "No space left on device", str(path))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full)
    for folder in ("there", "new"):
        with pytest.raises(StoreError, match=r"moving .*model-00003.* failed: No space left on device"):
            zinf_compile.export(model, tmp_path / folder, max_shard_size=1000)
        assert sorted(tmp_path.rglob("*")) == before
        assert (tmp_path / "there" / "config.json").read_text() == "mine"
    monkeypatch.undo()

    def fail(tensor: Tensor) -> Iterator[Tensor]:
        yield tensor.detach().reshape(-1)[:1]
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "_pieces", fail)
    for folder in ("there", "new"):
        with pytest.raises(KeyboardInterrupt):
            zinf_compile.export(model, tmp_path / folder)
        assert sorted(tmp_path.rglob("*")) == before


def killed_export(model: nn.Module, folder: Path, at: int) -> int:
    """Export in a process that kills itself at its ``at``-th change of a folder; return its exit status."""
    child = os.fork()
    if child == 0:
        counter = itertools.count(1)

        def dying(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if next(counter) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        try:
            for name in ("mkdir", "fsync", "replace", "unlink", "rmdir"):
                setattr(os, name, functools.partial(dying, getattr(os, name)))
            zinf_compile.export(model, folder, max_shard_size=150_000)
            os._exit(0)
        finally:
            os._exit(1)  # never go on as a second process of these tests
    return os.waitpid(child, 0)[1]


def test_killed_exports_leave_nothing_to_the_next(tmp_path: Path) -> None:
    """Killed at each change of the folder in turn. Files that only look like leftovers stay."""
    model, folder = Net(), tmp_path / "out"
    for name in ("mine", "linked"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("mine")
    folder.mkdir()
    (tmp_path / "mine").rename(folder / f".zinf-export-{'0' * 32}")
    (folder / f".zinf-export-{'1' * 32}").symlink_to(tmp_path / "linked")
    before, num_left = sorted(tmp_path.rglob("*")), 0
    for at in itertools.count(1):
        status = killed_export(model, folder, at)
        for path in folder.glob("model*"):
            path.unlink()
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        num_left += sorted(tmp_path.rglob("*")) != before
    assert sorted(tmp_path.rglob("*")) == before
    assert num_left > 5
