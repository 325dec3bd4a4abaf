"""Small models with their batches, in the form in which the parity tests take them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT, GPTConfig

STEPS = 5


def token_batches(vocab_size: int, *, batch: int = 2, seq: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(vocab_size, (batch, seq + 1), generator=generator) for _ in range(STEPS)]
    return [{"tokens": each[:, :-1], "targets": each[:, 1:]} for each in tokens]


def vector_batches(width: int, num_classes: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(4, width, generator=generator), "y": torch.randint(num_classes, (4,), generator=generator)}
        for _ in range(STEPS)
    ]


def gpt():
    return GPT(GPTConfig(vocab_size=64, layers=2, hidden=32, heads=2, seq=8)), token_batches(64)


def gpt_tied():
    model = GPT(GPTConfig(vocab_size=64, layers=2, hidden=32, heads=2, seq=8), tied=True)
    assert model.embed.weight is model.head.weight
    return model, token_batches(64)


class MLP(nn.Module):
    """Wide enough that the optimizer step cuts a parameter into chunks, with a short last chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 210)
        self.middle = nn.Linear(210, 50)
        self.down = nn.Linear(50, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(torch.tanh(self.middle(F.gelu(self.up(x))))), y)


def mlp():
    torch.manual_seed(0)
    return MLP(), vector_batches(24, 5)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 12, 3, stride=2, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
        )
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(x).mean(dim=(2, 3))), y)


def conv_net():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batches = [
        {"x": torch.randn(4, 3, 8, 8, generator=generator), "y": torch.randint(5, (4,), generator=generator)}
        for _ in range(STEPS)
    ]
    return ConvNet(), batches


class UsedTwice(nn.Module):
    """One module that is called twice in the forward, and once more under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 64)
        self.shared = nn.Linear(64, 64)
        self.again = nn.Sequential(nn.LayerNorm(64), self.shared)
        self.last = nn.Linear(64, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.first(x))))
        return F.cross_entropy(self.last(self.again(torch.tanh(self.shared(x)))), y)


def used_twice():
    torch.manual_seed(0)
    return UsedTwice(), vector_batches(24, 5)


class EarlyViews(nn.Module):
    """Views of a weight are created early and read much later: nothing would read a gather for the views alone."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(64, 64, bias=False)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = self.early.weight.t().chunk(2, dim=1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = torch.cat((x @ left, torch.tanh(x @ right)), dim=1)
        return F.cross_entropy(self.layers[0](x), y)


def early_views():
    torch.manual_seed(0)
    return EarlyViews(), vector_batches(64, 5)


class Recurrent(nn.Module):
    """``nn.LSTM`` keeps its own list of weights, and is not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(16, 32)
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.outward = nn.Linear(32, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        states, _ = self.lstm(torch.tanh(self.inward(x)))
        return F.cross_entropy(self.outward(states[:, -1]), y)


def recurrent():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batches = [
        {"x": torch.randn(2, 5, 16, generator=generator), "y": torch.randint(3, (2,), generator=generator)}
        for _ in range(3)
    ]
    return Recurrent(), batches
