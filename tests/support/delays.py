"""Random delays of reads, writes and copies: ``ZINF_DELAYS`` is their seed, and `make test-delays` runs tests of parity so.

On a fast disk a transfer has nearly always ended before anybody could miss that nothing waits for it. Here a third of them
begin late, and a third are known late to have ended, each by up to 10 ms, in the processes of pytest; processes that tests
start have no delays. Which ones are late depends on the seed and on how threads take turns.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

VARIABLE = "ZINF_DELAYS"
_SHARE, _LONGEST_SECONDS = 1 / 3, 0.01


@contextmanager
def delayed(seed: int) -> Iterator[None]:
    """A block in which transfers of all stores are delayed."""
    from zinf_compile.runtime.transfer.io_pool import IOPool  # imports torch

    enqueue, chance = IOPool._enqueue, random.Random(seed)

    def enqueue_late(pool: IOPool, urgency: int, call: Callable[[], None]) -> Future[None]:
        def call_late() -> None:
            before, after = (_LONGEST_SECONDS * chance.random() * (chance.random() < _SHARE) for _ in range(2))
            time.sleep(before)
            call()
            time.sleep(after)

        return enqueue(pool, urgency, call_late)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IOPool, "_enqueue", enqueue_late)
        yield


@pytest.fixture(scope="session", autouse=True)
def _delays() -> Iterator[None]:
    """Delay transfers if asked to."""
    if (seed := os.environ.get(VARIABLE)) is None:
        yield
        return
    with delayed(int(seed)):
        yield
