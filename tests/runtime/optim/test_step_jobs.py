"""The jobs of a step when gradients and state are in unusual places: the numbers are those of plain PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import zinf_compile
from tests.support.fake_device import FakeDevice, on_fake_device
from zinf_compile.runtime.optim.shadow import freeze

WIDTH = 160  # its weights are on nvme, its biases in memory


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def backward(model: nn.Module, scale: float = 1.0) -> None:
    model(torch.linspace(-scale, scale, 2 * WIDTH).view(2, WIDTH)).pow(2).sum().backward()


def weights(model: nn.Module) -> tuple[Any, Any]:
    parameters = dict(model.named_parameters())
    return parameters["0.weight"], parameters["2.weight"]


def share_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first, second = weights(model)
    clip_grad_norm_(model.parameters(), 0.1)
    first.grad = second.grad


def swap_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first, second = weights(model)
    first.grad, second.grad = second.grad, first.grad
    clip_grad_norm_(model.parameters(), 0.1)


def swap_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first, second = weights(model)
    optimizer.state[first], optimizer.state[second] = optimizer.state[second], optimizer.state[first]


def forget_momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = None


def drop_momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter].pop("momentum_buffer", None)
        optimizer.state[parameter]["of the user"] = 1


def turn_momentum_off(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()
    optimizer.param_groups[0]["momentum"] = 0


@pytest.mark.parametrize(
    "before_step", [share_gradient, swap_gradients, swap_states, forget_momentum, drop_momentum, turn_momentum_off]
)
def test_same_numbers(before_step: Callable[..., None], optimize: Callable[..., nn.Module]) -> None:
    plain, model = make_model(), optimize(make_model(), tiny=True)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9, dampening=0.5)
        for step in range(3):
            backward(each, 1.0 + step)
            if step > 0 or before_step is drop_momentum:
                before_step(each, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, which keeps its one state under a name of choice."""

    def __init__(self, parameters: Any, name: str) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.name = name

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                moment = state.setdefault(self.name, torch.zeros_like(parameter))
                moment.mul_(0.9).add_(parameter.grad)
                parameter.add_(moment, alpha=-0.01)


def momentum_steps(name: str, folder: Path, **options: Any) -> list[Tensor]:
    """Return the parameters and momenta after three steps, with everything but the biases on nvme."""
    model = make_model()
    zinf_compile.optimize(
        model, capture=False, device_memory="8MiB", nvme=folder, compute_dtype=torch.bfloat16, **options
    )
    optimizer = Momentum(model.parameters(), name)
    for step in range(3):
        inputs = torch.linspace(-1.0 - step, 1.0 + step, 2 * WIDTH).view(2, WIDTH).bfloat16()
        model(inputs).float().pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    numbers = [value.clone() for value in model.parameters()]
    numbers += [optimizer.state[parameter][name].clone() for parameter in model.parameters()]
    zinf_compile.close(model)
    return numbers


@pytest.mark.parametrize("name", ["gradient", "master copy", "compute copy"])
def test_state_may_have_the_name_of_another_copy(name: str, tmp_path: Path) -> None:
    on_host, on_device = {"host_memory": "512KiB"}, {"host_memory": "2MiB", "device": "cuda", "update_on": "device"}
    expected = momentum_steps("momentum", tmp_path, **on_host)
    for one, other in zip(expected, momentum_steps(name, tmp_path, **on_host), strict=True):
        assert torch.equal(one, other)
    with on_fake_device(FakeDevice(seed=0)):
        found = momentum_steps(name, tmp_path, **on_device)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_an_error_in_the_optimizers_own_step_changes_nothing(optimize: Callable[..., nn.Module]) -> None:
    """It is raised before our updates: groups, step counts and parameters stay, and training can go on."""

    class Moody(torch.optim.SGD):
        is_moody = True

        def step(self, closure: Any = None) -> Any:
            self.num_steps = getattr(self, "num_steps", 0) + 1
            for group in self.param_groups:
                group["seen"] = self.num_steps
            if self.is_moody:
                raise ValueError("not today")
            return super().step(closure)

    results = []
    for model in (make_model(), optimize(make_model(), tiny=True)):
        optimizer = Moody(model.parameters(), lr=0.1, momentum=0.9)
        backward(model)
        with pytest.raises(ValueError, match="not today"):
            optimizer.step()
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        assert not optimizer.state
        optimizer.zero_grad()
        optimizer.is_moody = False
        backward(model)
        optimizer.step()
        optimizer.step()
        assert optimizer.num_steps >= 2
        results.append([parameter.clone() for parameter in model.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, type("Mine", (torch.optim.AdamW,), {})])
def test_what_a_gradient_scaler_says_is_kept_as_it_was(cls: type[torch.optim.Optimizer]) -> None:
    """The scaler changes them in place after the step, which may still run, and a CPU's kernel cannot read a GPU's."""
    optimizer = cls([nn.Parameter(torch.ones(4))], fused=True)  # type: ignore[call-arg]
    scale, found = torch.tensor(4.0), torch.tensor(0.0)
    optimizer.grad_scale, optimizer.found_inf = scale, found  # type: ignore[attr-defined]
    frozen: Any = freeze(optimizer)
    scale.mul_(2)
    found.add_(1)
    assert (frozen.grad_scale.item(), frozen.found_inf.item()) == (4.0, 0.0)
    assert frozen.grad_scale.device.type == frozen.found_inf.device.type == "cpu"


class _Watched(Tensor):
    """A tensor that notes what is called on it."""

    calls: ClassVar[list[tuple[Any, Any, Any]]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append((func, args[1:], kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def test_what_a_gradient_scaler_says_is_waited_for() -> None:
    """A fused step copies it to its device without waiting, and a kernel of the CPU would read what is not there yet."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(4))], fused=True)
    optimizer.grad_scale = torch.tensor(4.0).as_subclass(_Watched)  # type: ignore[attr-defined]
    _Watched.calls.clear()
    freeze(optimizer)
    assert (Tensor.to, ("cpu",), {"copy": True}) in _Watched.calls


@pytest.mark.parametrize("update_on", ["host", "device"])
def test_capturable_on_a_device_with_its_own_memory(update_on: str) -> None:
    """Plain PyTorch accepts it there. Updates of homes on a CPU would refuse it."""

    def run(model: nn.Module, *, capturable: bool) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=capturable)
        for _ in range(3):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.param_groups[0]["capturable"] == capturable
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected = run(make_model(), capturable=False)
    with on_fake_device():
        model = zinf_compile.optimize(
            make_model(), device="cuda", compute="aten", device_memory="8MiB", host_memory="64MiB", update_on=update_on
        )
        found = run(model, capturable=True)
        zinf_compile.close(model)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
