"""Processes that die by SIGKILL, in training and in saving: the checkpoint they leave is whole, and training goes on."""

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
Run = Callable[[Path, int | None], dict[str, Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Return ``run(folder, kill_at)`` of crash_server.py."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    script = Path(__file__).with_name("crash_server.py")
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
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


def test_killed_at_any_point(run: Run, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", None)
    assert whole["status"] == 0, whole
    num_calls, digest = whole["noted"]["calls"], whole["noted"]["digest"]
    points = random.Random(0)
    died: Counter[str] = Counter()
    for trial in range(NUM_TRIALS):
        folder = tmp_path / f"{trial}"
        point = num_calls * trial // NUM_TRIALS + points.randrange(num_calls // NUM_TRIALS)  # all over the run
        attempts = [run(folder, point)]
        if trial % 2:  # and once more, while it is resumed
            attempts.append(run(folder, points.randrange(num_calls // 3)))
        for killed in attempts:
            assert killed["signal"] == 9, killed
            died[killed["events"][-1][0]] += 1
        num_saved = max(attempt["noted"].get("saved", 0) for attempt in attempts)
        resumed = run(folder, None)
        assert resumed["status"] == 0, resumed
        # Of a save that was under way, the rename may have happened or not.
        assert resumed["noted"].get("loaded", 0) in (num_saved, num_saved + 1), (attempts, resumed)
        assert resumed["noted"]["digest"] == digest, (attempts, resumed)
        if "saved" in resumed["noted"]:  # what the dead have left is gone
            assert len(list(folder.glob("data-*"))) == 1
            assert not (folder / "manifest.json.new").exists()
    assert died.total() >= 25
    assert died.keys() >= {"placement", "training", "saving", "loading"}, died


def test_all_is_on_the_disk_before_the_rename(make: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power failure would need: every file and folder is synchronised before the rename that makes it count."""
    model, optimizer = make()
    zinf_compile.save(tmp_path / "saved", model, optimizer)
    calls = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path))
        fsync(descriptor)

    def note_replace(*paths: Path) -> None:
        assert (tmp_path / "saved" / "data-1" / "model.safetensors").exists(), "the old one goes last"
        calls.append(Path("rename"))
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", note_fsync)
        patch.setattr(os, "replace", note_replace)
        zinf_compile.save(tmp_path / "saved", model, optimizer)
    assert [str(path) for path in calls] == [
        ".",
        "saved/data-2/model.safetensors",
        "saved/data-2/optimizer.safetensors",
        "saved/data-2/objects.pt",
        "saved/data-2",
        "saved/manifest.json.new",
        "rename",
        "saved",
    ]
