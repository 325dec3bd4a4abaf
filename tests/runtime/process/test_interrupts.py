"""Interrupts raise between operations and not inside of them, whatever the user's handler is."""

import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from zinf_compile.runtime.process.interrupts import (
    check_interrupt,
    interruptible,
    uninterrupted,
    without_interrupts,
)


@pytest.fixture(autouse=True)
def handler_stays() -> Iterator[None]:
    """Check that the user's signal handlers are installed again afterwards."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_raises_where_the_outermost_block_ends() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012  # the block is what is tested
        with uninterrupted():
            interrupt()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_a_function_that_was_interrupted_has_ended() -> None:
    done = []

    @without_interrupts
    def work() -> None:
        interrupt()
        done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]


def test_it_raises_at_once_while_code_runs_that_is_not_ours_and_cleaning_up_is_not_interrupted() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012  # the block is what is tested
        try:
            with interruptible():
                interrupt()
                done.append("never")
        finally:
            interrupt()  # once more
            done.append("cleaned up")
    assert done == ["cleaned up"]


def test_one_that_came_before_raises_before_such_code() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012  # the block is what is tested
        interrupt()
        with interruptible():
            done.append("never")
    assert done == []


def test_a_check_raises_and_only_for_the_impatient_if_told_so() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012  # the block is what is tested
        check_interrupt()
        interrupt()
        check_interrupt(only_if_impatient=True)
        done.append("once is waited for")
        interrupt()
        check_interrupt(only_if_impatient=True)
        done.append("never")
    assert done == ["once is waited for"]
    with uninterrupted():  # an interrupt that was raised is forgotten
        check_interrupt()


def test_it_counts_once() -> None:
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with uninterrupted():
            interrupt()
            interrupt()
            assert calls == []
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_signals_that_python_handles_wait_as_well(handle: Callable[[int], None]) -> None:
    handle(signal.SIGTERM)
    done = []
    with pytest.raises(SystemExit, match="asked to end"), uninterrupted():  # noqa: PT012  # the block is what is tested
        signal.raise_signal(signal.SIGTERM)
        done.append("the rest")
    assert done == ["the rest"]


def test_two_signals_raise_one_after_the_other(handle: Callable[[int], None]) -> None:
    handle(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012  # the block is what is tested
        interrupt()
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit), uninterrupted():
        pass


def test_without_may_raise_it_raises_at_the_next_chance() -> None:
    with uninterrupted(may_raise=False):
        interrupt()
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        pass


class Deleted:
    """Interrupts when it is deleted."""

    def __del__(self) -> None:
        interrupt()


def make_finalized() -> object:
    """Return an object that interrupts when it is gone."""
    each = type("Finalized", (), {})()
    weakref.finalize(each, interrupt)
    return each


@pytest.mark.parametrize("make", [Deleted, make_finalized])
def test_in_a_finalizer_it_waits_since_python_would_discard_it(make: Callable[[], object]) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012  # the block is what is tested
        with interruptible():
            held = [make()]
            held.clear()
            done.append("the code that deleted it")
        done.append("never")
    assert done == ["the code that deleted it"]


def test_other_threads_are_not_concerned() -> None:
    inside, over = threading.Event(), threading.Event()

    def work() -> None:
        with uninterrupted(), interruptible():
            inside.set()
            over.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    over.set()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def handle() -> Iterator[Callable[[int], None]]:
    """Return a function that makes a signal end the process, as the handlers of services do."""
    before: dict[int, object] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit("asked to end")

    def call(number: int) -> None:
        before[number] = signal.signal(number, stop)

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() has returned
