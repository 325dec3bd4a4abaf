"""One compute thread for tests of a folder whose conftest imports it, and the time that a trial of a test may take.

A test that hangs ends its process after ``faulthandler_timeout`` (``pyproject.toml``), and all stacks are printed.
"""

import faulthandler
from collections.abc import Iterator

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

# Seconds until a test hangs, and the standard error that pytest does not capture.
_limit: tuple[float, int] | None = None


def begin_trial() -> None:
    """Count the seconds to a hang from now on: for a test of many trials."""
    if _limit is not None:
        seconds, stderr = _limit
        faulthandler.dump_traceback_later(seconds, file=stderr, exit=True)


@pytest.fixture(autouse=True)
def guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use one compute thread, because OpenMP threads spin on shared cores."""
    global _limit  # of this process
    seconds = float(request.config.getini("faulthandler_timeout"))
    _limit = (seconds, request.config.stash[fault_handler_stderr_fd_key]) if seconds > 0 else None
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
