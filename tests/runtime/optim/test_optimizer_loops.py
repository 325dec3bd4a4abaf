"""Training loops around the streamed step: groups, closures, changed gradients, state dicts, several optimizers."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zinf_compile
from tests.support.optimizer_twins import (
    OPTIMIZERS,
    WIDTHS,
    assert_same,
    assert_same_training,
    make_batches,
    make_model,
    train_step,
)
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.store.store import Store


def make_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [parameter for parameter in model.parameters() if parameter.dim() > 1], "weight_decay": 0.1},
        {
            "params": [parameter for parameter in model.parameters() if parameter.dim() == 1],
            "lr": 0.5,
            "betas": (0, 0.5),
        },
    ]


def test_parameter_groups_and_a_schedule(optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True)
    optimizers = [torch.optim.AdamW(make_groups(each), lr=0.1, weight_decay=0) for each in (plain, model)]
    schedules = [
        torch.optim.lr_scheduler.SequentialLR(
            each,
            [
                torch.optim.lr_scheduler.LinearLR(each, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(each, 4),
            ],
            milestones=[2],
        )
        for each in optimizers
    ]
    for batch in make_batches():
        train_step(plain, optimizers[0], batch)
        train_step(model, optimizers[1], batch)
        for schedule in schedules:
            schedule.step()
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    assert_same_training(plain, optimizers[0], model, optimizers[1])


def test_closure(optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True)
    results = []
    for each in (plain, model):
        optimizer = torch.optim.Adam(each.parameters())
        losses = []
        for batch in make_batches():

            def closure(each: nn.Module = each, batch: Tensor = batch, optimizer: Optimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = each(batch).pow(2).sum()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        results.append((losses, each.state_dict(), optimizer.state_dict(), [p.grad for p in each.parameters()]))
    for plain_part, part in zip(*results, strict=True):
        assert_same("closure", plain_part, part)


def test_parameter_without_gradient_is_left_alone(optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (plain, model)]
    for step, batch in enumerate(make_batches()):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(batch).pow(2).sum().backward()
            each.get_parameter("2.weight").grad = None
            if step == 2:
                each.get_parameter("0.bias").grad = None
            optimizer.step()
            optimizer.zero_grad()
    assert_same_training(plain, optimizers[0], model, optimizers[1])
    assert not optimizers[1].state[model.get_parameter("2.weight")]


def test_gradients_changed_and_replaced_by_the_user(optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (plain, model)]
    for batch in make_batches():
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(batch).pow(2).sum().backward()
            weight, other = each.get_parameter("0.weight"), each.get_parameter("4.weight")
            assert weight.grad is not None
            assert other.grad is not None
            weight.grad = weight.grad.sign()
            other.grad = other.grad.t().contiguous().t()  # the same values, not contiguous
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_training(plain, optimizers[0], model, optimizers[1])


def test_gradients_accumulate_and_stay_after_the_step(optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (plain, model)]
    for batch in make_batches():
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(batch).pow(2).sum().backward()
            optimizer.step()  # and no zero_grad
    assert_same_training(plain, optimizers[0], model, optimizers[1])
    for name, parameter in plain.named_parameters():
        assert_same(f"{name}.grad", parameter.grad, model.get_parameter(name).grad)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool, optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True)
    optimizers = [torch.optim.Adam(each.parameters()) for each in (plain, model)]
    for batch in make_batches():
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            each(batch).pow(2).sum().backward()
            optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()  # gradients of zero still decay the moments; without gradients nothing happens
    assert_same_training(plain, optimizers[0], model, optimizers[1])


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "ASGD", "Adafactor"])
def test_state_dict_round_trip_in_the_middle_of_training(name: str, optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True, host_memory="2MiB")
    plain_optimizer, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    first, second, *rest = make_batches()
    for batch in (first, second):
        train_step(plain, plain_optimizer, batch)
        train_step(model, optimizer, batch)
    saved_model, saved = copy.deepcopy(dict(model.state_dict())), copy.deepcopy(optimizer.state_dict())
    for batch in rest:
        train_step(plain, plain_optimizer, batch)
        train_step(model, optimizer, batch)
    final = copy.deepcopy(dict(plain.state_dict()))
    # Back to where they were saved: once into the same optimizer, once into a new one, once into a model in memory.
    fresh = make_model()
    for each, target in (
        (model, optimizer),
        (model, OPTIMIZERS[name](model.parameters())),
        (fresh, OPTIMIZERS[name](fresh.parameters())),
    ):
        each.load_state_dict(saved_model)
        target.load_state_dict(saved)
        for batch in rest:
            train_step(each, target, batch)
        assert_same("model", final, dict(each.state_dict()))
        assert_same("optimizer", plain_optimizer.state_dict(), target.state_dict())


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "Adagrad", "Rprop"])
def test_optimizer_made_before_optimize(name: str, optimize: Callable[..., nn.Module]) -> None:
    plain, model = make_model(), make_model()
    plain_optimizer, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    first, *rest = make_batches()
    train_step(plain, plain_optimizer, first)  # it has state already
    train_step(model, optimizer, first)
    optimize(model, tiny=True)
    for batch in rest:
        train_step(plain, plain_optimizer, batch)
        train_step(model, optimizer, batch)
    assert_same_training(plain, plain_optimizer, model, optimizer)


def test_another_optimizer_takes_over(optimize: Callable[..., nn.Module], store_of: Callable[..., Store]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True)
    for name in ("AdamW", "SGD momentum", "Adam amsgrad", "SGD"):
        plain_optimizer, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
        for batch in make_batches()[:2]:
            train_step(plain, plain_optimizer, batch)
            train_step(model, optimizer, batch)
        assert_same_training(plain, plain_optimizer, model, optimizer)
    store_of(model).check_integrity()


def test_two_optimizers_take_turns(optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True)
    optimizers = [
        [OPTIMIZERS[name](each.parameters()) for name in ("AdamW", "SGD momentum", "AdamW fused")]
        for each in (plain, model)
    ]
    for _ in range(2):
        for batch, plain_optimizer, optimizer in zip(make_batches(), *optimizers, strict=False):
            train_step(plain, plain_optimizer, batch)
            train_step(model, optimizer, batch)
    for plain_optimizer, optimizer in zip(*optimizers, strict=True):
        assert_same_training(plain, plain_optimizer, model, optimizer)


def test_one_optimizer_over_a_store_and_plain_parameters(optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    stored, extra = copy.deepcopy(plain), nn.Linear(WIDTHS[0], WIDTHS[0])
    optimize(stored, tiny=True)
    plain_pair = nn.ModuleList([copy.deepcopy(extra), plain])
    pair = nn.ModuleList([extra, stored])
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (plain_pair, pair)]
    for batch in make_batches():
        for each, optimizer in zip((plain_pair, pair), optimizers, strict=True):
            each[1](each[0](batch)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_training(plain_pair, optimizers[0], pair, optimizers[1])


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW fused", "Adam amsgrad", "third party"])
def test_computing_in_bfloat16_updates_full_parameters(name: str, optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True, host_memory="3MiB", compute_dtype=torch.bfloat16)
    plain_optimizer, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    for batch in make_batches():
        rounded = {key: parameter.bfloat16() for key, parameter in plain.named_parameters()}
        loss = torch.func.functional_call(plain, rounded, (batch.bfloat16(),)).pow(2).sum()
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert torch.equal(train_step(model, optimizer, batch.bfloat16()), loss.detach())
    assert_same_training(plain, plain_optimizer, model, optimizer)


def test_state_lives_in_the_store(optimize: Callable[..., nn.Module]) -> None:
    model = optimize(make_model(), tiny=True)
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, make_batches()[0])
    for name, parameter in model.named_parameters():
        record = record_of(parameter)
        assert record is not None
        assert set(record.copies.states) == {"exp_avg", "exp_avg_sq"}
        for key, slot in record.copies.states.items():
            assert optimizer.state[parameter][key] is slot.shown, f"{name} {key}"
            assert slot.shown.data_ptr() == slot.tensor.data_ptr()
    report = zinf_compile.report(model)
    assert {moved.route for moved in report.moved} >= {"nvme -> host", "host -> nvme"}, report.moved


def test_a_state_dict_somebody_kept_outlives_its_optimizer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(200, 200))
    zinf_compile.optimize(model, device_memory="8MiB", host_memory="1MiB", nvme=tmp_path, capture=False)

    def train() -> dict[str, Any]:
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 200)).sum().backward()
        optimizer.step()
        return optimizer.state_dict()

    kept = train()
    moment = kept["state"][0]["exp_avg"].clone()
    gc.collect()
    assert train()["state"][0]["exp_avg"].data_ptr() != kept["state"][0]["exp_avg"].data_ptr()
    assert torch.equal(kept["state"][0]["exp_avg"], moment)
    zinf_compile.close(model)
