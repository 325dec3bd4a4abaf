"""Calls at any depth take equally long inside a function that has room for them."""

import sys
import time

import pytest

from zinf_compile.runtime.process.call_stack import with_room_for_calls

_DEPTHS, _CALLS, _ROUNDS = 200, 300, 5


def _leaf(x: int) -> int:
    return x


def _seconds_at(depth: int) -> float:
    """Return the least seconds of some calls from a frame so deep below this one."""
    if depth:
        return _seconds_at(depth - 1)
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for number in range(_CALLS):
            _leaf(number)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _slowest_over_usual() -> float:
    """Return how many times as long calls take at the depth where they take longest."""
    seconds = sorted(map(_seconds_at, range(_DEPTHS)))
    return seconds[-1] / seconds[_DEPTHS // 2]


@with_room_for_calls
def _roomy() -> float:
    return _slowest_over_usual()


def test_no_depth_is_slow_in_a_chunk_of_its_own() -> None:
    assert _roomy() < 20


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="newer versions of Python keep a chunk for the next call")
def test_some_depth_is_slow_without() -> None:
    """If this fails, what the decorator is for is gone. In a frame of another thread, whose stack is empty."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_slowest_over_usual).result() > 40


def test_it_is_the_same_function() -> None:
    def add(a: int, *, b: int = 2) -> int:
        """Add."""
        return a + b

    assert with_room_for_calls(add) is add
    assert (add(1), add(1, b=1), add.__doc__) == (3, 2, "Add.")
