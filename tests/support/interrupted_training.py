"""Training that is interrupted at a line or after a time, and in which state the model is afterwards."""

import dis
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from tests.support.guard import begin_trial
from zinf_compile.ir.errors import ZinfError
from zinf_compile.runtime.model.model_state import stores_of

WIDTH = 128
OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {"capture": False},
    "eager, step in step()": {"capture": False, "overlap_step": False},
    "eager, step in backward": {"capture": False, "step_in_backward": True},
    "captured": {},
    "captured, step in step()": {"overlap_step": False, "prefetch_memory": 0},
    "captured, step in backward": {"step_in_backward": True},
}
PHASES = ("forward", "backward", "step", "zero_grad", "synchronize", "save", "load", "close")
# Files that access the store.
FOLDERS = tuple(str(Path(zinf_compile.__file__).parent / name) for name in ("runtime", "checkpoint"))
SAME, REFUSED, WRONG, MISSED = "same bits", "refused", "silently wrong", "over before"


class Interrupted:
    """One interrupt: at the n-th line of our code that the main thread runs, or after some seconds."""

    def __init__(self, *, line: int | None = None, seconds: float | None = None, number: int = 1) -> None:
        """``number`` is how many times the signal is sent, as by a user who presses Ctrl-C repeatedly."""
        self._line, self._seconds, self._number = line, seconds, number
        self.num_lines = 0
        self.where = "nowhere"
        self._is_armed = True

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Interrupt code that runs inside this context, but not after it."""
        before = signal.signal(signal.SIGINT, self._raise)
        timer = None
        if self._seconds is not None:
            timer = threading.Timer(self._seconds, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
        else:
            sys.settrace(self._trace)
        try:
            yield
        finally:
            self._is_armed = False
            sys.settrace(None)
            if timer is not None:
                timer.cancel()
                timer.join()
            signal.signal(signal.SIGINT, before)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:
            raise KeyboardInterrupt

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename
        return self._count if file.startswith((*FOLDERS, "<eval_with_key>")) else None

    def _count(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and frame.f_lasti not in _exits_of_with(frame.f_code):
            self.num_lines += 1
            if self._line is not None and self._line <= self.num_lines < self._line + self._number:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._count


@cache
def _exits_of_with(code: CodeType) -> frozenset[int]:
    """Return the offsets at which the code of a ``with`` is over and its ``__exit__`` is about to be called.

    A tracer stops there, and what it raises skips ``__exit__``. No signal raises there: Python looks for signals at calls
    and jumps backward, not between the end of the block and the call of ``__exit__``.
    """
    instructions = list(dis.get_instructions(code))
    exits = set()
    for index, instruction in enumerate(instructions):
        start = index + (instruction.opname == "SWAP")  # below a value that the block returns
        passed = instructions[start : start + 3]
        call = next((each for each in instructions[start + 3 : start + 5] if each.opname == "CALL"), None)
        if all(each.opname == "LOAD_CONST" and each.argval is None for each in passed) and call and call.argval == 2:
            exits.add(instruction.offset)
    return frozenset(exits)


class Training:
    """A small model with weights on nvme and one step to take; it is reset for every trial."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.is_early = bool(options.get("step_in_backward"))
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        self.model = zinf_compile.optimize(
            nn.Sequential(*layers), **{"device_memory": "1MiB", "host_memory": "700KiB", "nvme": folder, **options}
        )
        (self.store,) = stores_of(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.inputs = torch.randn(8, WIDTH)
        self.loss: Tensor | None = None
        for _ in range(2):  # the first steps register the optimizer and make plans
            self.run_all()
        zinf_compile.save(folder / "before", self.model, self.optimizer)
        self.before = self.state()
        self.run_all()
        zinf_compile.save(folder / "after", self.model, self.optimizer)
        self.after = self.state()
        assert not self.is_in(self.before)

    def forward(self) -> None:
        self.loss = self.model(self.inputs).square().mean()

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        zinf_compile.synchronize(self.model)

    def save(self) -> None:
        zinf_compile.save(self.folder / "saved", self.model, self.optimizer)

    def load(self) -> None:
        zinf_compile.load(self.folder / "before", self.model, self.optimizer)

    def close(self) -> None:
        zinf_compile.close(self.model)

    @property
    def is_closed(self) -> bool:
        """Return whether the model is closed."""
        return self.store._closed

    def run_all(self) -> None:
        for phase in PHASES[:5]:
            getattr(self, phase)()

    def state(self) -> list[Tensor]:
        """Return all parameters and optimizer state."""
        values = [parameter.detach().clone() for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            values += [value.clone() for _, value in sorted(self.optimizer.state[parameter].items())]
        return values

    def is_in(self, expected: list[Tensor]) -> bool:
        """Return whether all values equal ``expected`` bit for bit."""
        return all(torch.equal(one, other) for one, other in zip(self.state(), expected, strict=True))

    def measure(self, phase: str) -> tuple[int, float]:
        """Return how many lines of our code a phase runs, and its seconds."""
        self._begin(phase)
        start = time.perf_counter()
        getattr(self, phase)()
        seconds = time.perf_counter() - start
        self._begin(phase)
        count = Interrupted()
        with count.inside():
            getattr(self, phase)()
        return count.num_lines, seconds

    def try_out(self, phase: str, interrupt: Interrupted) -> str:
        """Interrupt a phase, continue as a user would, and return the outcome."""
        self._begin(phase)
        try:
            with interrupt.inside():
                getattr(self, phase)()
            return MISSED if phase == "close" or self._goes_on(phase, is_over=True) else WRONG
        except KeyboardInterrupt:
            pass
        try:
            return SAME if self._goes_on(phase, is_over=False) else WRONG
        except ZinfError:
            return REFUSED

    def _begin(self, phase: str) -> None:
        zinf_compile.load(self.folder / "before", self.model, self.optimizer)
        self.loss = None
        if phase in ("save", "load"):
            self.run_all()
        elif phase in PHASES[:5]:
            for earlier in PHASES[: PHASES.index(phase)]:
                getattr(self, earlier)()

    def _goes_on(self, phase: str, *, is_over: bool) -> bool:
        """Continue after an interrupted phase; return whether the state then equals one of uninterrupted training."""
        if phase in ("save", "load"):
            return self._saves_and_loads(phase, is_over=is_over)
        if phase == "close":
            self.close()
            return True
        if phase in ("forward", "backward"):
            if self.is_early and phase == "backward":
                if is_over:
                    self.step()
                    return self.is_in(self.after)
                self.zero_grad()  # a gradient that backward left is applied by a step, as it is in plain PyTorch
                self.step()  # raises, unless everything or nothing was updated
                if self.is_in(self.after):
                    return True
                if not self.is_in(self.before):
                    return False
            if not is_over or phase == "backward":
                if not (is_over and phase == "backward"):
                    self.zero_grad()
                    self.forward()
                    self.backward()
                self.step()
            else:
                self.backward()
                self.step()
        elif phase == "step" and not is_over and not self.is_early:
            counts = {int(self.optimizer.state[parameter]["step"]) for parameter in self.model.parameters()}
            if counts == {2}:
                self.step()
        elif phase == "step" and not is_over:
            self.step()  # only closes the model
        self.zero_grad()
        self.synchronize()
        return self.is_in(self.after)

    def _saves_and_loads(self, phase: str, *, is_over: bool) -> bool:
        if phase == "save":
            if (self.folder / "saved" / "manifest.json").exists():  # the previous checkpoint, or this one
                zinf_compile.load(self.folder / "saved", self.model, self.optimizer)
                if not self.is_in(self.after):
                    return False
            zinf_compile.load(self.folder / "after", self.model, self.optimizer)
            self.save()
            zinf_compile.load(self.folder / "before", self.model, self.optimizer)
            zinf_compile.load(self.folder / "saved", self.model, self.optimizer)
            return self.is_in(self.after)
        was_refused = False
        try:
            self.forward()
        except ZinfError:
            was_refused = True
        else:
            if not self.is_in(self.before) and not self.is_in(self.after):
                return False
        self.load()
        if not self.is_in(self.before):
            return False
        if was_refused:
            raise ZinfError("the step was refused until a checkpoint was loaded")
        return True

    def check_at_rest(self) -> None:
        """Assert that no lease and no lock is still held, and that signals raise again."""
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert torch._C._is_torch_function_enabled()
        self.store.check_integrity()
        found: list[bool] = []

        def look() -> None:
            with self.store.busy("a look"):
                found.append(True)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(20)
        assert found, "a lock is still held"


def sample(
    make: Callable[[str], Training], rng: random.Random, trials: int, *, phases: tuple[str, ...], names: list[str]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield options, phase, outcome and place of random interrupts: a third of them by a timer, some sent twice."""
    lines: dict[tuple[str, str], tuple[int, float]] = {}
    for number in range(trials):
        name = names[number % len(names)]
        phase = phases[number // len(names) % len(phases)]
        begin_trial()
        training = make(name)
        if (name, phase) not in lines:
            lines[name, phase] = training.measure(phase) if phase != "close" else (400, 0.05)
        num_lines, seconds = lines[name, phase]
        if rng.random() < 1 / 3:
            interrupt = Interrupted(seconds=rng.uniform(0, seconds))
        else:
            interrupt = Interrupted(line=rng.randint(1, max(1, num_lines)), number=rng.choice((1, 1, 1, 3)))
        yield name, phase, training.try_out(phase, interrupt), interrupt.where
        if phase != "close":
            training.check_at_rest()
