"""Forked children: what a child may read of its parent's store. It never writes to the store and never waits for it.

A fork copies no threads, and a lock held by another thread at that time stays locked in the child for ever. So a child
does not wait for anything the store had in flight; it refuses, naming the parameter. A child cannot change the parent's
file: its mappings become private, so that its writes stay in the child, as in plain PyTorch. A child must see the
values of the fork. So it first copies the pages into its own memory, and then checks that the parent has not used any
stored tensor since::

    parent    on every use, increment a number on a shared page
    child     touch the pages, then compare the number with that of the fork: equal: the copy is valid; different: refuse
"""

import itertools
import mmap
import os
import threading
import weakref
from concurrent.futures import Future
from concurrent.futures._base import FINISHED
from typing import Protocol

import torch
from torch import Tensor


class UseCount:
    """Lets children see whether stored tensors were used since they were forked. Thread-safe."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)  # shared with children
        self._shown = memoryview(self._page).cast("Q")
        self._numbers = itertools.count(1)
        self._last = 0
        self._lock = threading.Lock()  # guards the two numbers that follow
        self._num_writes = 0

    def note(self) -> None:
        """Show children that stored tensors may change from now on. Must not be called by a child."""
        number = next(self._numbers)
        self._shown[0] = number  # first: a child that is forked in between sees a different number
        self._last = number

    def begin_write(self) -> None:
        """Count a write to the file that is about to start."""
        with self._lock:
            self._num_writes += 1
        self.note()

    def end_write(self) -> None:
        """Count a write as ended."""
        with self._lock:
            self._num_writes -= 1

    @property
    def was_at_rest(self) -> bool:
        """Return, in a child, whether nothing was being written when it was forked. Takes no lock."""
        return self._num_writes == 0

    @property
    def is_unchanged(self) -> bool:
        """Return, in a child, whether its parent has used no stored tensor since the fork."""
        return self._shown[0] == self._last


def has_ended(future: "Future[None]") -> bool:
    """Return, in a child, whether a future was done at the fork; ``Future.done`` would wait for a lock."""
    return future._state == FINISHED


def touch_pages(tensor: Tensor) -> None:
    """Rewrite every page of a tensor with its own content, so that privately mapped pages are copied to this process."""
    nbytes = tensor.numel() * tensor.dtype.itemsize
    if nbytes == 0:
        return
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    first = tensor.storage_offset() * tensor.dtype.itemsize
    flat[first : first + nbytes : mmap.PAGESIZE].add_(0)
    flat[first + nbytes - 1].add_(0)


class Forkable(Protocol):
    """An object with threads, locks or a file that a child must not use."""

    def leave_to_parent(self) -> None:
        """In a child: never wait for this object any more, and let go of what the parent owns. Takes no lock."""


_alive: "weakref.WeakSet[Forkable]" = weakref.WeakSet()


def leave_when_forked(forkable: Forkable) -> None:
    """Call ``leave_to_parent`` in every child that is forked while the object lives."""
    _alive.add(forkable)


def _leave_all() -> None:
    for forkable in list(_alive):
        forkable.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all)
