"""What an optimizer writes beside parameters and their state advances once per step, as in plain PyTorch, or is refused."""

import copy
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.optimizer_twins import assert_same, assert_same_training
from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.store.store import Store

WIDTH = 160  # its weights are on nvme, in several chunks; its biases in memory


class ByRule(Optimizer):
    """Calls ``before_group`` for every group; it returns the divisor of the group's gradients."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    def before_group(self, group: dict[str, Any]) -> Any:
        raise NotImplementedError

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], divisor: Any) -> None:
        parameter.sub_(gradient * (group["lr"] / divisor))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            divisor = self.before_group(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group, divisor)
        return loss


class GroupTensor(ByRule):
    """Creates a tensor in the group in its first step, and changes it in place."""

    def before_group(self, group: dict[str, Any]) -> Any:
        group.setdefault("k", torch.tensor(0.0)).add_(1)
        return 1 - 0.5 ** group["k"]


class GroupNumberAndList(ByRule):
    def before_group(self, group: dict[str, Any]) -> Any:
        group["k"] = group.get("k", 0) + 1
        group.setdefault("seen", []).append(group["k"])
        return len(group["seen"]) + group["k"]


class OnlyWithGradients(ByRule):
    """Counts, in the group, the steps in which any parameter has a gradient."""

    def before_group(self, group: dict[str, Any]) -> Any:
        group["k"] = group.get("k", 0) + any(parameter.grad is not None for parameter in group["params"])
        return max(1, group["k"])


class Helper:
    def __init__(self) -> None:
        self.count = 0


class Attributes(ByRule):
    """Keeps a number, a tensor, an object, a method, and a state entry that belongs to no parameter."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.count, self.tensor, self.helper = 0, torch.zeros(()), Helper()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.count += 1
        self.tensor.add_(1)
        self.helper.count += 1
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index]
        self.divide = self.divisor
        return super().step(closure)

    def divisor(self) -> Any:
        return self.count + self.tensor + self.helper.count + self.state["steps"]  # type: ignore[index]

    def before_group(self, group: dict[str, Any]) -> Any:
        return self.divide()


class WithoutCheck(ByRule):
    """Assumes that every parameter has a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            torch._foreach_add_(group["params"], [p.grad for p in group["params"]], alpha=-group["lr"] / group["k"])


class ByPlace(ByRule):
    """Updates parameters by the index of their group, their place in it and the size of the group."""

    def before_group(self, group: dict[str, Any]) -> Any:
        return 1

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], divisor: Any) -> None:
        index = next(index for index, each in enumerate(self.param_groups) if each is group)
        place = next(place for place, each in enumerate(group["params"]) if each is parameter)
        super().update(parameter, gradient, group, 1 + 10 * index + place + len(group["params"]))


class ByName(ByRule):
    """Normalises the updates of parameters with some names, which therefore are not cut into chunks."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for parameter, name in zip(group["params"], group["param_names"], strict=True):
                if parameter.grad is not None:
                    norm = parameter.grad.norm() if name.startswith("2.") else 1.0
                    parameter.sub_(parameter.grad, alpha=group["lr"] / float(norm))


class Drawing(ByRule):
    """Draws for every parameter from torch's generator, from Python's, and from a generator of its own."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(3)

    def before_group(self, group: dict[str, Any]) -> Any:
        return 1

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], divisor: Any) -> None:
        own = torch.randn(gradient.shape, generator=self.generator)
        parameter.sub_(gradient + own + torch.randn_like(gradient), alpha=group["lr"] * random.random())


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 8))


def make_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": named[:2]}, {"params": named[2:], "lr": 3e-3}]


def train(model: nn.Module, optimizer: Optimizer, num_steps: int = 4) -> None:
    random.seed(0)
    torch.manual_seed(1)
    for scale in torch.logspace(-2, 1, num_steps):
        model(scale * torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


ADVANCING = [GroupTensor, GroupNumberAndList, OnlyWithGradients, Attributes, WithoutCheck, ByPlace]
OPTIONS = [{}, {"overlap_step": False}, {"step_in_backward": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=["overlap", "wait", "in backward"])
@pytest.mark.parametrize("cls", ADVANCING)
def test_one_step_advances_once(cls: type[Any], options: dict[str, Any], optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True, **options)
    optimizers = [cls(make_groups(each)) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer)
    assert_same_training(plain, optimizers[0], model, optimizers[1])
    plain_own, own = ({name: vars(each).get(name) for name in ("count", "tensor")} for each in optimizers)
    assert_same("attributes", plain_own, own)
    if cls is Attributes:
        assert optimizers[1].helper.count == 4
        assert optimizers[1].divide.__self__ is optimizers[1]


@pytest.mark.parametrize("cls", [ByName, Drawing])
def test_whole_tensors_are_told_apart_and_draw_in_order(cls: type[Any], optimize: Callable[..., nn.Module]) -> None:
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True, host_memory="2MiB")
    optimizers = [cls(make_groups(each)) for each in (plain, model)]
    states = []
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer)
        states.append((torch.get_rng_state(), random.getstate()))
    assert_same_training(plain, optimizers[0], model, optimizers[1])
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]


class InPlace(ByRule):
    """Changes the user's tensor in place, in steps with a gradient."""

    def before_group(self, group: dict[str, Any]) -> Any:
        group["k"].add_(any(parameter.grad is not None for parameter in group["params"]))
        return 1 + group["k"]


