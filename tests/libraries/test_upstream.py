"""The tests that peft and accelerate have themselves, first with plain models and then with optimized ones.

They are not in the packages, so the repositories are cloned into ``runs/upstream``, each at the version that is installed.
``ZINF_UPSTREAM`` names another folder of clones.
"""

import fcntl
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_CLONES = Path(os.environ.get("ZINF_UPSTREAM", _ROOT / "runs" / "upstream"))
_SECONDS_TO_CLONE, _SECONDS_TO_RUN = 300, 1500
_ENDED = (0, 1)  # pytest's own: all passed, some failed


class Suite(NamedTuple):
    """Some of the tests of a library, the packages that they import, and how many tests here run them."""

    library: str
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()
    num_parts: int = 1


# grad_sync runs accelerate's own test_sync.py.
_OF_ACCELERATE = ("grad_sync", "accelerator", "optimizer", "scheduler", "state_checkpointing")
SUITES = (
    Suite(
        "peft", ("tests/test_custom_models.py", "-k", "test_training_custom_models"), ("diffusers", "scikit-learn"), 8
    ),
    Suite("accelerate", tuple(f"tests/test_{name}.py" for name in _OF_ACCELERATE), ("parameterized",)),
)


@pytest.mark.parametrize(
    ("suite", "part"),
    [
        pytest.param(suite, f"{number}/{suite.num_parts}", id=f"{suite.library}-{number}")
        for suite in SUITES
        for number in range(1, suite.num_parts + 1)
    ],
)
def test_passes_with_optimized_models(
    suite: Suite, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        for package in suite.needs:
            importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the tests of {suite.library} import packages of their own: pip install {' '.join(suite.needs)}")
    clone = _clone(suite.library)
    plain = _run(suite, part, clone, "plain", tmp_path)
    ours = _run(suite, part, clone, suite.library, tmp_path)
    with capsys.disabled():
        print(f"\n{suite.library} {part}, plain: {plain}\n{suite.library} {part}, optimized: {ours}")


def _clone(library: str) -> Path:
    """Return the folder of a library's repository at the installed version; skip the test if it cannot be had."""
    clone = _CLONES / library
    version = importlib.metadata.version(library)
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", f"v{version}"]
    command += [f"https://github.com/huggingface/{library}", str(clone)]
    _CLONES.mkdir(parents=True, exist_ok=True)
    with (_CLONES / f"{library}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of xdist clone once
        if not clone.is_dir():
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_TO_CLONE)
            if done.returncode != 0:
                pytest.skip(f"no clone in {clone}, and '{' '.join(command)}' says: {done.stderr.strip()}")
    return clone


def _run(suite: Suite, part: str, clone: Path, optimize: str, folder: Path) -> str:
    """Run the tests of a suite; return pytest's line of counts, and the line about models."""
    command = [sys.executable, "-m", "pytest", *suite.tests, "-p", "optimized", "--optimize", optimize]
    command += ["--part", part] if optimize == "plain" else []  # the other run is of what passed
    command += ["--passed", str(folder / "passed"), "-q", "-n", "2", "--tb=native", "--show-capture=no"]
    command += ["-o", "addopts=", "-p", "no:cacheprovider"]  # their own options are for their CI
    paths = os.pathsep.join(filter(None, (str(_ROOT), str(_HERE / "upstream"), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=_SECONDS_TO_RUN)
    failed = re.findall(r"^(?:FAILED|ERROR) .*$", done.stdout, re.MULTILINE)
    if optimize == "plain":
        assert done.returncode in _ENDED, done.stdout + done.stderr
    else:
        assert done.returncode == 0, "\n".join([*failed, done.stdout[-4000:], done.stderr[-2000:]])
    return " ".join(line for line in done.stdout.splitlines() if line.startswith("models: ") or " in " in line[-30:])
