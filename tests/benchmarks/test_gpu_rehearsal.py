"""A rehearsal of `benchmarks/gpu.sh` without a GPU, so that minutes on one are not lost to what a CPU could have shown."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_step
from benchmarks.gpu_step import PREDICTED, SHAPES, _build
from benchmarks.predictions import find_case
from tests.support.gpu_image import make_environment

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


@pytest.fixture(scope="module")
def run_tests(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return what runs pytest with the packages of a machine with a GPU, and returns what it prints."""
    python = make_environment(tmp_path_factory.mktemp("image"))
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "ZINF_PART", "ZINF_VARIANTS", "ZINF_STREAMS")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}

    def run(*arguments: str, **variables: str) -> str:
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=native", *arguments]
        ran = subprocess.run(
            command, cwd=ROOT, env=inherited | variables, capture_output=True, text=True, check=False, timeout=900
        )
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
        return ran.stdout

    return run


@pytest.mark.slow
def test_its_tests_are_collected_with_the_packages_of_such_a_machine(run_tests: Callable[..., str]) -> None:
    paths = sorted(set(re.findall(r"tests/[\w/]+(?:\.py)?", SCRIPT.read_text())))
    assert "tests/gpu" in paths
    assert all((ROOT / path).exists() for path in paths)
    assert "tests/gpu/test_training.py" in run_tests("--collect-only", *paths)


# Tests of one run, each with so many of its variants that all values occur.
RUNS = ("bitwise", "codes", "updates_on_the_host", "scaler", "options", "llama", "eager or limit or recorded or inputs")


@pytest.mark.slow
@pytest.mark.parametrize("names", [*(pytest.param(each, marks=pytest.mark.long) for each in RUNS[:-1]), RUNS[-1]])
def test_its_tests_run_on_the_tests_own_gpu(run_tests: Callable[..., str], names: str) -> None:
    """But for what needs a real one. A mistake in a test is found here."""
    printed = run_tests("-m", "not long", "-k", names, "tests/gpu", ZINF_STREAMS="1")
    assert re.search(r"\d+ passed", printed)
    skipped = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", printed, re.MULTILINE)
    assert all(reason.startswith("it needs a real GPU: ") for reason in skipped), skipped


def test_every_test_of_a_gpu_is_in_one_of_these_runs() -> None:
    tests = re.findall(r"^def (test_\w+)", (ROOT / "tests/gpu/test_training.py").read_text(), re.MULTILINE)
    words = [word for run in RUNS for word in run.split(" or ")]
    assert [name for name in tests if not any(word in name for word in words)] == []


