"""Every optimizer with each of its options is bitwise equal to the plain one; chunks are far smaller than tensors."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zinf_compile
from examples.soap import SOAP
from zinf_compile.runtime.params.records import record_of

pytestmark = pytest.mark.needs_more_on_streams(host_memory=1.25)

NUM_STEPS = 3
INPUTS, OUTPUTS = 273, 241  # a weight of 65 793 elements, more than host memory holds: sixteen chunks and a remainder

Make = Callable[[Iterable[Any]], Optimizer]


class Lion(Optimizer):
    """A third-party optimizer that is element-wise."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                parameter.data.mul_(1 - group["lr"] * group["weight_decay"])
                direction = state["mean"].clone().mul_(0.9).add_(parameter.grad, alpha=0.1).sign_()
                parameter.add_(direction, alpha=-group["lr"])
                state["mean"].lerp_(parameter.grad, 0.01)


class NormedMomentum(Optimizer):
    """A third-party optimizer that needs whole tensors from its second step on."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                if state["step"] == 1:
                    state["mean"] = parameter.grad.clone()
                    continue
                state["mean"].lerp_(parameter.grad, 0.1)
                parameter.mul_(1 - group["weight_decay"])
                parameter.add_(state["mean"], alpha=-group["lr"] / (1 + float(state["mean"].norm())))


def with_states(cls: type[Any]) -> type[Any]:
    """Return a class whose ``__init__`` makes its states, not zeros, which its steps expect to be there."""

    class WithStates(cls):  # type: ignore[misc]
        def __init__(self, params: Iterable[Any]) -> None:
            super().__init__(params)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].update({"mean": torch.full_like(parameter, 1e-3), "total": 0, "step": 1})

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.state[parameter]["total"] += 1
            super().step()

    return WithStates


class Assigning(torch.optim.SGD):
    """An element-wise subclass that assigns new memory to its parameters."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


def options_of(cls: type[Optimizer]) -> Iterator[dict[str, Any]]:
    """Yield the sets of options with which an optimizer of torch runs on a CPU."""
    flavours: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}]
    if cls in (torch.optim.Adam, torch.optim.AdamW):
        flavours += [{"fused": True}, {"fused": True, "lr": torch.tensor(0.01)}, {"lr": torch.tensor(0.01)}]
        for flavour, amsgrad, maximize in itertools.product(flavours, (False, True), (False, True)):
            yield {**flavour, "amsgrad": amsgrad, "maximize": maximize}
        yield {"fused": True, "capturable": True}
        yield {"betas": (0.4, 0.9), "eps": 1e-3}
        return
    if cls in (torch.optim.SGD, torch.optim.Adagrad):
        flavours += [{"fused": True}]
    more: dict[type[Optimizer], list[dict[str, Any]]] = {
        torch.optim.SGD: [
            {"momentum": 0.9, "dampening": 0.1},
            {"momentum": 0.9, "nesterov": True},
            {"lr": torch.tensor(0.1)},
        ],
        torch.optim.NAdam: [{"decoupled_weight_decay": True}],
        torch.optim.RAdam: [{"decoupled_weight_decay": True}],
        torch.optim.RMSprop: [{"centered": True, "momentum": 0.9}],
        torch.optim.ASGD: [{"t0": 1}],
        torch.optim.Adagrad: [{"lr_decay": 0.1, "initial_accumulator_value": 0.5}],
        torch.optim.Rprop: [{"etas": (0.4, 1.3)}],
    }
    for flavour, own, maximize in itertools.product(flavours, [{}, *more.get(cls, [])], (False, True)):
        if not ("lr" in own and (flavour.get("foreach") or flavour.get("fused"))):
            yield {**flavour, **own, "maximize": maximize}


CASES = [
    pytest.param(cls, options, id=" ".join([cls.__name__, *(f"{key}={value}" for key, value in options.items())]))
    for cls in (
        *(
            torch.optim.SGD,
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.Adamax,
            torch.optim.NAdam,
            torch.optim.RAdam,
        ),
        *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
    )
    for options in options_of(cls)
]


@pytest.fixture
def optimize(tmp_path: Path) -> Iterator[Callable[..., nn.Module]]:
    """Return ``zinf_compile.optimize`` with all but tiny tensors on nvme; close the models afterwards."""
    num_threads, models = torch.get_num_threads(), []
    torch.set_num_threads(1)  # tensors are small, and OpenMP spins where cores are shared

    def call(model: nn.Module, **options: Any) -> nn.Module:
        budgets = {"device_memory": "8MiB", "host_memory": "512KiB", "nvme": tmp_path, "capture": False}
        zinf_compile.optimize(model, **{**budgets, **options})
        models.append(model)
        return model

    yield call
    for model in models:
        zinf_compile.close(model)
    torch.set_num_threads(num_threads)


