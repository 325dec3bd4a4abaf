"""`zinf train --save-every --resume` is bitwise exact, after a SIGKILL and under other budgets."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zinf_compile
from zinf_compile.cli.main import main

LOOP = ["--accumulate", "2", "--clip", "0.5", "--optimizer", "adam", "--steps", "6"]


def _losses(printed: str) -> dict[str, str]:
    return dict(re.findall(r"^step +(\d+)/\d+  loss (\d+\.\d{3})", printed, flags=re.MULTILINE))


def _contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the tensor files of the checkpoint in a folder."""
    (data,) = folder.glob("data-*")
    return {path.name: path.read_bytes() for path in data.glob("*.safetensors")}


@pytest.mark.long
def test_killed_in_the_middle_it_ends_as_if_it_had_not_been(
    tiny: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*tiny, *LOOP, "--nvme", str(tmp_path), "--save-every", "2"]
    assert main([*words, "--checkpoint", str(tmp_path / "whole")]) == 0
    whole = _losses(capsys.readouterr().out)
    assert len(whole) == 6

    killed = [*words, "--checkpoint", str(tmp_path / "killed")]
    script = "import sys; from zinf_compile.cli.main import main; main(sys.argv[1:])"
    with subprocess.Popen([sys.executable, "-c", script, *killed], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("step    3/6"):
                child.kill()
    assert child.returncode == -signal.SIGKILL

    assert main([*killed, "--resume", "--device-memory", "6MiB", "--host-memory", "64MiB"]) == 0
    out = capsys.readouterr().out
    resumed = _losses(out)
    assert re.search(r"^resumed: .*killed, after step [24]$", out, flags=re.MULTILINE)
    assert "6" in resumed
    assert resumed.items() <= whole.items()
    assert _contents(tmp_path / "killed") == _contents(tmp_path / "whole")


def test_plain_and_longer(tiny: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*tiny, "--plain", "--checkpoint", str(tmp_path / "saved"), "--compute-dtype", "bfloat16"]
    assert main([*words, "--steps", "2"]) == 0
    assert f"checkpoint: {tmp_path / 'saved'}, after step 2" in capsys.readouterr().out
    assert main([*words, "--steps", "3", "--resume"]) == 0
    assert list(_losses(capsys.readouterr().out)) == ["3"]


def test_what_cannot_be_resumed(refused: Callable[..., None], tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run = ["--plain", "--checkpoint", folder, "--steps", "1"]
    refused(f"there is no checkpoint in '{folder}'; pass its folder", *run, "--resume")
    assert not folder.exists()
    assert main([*tiny, *map(str, run)]) == 0
    before = _contents(folder)
    refused("which this run would replace; pass --resume", *run)
    refused("step 1 is done in", *run, "--resume")
    refused("has --batch 4 (now 3), --clip None (now 1.0)", *run, "--resume", "--batch", "3", "--clip", "1")
    refused("has --text of 5344 tokens with checksum ", *run, "--resume", "--text", __file__)
    refused("AdamW in the checkpoint, SGD here; pass the options", *run, "--resume", "--optimizer", "sgd")
    refused("is not one of this GPT and its optimizer", *run, "--resume", "--params", "200K")
    assert _contents(folder) == before


def test_a_checkpoint_of_another_program(refused: Callable[..., None], tiny: list[str], tmp_path: Path) -> None:
    from zinf_compile.cli.presets import load_example

    example = load_example(None)
    model = example.GPT(example.GPTConfig(256, 2, 128, 2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    zinf_compile.save(tmp_path, model, optimizer, extra={"step": 1})
    refused("was not saved by zinf train", "--plain", "--checkpoint", tmp_path, "--resume")


def test_a_folder_that_cannot_be_written_is_known_before_training(refused: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        refused(
            f"'{tmp_path / 'file'}' is not a folder that can be written", "--checkpoint", folder, "--save-every", "1"
        )
