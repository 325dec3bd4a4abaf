"""`zinf train` and `zinf doctor` on ranks, and the report of several of them."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import zinf_compile
from tests.distributed.workloads import batch_of, build_gpt, optimize, placements
from tests.support.rank_pool import RankPool
from zinf_compile.cli.main import main
from zinf_compile.cli.text import Batches

ROOT = Path(__file__).resolve().parents[2]
TEXT = "".join(f"the square of {number} is {number * number};\n" for number in range(200))


class Said(NamedTuple):
    """What `zinf` printed on a rank, and its exit status."""

    out: str
    err: str
    status: int


def run_zinf(words: Sequence[str]) -> Said:
    """Run `zinf` on this rank."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as left:
            status = int(left.code or 0)
    return Said(out.getvalue(), err.getvalue(), status)


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """The words of a quick `zinf train`."""
    text = tmp_path / "squares.txt"
    text.write_text(TEXT)
    words = ["train", "--preset", "tiny", "--params", "30K", "--seq", "16", "--sample", "0", "--text", str(text)]
    return [*words, "--device-memory", "600KiB", "--host-memory", "600KiB", "--reserve-memory", "0"]


def losses_of(printed: str) -> list[str]:
    return re.findall(r"^step .* loss (\d+\.\d{3})", printed, flags=re.MULTILINE)


