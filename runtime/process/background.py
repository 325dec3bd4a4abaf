"""Background threads run torch ops single-threaded, without an OpenMP team each.

libgomp lets the threads of a team spin between ops only while all teams together have at most as many threads as there
are processors. With one more team, every op of compute has to wake its threads first: 0.1 ms per op on 2 cores, a third
of a step.
"""

import ctypes
import functools
from collections.abc import Callable

import torch


def run_alone() -> None:
    """Make torch's ops on the calling thread single-threaded from now on. Other threads are not affected."""
    torch.get_num_threads()  # a thread's first call sets its number to the process's, so it must come first
    set_num_threads = _omp_set_num_threads()
    if set_num_threads is not None:
        set_num_threads(1)


@functools.cache
def _omp_set_num_threads() -> Callable[[int], object] | None:
    """Return OpenMP's function for the calling thread alone (``torch.set_num_threads`` is for all); None without OpenMP."""
    try:
        function: Callable[[int], object] = ctypes.CDLL(None).omp_set_num_threads
    except AttributeError:
        return None
    return function
