"""Keeps compilations and updates apart: while Dynamo compiles on any thread, torch's optimizers round differently.

``torch.compiler.is_compiling()`` is one flag for the process. While it is set, optimizers treat step counts as tensors
instead of numbers, and round in another place. So updates and compilations take turns: each piece of an update holds
the lock under which Dynamo compiles. A thread that waits for something in the middle of a compilation yields its turn,
since it may be waiting for an update.
"""

import sys
import threading
from types import TracebackType
from typing import Any

import torch

_piece = (
    threading.Lock()
)  # held by an update that runs in a yielded turn, so that the turn is not taken back in between


class _Yielded:
    """Whether the compiling thread is waiting, and so not compiling at the moment."""

    is_yielded = False


class Uncompiled:
    """A turn to run an optimizer's code as if nothing were being compiled."""

    def __init__(self) -> None:
        self._held: Any = None
        self._was_compiling = False

    def try_begin(self) -> bool:
        """Begin, unless another thread is compiling."""
        lock = _compile_lock()
        if lock is None:
            return True
        if lock.acquire(blocking=False):
            self._held, self._was_compiling = (
                lock,
                _set_compiling(False),
            )  # this thread's own compilation is suspended meanwhile
            return True
        if _piece.acquire(blocking=False):
            if _Yielded.is_yielded:
                self._held = _piece
                return True
            _piece.release()
        return False

    def end(self) -> None:
        """End the turn."""
        if self._held is not None:
            if self._held is not _piece:
                _set_compiling(self._was_compiling)
            self._held.release()


class yielding_turn:  # noqa: N801  # read as a word: with yielding_turn()
    """A block in which this thread yields its turn: it compiles nothing, even in the middle of a compilation."""

    __slots__ = ("_yields",)

    def __enter__(self) -> None:
        lock = _compile_lock()
        self._yields = lock is not None and bool(lock._is_owned()) and not _Yielded.is_yielded and _set_compiling(False)
        if self._yields:
            _Yielded.is_yielded = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._yields:
            with _piece:
                _Yielded.is_yielded = False
            _set_compiling(True)


def _compile_lock() -> Any:
    """Return the lock under which Dynamo compiles; None if Dynamo is not imported."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)


def _set_compiling(flag: bool) -> bool:
    """Set torch's flag; return its previous value."""
    was: bool = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = flag
    return was
