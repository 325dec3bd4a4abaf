"""Pools of ranks, shared by the tests of a process."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.rank_pool import RankPool
from zinf_compile.passes.planner.placement import homes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if "distributed" in item.path.parts:
            item.add_marker(pytest.mark.distributed)


@pytest.fixture(autouse=True)
def _small_parameters_stay_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo in this process what ``workloads.optimize`` sets with ``streams``: it is meant for the processes of ranks."""
    monkeypatch.setattr(homes, "RESIDENT_THRESHOLD", homes.RESIDENT_THRESHOLD)


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    """Return the pools, by their number of ranks."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="module")
def pool_of(_pools: dict[int, RankPool]) -> Iterator[Callable[[int], RankPool]]:
    """Return a function from a number of ranks to the pool that has them.

    Larger pools end with their module: each group of gloo has threads that look for messages a hundred times a second, and
    four ranks of many meshes had 240 of them.
    """
    yield lambda size: _pools.setdefault(size, RankPool(size))
    for pool in _pools.values():
        if pool.size > 3:
            pool.stop()


@pytest.fixture
def two(pool_of: Callable[[int], RankPool]) -> RankPool:
    """Return two ranks."""
    return pool_of(2)


@pytest.fixture
def three(pool_of: Callable[[int], RankPool]) -> RankPool:
    """Return three ranks, which divide few things evenly."""
    return pool_of(3)


@pytest.fixture
def four(pool_of: Callable[[int], RankPool]) -> RankPool:
    """Return four ranks, as two replicas of two."""
    return pool_of(4)
