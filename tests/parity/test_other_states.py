"""Optimizers that keep more than AdamW, less, or state of other shapes: at home like other state, planned, bit for bit."""

import copy
import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zinf_compile
from examples.soap import SOAP
from tests.support.optimizer_twins import assert_same, assert_same_training
from zinf_compile.ir.copies import Granularity
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.params.home import HomeTensor
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.store.store import store_of

NUM_STEPS = 4
WIDTHS = (128, 256)  # two matrices of 4 bytes times 128 and 256 squared for each weight: 2.5 times its bytes
BUDGETS = {"device_memory": "16MiB", "host_memory": "4MiB"}


class Remembering(Optimizer):
    """Keeps state that changes its shape, becomes small, comes and goes, is a view of what was, or the gradient itself."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                before = state.get("last", torch.zeros(0, *parameter.shape))
                state["last"] = torch.cat([before, parameter.grad[None]])[-3:]
                state["half"] = state["half"][: len(state["half"]) // 2] if "half" in state else torch.arange(2.0**13)
                state["sometimes"] = (
                    None if state.get("sometimes") is not None else torch.cat([parameter.grad.abs()] * 2)
                )
                average = state.get("average", torch.zeros_like(parameter))
                state["previous"], state["average"] = average, 0.9 * average + parameter.grad  # the first is not copied
                state["odd"], state["even"] = (
                    state.get("even", torch.zeros(2, 4096)),
                    state.get("odd", torch.ones(8192)),
                )
                parameter.sub_(state["previous"], alpha=group["lr"] * float(state["odd"].sum()))
                if "before" in state:
                    parameter.sub_(state["before"], alpha=group["lr"])
                state["before"] = parameter.grad
                if state["sometimes"] is not None:
                    parameter.sub_(state["sometimes"][: len(parameter)], alpha=group["lr"])
                parameter.sub_(state["last"].mean(0), alpha=group["lr"] / float(state["half"].sum()))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(*WIDTHS), nn.Tanh(), nn.Linear(*reversed(WIDTHS)), nn.Tanh()]
    return nn.Sequential(*layers)


def train(model: nn.Module, optimizer: Optimizer, steps: range = range(NUM_STEPS)) -> list[Tensor]:
    losses = []
    for step in steps:
        batch = torch.randn(5, WIDTHS[0], generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def kept(model: nn.Module) -> int:
    """Return the bytes of all optimizer state with a home."""
    records = (record_of(parameter) for parameter in model.parameters())
    return sum(slot.nbytes for record in records if record is not None for slot in record.copies.states.values())


@pytest.fixture
def optimize(tmp_path: Path) -> Iterator[Callable[..., nn.Module]]:
    """Return ``zinf_compile.optimize`` under small budgets; close the models afterwards."""
    models = []

    def call(model: nn.Module, **options: Any) -> nn.Module:
        zinf_compile.optimize(model, **{**BUDGETS, "nvme": tmp_path, **options})
        models.append(model)
        return model

    yield call
    for model in models:
        zinf_compile.close(model)


@pytest.mark.parametrize("make", [lambda params: SOAP(params, every=2), Remembering], ids=["soap", "remembering"])
def test_state_of_other_shapes_is_at_home_and_planned(
    make: Callable[..., Optimizer], optimize: Callable[..., nn.Module]
) -> None:
    plain, model = make_model(), optimize(make_model())
    optimizers = [make(each.parameters()) for each in (plain, model)]
    losses = [train(each, optimizer) for each, optimizer in zip((plain, model), optimizers, strict=True)]
    assert_same("losses", *losses)
    assert_same_training(plain, optimizers[0], model, optimizers[1])
    for parameter, state in optimizers[1].state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() >= 4096:
                assert isinstance(value, HomeTensor), (tuple(parameter.shape), key)
    report = zinf_compile.report(model)
    assert "its optimizer keeps" in report.replanned[-1]
    assert report.replanned[-1].endswith("planned again")
    placements = report.plans[0].plan.placements
    states = [each.state for item in placements for each in item.copies if each.state is not None]
    assert any(state.granularity is Granularity.MATRIX for state in states)
    assert not report.plans[0].plan.step.ahead, "updates of whole tensors do not begin ahead of their step"
    for tier in report.tiers:
        assert tier.capacity is None or tier.measured_peak <= tier.capacity, tier


def test_soap_takes_what_its_plan_says(optimize: Callable[..., nn.Module]) -> None:
    model = optimize(make_model())
    train(model, SOAP(model.parameters()))
    (plan,) = (each.plan for each in zinf_compile.report(model).plans)
    assert kept(model) == sum(item.optimizer_state_nbytes for item in plan.placements)
    (nvme,) = (each for each in zinf_compile.report(model).tiers if each.tier is Tier.NVME)
    assert nvme.measured_peak <= nvme.predicted_peak


@pytest.mark.parametrize("into", ["out of core", "in memory"])
def test_state_of_other_shapes_is_saved_and_loaded(
    into: str, optimize: Callable[..., nn.Module], tmp_path: Path
) -> None:
    plain, model = make_model(), optimize(make_model())
    whole = train(plain, SOAP(plain.parameters(), every=2))
    optimizer = SOAP(model.parameters(), every=2)
    first = train(model, optimizer, range(2))
    zinf_compile.save(tmp_path / "saved", model, optimizer)
    other = make_model()
    if into == "out of core":
        optimize(other, host_memory="8MiB")
    restored = SOAP(other.parameters(), every=2)
    zinf_compile.load(tmp_path / "saved", other, restored)
    assert_same("state", optimizer.state_dict(), restored.state_dict())
    assert_same("losses", whole, first + train(other, restored, range(2, NUM_STEPS)))
    assert_same("model", plain.state_dict(), other.state_dict())


def test_a_state_dict_of_plain_pytorch_is_loaded(optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    plain_optimizer = SOAP(plain.parameters(), every=2)
    train(plain, plain_optimizer, range(2))
    model = optimize(copy.deepcopy(plain))
    optimizer = SOAP(model.parameters(), every=2)
    optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    for each, own in ((plain, plain_optimizer), (model, optimizer)):
        train(each, own, range(2, NUM_STEPS))
    assert_same_training(plain, plain_optimizer, model, optimizer)


def test_state_of_another_optimizer_is_loaded(optimize: Callable[..., nn.Module]) -> None:
    plain, model = make_model(), optimize(make_model())
    for each in (plain, model):
        first, second = SOAP(each.parameters(), every=2), SOAP(each.parameters(), every=2)
        train(each, first, range(2))
        train(each, second, range(2, 3))
        second.load_state_dict(first.state_dict())  # shows the same tensors
        train(each, second, range(3, NUM_STEPS))
    assert_same("model", plain.state_dict(), model.state_dict())


def test_what_an_optimizer_that_is_gone_kept_is_freed(optimize: Callable[..., nn.Module]) -> None:
    plain, model = make_model(), optimize(make_model(), speculate=False)  # no shadows of updates ahead
    for each in (plain, model):
        train(each, soap := SOAP(each.parameters()), range(2))
        gone = weakref.ref(soap)
        del soap
        deadline = time.monotonic() + 10  # an I/O thread may hold a job of its last step a moment longer
        while gone() is not None and time.monotonic() < deadline:
            gc.collect()
        assert gone() is None
        train(each, torch.optim.AdamW(each.parameters()), range(2, NUM_STEPS))
    assert_same("model", plain.state_dict(), model.state_dict())
    zinf_compile.synchronize(model)
    records = [record for parameter in model.parameters() if (record := record_of(parameter)) is not None]
    kept = [slot for record in records for states in record.copies.states_of_others for slot in states.values()]
    assert all(slot.per_element for slot in kept), "matrices fit no other optimizer"
    held = sum(store_of(records[0]).held.nbytes_on(tier) for tier in Tier)
    of_gradients = [
        slot for record in records for slot in record.gradient.held
    ]  # a late update may hold the one before
    slots = {slot for record in records for slot in record.slots} | {*kept, *of_gradients}
    assert held == sum(slot.nbytes for slot in slots)


def test_other_entries_of_an_element_wise_optimizer_are_left_alone(optimize: Callable[..., nn.Module]) -> None:
    plain, model = make_model(), optimize(make_model())
    for each in (plain, model):
        adamw = torch.optim.AdamW(each.parameters())
        train(each, adamw, range(2))
        mine = torch.arange(5000.0)
        for state in adamw.state.values():
            state["mine"] = mine
        train(each, adamw, range(2, NUM_STEPS))
        assert all(torch.equal(state["mine"], torch.arange(5000.0)) for state in adamw.state.values())
    assert_same("model", plain.state_dict(), model.state_dict())


@pytest.mark.of_a_cpu(reason="its budgets are those with which a plan keeps the state of some weights on nvme")
def test_one_tensor_is_updated_while_the_next_one_is_read(optimize: Callable[..., nn.Module]) -> None:
    """Staging takes what homes can spare of host memory, so that it holds two of the largest with their state."""
    plain, model = make_model(), optimize(make_model())
    store, usual = store_of(next(record_of(each) for each in model.parameters())), 2 * 2**20
    assert store.staging.capacity == usual
    for each in (plain, model):
        train(each, SOAP(each.parameters(), every=2))
    assert_same("model", plain.state_dict(), model.state_dict())
    zinf_compile.synchronize(model)
    (plan,) = (each.plan for each in zinf_compile.report(model).plans)
    largest = max(fact.nbytes_updated_whole for fact in store.facts.values())
    assert usual < 2 * largest <= store.staging.capacity == plan.step.staging_nbytes
    assert any(item.has_whole_state and item.optimizer_state is Tier.NVME for item in plan.placements)
    assert store.staging.peak_nbytes > largest + largest // 2
    for tier in zinf_compile.report(model).tiers:
        assert tier.capacity is None or tier.measured_peak <= tier.capacity, tier


@pytest.mark.of_a_cpu(reason="its budgets are those with which staging holds an update, and not the state beside it")
def test_what_staging_cannot_hold_at_once_stays_in_host_memory(optimize: Callable[..., nn.Module]) -> None:
    plain, model = make_model(), optimize(make_model(), host_memory="1MiB")
    for each in (plain, model):
        train(each, SOAP(each.parameters(), every=2))
    assert_same("model", plain.state_dict(), model.state_dict())
    zinf_compile.synchronize(model)
    records = [record for parameter in model.parameters() if (record := record_of(parameter)) is not None]
    odd = [slot for record in records for slot in record.copies.states.values() if not slot.per_element]
    assert Tier.HOST in {slot.tier for slot in odd}
    (sentence,) = zinf_compile.report(model).replanned
    assert "whose updates staging cannot hold" in sentence


@pytest.mark.of_a_cpu(reason="its budgets are those with which a plan keeps the state of some weights on the host")
def test_unplanned_state_leaves_planned_state_its_room(optimize: Callable[..., nn.Module]) -> None:
    plain, model = make_model(), optimize(make_model(), device_memory="4MiB", host_memory="3MiB")
    for each in (plain, model):
        train(each, SOAP(each.parameters()), range(1))
    assert_same("model", plain.state_dict(), model.state_dict())
    zinf_compile.synchronize(model)
    (plan,) = (each.plan for each in zinf_compile.report(model).plans)
    planned = {item.parameter for item in plan.placements if item.optimizer_state is Tier.HOST}
    assert sum(name.endswith("weight") for name in planned) > 1
    records = [record for parameter in model.parameters() if (record := record_of(parameter)) is not None]
    assert any(not slot.per_element for record in records for slot in record.copies.states.values())
    assert store_of(records[0]).held.host_room_nbytes >= 0


@pytest.mark.needs_more_on_streams(host_memory=1.3)
def test_a_third_moment_goes_where_the_others_are(optimize: Callable[..., nn.Module]) -> None:
    """More than was planned, of an optimizer whose updates are cut: staging need not hold all of a parameter."""
    plain, model = make_model(), optimize(make_model(), device_memory="2MiB", host_memory="512KiB")
    optimizers = [torch.optim.AdamW(each.parameters(), amsgrad=True) for each in (plain, model)]
    for steps in (range(1), range(1, NUM_STEPS)):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            train(each, optimizer, steps)
        records = [record for parameter in model.parameters() if (record := record_of(parameter)) is not None]
        large = [record for record in records if record.copies.states["exp_avg"].tier is Tier.NVME]
        assert large
        assert {slot.tier for record in large for slot in record.copies.states.values()} == {Tier.NVME}
    assert_same_training(plain, optimizers[0], model, optimizers[1])


@pytest.mark.needs_more_on_streams(host_memory=1.1)
def test_without_room_training_goes_on_and_says_so(
    optimize: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = make_model(), optimize(make_model(), nvme=None, host_memory="7MiB")
    with caplog.at_level(logging.WARNING, logger="zinf_compile"):
        results = [train(each, SOAP(each.parameters())) for each in (plain, model)]
    assert_same("losses", *results)
    report = zinf_compile.report(model)
    (sentence,) = report.replanned
    assert "more than planned, for which there is no room; its plan stays: " in sentence
    assert "there is no nvme folder" in sentence
    assert [record.message for record in caplog.records if "more than planned" in record.message] == [sentence]
    (host,) = (each for each in report.tiers if each.tier is Tier.HOST)
    assert host.measured_peak > host.predicted_peak
    assert "host: exceeded by" in str(report)


def test_a_second_optimizer_keeps_its_own(optimize: Callable[..., nn.Module]) -> None:
    plain, model = make_model(), optimize(make_model())
    for each in (plain, model):
        soap, adamw = SOAP(each.parameters(), every=1), torch.optim.AdamW(each.parameters())
        for step in range(NUM_STEPS):
            train(each, adamw if step % 2 else soap, range(step, step + 1))
    assert_same("model", plain.state_dict(), model.state_dict())
