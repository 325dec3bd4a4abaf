"""Ctrl-C on one of the ranks that work in rounds: it ends, and the others learn why at once."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.distributed.test_rounds_errors import ending_at_once, make, train
from tests.support.rank_pool import Raised, RankPool
from zinf_compile.driver.rounds import Rounds
from zinf_compile.runtime.ranks.messages import Messages

ROOT = Path(__file__).parents[2]
_AT_ONCE = 20.0  # seconds: less than ranks of the tests wait for each other


def _interrupt_at(stack: ExitStack, of: type, name: str, is_there: Callable[..., bool]) -> None:
    """Let this process get a SIGINT once, where a method is called with arguments that ``is_there`` accepts."""
    method, waiting = getattr(of, name), [True]

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if waiting and is_there(*args):
            waiting.clear()
            signal.raise_signal(signal.SIGINT)
        return method(self, *args, **kwargs)

    stack.enter_context(mock.patch.object(of, name, interrupted))


def always(*_: Any) -> bool:
    """Accept any arguments."""
    return True


def of_forward(_: Any, number: int, *__: Any) -> bool:
    """Accept messages of a forward."""
    return number >= 0


def of_backward(_: Any, number: int, *__: Any) -> bool:
    """Accept messages of a backward."""
    return number < 0


PLACES: dict[str, tuple[type, str, Callable[..., bool]]] = {
    "capture": (Rounds, "bind", always),
    "inputs": (Messages, "share", always),
    "receive in a forward": (Messages, "receive", of_forward),
    "receive in a backward": (Messages, "receive", of_backward),
    "send in a forward": (Messages, "send", of_forward),
    "send in a backward": (Messages, "send", of_backward),
}


def train_interrupted(where: str) -> None:
    """Train; rank 1 is interrupted in its second step, or where it captures."""
    model, optimizer = make()
    if where != "capture":
        train(model, optimizer)
    with ending_at_once(model), ExitStack() as stack:
        if dist.get_rank() == 1:
            _interrupt_at(stack, *PLACES[where])
        for step in range(1000):
            train(model, optimizer, step)


@pytest.mark.parametrize(
    "where",
    [
        *("inputs", "receive in a forward", "receive in a backward"),
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ("capture", "send in a forward", "send in a backward")
        ),
    ],
)
def test_an_interrupt_in_our_code_ends_all_at_once(where: str, two: RankPool) -> None:
    first, second = two.outcomes(train_interrupted, where, seconds=60.0)
    assert isinstance(first, Raised)
    assert isinstance(second, Raised)
    assert (first.kind, second.kind) == ("RankError", "KeyboardInterrupt")
    assert re.search("rank 1: .* broke off: KeyboardInterrupt", first.message)


def train_in_process(rank: int, meeting: str) -> None:
    """Train in a process of its own; rank 1 is interrupted in the user's code, in a hook of its second step."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model, optimizer = make()
    train(model, optimizer)
    if rank == 1:
        optimizer.register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    for step in range(1000):
        train(model, optimizer, step)


def test_a_process_that_ends_by_an_interrupt_in_its_step_ends_all(tmp_path: Path) -> None:
    call = f"from {__name__} import train_in_process; train_in_process(%d, {str(tmp_path / 'meeting')!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ZINF_QUIET": "1"}
    with ExitStack() as stack:
        ranks = [
            subprocess.Popen([sys.executable, "-c", call % rank], env=environment, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        for each in ranks:
            stack.callback(each.kill)
        _, interrupted = ranks[1].communicate(timeout=120.0)
        start = time.monotonic()
        _, told = ranks[0].communicate(timeout=120.0)
        assert time.monotonic() - start < _AT_ONCE
    assert interrupted.rstrip().endswith("KeyboardInterrupt")
    assert [each.returncode for each in ranks] == [1, -signal.SIGINT]
    (error,) = [line for line in told.splitlines() if "RankError: " in line]
    assert "since another rank is gone" in error