def test_the_script_is_one() -> None:
    shell = shutil.which("sh")
    assert shell is not None
    subprocess.run([shell, "-n", str(SCRIPT)], check=True)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_shape_computes(name: str) -> None:
    """On the meta device, with one of its layers: a width that its heads do not divide would fail."""
    shape = SHAPES[name]
    model = _build(replace(shape, layers=1))
    tokens = torch.zeros(1, shape.sequence, dtype=torch.long, device="meta")
    loss = model(tokens=tokens, targets=tokens)
    loss.backward()
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_predicted_cases_are_those_that_are_measured() -> None:
    lines = (ROOT / "benchmarks/results/2026-11-30-h200-predictions.jsonl").read_text().splitlines()
    noted = {line["model"]: line["num_parameters"] for line in map(json.loads, lines)}
    assert noted.keys() == PREDICTED.keys()
    for name, num_parameters in noted.items():
        predicted, shape = find_case(name, 4096), SHAPES[name]
        assert sum(parameter.numel() for parameter in predicted.model.parameters()) == num_parameters
        assert asdict(predicted.model.config) == asdict(_build(shape).config)
        assert predicted.inputs["tokens"].shape == (4096 // shape.sequence, shape.sequence)


# Instead of Python: it notes how it was called, takes a minute for what SLOW says, and ends with STATUS.
STUB = """#!/bin/sh
case "$*" in "-m pip"*) exit ;; esac
seen="gpu=${ZINF_GPU:-} races=${TORCH_CUDA_SANITIZER:-} allocator=${PYTORCH_CUDA_ALLOC_CONF:-}"
echo "$* part=${ZINF_PART:-} $seen" >> "$CALLS"
case "$*" in *"${SLOW:-nothing}"*) sleep 60 ;; esac
echo "of the stub"
exit "${STATUS:-0}"
"""


@pytest.fixture
def gpu_sh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Return what runs the script with a stub, and returns its status and the calls of Python."""
    stub, calls = tmp_path / "stub", tmp_path / "calls"
    stub.write_text(STUB)
    stub.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(stub))
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))

    def run(*steps: str, **variables: str) -> tuple[int, list[str]]:
        calls.write_text("")
        ended = subprocess.run(["sh", str(SCRIPT), *steps], cwd=ROOT, env={**os.environ, **variables}, check=False)
        return ended.returncode, calls.read_text().splitlines()

    return run


def test_parts_of_tests_that_have_ended_are_not_run_again(
    gpu_sh: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    """Whether they failed or not."""
    status, calls = gpu_sh("tests", "parity", STATUS="1")
    assert status == 0
    assert len(calls) == 9
    assert [call.split("part=")[1].split()[0] for call in calls[:3]] == ["1/3", "2/3", "3/3"]
    assert all("gpu=1" in call for call in calls[3:])
    assert "gpu=1" not in calls[0]
    (tmp_path / "out/tests-2of3.txt").unlink()
    status, calls = gpu_sh("tests", "parity", "sanitizer")
    assert [call.split("part=")[1].split()[0] for call in calls] == ["2/3", "1/3", "2/3", "3/3"]
    assert ["races=1" in call for call in calls] == [False, True, True, True]


def test_what_time_did_not_suffice_for_is_run_again(
    gpu_sh: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    """A run of tests that had all the time there is counts as one that has ended."""
    status, calls = gpu_sh("ranks", "tests", SLOW="tests/gpu", LIMIT="3")
    assert status == 3
    assert len(calls) == 2
    assert [file.name for file in (tmp_path / "out").glob("*.txt")] == ["ranks-1of1.txt"]
    status, calls = gpu_sh("ranks", "tests", SLOW="tests/gpu", LIMIT="3")
    assert status == 3
    assert len(calls) == 1
    assert "It was stopped after" in (tmp_path / "out/tests-1of3.txt").read_text()


def test_its_measurements_are_ones_that_the_benchmark_takes(
    gpu_sh: Callable[..., tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, calls = gpu_sh("step", "aten", "segments", "profile", "predicted", AGAIN="1")
    assert len(calls) == 8
    assert "expandable_segments:False" in calls[3]
    asked = []
    monkeypatch.setattr(gpu_step, "_compare", lambda name, args, lines, before: asked.append((name, args.tokens)))
    for call in calls:
        given = call.split(" part=")[0].split()
        assert given[:2] == ["-m", "benchmarks.gpu_step"]
        assert "--again" in given
        monkeypatch.setattr(sys, "argv", [*given[1:], "--device", "cpu"])
        gpu_step.main()
    assert set(asked) == {
        *(("1.6B", tokens) for tokens in (4096, 16384, 65536)),
        *((name, tokens) for name in ("1.5B", "7B") for tokens in (4096, 16384, 65536)),
        *(("13B", tokens) for tokens in (4096, 16384)),
    }


def test_a_machine_without_the_memory_checker(
    gpu_sh: Callable[..., tuple[int, list[str]]], capfd: pytest.CaptureFixture[str]
) -> None:
    status, calls = gpu_sh("memcheck", "ranks", PATH=os.defpath)
    assert status == 0
    assert len(calls) == 1
    assert "compute-sanitizer does not run here:" in capfd.readouterr().out


def test_a_memory_checker_that_runs(gpu_sh: Callable[..., tuple[int, list[str]]], tmp_path: Path) -> None:
    checker = tmp_path / "compute-sanitizer"
    checker.write_text('#!/bin/sh\nshift 2\n"$@"\necho ERROR SUMMARY: 0 errors\n')
    checker.chmod(0o755)
    status, calls = gpu_sh("memcheck", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert status == 0
    assert len(calls) == 6
    assert "test_state_kernels" in calls[1]
    assert all("bitwise or codes or scaler" in call for call in calls[2:])


def run_gpu_step(file: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[dict[str, Any]]:
    """Run the benchmark of the smallest model, and return the lines of its runs."""
    monkeypatch.setattr(sys, "argv", ["gpu_step", "--device", "cpu", "--only", "tiny", "--json", str(file), *options])
    gpu_step.main()
    return [line for line in map(json.loads, file.read_text().splitlines()) if line["question"] == "step"]


def test_a_run_that_takes_too_long_is_noted_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--contestants", "memory", "--limit", "0.1")
    (line,) = run_gpu_step(tmp_path / "lines", monkeypatch, *options)
    assert line["failed"] == ["it was stopped after 0.1 seconds"]
    assert line["limit_seconds"] == 0.1
    assert len(run_gpu_step(tmp_path / "lines", monkeypatch, *options)) == 1
    assert len(run_gpu_step(tmp_path / "lines", monkeypatch, *options, "--again")) == 2


def test_what_failed_is_not_repeated_and_budgets_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[str] = []

    def child(contestant: str, name: str, args: Any, device_memory: str) -> dict[str, Any]:
        budgets.append(f"{contestant} {device_memory}")
        is_small = contestant == "zinf" and device_memory == "1GiB"
        return {"failed": ["out of memory"]} if is_small else {"seconds": [1.0], "device_nbytes": 400}

    monkeypatch.setattr(gpu_step, "_child", child)
    options = ("--contestants", "memory", "zinf")
    for _ in range(2):
        run_gpu_step(tmp_path / "lines", monkeypatch, *options)
        run_gpu_step(tmp_path / "lines", monkeypatch, *options, "--device-memory", "1GiB")
        run_gpu_step(tmp_path / "lines", monkeypatch, *options, "--compute", "aten")
    assert budgets == ["memory 24GiB", "zinf 100", "zinf 1GiB", "zinf 100"]
    lines = run_gpu_step(tmp_path / "lines", monkeypatch, *options, "--device-memory", "1GiB", "--again")
    assert len(lines) == 5
    assert budgets[-1] == "zinf 1GiB"


def test_fsdp2_is_skipped_where_its_states_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinf_compile.ir.config.free_memory", lambda: 2**30)
    (line,) = run_gpu_step(tmp_path / "lines", monkeypatch, "--contestants", "fsdp2")
    assert re.fullmatch(r"its states need \d+ GB of host memory, and 1 GB are free", line["skipped"])
    assert len(run_gpu_step(tmp_path / "lines", monkeypatch, "--contestants", "fsdp2")) == 1


def test_fsdp2_of_seven_billion_needs_more_than_a_machine_of_128_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinf_compile.ir.config.free_memory", lambda: 122 * 2**30)
    assert gpu_step._lacking("fsdp2", "7B") is not None
    assert gpu_step._lacking("fsdp2", "1.6B") is None
    assert gpu_step._lacking("zinf", "7B") is None
