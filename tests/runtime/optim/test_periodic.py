"""Work that an optimizer does every few steps, in plain PyTorch: when it runs, what is adopted when, what is refused."""

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import zinf_compile
from zinf_compile.ir.errors import ConfigError
from zinf_compile.runtime.optim.periodic import Periodic, periodics_of
from zinf_compile.runtime.process.background import background_calls


class Averaging(Optimizer):
    """Steps along a factor that is made anew every few steps of a mean of gradients."""

    def __init__(self, params: Iterable[Tensor], every: Any = 4, staleness: Any = 0) -> None:
        super().__init__(params, {"every": every, "staleness": staleness})
        self.wait = threading.Event()
        self.wait.set()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(parameter), factor=torch.ones_like(parameter))
                state["step"] += 1
                state["mean"].lerp_(parameter.grad, 0.5)
                parameter.addcmul_(state["factor"], parameter.grad, value=-0.1)
                self.new_factor(state, reads=["mean"], writes=["factor"])

    @zinf_compile.every("every", staleness="staleness")
    def new_factor(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        assert self.wait.wait(30)
        return {"factor": torch.linalg.qr(state["mean"] @ state["mean"].T)[0] + state["mean"].sum()}


def make(staleness: int = 0, every: int = 4, kind: Callable[..., Averaging] = Averaging) -> tuple[Tensor, Averaging]:
    parameter = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    return parameter, kind([parameter], every, staleness)


def train(parameter: Tensor, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        parameter.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.step()


def factor_after(steps: int) -> Tensor:
    """Return what the method gives after so many steps, computed here."""
    mean = torch.zeros(8, 8)
    for step in range(steps):
        mean.lerp_(torch.randn(8, 8, generator=torch.Generator().manual_seed(step)), 0.5)
    return torch.linalg.qr(mean @ mean.T)[0] + mean.sum()


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_results_are_adopted_when_that_is_planned(staleness: int) -> None:
    parameter, optimizer = make(staleness)
    state = optimizer.state[parameter]
    for step in range(10):
        train(parameter, optimizer, range(step, step + 1))
        last = (step + 1 - staleness) // 4 * 4
        assert torch.equal(state["factor"], factor_after(last) if last > 0 else torch.ones(8, 8))
        is_pending = staleness > 0 and step >= 3 and (step + 1) % 4 < staleness
        assert ("new_factor.adopt_at" in state) == is_pending
        assert ("new_factor.pending.mean" in state) == is_pending


def test_a_slow_thread_changes_nothing() -> None:
    fast, fast_optimizer = make(2)
    slow, slow_optimizer = make(2)
    train(fast, fast_optimizer, range(9))
    slow_optimizer.wait.clear()
    train(slow, slow_optimizer, range(5))
    timer = threading.Timer(0.3, slow_optimizer.wait.set)
    timer.start()
    begin = time.monotonic()
    train(slow, slow_optimizer, range(5, 9))
    timer.join()
    assert time.monotonic() - begin > 0.2, "it was not waited for"
    assert torch.equal(fast, slow)


@pytest.mark.parametrize("how", ["load_state_dict", "deepcopy", "edited"])
def test_a_checkpoint_in_between_is_exact(how: str) -> None:
    whole, whole_optimizer = make(2)
    train(whole, whole_optimizer, range(12))
    first, first_optimizer = make(2)
    train(first, first_optimizer, range(5))
    assert "new_factor.pending.mean" in first_optimizer.state[first]
    if how == "deepcopy":
        parameter, optimizer = first, copy.deepcopy(first_optimizer.state_dict())
        restored = Averaging([parameter], 4, 2)
        restored.load_state_dict(optimizer)
    elif how == "load_state_dict":
        parameter, restored = make(2)
        parameter.data.copy_(first.data)
        restored.load_state_dict(first_optimizer.state_dict())
    else:  # what a thread has computed is not what the state says any more
        parameter, restored = first, first_optimizer
        first_optimizer.state[first]["new_factor.pending.mean"].mul_(2)
        train(parameter, restored, range(5, 12))
        assert not torch.equal(whole, parameter)
        return
    train(parameter, restored, range(5, 12))
    assert torch.equal(whole, parameter)


def test_an_error_in_the_background_is_raised_where_it_is_adopted() -> None:
    class Failing(Averaging):
        @zinf_compile.every("every", staleness="staleness")
        def new_factor(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
            raise ArithmeticError("no convergence")

    parameter, optimizer = make(1, kind=Failing)
    train(parameter, optimizer, range(4))
    state = optimizer.state[parameter]
    with pytest.raises(RuntimeError, match=r"Failing\.new_factor\(\), .* failed: ArithmeticError: no convergence; "):
        train(parameter, optimizer, range(4, 5))
    assert torch.equal(state["factor"], torch.ones(8, 8))
    assert state["new_factor.adopt_at"] == 5


def test_the_method_sees_no_state_and_no_groups() -> None:
    class Curious(Averaging):
        @zinf_compile.every(1)
        def new_factor(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
            assert self.defaults["every"] == 4
            assert state.keys() == {"mean"}
            return {"factor": self.param_groups[0]["params"][0]}

    parameter, optimizer = make(kind=Curious)
    with pytest.raises(AttributeError, match="'Curious' object has no attribute 'param_groups'"):
        train(parameter, optimizer, range(1))


@pytest.mark.parametrize(
    ("k", "staleness", "message"),
    [
        (0, 0, r"has k=0; give a number of steps of at least 1"),
        (4, 4, r"has staleness=4, and results .* 4 steps later; give a staleness from 0 to 3"),
        (4, -1, r"has staleness=-1, .*; give a staleness from 0 to 3"),
        (2.5, 0, r"has k=2\.5; give a whole number of steps"),
        (True, 0, r"has k=True; give a whole number"),
    ],
)
def test_numbers_that_cannot_be_are_refused(k: Any, staleness: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"every\(\) " + message):
        zinf_compile.every(k, staleness=staleness)
    parameter, optimizer = make(every=k, staleness=staleness)
    with pytest.raises(ConfigError, match=r"new_factor\(\) of Averaging " + message):
        train(parameter, optimizer, range(1))


def test_an_option_that_is_not_there_is_refused() -> None:
    class Named(Averaging):
        new_factor = zinf_compile.every("frequency")(lambda self, state: {})

    parameter, optimizer = make(kind=Named)
    with pytest.raises(
        ConfigError, match=r"k='frequency', which is none of the options in its defaults: every, staleness"
    ):
        train(parameter, optimizer, range(1))


def test_what_is_no_method_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"every\(\) was given 3; decorate a method of an optimizer"):
        zinf_compile.every(2)(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"decorate a method of an optimizer with it, def name\(self, state\)"):
        zinf_compile.every(2)(dict)  # type: ignore[arg-type, misc]

    @zinf_compile.every(2)
    def alone(self: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}

    with pytest.raises(ConfigError, match=r"alone\(\) was called as a function"):
        alone({}, reads=[], writes=[])
    other = type("Other", (), {"alone": alone})()
    with pytest.raises(ConfigError, match=r"alone\(\) belongs to Other"):
        other.alone({"step": 1}, reads=[], writes=[])


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda mean: {}, "returned nothing; it is to return factor"),
        (lambda mean: {"factor": mean, "mean": mean}, "returned factor, mean; it is to return factor"),
        (
            lambda mean: {"factor": mean[:4].clone()},
            r"returned torch\.float32 \(4, 8\) as 'factor', .*float32 \(8, 8\)",
        ),
        (lambda mean: {"factor": mean.double()}, r"returned torch\.float64 \(8, 8\) as 'factor'"),
        (lambda mean: {"factor": None}, "returned dict; it is to return a dict of tensors"),
        (lambda mean: mean, "returned Tensor; it is to return a dict of tensors"),
        (lambda mean: {"factor": mean.mul_(2)}, "changed 'mean', which it was given; return new tensors"),
    ],
)
def test_results_that_do_not_fit_are_refused(staleness: int, result: Callable[[Tensor], Any], message: str) -> None:
    class Odd(Averaging):
        @zinf_compile.every("every", staleness="staleness")
        def new_factor(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
            made: dict[str, Tensor] = result(state["mean"])
            return made

    parameter, optimizer = make(staleness, every=2, kind=Odd)
    with pytest.raises(RuntimeError if staleness else ConfigError, match=r"new_factor\(\) " + message):
        train(parameter, optimizer, range(3))
    assert torch.equal(optimizer.state[parameter]["factor"], torch.ones(8, 8))


def test_a_state_that_lacks_something_is_refused() -> None:
    parameter, optimizer = make()
    with pytest.raises(
        ConfigError, match=r"needs the number of steps of its parameter, and the state has None as 'step'"
    ):
        optimizer.new_factor({}, reads=[], writes=[])
    with pytest.raises(ConfigError, match=r"is to use 'mean' of a state whose tensors are basis; make it before"):
        optimizer.new_factor({"step": 1, "basis": parameter}, reads=["mean"], writes=["basis"])


def test_results_may_be_what_was_given() -> None:
    class Swapping(Averaging):
        new_factor = zinf_compile.every(1)(lambda self, state: {"factor": state["mean"]})

    parameter, optimizer = make(kind=Swapping)
    train(parameter, optimizer, range(2))
    state = optimizer.state[parameter]
    assert torch.equal(state["factor"], state["mean"])
    assert state["factor"].data_ptr() != state["mean"].data_ptr()


def test_methods_are_found_through_inheritance() -> None:
    class Derived(Averaging):
        pass

    class Overridden(Averaging):
        def new_factor(self, state: Any, *, reads: Any, writes: Any) -> None:  # type: ignore[override]
            pass

    assert isinstance(periodics_of(make(kind=Derived)[1])["new_factor"], Periodic)
    assert periodics_of(make(kind=Overridden)[1]) == {}


def test_threads_end_with_their_work() -> None:
    parameter, optimizer = make(1)
    train(parameter, optimizer, range(5))
    deadline = time.monotonic() + 10
    while any(thread.name == "zinf-background" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.name == "zinf-background" for thread in threading.enumerate())


def test_what_nobody_will_adopt_is_not_computed() -> None:
    gate, ran = threading.Event(), []
    first = background_calls().submit(gate.wait)
    others = [background_calls().submit(gate.wait) for _ in range(os.cpu_count() or 1)]  # all threads there may be

    class Noting(Averaging):
        @zinf_compile.every("every", staleness="staleness")
        def new_factor(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
            ran.append(1)
            return {"factor": state["mean"]}

    parameter, optimizer = make(1, kind=Noting)
    train(parameter, optimizer, range(4))
    del parameter, optimizer
    gate.set()
    for future in (first, *others):
        assert future.result(10)
    assert background_calls().submit(lambda: 1).result(10) == 1
    assert not ran


_SLEEPER = """
import sys, threading, time, torch
import zinf_compile

class Sleeping(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("step", 0)
            state.setdefault("kept", torch.ones(4))
            state["step"] += 1
            self.new(state, reads=["kept"], writes=["kept"])
    @zinf_compile.every(2, staleness=1)
    def new(self, state):
        time.sleep(SECONDS)
        return {"kept": state["kept"] + 1}

torch.set_num_threads(1)
parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(200)]
optimizer = Sleeping(parameters)
optimizer.step()
optimizer.step()
"""


def test_a_process_ends_without_waiting_for_what_has_not_begun() -> None:
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", _SLEEPER.replace("SECONDS", "0.5")], check=True, timeout=60)
    assert time.monotonic() - begin < 50, "200 calls of half a second were made"


def test_an_interrupt_leaves_the_wait() -> None:
    waiting = _SLEEPER.replace("SECONDS", "0.5") + "print('waits', flush=True)\noptimizer.step()\n"
    with subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"waits\n"
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=20)
    assert b"KeyboardInterrupt" in errors
    assert child.returncode != 0


def test_a_forked_child_computes_it_again() -> None:
    parameter, optimizer = make(2)
    train(parameter, optimizer, range(6))
    optimizer.wait.clear()
    whole, whole_optimizer = make(2)
    train(whole, whole_optimizer, range(9))
    train(parameter, optimizer, range(6, 8))  # begins anew, and its thread waits
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        optimizer.wait = threading.Event()
        optimizer.wait.set()
        signal.alarm(20)
        train(parameter, optimizer, range(8, 10))
        os.write(writer, parameter.detach().numpy().tobytes())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        values = pipe.read()
    _, status = os.waitpid(child, 0)
    optimizer.wait.set()
    train(parameter, optimizer, range(8, 10))
    assert status == 0
    assert values == parameter.detach().numpy().tobytes()
    train(whole, whole_optimizer, range(9, 10))
    assert torch.equal(whole, parameter)
