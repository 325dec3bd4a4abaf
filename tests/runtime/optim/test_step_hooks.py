"""Hooks on a step when Dynamo compiles its caller: they run as they are, and the bits stay the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zinf_compile.runtime.store.store import Store

WIDTH = 160  # its weights are on nvme, its biases in memory
NUM_STEPS = 3
BATCH = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def train_step(model: nn.Module, optimizer: Optimizer, step: Callable[[], object]) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(BATCH).pow(2).sum()
    loss.backward()
    step()
    return loss.detach()


@pytest.mark.parametrize("compiled", ["step", "training step"])
@pytest.mark.parametrize("capture", [False, True])
def test_a_compiled_step_gives_the_bits_of_an_eager_one(
    compiled: str, capture: bool, optimize: Callable[..., nn.Module], store_of: Callable[[nn.Module], Store]
) -> None:
    torch.compiler.reset()
    plain, model = make_model(), optimize(make_model(), tiny=True, capture=capture)
    plain_optimizer, optimizer = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model))
    run_step = torch.compile(optimizer.step, backend="eager") if compiled == "step" else optimizer.step
    train = torch.compile(train_step, backend="eager") if compiled == "training step" else train_step
    for _ in range(NUM_STEPS):
        assert torch.equal(train_step(plain, plain_optimizer, plain_optimizer.step), train(model, optimizer, run_step))
    train_step(plain, plain_optimizer, plain_optimizer.step)
    train_step(model, optimizer, optimizer.step)  # eager again: Dynamo left no option behind
    assert [record.update.count for record in store_of(model).records.values()] == [NUM_STEPS + 1] * 4
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, parameter)
        for key, value in plain_optimizer.state[expected].items():
            assert torch.equal(value, optimizer.state[parameter][key])
    (plain_group,), (group,) = plain_optimizer.param_groups, optimizer.param_groups
    assert {**plain_group, "params": None} == {**group, "params": None}