def test_the_users_own_tensor_changes_in_place(optimize: Callable[..., nn.Module]) -> None:
    model = optimize(make_model(), tiny=True)
    optimizer = InPlace(model.parameters())
    optimizer.param_groups[0]["k"] = kept = torch.tensor(0)
    train(model, optimizer)
    assert optimizer.param_groups[0]["k"] is kept
    assert kept == 4


@pytest.mark.parametrize("name", ["Adafactor", "Drawing"])
def test_states_come_in_the_order_of_parameters(name: str, optimize: Callable[..., nn.Module]) -> None:
    """State that is created in a later step comes after the others, in whatever order updates run."""
    orders = []
    for model in (make_model(), optimize(make_model(), host_memory="64MiB", capture=True)):
        optimizer: Any = torch.optim.Adafactor(model.parameters())
        if name == "Drawing":
            optimizer = Keeping(model.parameters())
        held = model[2].weight
        held.requires_grad_(False)
        train(model, optimizer, 1)
        held.requires_grad_(True)
        train(model, optimizer, 1)
        orders.append(list(optimizer.state_dict()["state"]))
    assert orders[0] == orders[1] == [0, 1, 3, 4, 2]


class Keeping(Drawing):
    """Keeps a number for every parameter."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], divisor: Any) -> None:
        super().update(parameter, gradient, group, divisor)
        self.state[parameter]["norm"] = float(gradient.norm())


class Steady(ByRule):
    def before_group(self, group: dict[str, Any]) -> Any:
        return 1


class ChangingGradients(Steady):
    """Adds weight decay to the gradient in place, and then assigns another one."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], divisor: Any) -> None:
        gradient.add_(parameter, alpha=0.1)
        parameter.grad = gradient * 0.5
        parameter.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("options", [{}, {"overlap_step": False}], ids=["overlap", "wait"])
def test_gradients_are_what_the_step_leaves(
    options: dict[str, Any], optimize: Callable[..., nn.Module], store_of: Callable[[nn.Module], Store]
) -> None:
    """The next backward adds to the gradients that the step leaves. Clipping is deferred until the step reads them."""
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True, **options)
    assert any(not record.gradient.slot.in_memory for record in store_of(model).records.values())
    left = []
    for each in (plain, model):
        optimizer = ChangingGradients(each.parameters())
        norms = []
        for _ in range(3):
            each(torch.ones(2, WIDTH)).pow(2).sum().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0))
            optimizer.step()
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in each.parameters()]))
        left.append(
            [norms, [p.grad.clone() for p in each.parameters()], [p.detach().clone() for p in each.parameters()]]
        )
    assert_same("gradients", *left)


class TakingGradients(Steady):
    """Sets gradients to None after use."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], divisor: Any) -> None:
        super().update(parameter, gradient, group, divisor)
        parameter.grad = None


class CountingParameters(Steady):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], divisor: Any) -> None:
        self.num_updated = vars(self).get("num_updated", 0) + 1
        super().update(parameter, gradient, group, divisor)


class Registry(Steady):
    """Keeps its state by parameter ids."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.counts = {id(parameter): 0 for group in self.param_groups for parameter in group["params"]}

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], divisor: Any) -> None:
        self.counts[id(parameter)] = self.counts.get(id(parameter), 0) + 1
        super().update(parameter, gradient, group, self.counts[id(parameter)])


class OwnList(Steady):
    """Updates parameters from its own list."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.parameters = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for parameter in self.parameters:
            parameter.sub_(parameter.grad)


class Wrapper(Steady):
    """Wraps another optimizer, as Lookahead does."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.inner.step()


class DecayingAll(Steady):
    """Decays even parameters without a gradient."""

    def before_group(self, group: dict[str, Any]) -> Any:
        for parameter in group["params"]:
            parameter.mul_(0.9)
        return 1


class DrawingOnce(Steady):
    """Draws one number for all parameters of a group."""

    def before_group(self, group: dict[str, Any]) -> Any:
        return 1 + torch.rand(())

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], divisor: Any) -> None:
        parameter.sub_(gradient / divisor)


