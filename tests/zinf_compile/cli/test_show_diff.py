"""``zinf show`` and ``zinf diff``, called as the dispatcher calls them."""

import argparse
import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from zinf_compile.cli import diff, show
from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.inspect.printing import dump_plan
from zinf_compile.ir.errors import ConfigError, PlanFileError
from zinf_compile.ir.plan import Plan, RecomputedValue
from zinf_compile.ir.plan_io import save_plan


def run(command: ModuleType, *arguments: Path | str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words: Sequence[str] = [str(argument) for argument in arguments]
    status: int = command.run(parser.parse_args(words))
    return status


@pytest.fixture
def saved(small_plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    save_plan(small_plan, path)
    return path


def test_show_prints_the_plan_as_wide_as_the_terminal(
    small_plan: Plan, saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns, width in (("100", 100), ("20", 80), ("400", 140)):
        monkeypatch.setenv("COLUMNS", columns)
        assert run(show, saved) == 0
        assert capsys.readouterr().out == dump_plan(small_plan, width=width) + "\n"


def test_show_writes_a_trace(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert run(show, saved, "--trace", trace) == 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert f"trace written to {trace}" in capsys.readouterr().out


def test_show_writes_a_memory_snapshot(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = tmp_path / "memory.pickle"
    assert run(show, saved, "--memory-viz", snapshot) == 0
    assert pickle.loads(snapshot.read_bytes())["segments"]
    assert f"memory viz written to {snapshot}; open it in pytorch.org/memory_viz" in capsys.readouterr().out


def test_diff_of_equal_plans_is_0(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(diff, saved, saved) == 0
    assert capsys.readouterr().out == "the plans are equal\n"


def test_diff_of_different_plans_is_1(
    small_plan: Plan, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    save_plan(replace(small_plan, name="other", prefetch_nbytes=800), other)
    assert run(diff, saved, other) == 1
    assert capsys.readouterr().out == "name: small -> other\nprefetch: 400 B -> 800 B\n"


def test_a_file_that_is_no_plan_is_an_error(saved: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(PlanFileError, match=r"broken\.json is damaged at line 1 column 2"):
        run(diff, saved, broken)
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read"):
        run(show, tmp_path / "absent.json")


def test_a_reader_that_goes_away_is_status_141(saved: Path) -> None:
    script = f"import sys; from zinf_compile.cli.main import main; sys.exit(main(['show', {str(saved)!r}]))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before anything is written
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_diff_tells_other_hardware(
    small_plan: Plan, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    save_plan(replace(small_plan, hardware=load_hardware("h200")), other)
    assert run(diff, saved, other) == 1
    out = capsys.readouterr().out
    assert "hardware name: paper -> h200\n" in out
    assert "hardware tier device: none -> 131.32 GiB\n" in out
    assert "hardware devices per node: 1 -> 8\n" in out


def test_diff_tells_what_is_made_again(
    small_plan: Plan, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    values = (RecomputedValue(value="gelu", nbytes=2**20, tick=7, seconds=1.0),)
    save_plan(replace(small_plan, activations=replace(small_plan.activations, recomputed=values)), other)
    assert run(diff, saved, other) == 1
    assert capsys.readouterr().out == "values recomputed in backward: 0 of 0 B -> 1 of 1.0 MiB\n"
