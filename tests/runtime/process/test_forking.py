"""Forked children: any use of the parent's model is right or refused, ends in time, and changes nothing in the parent."""

import gc
import os
import pickle
import random
import select
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

import zinf_compile
from zinf_compile.ir.errors import StoreError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.store.store import Store

SECONDS = 20  # far more than anything here takes
ELSEWHERE = "this model lives in a store of another process"
GONE_ON = "'0.weight' may have changed since this process was forked: the parent has continued training"
IN_FLIGHT = "'0.weight' was being updated when this process was forked"

NUM_FORKS = 12

Act = Callable[[nn.Module, Optimizer], Any]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(261, 263), nn.Tanh(), nn.Linear(263, 261))


def train(model: nn.Module, optimizer: Optimizer, *, step: bool = True) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 261)).pow(2).sum().backward()
    if step:
        optimizer.step()


def state_of(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return copies of all parameters, gradients and optimizer state."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *grads, *states)]


def outcome_of(act: Callable[[], Any]) -> Any:
    """Return what ``act`` returns, or its error as a string, which can be pickled."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001  # the test checks it
        return f"{type(error).__name__}: {error}"


class Child:
    """A forked child that runs an action and sends back its outcome. It is an error if it does not end in time."""

    def __init__(self, act: Callable[[], Any], *, ends_by_itself: bool = False) -> None:
        self._pipe, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.write(writing, pickle.dumps(outcome_of(act)))
                os.close(writing)
                if ends_by_itself:
                    ends_by_itself_now()
            finally:
                os._exit(0)
        os.close(writing)

    def outcome(self) -> Any:
        """Wait for the child to end, and return the outcome that it sent."""
        received = b""
        try:
            while select.select([self._pipe], [], [], SECONDS)[0]:
                piece = os.read(self._pipe, 2**16)
                if not piece:
                    return pickle.loads(received)
                received += piece
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"a child did not end within {SECONDS} seconds; so far it sent {received!r}")
        finally:
            os.close(self._pipe)
            os.waitpid(self.pid, 0)


def ends_by_itself_now() -> None:
    """Do what interpreter shutdown does to our objects: finalizers, and the exit hook of thread pools."""
    import concurrent.futures.thread
    import weakref

    gc.collect()
    concurrent.futures.thread._python_exit()
    weakref.finalize._exitfunc()


def zeros_like(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in model.state_dict().items()}


def sums(model: nn.Module) -> list[float]:
    return [float(parameter.sum()) for parameter in model.parameters()]


def write_states(model: nn.Module, optimizer: Optimizer) -> float:
    for state in optimizer.state.values():
        state["exp_avg"].fill_(3.0)
    return float(sum(state["exp_avg"].sum() for state in optimizer.state.values()))


# What a child may do, and its outcome: a value as in plain PyTorch, or a refusal.
def load_zeros(model: nn.Module, optimizer: Optimizer) -> list[float]:
    model.load_state_dict(zeros_like(model))
    return sums(model)


def init_ones(model: nn.Module, optimizer: Optimizer) -> list[float]:
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return sums(model)


def zero_data(model: nn.Module, optimizer: Optimizer) -> list[float]:
    for parameter in model.parameters():
        parameter.data.zero_()
    return sums(model)


def zero_gradients(model: nn.Module, optimizer: Optimizer) -> float:
    optimizer.zero_grad(set_to_none=False)
    return sum(float(parameter.grad.sum()) for parameter in model.parameters() if parameter.grad is not None)


LOOKS: dict[str, Act] = {
    "read": lambda model, _: sums(model),
    "load_state_dict": load_zeros,
    "init": init_ones,
    "data": zero_data,
    "gradients": zero_gradients,
    "states": write_states,
}
REFUSALS: dict[str, Act] = {
    "forward": lambda model, _: model(torch.ones(2, 261)),
    "step": lambda _, optimizer: optimizer.step(),
    "save": lambda model, optimizer: zinf_compile.save("/nowhere", model, optimizer),
    "synchronize": lambda model, _: zinf_compile.synchronize(model),
    "full_parameters": lambda model, _: zinf_compile.full_parameters(model).__enter__(),
}
ENDS: dict[str, Act] = {
    "report": lambda model, _: zinf_compile.report(model).model,
    "close": lambda model, _: zinf_compile.close(model),
}


def outcomes_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Run all actions in turn, and return the outcome of each."""
    return {name: outcome_of(partial(act, model, optimizer)) for name, act in (REFUSALS | LOOKS | ENDS).items()}


def plain_outcomes() -> dict[str, Any]:
    """Return what each of ``LOOKS`` gives on a new plain model after one step."""
    outcomes = {}
    for name, act in LOOKS.items():
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer)
        outcomes[name] = act(model, optimizer)
    return outcomes


