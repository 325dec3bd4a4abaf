"""Gradients of gradients: as in plain PyTorch where the forward runs eagerly, refused in captured graphs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zinf_compile.errors import UnsupportedError

STEPS = 3
WIDTH = 24


class SmoothNet(nn.Module):
    """Every parameter is used once: the sum of more uses has another order in a backward of a backward."""

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
    """The gradient's own norm is part of the loss."""
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