class NamedState(Steady):
    """Keeps its state by parameter names."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for parameter, name in zip(group["params"], group["param_names"], strict=True):
                if parameter.grad is not None:
                    state = self.state[name]  # type: ignore[index]
                    state["count"] = state.get("count", 0) + 1


class Evaluating(Steady):
    """Evaluates its closure by itself, twice."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        closure()
        return super().step(closure)


class EvaluatingAgain(Steady):
    """Evaluates its closure twice, if it has one."""

    def before_group(self, group: dict[str, Any]) -> Any:
        group.setdefault("step", 0)
        return 1

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], divisor: Any) -> None:
        parameter.sub_(gradient)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            closure()
        return super().step(closure)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            CountingParameters,
            "what it keeps in its attributes as 'num_updated' depends on the gradients of all parameters",
        ),
        (Registry, "its step looks at its attribute 'counts', which holds ids of parameters"),
        (OwnList, "its step looks at its attribute 'parameters', which holds parameters"),
        (Wrapper, "its step looks at its attribute 'inner', which holds another optimizer"),
        (DecayingAll, "it changes parameters that have no gradient"),
        (DrawingOnce, "it draws random numbers for all of them together"),
        (NamedState, "what it keeps in its shared state as '0.bias' depends on"),
        (TakingGradients, "it takes gradients away"),
        (Evaluating, "its step needs a closure"),
        (EvaluatingAgain, "with a closure: it calls it 2 times"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(
    cls: type[Any], message: str, optimize: Callable[..., nn.Module]
) -> None:
    model = optimize(make_model(), tiny=True, host_memory="2MiB")
    before = copy.deepcopy(dict(model.state_dict()))
    optimizer = cls(model.named_parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, WIDTH)).pow(2).sum()
        loss.backward()
        return loss.detach()

    with pytest.raises(UnsupportedError, match=f"{cls.__name__} is not supported by zinf_compile.*{message}"):
        optimizer.step(closure)
    assert_same("model", before, dict(model.state_dict()))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)


def test_arguments_that_shadows_are_not_told_are_refused(optimize: Callable[..., nn.Module]) -> None:
    class Scaled(GroupTensor):
        def step(self, closure: Callable[[], Any] | None = None, scale: float | None = None) -> Any:
            return super().step(closure)

    model = optimize(make_model(), tiny=True)
    optimizer = Scaled(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    with pytest.raises(UnsupportedError, match=r"Scaled.step\(\) cannot take 'scale' where parameters live in a store"):
        optimizer.step(scale=2.0)
    optimizer.step(scale=None)
    assert optimizer.param_groups[0]["k"] == 1


def test_what_updates_write_differently_is_refused_when_it_begins(optimize: Callable[..., nn.Module]) -> None:
    """The trial before the first step covers three steps; this optimizer couples parameters in its fourth."""

    class Late(ByRule):
        def before_group(self, group: dict[str, Any]) -> Any:
            group["k"] = group.get("k", 0) + 1
            if group["k"] >= 4:
                group["norm"] = [float(p.grad.norm()) for p in group["params"] if p.grad is not None]
            return 1

    model = optimize(make_model(), tiny=True, host_memory="2MiB")
    with pytest.raises(UnsupportedError, match=r"Late .*: what it keeps in its parameter group as 'norm' differs"):
        train(model, Late(model.parameters()))


def test_options_that_were_loaded_count_in_the_next_backward(optimize: Callable[..., nn.Module]) -> None:
    """``load_state_dict`` replaces the groups that the first step has seen."""
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True, step_in_backward=True)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer, 2)
        loaded = copy.deepcopy(optimizer.state_dict())
        loaded["param_groups"][0]["lr"] = 0.1
        optimizer.load_state_dict(loaded)
        train(each, optimizer, 2)
    assert_same_training(plain, optimizers[0], model, optimizers[1])


@pytest.mark.parametrize("how", ["by parameter", "by module"])
def test_options_of_single_parameters_of_bitsandbytes_stay_theirs(
    how: str, optimize: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True, host_memory="2MiB")
    optimizers = []
    for each in (plain, model):
        monkeypatch.setattr(bitsandbytes.optim.GlobalOptimManager, "_instance", None)
        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        if how == "by parameter":
            manager.override_config(each[2].weight, "optim_bits", 32)
        else:
            manager.register_module_override(each[2], "weight", {"optim_bits": 32})
        optimizers.append(bitsandbytes.optim.AdamW8bit(make_groups(each)))
        train(each, optimizers[-1])
    assert_same_training(plain, optimizers[0], model, optimizers[1])
    dtypes = [optimizers[1].state[layer.weight]["state1"].dtype for layer in (model[0], model[2])]
    assert dtypes == [torch.uint8, torch.float32]
