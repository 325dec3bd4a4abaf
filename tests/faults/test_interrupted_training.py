"""Interrupts at random lines and times: afterwards the bits are right, or the model refuses with an error.

``ZINF_SEED`` sets the seed.
"""

import collections
import copy
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from tests.support.guard import begin_trial
from tests.support.interrupted_training import (
    OPTIONS,
    PHASES,
    REFUSED,
    SAME,
    WIDTH,
    WRONG,
    Interrupted,
    Training,
    sample,
)
from zinf_compile.driver import session
from zinf_compile.driver.planning import GraphPlanner
from zinf_compile.ir.errors import StoreError
from zinf_compile.runtime.execute import segments
from zinf_compile.runtime.model.model_state import stores_of
from zinf_compile.runtime.native.compiled import find_compiler
from zinf_compile.runtime.optim.optimizer import StreamedStep
from zinf_compile.runtime.optim.step_chunks import Chunk
from zinf_compile.runtime.storage.staging import StagingBuffer
from zinf_compile.runtime.transfer.io_pool import IOPool
from zinf_compile.runtime.transfer.tensor_io import TensorIO

SEED = int(os.environ.get("ZINF_SEED", "0"))
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on the PATH")
# Captures take seconds, and add only the executor to what eager runs cover: a few trials get by with one of them, and
# without closing models, since the next trial captures another.
FEW = (24, [*list(OPTIONS)[:3], "captured, step in backward"], PHASES[:7])
MANY = (300, list(OPTIONS), PHASES)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Training]]:
    """Return the training with some options. All trials share it; a closed one is replaced."""
    made: dict[str, Training] = {}

    def find(name: str) -> Training:
        if name not in made or made[name].is_closed:
            made[name] = Training(tmp_path_factory.mktemp("training"), OPTIONS[name])
        return made[name]

    yield find
    for training in made.values():
        training.close()


@pytest.mark.parametrize(
    ("num_trials", "names", "phases"), [FEW, pytest.param(*MANY, marks=[pytest.mark.long, pytest.mark.slow])]
)
def test_interrupts_anywhere(
    num_trials: int, names: list[str], phases: tuple[str, ...], make: Callable[[str], Training]
) -> None:
    outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
    before = threading.active_count()
    for name, phase, outcome, where in sample(make, random.Random(SEED), num_trials, phases=phases, names=names):
        outcomes[phase, outcome] += 1
        assert outcome != WRONG, f"{name}: {phase} was interrupted at {where}, and the result is wrong"
    for (phase, outcome), count in sorted(outcomes.items()):
        print(f"{phase:12} {outcome:12} {count}")
    assert sum(count for (_, outcome), count in outcomes.items() if outcome in (SAME, REFUSED)) > num_trials // 2
    assert {phase for phase, outcome in outcomes if outcome == REFUSED} <= {"backward", "load", "step"}
    assert threading.active_count() <= before + 12 * len(names), "threads leaked"


