"""SIGKILL during training and during saving leaves a complete checkpoint, from which training resumes."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zinf_compile

NUM_TRIALS = 26
# Which of them: every other pair in ``make test``, the rest in ``make test-long``. Of a pair, the second is killed twice.
SOME = tuple(trial for trial in range(NUM_TRIALS) if trial % 4 < 2)
OTHERS = tuple(trial for trial in range(NUM_TRIALS) if trial % 4 >= 2)
Run = Callable[[Path, int | None], dict[str, Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Return ``run(folder, kill_at)`` of ``tests.support.crash_server``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.crash_server"]
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def ask(folder: Path, kill_at: int | None) -> dict[str, Any]:
            print(json.dumps({"folder": str(folder), "kill_at": kill_at}), file=server.stdin, flush=True)
            answer: dict[str, Any] = json.loads(server.stdout.readline())
            answer["noted"] = {event[0]: event[-1] for event in answer["events"]}
            return answer

        yield ask
        server.stdin.close()


@pytest.mark.parametrize(
    ("trials", "phases"),
    [
        (SOME, {"placement", "training", "saving", "loading"}),
        pytest.param(OTHERS, {"saving", "loading"}, marks=pytest.mark.long),
    ],
    ids=["some", "others"],
)
def test_killed_at_any_point(run: Run, tmp_path: Path, trials: tuple[int, ...], phases: set[str]) -> None:
    whole = run(tmp_path / "whole", None)
    assert whole["status"] == 0, whole
    num_calls, digest = whole["noted"]["calls"], whole["noted"]["digest"]
    points = random.Random(0)
    drawn = []
    for trial in range(NUM_TRIALS):
        first = num_calls * trial // NUM_TRIALS + points.randrange(num_calls // NUM_TRIALS)  # spread over the run
        drawn.append([first, points.randrange(num_calls // 3)] if trial % 2 else [first])  # again while it resumes
    died: Counter[str] = Counter()
    for trial in trials:
        folder = tmp_path / f"{trial}"
        attempts = [run(folder, point) for point in drawn[trial]]
        for killed in attempts:
            assert killed["signal"] == 9, killed
            died[killed["events"][-1][0]] += 1
        num_saved = max(attempt["noted"].get("saved", 0) for attempt in attempts)
        resumed = run(folder, None)
        assert resumed["status"] == 0, resumed
        # If a save was in progress, its rename may have happened or not.
        assert resumed["noted"].get("loaded", 0) in (num_saved, num_saved + 1), (attempts, resumed)
        assert resumed["noted"]["digest"] == digest, (attempts, resumed)
        if "saved" in resumed["noted"]:  # leftovers of the killed processes are removed
            assert len(list(folder.glob("data-*"))) == 1
            assert sorted(os.listdir(folder))[1:] == ["manifest.json"]
    assert died.total() >= len(trials)
    assert died.keys() >= phases, died


def test_all_is_on_the_disk_before_the_rename(make: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For power failures: every file and folder is fsynced before the rename that makes the checkpoint valid."""
    model, optimizer = make()
    zinf_compile.save(tmp_path / "saved", model, optimizer)
    calls = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path))
        fsync(descriptor)

    def note_replace(*paths: Path) -> None:
        assert (tmp_path / "saved" / "data-1" / "model.safetensors").exists(), "the old checkpoint must be removed last"
        calls.append(Path("rename"))
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", note_fsync)
        patch.setattr(os, "replace", note_replace)
        zinf_compile.save(tmp_path / "saved", model, optimizer)
    assert [str(path) for path in calls] == [
        ".",
        "saved/.zinf-saving.json",
        "saved/data-2/.zinf-made-this",
        "saved/data-2/model.safetensors",
        "saved/data-2/optimizer.safetensors",
        "saved/data-2/objects.pt",
        "saved/data-2/manifest.json",
        "saved/data-2",
        "rename",
        "saved",
    ]
