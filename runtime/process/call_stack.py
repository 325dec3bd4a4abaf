"""Gives what a function calls a piece of Python's stack that is large enough for all of it.

CPython keeps the frames of a thread in chunks of 16 KiB. A call that finds no room in the last one maps another, which its
return unmaps. Where a loop calls across that border, each call takes 10 microseconds instead of 0.04, and which loop does
depends on how deep it is called (https://github.com/python/cpython/issues/142183, mended in 3.14). Dynamo calls its backend
from over a hundred frames: planning a graph took up to five times as long.
"""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# A chunk has a power of two of bytes, with room for the frame that it is made for: 2 MiB for this one, which leaves half of
# them to what is called. Only what is touched takes memory.
_SLOTS = 2**17 + 2**10
_IS_MENDED = sys.version_info >= (3, 14)


def with_room_for_calls(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function, changed: its frame, and those of all that it calls, are in a chunk of their own."""
    if not _IS_MENDED:
        assert isinstance(function, FunctionType)
        function.__code__ = function.__code__.replace(co_stacksize=_SLOTS)
    return function
