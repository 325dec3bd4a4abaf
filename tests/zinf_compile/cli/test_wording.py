"""Help texts and messages say what the field says, and no longer what was hard to understand."""

import json
import re
from pathlib import Path

import pytest

from zinf_compile.cli.main import main
from zinf_compile.inspect.step_summary import dump_summary
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.simulator.simulate import simulate


def words_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what was printed, in one line."""
    printed = capsys.readouterr()
    return re.sub(r"\s+", " ", printed.out + printed.err)


@pytest.mark.parametrize(
    ("command", "new", "old"),
    [
        ("plan", "model options (gpt and hf: only)", "the model, where it is gpt"),
        ("plan", "--layers N number of layers", "layers of the gpt"),
        ("plan", "--hidden N hidden size", "hidden of the gpt"),
        ("plan", "--heads N number of attention heads", "heads of the gpt"),
        ("plan", "plan inference only", "plan a forward alone"),
        ("train", "peak learning rate", "highest learning rate"),
        ("train", "resume from the checkpoint with these budgets", "go on from the checkpoint"),
        ("train", "gradient accumulation steps", "micro-batches"),
        ("", "report limits, missing features and their impact", "tell its limits"),
    ],
)
def test_help(
    command: str, new: str, old: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main([*filter(None, [command]), "--help"])
    shown = words_of(capsys)
    assert new in shown
    assert old not in shown


@pytest.mark.parametrize(
    ("arguments", "new", "old"),
    [
        ("plan gpt --layers 0", "--layers must be at least 1, and is 0", "is not a size"),
        (
            "plan gpt --layers 1 --hidden 64 --heads 5",
            "--hidden must be divisible by --heads, with an even head size",
            "cannot be cut into",
        ),
        ("plan hf:absent", "no config.json found at absent", "is no config.json"),
        ("show plan.json", "plan.json is not a zinf plan file (missing 'version')", "lacks the field"),
    ],
)
def test_messages(
    arguments: str,
    new: str,
    old: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(json.dumps({"name": "graph"}))
    hardware = ["--hardware", "laptop-16g"] if arguments.startswith("plan") else []
    assert main([*arguments.split(), *hardware]) == 2
    said = words_of(capsys)
    assert new in said
    assert old not in said


def test_a_summary_says_ssd_writes(small_plan: Plan) -> None:
    shown = "\n".join(dump_summary(simulate(small_plan)))
    assert re.search(r"SSD writes .* per step, .* per day", shown)
    assert "wear" not in shown