@pytest.fixture
def trained(optimize: Callable[..., nn.Module]) -> Callable[..., tuple[nn.Module, Optimizer]]:
    """Return a function that makes a model, mostly on nvme, and its optimizer, after one step."""

    def make(**options: Any) -> tuple[nn.Module, Optimizer]:
        model = optimize(make_model(), **({"tiny": True, "overlap_step": False} | options))
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer)
        return model, optimizer

    return make


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_child_looks_and_writes_as_in_plain_pytorch_and_its_parent_sees_nothing_of_it(
    trained: Callable[..., tuple[nn.Module, Optimizer]], in_memory: bool
) -> None:
    model, optimizer = trained(tiny=not in_memory)
    before, expected = state_of(model, optimizer), plain_outcomes()
    for name, act in LOOKS.items():
        assert Child(lambda act=act: act(model, optimizer)).outcome() == expected[name], name
        assert all(map(torch.equal, state_of(model, optimizer), before)), f"{name} in a child changed its parent"
    for name, act in REFUSALS.items():
        assert ELSEWHERE in Child(lambda act=act: act(model, optimizer)).outcome(), name
    train(model, optimizer)


def test_a_child_may_do_all_of_it_one_after_another(trained: Callable[..., tuple[nn.Module, Optimizer]]) -> None:
    model, optimizer = trained()
    before = state_of(model, optimizer)

    outcomes = Child(lambda: outcomes_of(model, optimizer), ends_by_itself=True).outcome()
    assert {name for name, outcome in outcomes.items() if ELSEWHERE in str(outcome)} == set(REFUSALS)
    assert all(map(torch.equal, state_of(model, optimizer), before))


def test_a_tensor_over_a_home_that_a_child_inherits_does_not_reach_its_parent(
    trained: Callable[..., tuple[nn.Module, Optimizer]],
) -> None:
    model, optimizer = trained()
    alias = model.get_parameter("0.weight").data
    before = state_of(model, optimizer)
    assert Child(lambda: float(alias.zero_().sum())).outcome() == 0.0
    assert all(map(torch.equal, state_of(model, optimizer), before))


@pytest.mark.parametrize("use", ["forward and backward", "a write"])
def test_a_child_is_refused_what_its_parent_may_have_changed_since(
    trained: Callable[..., tuple[nn.Module, Optimizer]], use: str
) -> None:
    """What the child read before keeps its value from the fork."""
    model, optimizer = trained()
    weight, bias = model.get_parameter("0.weight"), model.get_parameter("0.bias")
    total = float(weight.sum())
    reading, writing = os.pipe()
    looked, announcing = os.pipe()

    def act() -> Any:
        first = float(weight.sum())
        os.write(announcing, b"looked")
        os.read(reading, 1)  # until the parent has gone on
        return first, float(weight.sum()), outcome_of(lambda: float(model.get_parameter("2.weight").sum()))

    def act_late() -> Any:
        os.read(reading, 1)
        return float(weight.sum())

    children = [Child(act), Child(act_late)]
    os.read(looked, 6)
    if use == "a write":
        with torch.no_grad():
            weight.zero_(), bias.zero_()
    else:
        train(model, optimizer, step=False)
    os.write(writing, b"go")
    first, again, other = children[0].outcome()
    assert first == again == total
    assert other == f"StoreError: {GONE_ON}".replace("0.weight", "2.weight") + other[len(GONE_ON) + 12 :]
    assert children[1].outcome().startswith(f"StoreError: {GONE_ON}")
    for descriptor in (reading, writing, looked, announcing):
        os.close(descriptor)


