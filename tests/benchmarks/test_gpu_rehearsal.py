"""A rehearsal of `benchmarks/gpu.sh` without a GPU, so that minutes on one are not lost to what a CPU could have shown."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_step import SHAPES, Shape, _build

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


@pytest.mark.long
def test_its_tests_are_collected_with_the_packages_of_such_a_machine() -> None:
    paths = sorted(set(re.findall(r"tests/[\w/]+(?:\.py)?", SCRIPT.read_text())))
    assert "tests/gpu" in paths
    assert all((ROOT / path).exists() for path in paths)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.gpu_image", "--collect-only", "-q", *paths]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert collected.returncode == 0, collected.stdout[-2000:]
    assert "tests/gpu/test_training.py" in collected.stdout


def test_the_script_is_one() -> None:
    shell = shutil.which("sh")
    assert shell is not None
    subprocess.run([shell, "-n", str(SCRIPT)], check=True)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_shape_computes(name: str) -> None:
    """On the meta device, with one of its layers: a width that its heads do not divide would fail."""
    shape = SHAPES[name]
    model = _build(Shape(layers=1, hidden=shape.hidden, sequence=shape.sequence, head_width=shape.head_width))
    tokens = torch.zeros(1, shape.sequence, dtype=torch.long, device="meta")
    loss = model(tokens=tokens, targets=tokens)
    loss.backward()
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in model.parameters())
