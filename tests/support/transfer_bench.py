"""Transfers over an engine in memory, for tests of what moves bytes."""

from collections.abc import Iterator, Sequence

import pytest

from tests.support.memory_engine import Fault, MemoryEngine
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.storage.arena import Arena
from zinf_compile.runtime.storage.engine import ALIGN
from zinf_compile.runtime.storage.layout import FileLayout
from zinf_compile.runtime.storage.staging import StagingPool
from zinf_compile.runtime.transfer.transfers import Transfers


class TransferBench:
    """Transfers, and what they need: an engine, staging, an arena, a meter and the layout of a file."""

    def __init__(
        self, *, faults: Sequence[Fault] = (), latency_seconds: float = 0.0, staging: int = 64 * ALIGN
    ) -> None:
        self.engine = MemoryEngine(max_nbytes=2**24, faults=faults, latency_seconds=latency_seconds)
        self.staging, self.arena, self.meter, self.layout = StagingPool(staging), Arena(), Meter(), FileLayout()
        self.arena.reserve(2**22)
        self.transfers = Transfers(engine=self.engine, staging=self.staging, arena=self.arena, meter=self.meter)

    def check(self) -> None:
        self.staging.check_integrity(expect_idle=True)
        self.arena.check_integrity(expect_idle=True)
        self.layout.check_integrity()


@pytest.fixture
def benches() -> Iterator[list[TransferBench]]:
    """Return a list for benches, which are closed and checked afterwards."""
    made: list[TransferBench] = []
    yield made
    for bench in made:
        bench.transfers.close()
        bench.check()
