"""Waits for collectives that end at the wrong moment, and for ranks that do not end."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.support.rank_pool import RankPool
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


def timeouts_of(mesh: list[Any]) -> list[float]:
    """Return how long this rank waits for the others of a mesh, and how long its process groups do."""
    ranks, cpu = Ranks(DeviceMesh("cpu", mesh)), torch.device("cpu")
    groups = (ranks._gathers, ranks._reductions, ranks._control)
    return [
        ranks.timeout_seconds,
        *(group._get_backend(cpu).options._timeout.total_seconds() for group in groups),  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize("mesh", [[0, 1], [[0], [1]]], ids=str)
def test_groups_wait_a_little_longer_than_the_ranks_which_wait_as_long_as_the_default_group(
    two: RankPool, mesh: list[Any]
) -> None:
    for seconds, *of_groups in two.run(timeouts_of, mesh):
        assert seconds == 180.0  # given by the pool to init_process_group
        assert of_groups == [240.0] * 3


def sleep_long() -> None:
    """Hang."""
    time.sleep(600)


def test_a_hang_shows_where_each_rank_is() -> None:
    pool = RankPool(2)
    with pytest.raises(
        AssertionError, match=r"(?s)ranks \[0, 1\] hang in sleep_long for 4 s.*rank 0:.*in sleep_long.*rank 1:"
    ):
        pool.run(sleep_long, seconds=4.0)
