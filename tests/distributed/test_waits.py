"""Waits for collectives that end at the wrong moment."""

from datetime import timedelta
from typing import Any

import pytest

from zinf_compile.ir.errors import RankError
from zinf_compile.runtime.ranks.ranks import Collective, Ranks


class LateWork:
    """A collective that is done right after a wait for it has timed out, in good order or with an error."""

    def __init__(self, error: str | None) -> None:
        self._error = error
        self._has_waited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Time out the first time."""
        if timeout is not None and not self._has_waited:
            self._has_waited = True
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return True


def wait_for(work: Any) -> None:
    """Wait for a collective."""
    Ranks().wait(Collective(name="a gather", works=(work,), tensors=()))


def test_a_collective_that_is_done_right_after_a_timeout_is_no_failure() -> None:
    wait_for(LateWork(None))


def test_its_error_is_raised() -> None:
    with pytest.raises(RankError, match=r"a gather broke off, since another rank is gone \(Connection reset"):
        wait_for(LateWork("Connection reset"))
