"""One server process for all tests of this folder, which forks for each of their cases: see tests/support/forks.py."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.forks import forks_of

RUN = """
def measure(request):
    script, case = request
    exec(script, globals())  # in this fork only: it defines another ``measure``
    return globals()["measure"](case)
"""


@pytest.fixture(scope="session")
def measure() -> Iterator[Callable[[str, Any], Any]]:
    """Return ``measure(script, case)``: what the script's ``measure(case)`` returns in a fork of its own."""
    with forks_of(RUN) as forks:
        yield lambda script, case: forks.measure([script, case])
