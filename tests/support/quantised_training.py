"""What tests of quantised bases share: the bytes of a base, and training adapters on top of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zinf_compile.runtime.model.quantised import quantised_tensors

STEPS = 3


def bytes_of(model: nn.Module) -> list[Tensor]:
    """Return copies of the bytes of all tensors of the quantised parameters of a model."""
    tensors = (tensor for found in quantised_tensors(model).values() for tensor in found.values())
    return [tensor.detach().reshape(-1).view(torch.uint8).clone() for tensor in tensors]


def equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether two lists have the same tensors, bit for bit."""
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def train(model: nn.Module, called: Callable[..., Any] | None = None, *, width: int, lr: float) -> list[Tensor]:
    """Return the losses of some steps and the trained parameters; ``called`` is what computes, if not the model."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = (model if called is None else called)(torch.randn(8, width, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert not torch.equal(losses[0], losses[-1])
    return [*losses, *(parameter.detach().clone() for parameter in trained)]
