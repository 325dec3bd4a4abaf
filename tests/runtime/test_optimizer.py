"""The streamed step is the user's own optimizer: bit for bit what it does to a model in memory."""

import copy
import gc
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zinf_compile
from zinf_compile.errors import CapacityError, UnsupportedError
from zinf_compile.runtime.slots import record_of
from zinf_compile.runtime.store import Store
from zinf_compile.terms import Tier

NUM_STEPS = 4
# Three weights of 49 601 elements and one that divides evenly: with the tiny budgets, chunks are 4096 to 32768 elements.
WIDTHS = (257, 193, 257, 193, 256)

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]


def make_model(*, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width, next_width in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(width, next_width, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def make_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, WIDTHS[0], generator=generator) for _ in range(NUM_STEPS)]


def train_step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    loss = model(batch).pow(2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def assert_same(name: str, left: object, right: object) -> None:
    """Fail unless two values of a state dict are equal, tensors bit for bit."""
    if isinstance(left, Tensor):
        assert isinstance(right, Tensor), name
        assert left.dtype == right.dtype, name
        assert torch.equal(left, right), f"{name}: {(left != right).sum()} of {left.numel()} elements differ"
    elif isinstance(left, dict):
        assert isinstance(right, dict)
        assert left.keys() == right.keys(), name
        for key in left:
            assert_same(f"{name}.{key}", left[key], right[key])
    elif isinstance(left, list):
        assert isinstance(right, list)
        assert len(left) == len(right), name
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(f"{name}.{index}", one, other)
    else:
        assert left == right, name


def assert_same_training(plain: nn.Module, plain_optimizer: Optimizer, model: nn.Module, optimizer: Optimizer) -> None:
    assert_same("model", plain.state_dict(), model.state_dict())
    assert_same("optimizer", plain_optimizer.state_dict(), optimizer.state_dict())


class SignDescent(Optimizer):
    """A third-party optimizer: updates by the sign of a running mean, scaled by the norm of the whole tensor."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"] = 0
                    state["mean"] = torch.zeros_like(parameter)
                state["count"] += 1
                state["mean"].lerp_(parameter.grad, 0.1)
                parameter.add_(state["mean"].sign(), alpha=-group["lr"] * float(state["mean"].norm()))


class MyAdam(torch.optim.Adam):
    """A subclass that happens to be element-wise, which has to be found out."""


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD nesterov": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True),
    "Adam": lambda params: torch.optim.Adam(params),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True, weight_decay=0.1),
    "Adam maximize": lambda params: torch.optim.Adam(params, maximize=True),
    "AdamW": lambda params: torch.optim.AdamW(params),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "Adamax": lambda params: torch.optim.Adamax(params),
    "NAdam": lambda params: torch.optim.NAdam(params),
    "RAdam": lambda params: torch.optim.RAdam(params),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr_decay=0.1),
    "Adagrad fused": lambda params: torch.optim.Adagrad(params, fused=True),
    "Adadelta": lambda params: torch.optim.Adadelta(params),
    "ASGD": lambda params: torch.optim.ASGD(params, t0=2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.9),
    "Rprop": lambda params: torch.optim.Rprop(params),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
    "third party": SignDescent,
    "subclass": MyAdam,
}
NEED_WHOLE_TENSORS = ("Adafactor", "third party")


@pytest.mark.parametrize("where", ["nvme", "host"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_is_bitwise_the_plain_one(
    name: str, where: str, optimize: Callable[..., nn.Module], store_of: Callable[[nn.Module], Store]
) -> None:
    whole = name in NEED_WHOLE_TENSORS
    budgets = {"host_memory": "2MiB"} if whole else {}
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=where == "nvme", **(budgets if where == "nvme" else {}))
    plain_optimizer, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    for batch in make_batches():
        loss = train_step(plain, plain_optimizer, batch)
        assert torch.equal(train_step(model, optimizer, batch), loss)
    assert_same_training(plain, plain_optimizer, model, optimizer)
    store = store_of(model)
    masters = [record.master.tier for record in store.records.values()]
    if where == "nvme" and not whole:
        assert masters.count(Tier.NVME) >= 2
    else:
        assert where == "nvme" or Tier.NVME not in masters
    store.check_integrity()


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "NAdam"])
def test_threads_cut_whole_tensors_elsewhere_and_nothing_changes(name: str, optimize: Callable[..., nn.Module]) -> None:
    torch.set_num_threads(2)
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True)
    plain_optimizer, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    for batch in make_batches()[:2]:
        train_step(plain, plain_optimizer, batch)
        train_step(model, optimizer, batch)
    assert_same_training(plain, plain_optimizer, model, optimizer)


def test_muon_takes_whole_matrices(optimize: Callable[..., nn.Module]) -> None:
    plain = make_model(bias=False)
    model = optimize(copy.deepcopy(plain), tiny=True, host_memory="2MiB")
    plain_optimizer, optimizer = torch.optim.Muon(plain.parameters()), torch.optim.Muon(model.parameters())
    for batch in make_batches():
        train_step(plain, plain_optimizer, batch)
        train_step(model, optimizer, batch)
    assert_same_training(plain, plain_optimizer, model, optimizer)


def test_every_optimizer_of_torch_is_tested_or_refused() -> None:
    classes = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    assert classes == {name.split()[0] for name in OPTIMIZERS} - {"third", "subclass"} | {"Muon", "LBFGS", "SparseAdam"}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            torch.optim.LBFGS,
            "LBFGS cannot step .*: it needs all parameters at once and keeps a history of them; use AdamW",
        ),
        (torch.optim.SparseAdam, "SparseAdam cannot step .*: it needs sparse gradients, which a store does not hold"),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    make: MakeOptimizer, reason: str, optimize: Callable[..., nn.Module]
) -> None:
    model = optimize(make_model())
    optimizer = make(model.parameters())
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(UnsupportedError, match=reason):
        optimizer.step(lambda: model(make_batches()[0]).sum())  # type: ignore[arg-type,return-value]
    assert_same("model", before, dict(model.state_dict()))
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), make_batches()[0])


def test_whole_tensors_that_do_not_fit_staging_are_refused_before_anything_changes(
    optimize: Callable[..., nn.Module],
) -> None:
    model = optimize(make_model(), tiny=True)
    optimizer = SignDescent(model.parameters())
    model(make_batches()[0]).sum().backward()
    before = copy.deepcopy(dict(model.state_dict()))
    message = (
        r"updating '\d\.weight' needs .* of staging at once, because SignDescent needs whole tensors; .* raise host"
    )
    with pytest.raises(CapacityError, match=message):
        optimizer.step()
    assert_same("model", before, dict(model.state_dict()))
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), make_batches()[0])


def test_the_log_says_once_why_an_optimizer_gets_whole_tensors(
    optimize: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="zinf_compile")
    model = optimize(make_model())
    optimizers = [SignDescent(model.parameters()), MyAdam(model.parameters())]
    for batch in make_batches():
        for optimizer in optimizers:
            train_step(model, optimizer, batch)
    (record,) = [record for record in caplog.records if "whole tensors" in record.getMessage()]
    assert record.getMessage() == "SignDescent gets whole tensors: it calls aten.linalg_vector_norm.default"


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
        optimizer.step()  # with gradients of zero the moments still decay; with none nothing happens
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
    train_step(plain, plain_optimizer, first)  # and it has state already
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
        assert set(record.states) == {"exp_avg", "exp_avg_sq"}
        for key, slot in record.states.items():
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