def contents_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the tensor files of the checkpoint in a folder."""
    (data,) = folder.glob("data-*")
    return {path.name: path.read_bytes() for path in data.glob("*.safetensors")}


def test_ranks_deal_out_the_batches_of_one_process() -> None:
    tokens = torch.arange(1000, dtype=torch.int32)
    alone = Batches(tokens, batch=2, seq=8, seed=3)
    ranks = [Batches(tokens, batch=2, seq=8, seed=3, rank=rank, num_ranks=3) for rank in range(3)]
    for _ in range(2):
        for each in ranks:
            assert torch.equal(next(each).tokens, next(alone).tokens)
    assert all(torch.equal(each.position, alone.position) for each in ranks)


def test_ranks_train_as_one_process_that_accumulates_and_each_resumes_the_other(
    tiny: list[str], two: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*tiny, "--nvme", str(tmp_path), "--steps", "2"]
    first, second = two.run(run_zinf, [*words, "--checkpoint", str(tmp_path / "ranks")])
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert second.out == second.err == ""
    assert "budget of each of 2 ranks" in first.out
    assert "2 steps of 2 x 4 x 16" in first.out
    assert re.search(r"^slowest: rank [01], which waits", first.out, flags=re.MULTILINE)
    shared = [*words, "--accumulate", "2"]
    torch.set_num_threads(1)
    assert main([*shared, "--checkpoint", str(tmp_path / "alone")]) == 0
    assert losses_of(first.out) == losses_of(capsys.readouterr().out) != []
    assert contents_of(tmp_path / "ranks") == contents_of(tmp_path / "alone") != {}

    longer = [*shared, "--steps", "3", "--resume"]
    assert main([*longer, "--checkpoint", str(tmp_path / "ranks")]) == 0
    alone = capsys.readouterr().out
    assert "after step 2" in alone
    on_ranks, _ = two.run(run_zinf, [*longer, "--checkpoint", str(tmp_path / "alone")])
    assert losses_of(on_ranks.out) == losses_of(alone) != []
    assert contents_of(tmp_path / "ranks") == contents_of(tmp_path / "alone")


def test_a_sentence_is_printed_by_one_rank(tiny: list[str], two: RankPool) -> None:
    said = two.run(run_zinf, [*tiny, "--lr", "-1"])
    assert [each.status for each in said] == [2, 2]
    assert sorted(each.err.count("\n") for each in said) == [0, 1]
    assert "learning rate" in "".join(each.err for each in said)


def run_with_other_rates(words: Sequence[str]) -> Said:
    """Run `zinf` with another learning rate on each rank."""
    return run_zinf([*words, "--lr", f"1e-{3 + dist.get_rank()}"])


def test_settings_that_differ_are_named(tiny: list[str], two: RankPool, tmp_path: Path) -> None:
    said = two.run(run_with_other_rates, [*tiny, "--nvme", str(tmp_path)])
    assert [each.status for each in said] == [2, 2]
    assert "settings of zinf train differ: 'lr' is 0.001 on rank 0 and 0.0001 on rank 1" in said[0].err + said[1].err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks 0 is not a positive number"),
        (["--ranks", "2", "--plain"], "--plain trains in one process"),
        (["--ranks", "2", "--lora", "4"], "--lora is not supported on several ranks"),
        (["--ranks", "2", "--accumulate", "3"], "--accumulate 3: 2 ranks share the micro-batches"),
    ],
)
def test_what_ranks_cannot_do_is_known_before_they_start(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--preset", "tiny", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"zinf train: {message}")
    assert err.count("\n") == 1


def test_ranks_of_torchrun_and_of_the_option_must_be_as_many(tiny: list[str], two: RankPool) -> None:
    said = two.run(run_zinf, [*tiny, "--ranks", "3"])
    assert [each.status for each in said] == [2, 2]
    assert "--ranks 3, and torchrun has started 2" in said[0].err + said[1].err


@pytest.mark.slow
@pytest.mark.long
def test_zinf_starts_ranks_and_ctrl_c_ends_them_all(tiny: list[str], tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    if "tmpfs" in subprocess.run(["stat", "-fc", "%T", here], capture_output=True, text=True, check=True).stdout:
        pytest.skip("the temporary folder of the tests is in memory")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    words = [*tiny, "--ranks", "2", "--steps", "1000", "--checkpoint", str(tmp_path / "saved"), "--save-every", "20"]
    with subprocess.Popen(
        [sys.executable, "-m", "zinf_compile.cli", *words],
        cwd=here,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        printed = []
        for line in child.stdout:
            printed.append(line)
            if line.startswith("step   50/"):
                children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
                child.send_signal(signal.SIGINT)
        err = child.stderr.read()
    assert child.returncode == 130, err
    assert len([line for line in printed if line.startswith("model: ")]) == 1
    (stopped,) = [line for line in err.splitlines() if not line.startswith("zinf: ")]
    assert re.search(r": stopped; resume with --resume; last checkpoint: step \d+ in .*saved$", stopped)
    assert len(children) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert list(here.iterdir()) == []


def diagnose(words: Sequence[str]) -> Said:
    """Run `zinf doctor` on this rank, quickly."""
    from zinf_compile.runtime.calibration import rank_rates

    rank_rates._DISK_NBYTES = 2**20
    return run_zinf(["doctor", *words])


def test_doctor_measures_links_and_shared_disks(two: RankPool, tmp_path: Path) -> None:
    first, second = two.run(diagnose, ["--nvme", str(tmp_path), "--json"])
    assert (first.status, second.status, second.out) == (0, 0, ""), first.err + second.err
    found = json.loads(first.out)
    assert {(each["collective"], each["nbytes"]) for each in found["links"]} == {
        (name, nbytes) for name in ("all-gather", "reduce-scatter", "all-to-all") for nbytes in (2**16, 2**20, 2**24)
    }
    rates = [
        *(each["bytes_per_second"] for each in found["links"]),
        found["disks"]["alone"],
        found["disks"]["together"],
    ]
    assert all(len(each) == 2 and min(each) > 0 for each in rates)
    assert list(tmp_path.iterdir()) == []

    first, second = two.run(diagnose, ["--nvme", str(tmp_path)])
    assert second.out == ""
    assert "all-gather of 64.0 KiB" in first.out
    assert re.search(r"^2 ranks on 1 machine; when all read, they get \d+% of", first.out, flags=re.MULTILINE)
    assert re.search(r"^slowest: rank [01] on .*, which then reads [\d.]+ GB/s", first.out, flags=re.MULTILINE)


def diagnose_a_folder_of_my_own(folder: str) -> Said:
    """Run `zinf doctor` on a folder that only rank 0 has."""
    return diagnose(["--nvme", f"{folder}{{rank}}"])


def test_doctor_refuses_what_one_rank_cannot_use(two: RankPool, tmp_path: Path) -> None:
    (tmp_path / "nvme0").mkdir()
    said = two.run(diagnose_a_folder_of_my_own, str(tmp_path / "nvme"))
    assert [each.status for each in said] == [2, 2]
    assert "nvme1' is not a folder" in said[1].err
    assert "opening the folders of --nvme failed on rank 1" in said[0].err
    said = two.run(diagnose, ["--save", str(tmp_path / "profile.json")])
    assert "--save writes the profile of one machine" in said[0].err + said[1].err


def report_of(options: Mapping[str, Any], slow: int) -> list[str]:
    """Train with a rank that is slow; return its own report, and one of all ranks."""
    model = optimize(build_gpt(), options)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        if dist.get_rank() == slow:
            time.sleep(0.5)  # more than what other load on the machine costs one of them
        model(**batch_of(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    texts = [str(zinf_compile.report(model))] if dist.get_rank() == 1 else [""]  # nobody waits for rank 0
    everywhere = zinf_compile.report(model, all_ranks=True)
    assert [each.rank for each in everywhere.ranks] == [0, 1]
    assert everywhere.slowest_rank is not None
    assert everywhere.slowest_rank.rank == slow
    assert all(each.nbytes_read > 0 for each in everywhere.ranks)
    zinf_compile.close(model)
    return [*texts, str(everywhere)]


@pytest.mark.long
@pytest.mark.parametrize("slow", [0, 1])
def test_the_report_names_the_slowest_rank(slow: int, two: RankPool, tmp_path: Path) -> None:
    (_, of_all), (own, again) = two.run(report_of, placements(str(tmp_path))["nvme"], slow)
    assert f"\nslowest: rank {slow}, which waits" in of_all
    assert "one of 2 ranks; report(model, all_ranks=True), called on every rank" in own
    assert "slowest" not in own
    table = re.compile(r"^rank .*?^slowest[^\n]*", flags=re.MULTILINE | re.DOTALL)
    assert table.findall(of_all) == table.findall(again) != []


def report_on_one(options: Mapping[str, Any]) -> None:
    """Ask for the report of all ranks on one of them, while the other goes on training."""
    model = optimize(build_gpt(), options)
    if dist.get_rank() == 0:
        zinf_compile.report(model, all_ranks=True)
    model(**batch_of(0, 0))


def test_a_report_of_all_ranks_on_one_of_them_names_who_does_what(two: RankPool, tmp_path: Path) -> None:
    for each in two.outcomes(report_on_one, placements(str(tmp_path))["nvme"]):
        assert each.kind == "RankError"
        assert "rank 0: report(model, all_ranks=True); rank 1: capture" in each.message
