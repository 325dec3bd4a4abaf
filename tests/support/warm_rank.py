"""Imported by the process that ranks are forked from: what a first step imports and registers is there in every rank.

Torch imports much of Dynamo and AOTAutograd at a first capture. So do we: a first step takes four times as long as a second
one. It leaves no threads, so that forking is safe, but for one that watches progress bars, which is disabled here.
"""

import os
import tempfile

import torch
from tqdm import tqdm

import zinf_compile
from tests.distributed.workloads import batch_of, build_gpt
from tests.support.fixed_rates import fixed_rates
from tests.support.sharing import sharing


def _take_a_step() -> None:
    tqdm.monitor_interval = 0
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        fixed_rates(),
        sharing(True),
    ):
        model = zinf_compile.optimize(
            build_gpt(), device_memory="2MiB", host_memory="2MiB", nvme=folder, compute="aten", reserve_memory=0
        )
        optimizer = torch.optim.AdamW(model.parameters())
        model(**batch_of(0, 0)).backward()
        optimizer.step()
        zinf_compile.close(model)
    torch._dynamo.reset()
    assert len(os.listdir("/proc/self/task")) == 1


_take_a_step()
