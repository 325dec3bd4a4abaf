"""What the first steps show, with a clock that the test advances."""

import pytest

from zinf_compile.hardware.observed import BusyTime, Observed, RouteBytes
from zinf_compile.ir.glossary import Phase, Tier
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.observe.watch import StepWatch


class Bench:
    """A watched graph: steps of two seconds forward, three backward, and stalls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        monkeypatch.setattr("time.perf_counter", lambda: self.seconds)
        self.meter = Meter()
        self.watch = StepWatch(self.meter)

    def run(self, phase: Phase, seconds: float, *, stall: float = 0.0) -> None:
        with self.watch.run(phase):
            with self.meter.stall("w"):
                self.seconds += stall
            self.seconds += seconds

    def step(self) -> None:
        with self.meter.phase(Phase.STEP):
            self.seconds += 1.0

    def train(self, *, stall: float = 0.0, scale: float = 1.0) -> Observed | None:
        """Take one step, within which nothing is observed yet."""
        assert self.watch.look() is None
        self.run(Phase.FORWARD, 2.0 * scale, stall=stall)
        assert self.watch.look() is None, "nothing is observed in the middle of a step"
        with self.meter.moving(Tier.NVME, Tier.DEVICE, 100, "w"):
            self.run(Phase.BACKWARD, 3.0 * scale)
        self.step()
        return None


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return a bench."""
    return Bench(monkeypatch)


def test_three_steps_are_seen_without_the_first_and_without_stalls(bench: Bench) -> None:
    bench.train(stall=50.0, scale=10.0)  # touches fresh memory
    bench.train(stall=7.0)
    bench.train(stall=9.0)
    assert bench.watch.look() == Observed(
        num_steps=3,
        compute_seconds=5.0,
        step_seconds=14.0,  # 2 and 3 of compute, 1 of step, 7 or 9 of stalls
        moved=(RouteBytes("nvme -> device", 200),),
        busy=(BusyTime(("nvme -> device",), 6.0),),
    )
    assert bench.watch.look() is None, "an observation is returned once"


def test_fast_steps_are_watched_for_a_second(bench: Bench) -> None:
    for _ in range(5):
        bench.train(scale=0.05)  # a quarter of a second
    observed = bench.watch.look()
    assert observed is not None
    assert (observed.num_steps, observed.compute_seconds) == (5, pytest.approx(0.25))


def test_several_forwards_of_one_step_count_as_one_step(bench: Bench) -> None:
    for _ in range(3):
        bench.watch.look()
        for _ in range(2):
            bench.run(Phase.FORWARD, 2.0)
            bench.run(Phase.BACKWARD, 4.0)
            assert bench.watch.look() is None
        bench.step()
    observed = bench.watch.look()
    assert observed is not None
    assert (observed.num_steps, observed.compute_seconds, observed.step_seconds) == (3, 6.0, 13.0)


def test_a_graph_that_is_never_stepped_shows_nothing(bench: Bench) -> None:
    for _ in range(9):
        assert bench.watch.look() is None
        bench.run(Phase.FORWARD, 2.0)
        bench.step()  # of another model
