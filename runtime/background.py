"""Background threads run their ops alone, without a team of OpenMP threads each.

libgomp lets the threads of a team spin from one op to the next only while all teams together have no more threads than there
are processors. With one team more, every op of compute wakes its threads first: 0.1 ms an op on 2 cores, a third of a step.
"""

import ctypes
import functools
from collections.abc import Callable

import torch


def run_alone() -> None:
    """Let torch's ops on the calling thread use no other thread, from now on. Other threads keep their number."""
    torch.get_num_threads()  # sets it by the process's at a thread's first call, which must not come later
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