@pytest.mark.parametrize("trial", range(2))
def test_close_ends_all_threads_whenever_it_is_interrupted(trial: int, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    training = Training(tmp_path, OPTIONS["eager"])
    training.run_all()
    interrupt = Interrupted(line=random.Random(trial).randint(1, 100))
    assert training.try_out("close", interrupt) == SAME, interrupt.where
    assert set(threading.enumerate()) <= before


def test_second_interrupt_aborts_optimizer_step_and_stops_the_model(
    make: Callable[[str], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make("eager, step in step()")
    for number, has_ended in ((1, True), (2, False)):
        training.load()
        training.forward()
        training.backward()
        update, left = StreamedStep._update, [number]

        def interrupted(
            step: StreamedStep, chunk: Chunk, update: Callable[..., None] = update, left: list[int] = left
        ) -> None:
            while left[0]:
                left[0] -= 1
                signal.raise_signal(signal.SIGINT)
            update(step, chunk)

        monkeypatch.setattr(StreamedStep, "_update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.step()
        monkeypatch.undo()
        if has_ended:
            training.zero_grad()
            assert training.is_in(training.after)
        else:
            with pytest.raises(
                StoreError, match=r"an earlier error stopped this model: KeyboardInterrupt.*already updated"
            ):
                training.forward()
    training.load()
    assert training.is_in(training.before)


def test_the_state_of_a_step_that_raised_before_it_began_is_that_of_before(tmp_path: Path) -> None:
    training = Training(tmp_path, OPTIONS["eager, step in step()"])
    training.load()
    training.forward()
    training.backward()
    pool = training.store.staging
    refuse = pytest.MonkeyPatch()

    def interrupted(nbytes: int, **options: Any) -> None:
        raise KeyboardInterrupt

    refuse.setattr(pool, "try_lease", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.step()
    refuse.undo()
    assert training.is_in(training.before)
    training.step()
    training.zero_grad()
    assert training.is_in(training.after)
    training.close()


def steps_of(model: nn.Module, steps: int = 2) -> list[Tensor]:
    """Return the parameters of a model after some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def uncaptured(**options: Any) -> nn.Module:
    """Return an optimized model that was not called yet."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)))
    return zinf_compile.optimize(model, device_memory="1MiB", host_memory="700KiB", **options)


def check_interrupted(options: dict[str, Any], timer: threading.Timer, expected: list[Tensor]) -> None:
    """Interrupt a first call when ``timer`` is over, or at once in the call; compare what the model then trains."""
    torch._dynamo.reset()
    model = uncaptured(**options)
    with suppress(KeyboardInterrupt, AssertionError):  # Dynamo says so of an interrupt while it checks its new guards
        timer.start()
        model(torch.ones(4, WIDTH))
        timer.join()  # the signal may come after the call
    timer.join()
    (store,) = stores_of(model)
    store.check_integrity()
    assert not torch.is_anomaly_enabled()
    assert not torch.compiler.is_compiling()
    assert torch.is_grad_enabled()
    assert all(map(torch.equal, steps_of(model), expected))
    assert zinf_compile.report(model).num_eager_gathers == 0
    assert not zinf_compile.report(model).fallbacks
    zinf_compile.close(model)


@pytest.mark.parametrize(
    ("owner", "name", "compute"),
    [
        (session, "compile_graph", "aten"),
        (GraphPlanner, "choose", "aten"),
        pytest.param(segments, "_compile", "inductor", marks=[needs_compiler, pytest.mark.long]),
    ],
)
def test_an_interrupt_in_the_first_call_is_as_if_it_was_never_made(
    owner: Any, name: str, compute: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While a graph is traced, planned and compiled."""
    options = {"compute": compute, "nvme": tmp_path}
    monkeypatch.setattr(segments, "_compiled", {})
    expected = steps_of(model := uncaptured(**options))
    zinf_compile.close(model)
    segments._compiled.clear()
    original, calls = getattr(owner, name), []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if calls.count(name) == 1:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    check_interrupted(options, threading.Timer(0, calls.append, ("no signal",)), expected)
    assert calls.count(name) > 1


def test_an_interrupt_waits_for_the_end_of_a_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch traces backward in C++, which ends the process where an exception comes out of Python at the wrong place."""
    plain = nn.Sequential(nn.Linear(72, 72), nn.SiLU(), nn.Linear(72, 72))  # that no other test traces and shares
    model = zinf_compile.optimize(
        copy.deepcopy(plain), device_memory="1MiB", host_memory="700KiB", compute="aten", nvme=tmp_path
    )
    differentiate, traces = torch.autograd.grad, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():  # no trace: the machine is measured
            return differentiate(*args, **kwargs)
        if not traces:
            signal.raise_signal(signal.SIGINT)
        traces.append("begun")
        gradients = differentiate(*args, **kwargs)
        traces.append("ended")
        return gradients

    x = torch.ones(4, 72)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    assert traces.count("ended") == traces.count("begun") > 0
    for each in (plain, model):
        each(x).square().sum().backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert expected.grad is not None
        assert torch.equal(ours.grad, expected.grad)
    zinf_compile.close(model)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("compute", ["aten", pytest.param("inductor", marks=needs_compiler)])
def test_interrupts_anywhere_in_the_first_call(compute: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = {"compute": compute, "nvme": tmp_path}
    monkeypatch.setattr(segments, "_compiled", {})
    expected = steps_of(model := uncaptured(**options))
    zinf_compile.close(model)
    rng, seconds = random.Random(SEED), 1.0
    for _ in range(25):
        begin_trial()
        segments._compiled.clear()
        start = time.perf_counter()
        timer = threading.Timer(rng.uniform(0, seconds), os.kill, (os.getpid(), signal.SIGINT))
        check_interrupted(options, timer, expected)
        seconds = min(seconds, time.perf_counter() - start)


def lease_interrupted(pool: IOPool, nbytes: int, name: str, **options: Any) -> StagingBuffer:
    leased = pool.staging.lease(nbytes)
    signal.raise_signal(signal.SIGINT)
    return leased


def write_interrupted(io: TensorIO, *args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("owner", "name", "interrupted"), [(IOPool, "lease", lease_interrupted), (TensorIO, "send_home", write_interrupted)]
)
def test_an_interrupt_between_a_lease_and_its_return_loses_no_memory(
    owner: type,
    name: str,
    interrupted: Callable[..., object],
    make: Callable[[str], Training],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = make("eager")
    training.load()
    training.forward()
    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.backward()
    monkeypatch.undo()
    training.zero_grad()
    training.synchronize()
    training.store.staging.check_integrity(expect_idle=True)
    training.run_all()
    assert training.is_in(training.after)


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Return a function that makes its argument the handler of SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)

    def give(call: Callable[[], object]) -> None:
        def handle(number: int, frame: FrameType | None) -> None:
            call()

        signal.signal(signal.SIGUSR1, handle)

    yield give
    signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_saves_runs_between_operations(
    make: Callable[[str], Training], on_signal: Callable[[Callable[[], object]], None]
) -> None:
    training = make("eager")
    training.load()
    training.run_all()
    on_signal(training.save)
    signal.raise_signal(signal.SIGUSR1)
    training.load()
    zinf_compile.load(training.folder / "saved", training.model, training.optimizer)
    assert training.is_in(training.after)


@pytest.mark.parametrize("name", ["eager", "captured, step in backward"])
def test_a_handler_that_saves_inside_of_a_backward_is_refused(
    name: str, make: Callable[[str], Training], on_signal: Callable[[Callable[[], object]], None]
) -> None:
    training = make(name)
    training.load()
    training.forward()
    on_signal(training.save)
    assert training.loss is not None
    training.loss.register_hook(lambda grad: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(StoreError, match="cannot be saved or loaded inside of a backward"):
        training.backward()
    training.zero_grad()
    training.run_all()
    assert training.is_in(training.after)


SCRIPT = """
    import os, signal, sys, threading, torch, zinf_compile

    torch.set_num_threads(1)
    if sys.argv[2] == "raises":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    zinf_compile.optimize(model, device_memory="1MiB", host_memory="700KiB", nvme=sys.argv[1], capture=False)
    optimizer = torch.optim.AdamW(model.parameters())
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    while True:
        model(torch.ones(2, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("handler", "code"), [pytest.param("raises", 7, marks=pytest.mark.long), ("none", -signal.SIGTERM)]
)
def test_a_process_that_is_told_to_end_ends_with_all_its_threads(handler: str, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), handler]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=80)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert torch.is_grad_enabled()
