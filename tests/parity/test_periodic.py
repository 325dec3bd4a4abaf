"""Work that an optimizer does every few steps, out of core: the same bits as in memory, late or not, and resumed."""

import copy
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zinf_compile
from examples.soap import SOAP
from tests.parity.test_other_states import WIDTHS, train
from tests.support.optimizer_twins import assert_same, assert_same_training
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.params.home import HomeTensor
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.process.background import background_calls
from zinf_compile.runtime.store.store import Store, store_of

BUDGETS = {"device_memory": "16MiB", "host_memory": "4MiB"}
NUM_STEPS = 8
_LIMIT_SECONDS = 10.0


class Whitening(SOAP):
    """Its work fails on demand, reads what it does not write, and waits for a permit."""

    permit = threading.Event()
    fails = False

    @zinf_compile.every("every", staleness="staleness")
    def new_bases(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        if threading.current_thread() is not threading.main_thread():  # where it is tried on small tensors
            assert Whitening.permit.wait(30)
            if Whitening.fails:
                raise ArithmeticError("no convergence")
        bases = [key for key in state if key.startswith("basis_")]
        return {key: torch.linalg.qr(state[key.replace("basis", "matrix")] @ state[key])[0] for key in bases}


class Rooting(Optimizer):
    """Shampoo's inverse roots: what is read is not written; and small matrices, which stay in memory."""

    def __init__(self, params: Any, staleness: int) -> None:
        super().__init__(params, {"staleness": staleness})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad.view(len(parameter), -1)
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    for key, size in (("left", len(grad)), ("right", grad.shape[1])):
                        state[key], state[f"root_{key}"] = torch.eye(size) * 1e-3, torch.eye(size)
                state["step"] += 1
                state["left"].addmm_(grad, grad.T)
                state["right"].addmm_(grad.T, grad)
                parameter.sub_((state["root_left"] @ grad @ state["root_right"]).view(parameter.shape), alpha=1e-3)
                self.new_roots(state, reads=["left", "right"], writes=["root_left", "root_right"])

    @zinf_compile.every(3, staleness="staleness")
    def new_roots(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        roots = {}
        for key, matrix in state.items():
            values, vectors = torch.linalg.eigh(matrix)
            roots[f"root_{key}"] = (vectors * values.clamp(min=1e-6).pow(-0.25)) @ vectors.T
        return roots


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(*WIDTHS), nn.Tanh(), nn.Linear(*reversed(WIDTHS)), nn.Tanh()]
    return nn.Sequential(*layers)


def the_store(model: nn.Module) -> Store:
    record = next(record for parameter in model.parameters() if (record := record_of(parameter)) is not None)
    return store_of(record)


@pytest.fixture(autouse=True)
def permitted() -> Iterator[None]:
    """Let work run, and leave it so."""
    Whitening.permit.set()
    yield
    Whitening.permit.set()
    Whitening.fails = False


@pytest.fixture
def optimize(tmp_path: Path) -> Iterator[Callable[..., nn.Module]]:
    """Return ``zinf_compile.optimize`` under small budgets; check and close the models afterwards."""
    models = []

    def call(model: nn.Module, **options: Any) -> nn.Module:
        zinf_compile.optimize(model, **{**BUDGETS, "nvme": tmp_path, "compute": "aten", **options})
        models.append(model)
        return model

    yield call
    for model in models:
        store = the_store(model)
        if store.is_open:
            store.check_integrity()
        zinf_compile.close(model)
    for thread in threading.enumerate():
        if thread.name == "zinf-background":  # ends by itself, just after the last of its work has
            thread.join(_LIMIT_SECONDS)
    assert not any(thread.name.startswith("zinf") for thread in threading.enumerate())


MAKE: list[Callable[[Any, int], Optimizer]] = [
    lambda params, staleness: SOAP(params, every=3, staleness=staleness),
    lambda params, staleness: Rooting(params, staleness),
]


@pytest.mark.parametrize("host_memory", ["4MiB", "16MiB"], ids=["too little to compute ahead", "enough"])
@pytest.mark.parametrize("make", MAKE, ids=["soap", "roots"])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_bits_are_those_in_memory(
    staleness: int, make: Callable[..., Optimizer], host_memory: str, optimize: Callable[..., nn.Module]
) -> None:
    plain, model = make_model(), optimize(make_model(), host_memory=host_memory)
    optimizers = [make(each.parameters(), staleness) for each in (plain, model)]
    for steps in (range(4), range(4, NUM_STEPS)):  # after 4 steps, results are pending
        losses = [train(each, optimizer, steps) for each, optimizer in zip((plain, model), optimizers, strict=True)]
        assert_same("losses", *losses)
        assert_same_training(plain, optimizers[0], model, optimizers[1])


def test_copies_live_at_home_until_they_are_adopted(optimize: Callable[..., nn.Module]) -> None:
    model = optimize(make_model(), host_memory="16MiB")
    optimizer = SOAP(model.parameters(), every=4, staleness=2)
    store = the_store(model)
    train(model, optimizer, range(4))
    at_rest = [store.layout.live_nbytes, *(store.held.nbytes_on(tier) for tier in Tier)]
    train(model, optimizer, range(4, 5))
    weight = model[0].weight
    state = optimizer.state[weight]
    record = record_of(weight)
    assert record is not None
    for key in ("matrix_0", "basis_0", "matrix_1", "basis_1"):
        assert isinstance(state[f"new_bases.pending.{key}"], HomeTensor)
        assert record.copies.states[f"new_bases.pending.{key}"].tier is Tier.NVME
    train(model, optimizer, range(5, 7))
    assert not any("pending" in key for key in (*optimizer.state[weight], *record.copies.states))
    assert [store.layout.live_nbytes, *(store.held.nbytes_on(tier) for tier in Tier)] == at_rest
    for tier in zinf_compile.report(model).tiers:
        if tier.tier is not Tier.NVME:
            assert tier.capacity is None or tier.measured_peak <= tier.capacity, tier


def test_it_computes_beside_the_next_forward(optimize: Callable[..., nn.Module]) -> None:
    plain, model = make_model(), optimize(make_model(), host_memory="16MiB")
    optimizers = [Whitening(each.parameters(), every=3, staleness=1) for each in (plain, model)]
    train(plain, optimizers[0], range(NUM_STEPS))
    train(model, optimizers[1], range(3))
    Whitening.permit.clear()
    losses = train(
        model, optimizers[1], range(3, 4)
    )  # the first step only finds the bases: this is step 3 of the state
    batch = torch.randn(5, WIDTHS[0], generator=torch.Generator().manual_seed(4))
    loss = model(batch).square().mean()
    loss.backward()  # while a thread of the work waits
    threading.Timer(0.2, Whitening.permit.set).start()
    begin = time.monotonic()
    optimizers[1].step()
    assert time.monotonic() - begin > 0.1, "it was not waited for"
    optimizers[1].zero_grad()
    assert len(losses) == 1
    train(model, optimizers[1], range(5, NUM_STEPS))
    assert_same_training(plain, optimizers[0], model, optimizers[1])


@pytest.mark.parametrize("into", ["out of core", "in memory", "the same model"])
@pytest.mark.parametrize("after", [4, 5])
def test_a_checkpoint_in_between_is_exact(
    after: int, into: str, optimize: Callable[..., nn.Module], tmp_path: Path
) -> None:
    plain = make_model()
    optimizer = SOAP(plain.parameters(), every=3, staleness=2)
    whole = train(plain, optimizer, range(NUM_STEPS))
    model = optimize(make_model(), host_memory="16MiB")
    saving = SOAP(model.parameters(), every=3, staleness=2)
    first = train(model, saving, range(after))
    assert any("pending" in key for key in saving.state[model[0].weight])
    zinf_compile.save(tmp_path / "saved", model, saving)
    if into == "the same model":
        train(model, saving, range(after, NUM_STEPS))
        other, restored = model, saving
    else:
        other = make_model() if into == "in memory" else optimize(make_model(), host_memory="16MiB")
        restored = SOAP(other.parameters(), every=3, staleness=2)
    zinf_compile.load(tmp_path / "saved", other, restored)
    if into != "the same model":
        assert_same("state", saving.state_dict(), restored.state_dict())
    assert_same("losses", whole, first + train(other, restored, range(after, NUM_STEPS)))
    assert_same_training(plain, optimizer, other, restored)


def test_a_state_dict_in_between_is_exact(optimize: Callable[..., nn.Module]) -> None:
    plain, model = make_model(), optimize(make_model(), host_memory="16MiB")
    optimizers = [SOAP(each.parameters(), every=3, staleness=2) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer, range(5))
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer, range(5, NUM_STEPS))
    assert_same_training(plain, optimizers[0], model, optimizers[1])


