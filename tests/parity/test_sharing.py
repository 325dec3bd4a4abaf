"""Two models that share budgets, as in a GAN: ``optimize(second, share=first)``."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zinf_compile
from zinf_compile.ir.errors import CapacityError, ConfigError
from zinf_compile.runtime.params.records import record_of

STEPS = 3
WIDTH = 32
pytestmark = pytest.mark.needs_more_on_streams(device_memory=5)

BUDGETS = {"device_memory": 26 * 2**10, "host_memory": 512 * 2**10}


class Maker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Critic(Maker):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


class Both(nn.Module):
    """One captured function that calls two optimized models."""

    def __init__(self, maker: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.maker = maker
        self.critic = critic

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.maker(x))


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return Maker(), Critic()


def play(maker: nn.Module, critic: nn.Module) -> dict[str, Tensor]:
    """Train both in turns, the maker through the critic; return losses, parameters and gradients."""
    torch.manual_seed(1)
    of_maker = torch.optim.AdamW(maker.parameters(), lr=1e-2)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    numbers = {}
    for step in range(STEPS):
        noise, real = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
        told_apart = F.softplus(critic(maker(noise).detach())).mean() + F.softplus(-critic(real)).mean()
        of_critic.zero_grad()
        told_apart.backward()
        of_critic.step()
        fooled = F.softplus(-critic(maker(noise))).mean()
        of_maker.zero_grad()
        fooled.backward()
        of_maker.step()
        numbers[f"{step} told apart"], numbers[f"{step} fooled"] = told_apart.detach(), fooled.detach()
        for model in (maker, critic):
            for name, parameter in model.named_parameters():
                numbers[f"{step} {type(model).__name__} {name}"] = parameter.detach().clone()
                numbers[f"{step} {type(model).__name__} {name} gradient"] = parameter.grad.clone()
    torch._dynamo.reset()
    return numbers


def test_two_models_under_one_budget(parity, way, tmp_path):
    options = {"capture": way["captured"], **{name: option for name, option in way.items() if name != "captured"}}
    expected = play(*models())
    if "compute" in way:  # the same segments with everything on the device
        plain, expected = expected, play(*(parity.resident(model, **options) for model in models()))
        torch.testing.assert_close(expected["0 told apart"], plain["0 told apart"])
    maker, critic = models()
    parity.optimize(maker, **BUDGETS, nvme=tmp_path, **options)
    assert zinf_compile.optimize(critic, share=maker) is critic
    ours = play(maker, critic)
    for name, value in expected.items():
        parity.assert_equal(ours[name], value, name)
    store = record_of(maker.get_parameter("layers.0.weight")).store
    assert record_of(critic.get_parameter("layers.0.weight")).store is store
    assert list(store.records)[:1] == ["layers.0.weight"]
    assert list(store.records)[-1:] == ["Critic.layers.3.bias"]
    report = zinf_compile.report(critic)
    assert report == zinf_compile.report(maker)
    if way["captured"]:
        assert not report.fallbacks
        assert all(len(plan.placements) == 16 for plan in report.plans)
        for tier in report.tiers:
            assert tier.capacity is None or tier.predicted_peak <= tier.capacity


def test_both_in_one_captured_function(parity, tmp_path):
    plain, ours = Both(*models()), Both(*models())
    parity.optimize(ours.maker, **BUDGETS, nvme=tmp_path)
    zinf_compile.optimize(ours.critic, share=ours.maker)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
    for model, backend in ((plain, "aot_eager"), (ours, "zinf")):
        torch.compile(model, backend=backend, dynamic=False)(x).sum().backward()
        torch._dynamo.reset()
    for name, parameter in plain.named_parameters():
        parity.assert_equal(ours.get_parameter(name).grad, parameter.grad, name)


def test_what_is_refused_changes_nothing(parity, tmp_path):
    maker, critic = models()
    optimize = partial(zinf_compile.optimize, critic)
    with pytest.raises(ConfigError, match="Maker has no parameter in a store"):
        optimize(share=maker)
    parity.optimize(maker, **BUDGETS, nvme=tmp_path, nvme_memory="160KiB", capture=False)
    with pytest.raises(ConfigError, match="leave out share, or host_memory, nvme"):
        optimize(share=maker, host_memory="1GiB", nvme=tmp_path)
    with pytest.raises(CapacityError, match=r"nvme_memory is 160\.0 KiB; largest: "):
        optimize(share=maker)
    assert type(critic) is Critic
    maker(torch.randn(4, WIDTH)).sum().backward()
    assert len(record_of(maker.get_parameter("layers.0.weight")).store.records) == 8
