"""A first call reports its progress on standard error, with seconds; later calls print nothing. It can be silenced."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.runtime.execute import segments
from zinf_compile.runtime.observe.progress import say, timed
from zinf_compile.runtime.process import waiting
from zinf_compile.runtime.store.cuts import Cuts

_LOGGER = logging.getLogger("zinf_compile")
_WITHOUT_SECONDS = re.compile(r" ?\(?\d+\.\d s\)?")


@pytest.fixture(autouse=True)
def _not_quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ZINF_QUIET", raising=False)
    yield
    _LOGGER.setLevel(logging.NOTSET)


def call_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int = 4) -> None:
    model(torch.ones(batch, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_first_call_says_what_it_does_and_later_ones_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without a saved profile of zinf doctor
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Tanh()), nn.Linear(64, 64))
    zinf_compile.optimize(
        model, device_memory="8MiB", host_memory="8MiB", compute="inductor", remake_plan=False, recompute=False
    )
    assert capfd.readouterr() == ("", "")  # optimize itself takes no time
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call_and_step(model, optimizer)
    out, err = capfd.readouterr()
    lines = [_WITHOUT_SECONDS.sub("", line) for line in err.splitlines()]
    compiling = [line for line in lines if line.startswith("zinf: compiling segment")]
    assert compiling == [
        f"zinf: compiling segment {number} of {len(compiling)}" for number in range(1, len(compiling) + 1)
    ]
    assert compiling
    assert [line for line in lines if line not in compiling and "fused_adamw.cpp" not in line] == [
        "zinf: capturing Sequential",
        "zinf: measuring what this machine does per second; zinf doctor does so once for all",
        "zinf: tracing forward and backward of Sequential graph 0",
        "zinf: planning Sequential graph 0",
        "zinf: Sequential graph 0 ready in",
        "zinf: first call of Sequential done in",
    ]
    assert len(_WITHOUT_SECONDS.findall(err)) == len(lines) - 1  # all but the first
    call_and_step(model, optimizer)
    assert capfd.readouterr().err == ""
    call_and_step(model, optimizer, batch=6)
    recaptured = capfd.readouterr().err
    assert "zinf: tracing forward and backward of Sequential graph 1" in recaptured
    assert "capturing" not in recaptured
    assert out == ""


@pytest.mark.parametrize("how", ["environment", "level", "level of the lines", "disabled"])
def test_it_can_be_silenced(how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    say("before")
    lines = logging.getLogger("zinf_compile.runtime.observe.progress")
    match how:
        case "environment":
            monkeypatch.setenv("ZINF_QUIET", "1")
        case "level":
            _LOGGER.setLevel(logging.WARNING)
        case "level of the lines":
            monkeypatch.setattr(lines, "level", logging.ERROR)
        case "disabled":
            monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)
    say("one")
    with timed("begin", "end"):
        say("inside")
    assert capfd.readouterr() == ("", "zinf: before\n")


def test_an_application_that_shows_info_gets_records_instead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZINF_QUIET", "1")  # silences standard error only
    with caplog.at_level(logging.INFO, logger="zinf_compile"), timed("begin", "end"):
        say("inside")
    assert [(record.name, _WITHOUT_SECONDS.sub("", record.message)) for record in caplog.records] == [
        ("zinf_compile.runtime.observe.progress", "begin"),
        ("zinf_compile.runtime.observe.progress", "inside"),
        ("zinf_compile.runtime.observe.progress", "end in"),
    ]
    assert capfd.readouterr().err == ""


def test_seconds_are_those_of_the_outermost_block(capfd: pytest.CaptureFixture[str]) -> None:
    with timed("begin", "end"), timed(None, "inner"):
        say("inside")
    assert re.fullmatch(
        r"zinf: begin\nzinf: inside \(\d\.\d s\)\nzinf: inner in \d\.\d s\nzinf: end in \d\.\d s\n",
        capfd.readouterr().err,
    )
    with pytest.raises(ValueError, match="the user's"), timed("begin", "end"):
        raise ValueError("the user's")
    say("after")
    assert capfd.readouterr().err == "zinf: begin\nzinf: after\n"


def test_names_cannot_write_on_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    say("capturing Net\x1b[2J\nzinf: ok")
    assert capfd.readouterr().err == "zinf: capturing Net\\x1b[2J\\nzinf: ok\n"


def wait_for(what: str) -> None:
    future: Future[None] = Future()
    threading.Timer(0.2, future.set_result, (None,)).start()
    waiting.wait_future(future, what)


def resume_in_tiles(way: str) -> None:
    cuts = Cuts()
    cuts.add(way)
    cuts.resume([""])


@pytest.mark.parametrize(
    "warn", [wait_for, resume_in_tiles, partial(segments._refuse, -1), partial(segments._remark, -1)]
)
def test_names_cannot_forge_a_line_of_the_log(
    warn: Callable[[str], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_REST_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(segments, "_remarks", {})
    warn("'weight\x1b[2J\nWARNING all is well'")
    (record, *_) = caplog.records
    assert "'weight\\x1b[2J\\nWARNING all is well'" in record.getMessage()


def test_nothing_fails_without_a_standard_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    say("one")
    with (tmp_path / "closed").open("w") as closed:
        pass
    monkeypatch.setattr("sys.stderr", closed)
    say("two")
    monkeypatch.undo()
    assert capfd.readouterr() == ("", "")
