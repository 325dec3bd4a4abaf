"""Saves and restores the global random generators, so that trial runs do not change the user's random numbers."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def random_state() -> tuple[Any, ...]:
    """Return the states of the global random generators: torch's, Python's, and numpy's if it is imported."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return torch.get_rng_state(), random.getstate()
    name, keys, *others = numpy.random.get_state()
    return torch.get_rng_state(), random.getstate(), (name, keys.tolist(), *others)


def set_random_state(state: tuple[Any, ...]) -> None:
    """Restore a state that ``random_state`` returned."""
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if len(state) > 2:
        sys.modules["numpy"].random.set_state(state[2])


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Restore the random state at the end of this block."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