def test_copies_that_the_user_changes_are_what_counts(optimize: Callable[..., nn.Module]) -> None:
    plain, model = make_model(), optimize(make_model(), host_memory="16MiB")
    optimizers = [SOAP(each.parameters(), every=3, staleness=2) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer, range(4))
        with torch.no_grad():
            optimizer.state[each[0].weight]["new_bases.pending.basis_1"].mul_(-1)
        train(each, optimizer, range(4, NUM_STEPS))
    assert_same_training(plain, optimizers[0], model, optimizers[1])


def test_without_nvme_host_memory_has_the_copies(optimize: Callable[..., nn.Module]) -> None:
    plain, model = make_model(), optimize(make_model(), nvme=None, host_memory="32MiB")
    optimizers = [SOAP(each.parameters(), every=3, staleness=1) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer, range(NUM_STEPS))
    assert_same_training(plain, optimizers[0], model, optimizers[1])


def test_a_step_can_be_taken_again_after_an_error_in_the_background(optimize: Callable[..., nn.Module]) -> None:
    plain, model = make_model(), optimize(make_model(), host_memory="16MiB")
    plain_optimizer, optimizer = (Whitening(each.parameters(), every=3, staleness=1) for each in (plain, model))
    train(plain, plain_optimizer, range(NUM_STEPS))
    train(model, optimizer, range(3))
    Whitening.permit.clear()
    train(model, optimizer, range(3, 4))
    Whitening.fails = True
    Whitening.permit.set()
    with pytest.raises(RuntimeError, match=r"Whitening\.new_bases\(\), .* has failed: ArithmeticError: no convergence"):
        train(model, optimizer, range(4, 5))
    Whitening.fails = False
    optimizer.step()  # with the gradients that there are
    optimizer.zero_grad()
    train(model, optimizer, range(5, NUM_STEPS))
    assert_same_training(plain, plain_optimizer, model, optimizer)


def test_a_method_that_returns_something_else_is_refused_before_anything_changes(
    optimize: Callable[..., nn.Module],
) -> None:
    class Narrowing(SOAP):
        @zinf_compile.every("every", staleness="staleness")
        def new_bases(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
            return {key: value.double() for key, value in state.items() if key.startswith("basis")}

    model = optimize(make_model(), host_memory="16MiB")
    optimizer = Narrowing(model.parameters(), every=3, staleness=1)
    train(model, optimizer, range(1))  # the next step might call it before it counts itself
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"new_bases\(\) returned torch\.float64 .* as 'basis_0', .*torch\.float32"):
        train(model, optimizer, range(1, 2))
    assert_same("model", before, dict(model.state_dict()))


def test_closing_waits_for_what_runs_only(optimize: Callable[..., nn.Module]) -> None:
    model = optimize(make_model(), host_memory="16MiB")
    optimizer = Whitening(model.parameters(), every=3, staleness=1)
    train(model, optimizer, range(3))
    Whitening.permit.clear()
    train(model, optimizer, range(3, 4))
    threading.Timer(0.2, Whitening.permit.set).start()
    zinf_compile.close(model)
    assert background_calls().submit(lambda: 1).result(10) == 1
