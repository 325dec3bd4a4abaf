"""`zinf verify`: exit codes and the verdict, for each kind of model."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from zinf_compile.cli.main import main
from zinf_compile.frontend import verification

BUDGETS = ["--device-memory", "2MiB", "--host-memory", "2MiB", "--compute", "aten"]
GPT = ["gpt", "--layers", "2", "--hidden", "64", "--heads", "2", "--batch", "2", "--seq", "16", "--vocab", "64"]
MODULE = """
import torch

def good():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Flatten(0), torch.nn.Linear(512, 1)), torch.randn(8, 64)
"""


def test_a_gpt_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *GPT, *BUDGETS]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "GPT: 3 steps, compared with plain PyTorch in memory"
    assert "losses, gradients, parameters, buffers and optimizer states are equal, op by op" in printed[1]
    assert printed[-1] == "verdict: right, and within its budgets"
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verification, "_has_same_bits", lambda one, other: one is not None and one.numel() > 64)
    assert main(["verify", *GPT, *BUDGETS]) == 1
    printed = capsys.readouterr().out
    assert "tensors differ, op by op: loss of step 1" in printed
    assert printed.endswith("verdict: WRONG\n")


def test_a_function_is_called_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "of_verify.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert main(["verify", "of_verify:good", *BUDGETS, "--optimizer", "sgd", "--steps", "1"]) == 0
    assert capsys.readouterr().out.startswith("Sequential: 1 steps")


def test_a_transformers_model_has_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    with torch.no_grad():
        model.lm_head.weight.fill_(0.25)
    model.save_pretrained(tmp_path / "llama")
    heads: list[nn.Parameter] = []
    true_verify = verification.verify

    def verify(model: nn.Module, *args: object, **options: object) -> verification.Verdict:
        heads.append(model.lm_head.weight)
        return true_verify(model, *args, **options)

    monkeypatch.setattr("zinf_compile.verify", verify, raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "hf:llama", "--seq", "8", *BUDGETS]) == 0
    assert torch.equal(heads[0], torch.full((64, 32), 0.25))
    assert "verdict: right" in capsys.readouterr().out


def test_what_does_not_fit_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *GPT, "--device-memory", "1KiB", "--host-memory", "2MiB"]) == 2
    assert capsys.readouterr().err.startswith("zinf verify: ")
