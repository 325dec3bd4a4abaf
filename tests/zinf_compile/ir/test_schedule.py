"""The schedule defines the ticks: the phase, micro-batch and stage of each."""

from zinf_compile.ir.glossary import Phase
from zinf_compile.ir.schedule import PhaseRun, Schedule


def test_training_is_a_forward_and_a_backward() -> None:
    schedule = Schedule.of_one_graph(6, 10)
    assert schedule.is_training
    assert schedule.num_ticks == 10
    assert (schedule.ticks(Phase.FORWARD), schedule.ticks(Phase.BACKWARD)) == (range(6), range(6, 10))
    assert [schedule.phase_of(tick) for tick in (0, 5, 6, 9)] == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 2


def test_inference_has_no_backward() -> None:
    schedule = Schedule.of_one_graph(6, 6)
    assert not schedule.is_training
    assert schedule.ticks(Phase.BACKWARD) == range(6, 6)
    assert schedule.phase_of(5) is Phase.FORWARD


def test_each_micro_batch_has_ticks_of_its_own() -> None:
    order = [(Phase.FORWARD, 0), (Phase.FORWARD, 1), (Phase.BACKWARD, 0), (Phase.BACKWARD, 1)]
    schedule = Schedule(
        runs=tuple(
            PhaseRun(stage=0, micro_batch=micro_batch, phase=phase, start=3 * index, end=3 * index + 3)
            for index, (phase, micro_batch) in enumerate(order)
        )
    )
    assert schedule.ticks(Phase.FORWARD, micro_batch=1) == range(3, 6)
    assert schedule.ticks(Phase.BACKWARD) == range(6, 9)
    assert schedule.ticks(Phase.BACKWARD, micro_batch=2) == range(12, 12)
    assert [schedule.phase_of(tick) for tick in range(12)] == [Phase.FORWARD] * 6 + [Phase.BACKWARD] * 6
