"""Interrupts: a signal whose handler raises (Ctrl-C) takes effect between our operations, or where one allows it.

Python runs signal handlers on the main thread, between any two instructions, so an exception can come out anywhere:
between a lease and the code that returns it, or inside a condition that holds its lock. ``finally`` does not help
against that. So code that must not be interrupted runs in an ``uninterrupted`` block: there our own handler is
installed instead of the user's, and only records the signal::

    with uninterrupted():            from here on signals are recorded
        lease = pool.lease(..)
        check_interrupt()            a recorded signal raises here, like an ordinary error that normal cleanup handles
        with interruptible():        signals raise anywhere again, while user code runs
            model.forward(..)
                                     at the end of the outermost block a recorded signal raises

Outside such blocks the user's handlers are installed. Other threads receive no signals, and these blocks do nothing
there. Exceptions set by ``PyThreadState_SetAsyncExc`` are not covered, because no handler sees them.
"""

import _signal  # type: ignore[import-not-found]  # ``signal`` converts to enums, which takes longer than everything else here
import functools
import signal
import sys
import threading
import weakref
from _thread import get_ident
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_Handler = Callable[[int, FrameType | None], object]

# Signals whose handlers are known to raise: Ctrl-C, the end of a job or its announcement, and alarms used as timeouts.
_SIGNALS = tuple(
    map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2))
)
_IMPATIENT = 2  # signals: a second one while the first is pending means that the user does not want to wait


class _State:
    """The state of the main thread. One object, because setting an attribute is a single instruction."""

    def __init__(self) -> None:
        self.is_deferring = False
        self.is_placed = False  # our handler, instead of the user's
        self.noted: list[int] = []  # signals, each once, in order of arrival
        self.num_noted = 0  # with repetitions
        self.handlers: dict[int, _Handler] = {}  # the user's, by signal


_state = _State()


def _handle(number: int, frame: FrameType | None) -> object:
    """Record a signal, or pass it to the user's handler where it may raise and somebody would see it."""
    if _state.is_deferring or _is_at_boundary(frame) or _is_in_finalizer(frame):
        _state.num_noted += 1
        if number not in _state.noted:
            _state.noted.append(number)
        return None
    return _hand_on(number, frame)


def _is_at_boundary(frame: FrameType | None) -> bool:
    """Return whether one of the block's own boundary functions, or something it calls, is running."""
    return frame is not None and (
        frame.f_code in _BOUNDARIES or (frame.f_back is not None and frame.f_back.f_code in _BOUNDARIES)
    )


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Return whether a finalizer is running: Python prints what it raises, and goes on."""
    while frame is not None:
        if frame.f_code is _FINALIZE or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _hand_on(number: int, frame: FrameType | None) -> object:
    if number in _state.noted:  # it raises only once
        _state.noted.remove(number)
    return _state.handlers[number](number, frame)


def _place() -> None:
    """Install our handler instead of the user's. It records signals from that moment on."""
    for number in _SIGNALS:
        handler = _signal.getsignal(number)
        if callable(handler) and handler is not _handle:
            _state.handlers[number] = handler
            _signal.signal(number, _handle)
    _state.is_placed = True


def _remove() -> None:
    """Restore the user's handlers. If one raises meanwhile, others stay behind ours, which then only passes signals on."""
    for number, handler in _state.handlers.items():
        if _signal.getsignal(number) is _handle:
            _signal.signal(number, handler)


def _deliver() -> None:
    """Pass recorded signals to the user's handlers. Usually the first one raises."""
    _state.num_noted = 0
    while _state.noted:
        _hand_on(_state.noted[0], sys._getframe())


class uninterrupted:  # noqa: N801  # read as a word: with uninterrupted()
    """A block in which signals are only recorded. They raise when the outermost block ends."""

    __slots__ = ("_may_raise", "_was_deferring", "_was_placed")

    def __init__(self, *, may_raise: bool = True) -> None:
        """Without ``may_raise`` recorded signals raise later: for finalizers, whose exceptions Python discards."""
        self._may_raise = may_raise

    def __enter__(self) -> None:
        self._was_deferring, self._was_placed = _state.is_deferring, _state.is_placed
        if get_ident() != _MAIN or self._was_deferring:
            return
        try:
            _state.is_deferring = True
            if not self._was_placed:
                _place()
        except BaseException:  # from a user's handler that was not replaced yet
            _state.is_deferring, _state.is_placed = False, self._was_placed
            if not self._was_placed:
                _remove()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if get_ident() != _MAIN or self._was_deferring:
            return
        _state.is_deferring, _state.is_placed = False, self._was_placed
        if not self._was_placed:
            _remove()
        if _state.noted and self._may_raise:
            _deliver()


class interruptible:  # noqa: N801  # read as a word: with interruptible()
    """A part of an ``uninterrupted`` block that runs user code, in which signals raise at once."""

    __slots__ = ("_was_deferring",)

    def __enter__(self) -> None:
        self._was_deferring = get_ident() == _MAIN and _state.is_deferring
        if self._was_deferring:
            check_interrupt()
            _state.is_deferring = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._was_deferring:
            _state.is_deferring = True
            if error is None:
                check_interrupt()


def check_interrupt(*, only_if_impatient: bool = False) -> None:
    """Let recorded signals raise now; with ``only_if_impatient`` only if a signal was sent again since.

    Called where an error is allowed; the cleanup that follows is safe from further signals.
    """
    if _state.noted and get_ident() == _MAIN and (not only_if_impatient or _state.num_noted >= _IMPATIENT):
        _deliver()


def without_interrupts(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose whole body is ``uninterrupted``."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _state.is_deferring or get_ident() != _MAIN:
            return function(*args, **kwargs)
        with uninterrupted():
            return function(*args, **kwargs)

    return call


_MAIN = threading.main_thread().ident
_FINALIZE = weakref.finalize.__call__.__code__
# Python also handles signals at the start of a function, where these functions have done nothing yet.
_BOUNDARIES = frozenset({interruptible.__exit__.__code__, uninterrupted.__exit__.__code__})