def test_a_child_forked_under_an_update_waits_for_nothing(
    trained: Callable[..., tuple[nn.Module, Optimizer]],
    store_of: Callable[[nn.Module], Store],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hold an update in its thread while another thread holds the locks that a child may need."""
    model, optimizer = trained(overlap_step=True)
    store = store_of(model)
    zinf_compile.synchronize(model)
    go, begun = threading.Event(), threading.Event()
    write = type(store.engine).write

    def held_up(self: Any, offset: int, buffer: memoryview) -> None:
        begun.set()
        assert go.wait(SECONDS)
        write(self, offset, buffer)

    train(model, optimizer, step=False)
    before = state_of(model, optimizer)
    monkeypatch.setattr(type(store.engine), "write", held_up)
    optimizer.step()
    assert begun.wait(SECONDS)
    update = record_of(model.get_parameter("0.weight")).update.future  # type: ignore[union-attr]
    assert update is not None
    with store.meter._lock, update._condition, store.staging._condition, store.io_pool.uses._lock:
        held = threading.Thread(target=store._lock.acquire)
        held.start()
        held.join()
        outcomes = Child(lambda: outcomes_of(model, optimizer), ends_by_itself=True).outcome()
    go.set()
    assert all(ELSEWHERE in outcomes[name] or IN_FLIGHT in outcomes[name] for name in REFUSALS), outcomes
    for name in LOOKS:
        assert IN_FLIGHT in outcomes[name] or "'0.bias' was being updated" in outcomes[name], (name, outcomes[name])
    assert outcomes["report"] == "Sequential"
    store._lock = threading.RLock()  # the thread that holds it is gone
    zinf_compile.synchronize(model)
    plain = make_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    for _ in range(2):
        train(plain, plain_optimizer)
    assert all(map(torch.equal, state_of(model, optimizer), state_of(plain, plain_optimizer)))
    assert not all(map(torch.equal, state_of(model, optimizer), before))


def test_a_closed_model_is_a_childs_own(trained: Callable[..., tuple[nn.Module, Optimizer]]) -> None:
    """Closing releases the file: without a descriptor nothing can be mapped again."""
    model, optimizer = trained()
    zinf_compile.close(model)
    before = state_of(model, optimizer)
    with torch.no_grad():
        model.get_parameter("0.bias").fill_(2.0)
    assert Child(lambda: float(model.get_parameter("0.bias").sum())).outcome() == 2.0 * 263
    for act in LOOKS.values():
        Child(lambda act=act: act(model, optimizer)).outcome()
    with torch.no_grad():
        model.get_parameter("0.bias").copy_(before[1])
    assert all(map(torch.equal, state_of(model, optimizer), before))


def test_children_of_children(trained: Callable[..., tuple[nn.Module, Optimizer]]) -> None:
    model, optimizer = trained()
    before = state_of(model, optimizer)

    def act() -> Any:
        model.get_parameter("0.weight").data.fill_(1.0)
        below = Child(lambda: (float(model.get_parameter("0.weight").sum()), *zero_data(model, optimizer))).outcome()
        return below, float(model.get_parameter("0.weight").sum()), float(model.get_parameter("2.weight").sum())

    below, *own = Child(act).outcome()
    assert below == (261.0 * 263, 0.0, 0.0, 0.0, 0.0)
    assert own == [261.0 * 263, float(before[2].sum())]
    assert all(map(torch.equal, state_of(model, optimizer), before))


class Rows(Dataset[Tensor]):
    """A dataset whose workers inherit a model, try to run it, and sometimes write to it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        with pytest.raises(StoreError):
            self.model(torch.ones(2, 261))
        if index % 3 == 0:
            outcome_of(lambda: self.model.get_parameter("0.weight").data.zero_())
        return torch.full((261,), 0.01 * index)


def test_workers_of_a_data_loader_beside_training(optimize: Callable[..., nn.Module]) -> None:
    def run(model: nn.Module, data: DataLoader[Tensor]) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):  # each pass forks new workers while the last update may run
            for batch in data:
                optimizer.zero_grad()
                model(batch).pow(2).sum().backward()
                optimizer.step()
        return state_of(model, optimizer)

    model = optimize(make_model(), tiny=True, capture=True)
    workers = DataLoader(Rows(model), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=SECONDS)
    found = run(model, workers)
    batches = [torch.stack([torch.full((261,), 0.01 * index) for index in (at, at + 1)]) for at in range(0, 12, 2)]
    assert all(map(torch.equal, found, run(make_model(), batches)))  # type: ignore[arg-type]


@pytest.mark.long
def test_forks_at_random_instants(optimize: Callable[..., nn.Module], store_of: Callable[[nn.Module], Store]) -> None:
    """A thread trains while another forks: a child reads every parameter as of one instant, or is refused."""
    model = optimize(make_model(), tiny=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    known = {float(model.get_parameter("0.weight").sum())}
    done = threading.Event()

    def go_on() -> None:
        while not done.is_set():
            train(model, optimizer)
            known.add(float(model.get_parameter("0.weight").sum()))

    rng, outcomes = random.Random(0), []
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for number in range(NUM_FORKS):
            time.sleep(rng.uniform(0, 0.02))
            act = rng.choice([*LOOKS.values(), *REFUSALS.values()])
            child = Child(
                lambda act=act: (
                    float(model.get_parameter("0.weight").sum()),
                    outcome_of(lambda: act(model, optimizer)),
                ),
                ends_by_itself=number % 4 == 0,
            )
            outcomes.append(child.outcome())
    finally:
        done.set()
        thread.join()
    assert store_of(model).held.nbytes_on(Tier.NVME) > 0
    for outcome in outcomes:
        if isinstance(outcome, tuple):
            assert outcome[0] in known
        else:
            assert outcome.startswith("StoreError: '0.weight' ") or ELSEWHERE in outcome, (
                outcome
            )  # in a forward: a gather
