"""Modules of torch that keep lists of their weights: Dynamo does not capture them, and they gather eagerly."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 3
WIDTH = 32


class Recurrent(nn.Module):
    """``nn.LSTM`` keeps its own list of weights, and is not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(16, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.outward = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        states, _ = self.lstm(torch.tanh(self.inward(x)))
        return F.cross_entropy(self.outward(states[:, -1]), y)


def recurrent():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batches = [
        {"x": torch.randn(2, 5, 16, generator=generator), "y": torch.randint(3, (2,), generator=generator)}
        for _ in range(STEPS)
    ]
    return Recurrent(), batches


def test_lstm(parity, captured):
    parity.check(recurrent, "nvme", captured=captured)
