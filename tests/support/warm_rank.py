"""Imported by the process that ranks are forked from: what a first capture imports and registers is there in every rank.

Torch imports much of Dynamo and AOTAutograd at a first capture. A capture on a CPU starts no threads, so that forking is
safe, but for one that watches progress bars, which is disabled here.
"""

import threading

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from tqdm import tqdm


def _capture_something() -> None:
    tqdm.monitor_interval = 0
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph), partition_fn=min_cut_rematerialization_partition
    )
    torch.compile(torch.nn.Linear(2, 2), backend=backend)(torch.ones(1, 2)).sum().backward()
    torch._dynamo.reset()
    assert threading.active_count() == 1, threading.enumerate()


_capture_something()
