"""A small model with an optimizer that has state, plain or in a store."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zinf_compile

Made = tuple[nn.Sequential, Optimizer]


def train(model: nn.Module, optimizer: Optimizer, num_steps: int) -> list[float]:
    """Train on inputs drawn from torch's generator; return the losses."""
    losses = []
    for _ in range(num_steps):
        loss = (model(torch.randn(3, 65)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Made]]:
    """Return ``make(stored=..., width=...)``: a model after a step. Stores are checked and closed afterwards."""
    models: list[nn.Module] = []
    before = set(threading.enumerate())

    def call(*, stored: bool = True, width: int = 67, num_steps: int = 1) -> Made:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(65, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 65))
        if stored:
            zinf_compile.optimize(model, device_memory="8MiB", host_memory="512KiB", nvme=tmp_path, capture=False)
            models.append(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, num_steps)
        return model, optimizer

    yield call
    for model in models:
        store = next(model.parameters())._zinf_record.store
        store.check_integrity()
        zinf_compile.close(model)
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert not names, f"threads outlive their model: {names}"
