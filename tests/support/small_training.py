"""A small model, and a few steps of it under any options, for tests that observe the runtime."""

from typing import Any

import torch
from torch import Tensor, nn

import zinf_compile

STEPS = 3


class Net(nn.Module):
    """MLPs with residual connections, and a loss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def train(width: int, depth: int, *, num_micro_steps: int = 1, **options: Any) -> list[Tensor]:
    """Return the losses and the parameters at the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zinf_compile.optimize(Net(width, depth), **options)
    try:
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(STEPS):
            for _ in range(num_micro_steps):
                loss = model(torch.randn(16, width, dtype=options.get("compute_dtype")))
                loss.backward()
                losses.append(loss.detach().clone())
            adamw.step()
            adamw.zero_grad()
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]
    finally:
        zinf_compile.close(model)
