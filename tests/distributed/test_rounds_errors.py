"""Ranks that work in rounds and fail: every other rank learns why at once, and nothing waits for ever."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zinf_compile
from tests.distributed.test_rounds import build_deep
from tests.distributed.workloads import KIB, batch_of, optimize
from tests.support.rank_pool import Died, Raised, RankPool

OPTIONS = {"compute": "aten", "reserve_memory": 0, "device_memory": 8192 * KIB, "host_memory": 8192 * KIB}
_AT_ONCE = 90.0  # seconds, most of them capture on a busy machine; ranks of the tests wait twice as long for each other


def make(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model on this rank, and its optimizer."""
    model = optimize(build_deep(), {**OPTIONS, "schedule": "rounds", **options})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> float:
    """Train a step; return the loss."""
    loss = model(**batch_of(step, dist.get_rank()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@contextmanager
def ending_at_once(model: torch.nn.Module) -> Iterator[None]:
    """A block that is broken off within ``_AT_ONCE``; then the model is closed."""
    start = time.monotonic()
    try:
        yield
    except BaseException:
        assert time.monotonic() - start < _AT_ONCE
        zinf_compile.close(model)
        raise


def do_otherwise(what: str) -> None:
    """Train a step, and then do something else on rank 1, and go on training."""
    model, optimizer = make()
    train(model, optimizer)
    batch, is_second = batch_of(1, dist.get_rank()), dist.get_rank() == 1
    with ending_at_once(model):
        if what == "a token that does not exist" and is_second:
            model(tokens=batch["tokens"] + 1000, targets=batch["targets"])
        elif what == "a shorter batch" and is_second:
            model(**{name: each[:, :5].contiguous() for name, each in batch.items()})
        elif what == "another dtype" and is_second:
            model(tokens=batch["tokens"].int(), targets=batch["targets"])
        elif what == "no gradients" and is_second:
            with torch.no_grad():
                model(**batch)
        elif what == "no backward" and is_second:
            model(**batch)
            model(**batch)
        elif what == "death" and is_second:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        for step in range(1000):
            train(model, optimizer, step)


_SHORTER = "rank 1: capture of Loss graph 1, .* of inputs \\(2, 5\\) int64"
_NARROWER = "rank 1: capture of Loss graph 1, .* of inputs \\(2, 8\\) int32"
_EVALUATES = "rank 0: a forward in rounds of Loss graph 0, training, .*; rank 1: capture of Loss graph 1"
_GOES_ON = "rank 0: a backward of Loss graph 0; rank 1: a forward in rounds"
_NO_TOKEN = "IndexError: index out of range"


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("a token that does not exist", _NO_TOKEN, _NO_TOKEN),
        ("a shorter batch", _SHORTER, _SHORTER),
        pytest.param("another dtype", _NARROWER, _NARROWER, marks=pytest.mark.long),
        pytest.param("no gradients", _EVALUATES, _EVALUATES, marks=pytest.mark.long),
        ("no backward", _GOES_ON, _GOES_ON),
        ("death", "rank 1: .*gone|another rank is gone", ""),
    ],
)
def test_a_rank_that_does_something_else(what: str, first: str, second: str, two: RankPool) -> None:
    of_first, of_second = two.outcomes(do_otherwise, what)
    assert isinstance(of_first, Raised)
    assert re.search(first, f"{of_first.kind}: {of_first.message}")
    if what == "death":
        assert isinstance(of_second, Died)
        return
    assert isinstance(of_second, Raised)
    assert re.search(second, f"{of_second.kind}: {of_second.message}")


def train_again() -> list[list[float]]:
    """Train a model, close it, and train others in the same processes; return all losses."""
    losses = []
    for options in ({}, {"schedule": None}, {}):
        model, optimizer = make(**options)
        losses.append([train(model, optimizer, step) for step in range(2)])
        zinf_compile.close(model)
        zinf_compile.close(model)
    end = time.monotonic() + 10.0
    while any(thread.name.startswith(("zinf-sends", "zinf-receives")) for thread in threading.enumerate()):
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.05)
    return losses


def test_a_closed_model_leaves_no_thread_and_others_follow(two: RankPool) -> None:
    for rounds, sharded, again in two.run(train_again):
        assert rounds == sharded == again
