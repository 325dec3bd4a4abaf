"""`zinf train hf:FOLDER`, with and without LoRA, compared with plain transformers and PEFT."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zinf_compile.cli.checkpoints import CheckpointFolder
from zinf_compile.cli.main import main
from zinf_compile.cli.training import Training

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=32, attention_dropout=0.1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _contents(folder: Path) -> dict[str, bytes]:
    (data,) = folder.glob("data-*")
    return {path.name: path.read_bytes() for path in data.glob("*.safetensors")}


def _losses(printed: str) -> list[str]:
    return re.findall(r"^step .* loss (\d+\.\d{3})", printed, flags=re.MULTILINE)


@pytest.mark.parametrize("options", [[], ["--lora", "4", "--optimizer", "muon", "--lr", "0.02"]])
def test_within_a_budget_the_losses_are_those_of_plain(
    tiny: list[str], llama: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str]
) -> None:
    # dropout draws different random numbers in a captured graph
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(llama / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    printed = []
    for more in (["--plain"], ["--nvme", str(tmp_path), "--device-memory", "1MiB", "--host-memory", "1MiB"]):
        words = ["train", f"hf:{tmp_path}", *tiny[1:], "--steps", "3", "--sample", "4", *options, *more]
        assert main(words) == 0
        printed.append(capsys.readouterr().out)
    assert _losses(printed[1]) == _losses(printed[0])
    assert len(set(_losses(printed[0]))) == 3
    assert printed[1].partition("sample:")[2] == printed[0].partition("sample:")[2] != ""
    trained = "35,616 parameters, 3,712 of them in adapters of rank 4" if options else "31,904 parameters, with"
    assert f"model: a llama of {trained}" in printed[1]


def test_first_values_of_its_own_are_those_of_plain(
    tiny: list[str], llama: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    printed = []
    for more in (["--plain"], ["--nvme", str(tmp_path)]):
        assert main(["train", f"hf:{tmp_path}", *tiny[1:], "--steps", "1", *more]) == 0
        printed.append(_losses(capsys.readouterr().out))
    assert printed[0] == printed[1]


def test_lora_resumes_with_its_random_numbers(
    tiny: list[str], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has dropout, and the run is stopped after its second step."""
    words = ["train", f"hf:{llama}", *tiny[1:], "--plain", "--lora", "4", "--compute-dtype", "bfloat16", "--steps", "4"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main([*words, "--checkpoint", str(whole)]) == 0
    save_when_due = CheckpointFolder.save_when_due

    def stop_behind_2(self: CheckpointFolder, training: Training) -> None:
        save_when_due(self, training)
        if training.step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "save_when_due", stop_behind_2)
        assert main([*words, "--checkpoint", str(stopped), "--save-every", "2"]) == 130
    assert _contents(stopped) != _contents(whole)
    assert main([*words, "--checkpoint", str(stopped), "--resume"]) == 0
    assert _contents(stopped) == _contents(whole)
    assert _contents(whole).keys() == {"model.safetensors", "optimizer.safetensors"}


def test_refusals(refused: Callable[..., None], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("is no model; pass hf: and a folder", model=str(llama))
    refused("is no model; pass hf: and a folder", model=f"hf:{tmp_path}")
    refused("leave out --params and --model", "--params", "1M", model=f"hf:{llama}")
    refused("--seq 64 is longer than the 32 positions", "--seq", "64", model=f"hf:{llama}")
    monkeypatch.setitem(sys.modules, "peft", None)
    refused("pip install zinf_compile[lora]", "--lora", "4", model=f"hf:{llama}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused("pip install zinf_compile[hf]", model=f"hf:{llama}")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "vocab_size": 99}, "the text has 256 kinds of tokens"),
        ({"model_type": "no such"}, "no causal language model can be made from"),
        ({"model_type": "clip"}, "no causal language model can be made from"),
        ("{", "no causal language model can be made from"),
    ],
)
def test_folders_that_cannot_be_trained(
    refused: Callable[..., None], tmp_path: Path, config: object, message: str
) -> None:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    refused(message, model=f"hf:{tmp_path}")


def test_pickled_weights_are_not_overlooked(refused: Callable[..., None], llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused("pytorch_model.bin; save them as safetensors first", model=f"hf:{tmp_path}")
