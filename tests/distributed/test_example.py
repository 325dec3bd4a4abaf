"""The examples of docs/ranks.md, as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zinf_compile
from zinf_compile.checkpoint.checkpoint_folder import read_manifest

ROOT = Path(__file__).resolve().parents[2]


def run(example: str, folder: Path) -> list[str]:
    """Return the lines that an example prints on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(ROOT / "examples" / example)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long  # test_cli.py starts processes, too
def test_the_examples_train_to_the_same_numbers_and_their_checkpoints_are_there(tmp_path: Path) -> None:
    sharded = run("ranks.py", tmp_path)
    assert [line.split(":")[0] for line in sharded] == ["step 0", "step 1", "step 2"], sharded
    assert read_manifest(tmp_path / "checkpoint") is not None
    (tmp_path / "rounds").mkdir()
    assert run("rounds.py", tmp_path / "rounds") == sharded
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    first = model[5].weight.detach().clone()
    zinf_compile.load(tmp_path / "rounds" / "checkpoint", model, torch.optim.AdamW(model.parameters(), lr=3e-4))
    assert not torch.equal(model[5].weight, first)