def make_model(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS, bias=bias)


def make_groups(model: nn.Module, cls: type[Optimizer]) -> list[dict[str, Any]]:
    """Return a group per parameter, each with its own learning rate and, if the optimizer has one, weight decay."""
    decays = (0.1, 0.0) if cls is not torch.optim.Rprop else (None, None)
    return [
        {"params": [parameter], "lr": 0.02 / (1 + index)} | ({} if decay is None else {"weight_decay": decay})
        for index, (parameter, decay) in enumerate(zip(model.parameters(), decays, strict=False))
    ]


def train(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Train some steps with gradients of very different scales; return the values of the model and the optimizer's state."""
    generator = torch.Generator().manual_seed(1)
    for scale in (1.0, 1e-3, 10.0)[:NUM_STEPS]:
        x = scale * torch.randn(2, INPUTS, generator=generator)
        model(x).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy({"model": dict(model.state_dict()), "state": optimizer.state_dict()["state"]})


def assert_same(path: str, left: Any, right: Any) -> None:
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype, path
        assert torch.equal(left, right), f"{path}: {(left != right).sum()} of {left.numel()} elements differ"
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_same(f"{path}.{key}", left[key], right[key])
    else:
        assert left == right, path


def is_on_nvme(model: nn.Module) -> bool:
    record = record_of(model.get_parameter("weight"))
    assert record is not None
    return not record.copies.master.in_memory


@pytest.mark.parametrize(("cls", "options"), CASES)
def test_options(cls: type[Any], options: dict[str, Any], optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain))
    results = []
    for each in (plain, model):
        groups = make_groups(each, cls)
        if isinstance(options.get("lr"), Tensor):  # each group has its own tensor, as schedulers keep it
            groups = [{**group, "lr": torch.tensor(group["lr"])} for group in groups]
        results.append(train(each, cls(groups, **options)))
    assert is_on_nvme(model)
    assert_same("", *results)


@pytest.mark.parametrize("cls", [Lion, NormedMomentum, Assigning, torch.optim.Adafactor])
def test_other_classes(cls: type[Any], optimize: Callable[..., nn.Module]) -> None:
    whole = cls in (NormedMomentum, torch.optim.Adafactor)
    plain = make_model()
    model = optimize(copy.deepcopy(plain), **({"host_memory": "4MiB"} if whole else {}))
    assert_same("", *(train(each, cls(make_groups(each, cls))) for each in (plain, model)))


@pytest.mark.parametrize("cls", [Lion, NormedMomentum])
def test_states_that_init_has_made(cls: type[Any], optimize: Callable[..., nn.Module]) -> None:
    whole = cls is NormedMomentum
    plain = make_model()
    model = optimize(copy.deepcopy(plain), **({"host_memory": "4MiB"} if whole else {}))
    made = with_states(cls)
    assert_same("", *(train(each, made(make_groups(each, made))) for each in (plain, model)))


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "ns_steps": 3}, {"adjust_lr_fn": "match_rms_adamw"}])
def test_muon(options: dict[str, Any], optimize: Callable[..., nn.Module]) -> None:
    plain = make_model(bias=False)
    model = optimize(copy.deepcopy(plain), host_memory="2MiB")
    results = (train(each, torch.optim.Muon(make_groups(each, torch.optim.Muon), **options)) for each in (plain, model))
    assert_same("", *results)


def test_state_of_other_shapes(optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), host_memory="3MiB")
    assert_same("", *(train(each, SOAP(make_groups(each, SOAP), every=1)) for each in (plain, model)))


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Rprop])
@pytest.mark.of_a_cpu(reason="on a GPU capturable is not refused")
def test_capturable_is_refused_as_plain_pytorch_does(cls: type[Any], optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain))
    for each in (plain, model):
        with pytest.raises(AssertionError, match="capturable=True"):
            train(each, cls(each.parameters(), capturable=True))
    assert_same("", dict(plain.state_dict()), dict(model.state_dict()))


def test_options_that_change_on_the_way(optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain))
    results = []
    for each in (plain, model):
        optimizer = torch.optim.AdamW(make_groups(each, torch.optim.AdamW))
        train(each, optimizer)
        for change in (
            {"maximize": True},
            {"weight_decay": 0.0},
            {"betas": (0.3, 0.8)},
            {"fused": True},
            {"foreach": True},
        ):
            for group in optimizer.param_groups:
                group.update({"fused": None, **change})
            train(each, optimizer)
        results.append(train(each, optimizer))
    assert_same("", *results)
