"""The garbage collector runs less often during a capture, and as before afterwards."""

import gc
import signal
from collections.abc import Iterator

import pytest
import torch

import zinf_compile
from zinf_compile.driver import session
from zinf_compile.runtime.process import garbage
from zinf_compile.runtime.process.garbage import fewer_collections


@pytest.fixture(autouse=True)
def _own_threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 11)
    yield
    gc.set_threshold(*before)


def test_blocks_in_each_other_end_with_the_last() -> None:
    with fewer_collections():
        with pytest.raises(ValueError, match="the user's"), fewer_collections():
            raise ValueError("the user's")
        assert gc.get_threshold() == (50_000, 10, 11)
    assert gc.get_threshold() == (700, 10, 11)


@pytest.mark.parametrize("threshold", [0, 60_000])
def test_who_has_set_it_keeps_that(threshold: int) -> None:
    gc.set_threshold(threshold, 10, 11)
    with fewer_collections():
        assert gc.get_threshold() == (threshold, 10, 11)
    assert gc.get_threshold() == (threshold, 10, 11)
    gc.set_threshold(700, 10, 11)
    with fewer_collections():
        gc.set_threshold(800)
    assert gc.get_threshold()[0] == 800


@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_while_it_is_set_or_restored_changes_nothing(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_threshold, calls = gc.set_threshold, []

    def interrupted(*values: int) -> None:
        calls.append(values)
        set_threshold(*values)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(gc, "set_threshold", interrupted)
    with pytest.raises(KeyboardInterrupt), fewer_collections():
        pass
    assert gc.get_threshold() == (700, 10, 11)
    with fewer_collections():
        assert gc.get_threshold() == (50_000, 10, 11)


def test_a_block_that_could_not_say_that_it_ends_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(block: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(garbage, "_end", interrupted)
    with pytest.raises(KeyboardInterrupt), fewer_collections():
        pass
    monkeypatch.undo()
    gc.collect()
    with fewer_collections():
        assert gc.get_threshold() == (50_000, 10, 11)
    assert gc.get_threshold() == (700, 10, 11)


def test_captures_are_such_blocks_and_steps_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    compile_graph = session.compile_graph

    def look(*args: object, **kwargs: object) -> object:
        seen.append(gc.get_threshold())
        return compile_graph(*args, **kwargs)

    monkeypatch.setattr(session, "compile_graph", look)
    model = zinf_compile.optimize(torch.nn.Linear(8, 8), device_memory="8MiB", host_memory="8MiB")
    for size in (2, 2, 3):
        model(torch.ones(size, 8)).sum().backward()
        assert gc.get_threshold() == (700, 10, 11)
    assert seen == 2 * [(50_000, 10, 11)]  # for the first call, and for another shape
    zinf_compile.close(model)
