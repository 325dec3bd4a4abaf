"""Fixtures for the tests of bad input: an optimizable model, and a check that a refused model is untouched."""

import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from tests.support.guard import guard as guard


@pytest.fixture
def model() -> nn.Sequential:
    """Return a model with two weights of 160 KB, too large to be always kept in memory."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 200))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 200)).pow(2).sum().backward()
    optimizer.step()


@pytest.fixture
def stays_plain() -> Callable[[nn.Module], AbstractContextManager[None]]:
    """Check that the block leaves a model as it was: same objects, same values, and it trains by itself.

    The block may leave no thread, descriptor or file.
    """

    @contextmanager
    def check(model: nn.Module) -> Iterator[None]:
        before = {
            name: (parameter, parameter.detach().clone() if not parameter.is_meta else None, parameter.data_ptr())
            for name, parameter in model.named_parameters()
        }
        classes = [type(module) for module in model.modules()]
        gc.collect()
        threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
        yield
        gc.collect()
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert [type(module) for module in model.modules()] == classes
        for name, parameter in model.named_parameters():
            kept, value, address = before[name]
            assert parameter is kept
            assert type(parameter) is Parameter
            assert parameter.data_ptr() == address
            assert value is None or torch.equal(parameter, value)
        if not any(parameter.is_meta for parameter in model.parameters()):
            plain = copy.deepcopy(model)
            train(plain)
            train(model)
            assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))

    return check
