"""Gradients of gradients: as in plain PyTorch where the forward runs eagerly, refused in captured graphs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zinf_compile
from zinf_compile.ir.errors import UnsupportedError

STEPS = 3
WIDTH = 24


class SmoothNet(nn.Module):
    """Every parameter is used once: double backward sums over several uses in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(F.one_hot(x, WIDTH).float()))).square().mean()


def smooth_net():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(WIDTH, (STEPS, 2, 7), generator=generator)
    return SmoothNet(), [{"x": each[:, :-1], "y": each[:, 1:]} for each in tokens]


def penalised(model, batch):
    """Add the squared norm of the gradient to the loss."""
    loss = model(**batch)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(grad.square().sum() for grad in grads)


def test_gradients_of_gradients(parity):
    plain = parity.reference(smooth_net, captured=False, loss=penalised)
    model, batches = parity.optimized(smooth_net, captured=False, loss=penalised)
    parity.assert_same(parity.train(model, batches, loss=penalised), plain)


def test_gradients_of_gradients_are_refused_in_captured_graphs(parity):
    model, batches = parity.optimized(smooth_net, captured=True)
    with pytest.raises(UnsupportedError, match="create_graph=True asks; say capture=False"):
        penalised(model, batches[0])
    model(**batches[0]).backward()


def test_second_gradients_by_an_input_are_refused_in_captured_graphs():
    """As a gradient penalty does. torch would raise only in the second backward, and not say what to do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    zinf_compile.optimize(model, device_memory="8MiB", host_memory="8MiB")
    x = torch.randn(4, WIDTH, requires_grad=True)
    output = model(x)
    with pytest.raises(UnsupportedError, match=r"create_graph=True asks; say capture=False in optimize\(\)"):
        torch.autograd.grad(output.sum(), x, create_graph=True)
    (by_input,) = torch.autograd.grad(model(x).sum(), x)
    assert by_input.shape == x.shape
    # The user's own graph before and after the model may still be differentiated twice.
    y = torch.randn(4, WIDTH, requires_grad=True)
    with torch.no_grad():
        weight = model(x)
    (slope,) = torch.autograd.grad((y.square().sum(1, keepdim=True) * weight).sum(), y, create_graph=True)
    slope.sum().backward()
    assert torch.equal(y.grad, 2 * weight.expand(-1, WIDTH))
    zinf_compile.close(model)
