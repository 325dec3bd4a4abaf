"""The example of docs/ranks.md, as torchrun starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zinf_compile.checkpoint.checkpoint_folder import read_manifest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long  # test_cli.py starts processes, too
def test_the_example_trains_and_its_checkpoint_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "ranks.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["step 0", "step 1", "step 2"], done.stdout
    assert read_manifest(tmp_path / "checkpoint") is not None
