"""A guard against tests that hang. It wraps every test of a folder whose conftest imports it."""

import faulthandler
from collections.abc import Iterator

import pytest
import torch

HANG_SECONDS = 100  # far longer than any guarded test takes, or one of its trials


def begin_trial() -> None:
    """Count the seconds to a hang from now on: for a test of many trials."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    """Use one compute thread, because OpenMP threads spin on shared cores; dump a traceback if a test hangs."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    begin_trial()
    yield
    faulthandler.cancel_dump_traceback_later()
    torch.set_num_threads(num_threads)
