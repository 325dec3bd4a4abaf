"""Ranks on devices with memory and streams of their own: bit by bit as on CPUs, without races between streams."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zinf_compile
from tests.distributed.test_owners import LOOPS as OWNED_LOOPS
from tests.distributed.test_parity import LOOPS as PARITY_LOOPS
from tests.distributed.test_rounds import LOOPS as LOOPS_IN_ROUNDS
from tests.distributed.test_rounds import joined, train_in_rounds
from tests.distributed.workloads import (
    KIB,
    TILES,
    Loop,
    build_gpt,
    build_small,
    of_rank,
    optimize,
    placements,
    train_alone,
    train_on_ranks,
)
from tests.support.fake_device import FakeEvent, FakeStream, on_fake_device
from tests.support.races import watching_races
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace, assert_same
from zinf_compile.ir.config import Config
from zinf_compile.runtime.ranks.find_ranks import find_ranks
from zinf_compile.runtime.ranks.ranks import Ranks

LOOPS = {name: loop for name, loop in PARITY_LOOPS.items() if loop.divide_by is None}
# More than on a CPU: gradients and what arrives from the disk pass through host memory.
MEMORY: Mapping[str, Mapping[str, Any]] = {
    "nvme": {"device_memory": 800 * KIB, "host_memory": 1024 * KIB},
    "resident": {},
}


def options_of(placement: str, folder: Path) -> dict[str, Any]:
    """Return budgets that put parameters on each tier."""
    return {**placements(str(folder))[placement], **MEMORY[placement]}


def train_on_devices(loop: Loop, options: Mapping[str, Any]) -> tuple[Trace, tuple[int, int]]:
    """Return the numbers of a rank with a fake device, and how many all-gathers and reductions its streams ran."""
    with on_fake_device() as device:
        trace = train_on_ranks(loop, {**options, "device": "cuda"})
    return trace, (device.collectives.gathers.num_run, device.collectives.reductions.num_run)


@pytest.mark.parametrize("placement", ["nvme", pytest.param("resident", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "loop", ["ordinary", *(pytest.param(loop, marks=pytest.mark.long) for loop in LOOPS if loop != "ordinary")]
)
def test_two_ranks(loop: str, placement: str, two: RankPool, tmp_path: Path) -> None:
    plain, options = train_alone(LOOPS[loop], 2), options_of(placement, tmp_path)
    for rank, (ours, (num_gathers, num_reductions)) in enumerate(two.run(train_on_devices, LOOPS[loop], options)):
        assert_same(ours, of_rank(plain, rank, 2))
        assert (num_gathers > 0) == (placement == "nvme")
        assert num_reductions > 0


def train_in_rounds_on_devices(loop: Loop, options: Mapping[str, Any]) -> Trace:
    """Return the numbers of a rank that works in rounds with a fake device."""
    with on_fake_device():
        return train_in_rounds(loop, {**options, "device": "cuda"})


@pytest.mark.parametrize("loop", ["clipped", pytest.param("ordinary", marks=pytest.mark.long)])
def test_two_ranks_in_rounds(loop: str, two: RankPool, tmp_path: Path) -> None:
    plain = train_alone(LOOPS_IN_ROUNDS[loop], 2)
    options = options_of("nvme", tmp_path) | {"device_memory": 1024 * KIB}
    assert_same(joined(two.run(train_in_rounds_on_devices, LOOPS_IN_ROUNDS[loop], options), plain), plain)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        *({"stage": stage, "device_memory": 1600 * KIB} for stage in (1, 2)),
        {"reduce": "fast"},  # of two ranks the sum has one order
        {"step_in_backward": True},
        {"update_on": "host"},
        {"overlap_step": False, "speculate": False},
        {"capture": False},
        {"prefetch_memory": 160 * KIB},
    ],
    ids=str,
)
def test_options(changes: Mapping[str, Any], two: RankPool, tmp_path: Path) -> None:
    loop = replace(LOOPS["accumulated"], num_accumulated=1, looks_at_gradients=False)
    plain = train_alone(loop, 2)
    plain.gradients = []
    for rank, (ours, _) in enumerate(two.run(train_on_devices, loop, options_of("nvme", tmp_path) | changes)):
        assert_same(ours, of_rank(plain, rank, 2))


@pytest.mark.long
def test_three_ranks_that_divide_nothing_evenly(three: RankPool, tmp_path: Path) -> None:
    plain = train_alone(Loop(), 3)
    for rank, (ours, _) in enumerate(three.run(train_on_devices, Loop(), options_of("nvme", tmp_path))):
        assert_same(ours, of_rank(plain, rank, 3))


@pytest.mark.long
def test_tiles(two: RankPool, tmp_path: Path) -> None:
    loop = Loop(build=build_small, num_steps=2)
    plain = train_alone(replace(loop, build=partial(build_small, 2)), 2)
    for rank, (ours, _) in enumerate(
        two.run(train_on_devices, loop, options_of("nvme", tmp_path) | {"tiles": TILES, "streams": True})
    ):
        assert_same(ours, of_rank(plain, rank, 2))


@pytest.mark.long
@pytest.mark.parametrize("reduce", ["ordered", "fast"])
def test_two_replicas_of_two(reduce: str, four: RankPool, tmp_path: Path) -> None:
    loop = Loop(num_steps=2, num_accumulated=2)
    plain = train_alone(loop, 4)
    options = {**options_of("nvme", tmp_path), "mesh": (2, 2), "reduce": reduce}
    for rank, (ours, _) in enumerate(four.run(train_on_devices, loop, options)):
        theirs = of_rank(plain, rank, 4)
        if reduce == "ordered":
            assert_same(ours, theirs)
        for mine, loss in zip(ours.losses, theirs.losses, strict=True):
            torch.testing.assert_close(mine, loss, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", OWNED_LOOPS)
def test_optimizers_that_need_whole_tensors(name: str, two: RankPool, tmp_path: Path) -> None:
    plain = train_alone(OWNED_LOOPS[name], 2)
    options = {**options_of("nvme", tmp_path), "capture": False}
    for rank, (ours, _) in enumerate(two.run(train_on_devices, OWNED_LOOPS[name], options)):
        assert_same(ours, of_rank(plain, rank, 2))


def train_watched(options: Mapping[str, Any], fault: str | None = None) -> tuple[list[str], list[str]]:
    """Return the races of a loop on this rank, and what was touched."""
    with on_fake_device() as device, watching_races() as races, ExitStack() as stack:
        races.device = device
        if fault is not None:
            stack.enter_context(FAULTS[fault]())
        # No more than an optimizer step takes: the rest of host memory would hold all shards.
        stack.enter_context(mock.patch.object(Config, "staging_memory", 512 * KIB))
        train_on_ranks(Loop(num_steps=2), {**options, "device": "cuda"})
    return races.found, [*races.num_accesses]


@contextmanager
def deaf(name: str, other: str) -> Iterator[None]:
    """Let a stream wait for the events of another one, but keep that from the detector."""
    wait = FakeStream.wait

    def wait_but(stream: FakeStream, event: FakeEvent) -> None:
        if stream.name != name or event.stream.name != other:
            wait(stream, event)
        elif event.stream.runs:  # what runs on it makes tensors that the caller takes next
            event.done.wait()
        else:
            stream.enqueue(lambda: event.done.wait() and None)

    with mock.patch.object(FakeStream, "wait", wait_but):
        yield


FAULTS = {
    "compute does not wait for all-gathers": partial(deaf, "compute", "gathers"),
    "compute does not wait for reductions": partial(deaf, "compute", "reductions"),
    "all-gathers do not wait for shards": partial(deaf, "gathers", "to-device"),
    "reductions do not wait for compute": partial(deaf, "reductions", "compute"),
}


@pytest.mark.parametrize(
    "changes", [{}, *(pytest.param(each, marks=pytest.mark.long) for each in ({"reduce": "fast"}, {"stage": 3}))]
)
def test_no_run_has_a_race(two: RankPool, tmp_path: Path, changes: Mapping[str, Any]) -> None:
    for found, touched in two.run(train_watched, options_of("nvme", tmp_path) | changes):
        assert found == []
        kinds = {what.partition(" of ")[0] for what in touched if "calibration" not in what}
        assert {"the all-gather", "the reduction", "what fills the buffer", "the to-device stream, writing"} <= kinds


@pytest.mark.parametrize(
    "fault",
    [
        "compute does not wait for all-gathers",
        *(pytest.param(fault, marks=pytest.mark.long) for fault in list(FAULTS)[1:]),
    ],
)
def test_injected_races_are_found(two: RankPool, tmp_path: Path, fault: str) -> None:
    kind = "reduction" if "reductions" in fault else "all-gather"
    for found, _ in two.run(train_watched, options_of("nvme", tmp_path), fault):
        assert any(f"the {kind} of" in each for each in found), found[:9]


def on_one_gpu(backends: Mapping[str, str | None]) -> Any:
    """Return what optimize raises on this rank where all ranks have the same GPU, with such backends."""
    with (
        on_fake_device() as device,
        mock.patch.object(Ranks, "backend_of", lambda _, device: backends[device.type]),
    ):
        device.torch_device = torch.device("meta") if len(backends) > 1 else device.torch_device
        try:
            optimize(build_gpt(), {"device": "cuda", "device_memory": "8MiB", "host_memory": "8MiB"})
        except zinf_compile.ConfigError as error:
            return str(error)
    return None


def test_one_gpu_for_all(two: RankPool) -> None:
    for message in two.run(on_one_gpu, {"cpu": "nccl"}):
        assert message.startswith("ranks 0 and 1 both compute on the GPU fake of ")
        assert 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))' in message


def test_no_backend_for_host_memory(two: RankPool) -> None:
    for message in two.run(on_one_gpu, {"cpu": None, "meta": "nccl"}):
        assert message.startswith("the default process group moves no tensors of cpu, ")
        assert 'init_process_group("cpu:gloo,cuda:nccl")' in message


class Backend:
    """A backend of a process group, and how often it was told to abort."""

    def __init__(self, name: str) -> None:
        self._name, self.num_aborted = name, 0

    def name(self) -> str:
        """Return its name."""
        return self._name

    def abort(self) -> None:
        """Count it."""
        self.num_aborted += 1


class Group:
    """A process group with a backend for each kind of device."""

    def __init__(self) -> None:
        self.backends = {"cuda": Backend("nccl"), "cpu": Backend("gloo")}
        self._device_types = [torch.device(kind) for kind in self.backends]

    def _get_backend(self, device: torch.device) -> Backend:
        return self.backends[device.type]


def fail_with_nccl() -> dict[str, int]:
    """Return how often the backends of a rank that fails were told to abort."""
    ranks, group = find_ranks(None), Group()
    ranks._moving = group, group  # type: ignore[assignment]
    ranks.fail("the test")
    return {kind: backend.num_aborted for kind, backend in group.backends.items()}


def test_a_failure_ends_what_hangs_on_a_gpu(two: RankPool) -> None:
    assert two.run(fail_with_nccl) == [{"cuda": 2, "cpu": 0}] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_two_ranks_that_share_a_gpu_over_gloo(two: RankPool, tmp_path: Path) -> None:
    """NCCL takes one rank on each GPU, and gloo any number of them."""
    plain, options = train_alone(Loop(), 2), options_of("nvme", tmp_path) | {"device": "cuda"}
    for rank, ours in enumerate(two.run(train_on_ranks, Loop(), options)):
        for mine, loss in zip(ours.losses, of_rank(plain, rank, 2).losses, strict=True):
            torch.testing.assert_close(mine.cpu(), loss, rtol=1e-4, atol=1e-5)
