"""The step inside backward with tight staging: gradients too large to copy are updated beside copies of others."""

import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from tests.support.fake_device import on_fake_device
from tests.support.small_training import train
from zinf_compile.runtime.optim.backward_step import BackwardStep, JobFeed
from zinf_compile.runtime.optim.step_jobs import Job

KIB = 2**10
TIGHT = {"width": 192, "depth": 2, "device_memory": 1600 * KIB, "host_memory": 700 * KIB, "tiles": False}


def test_backward_thread_does_not_deadlock_with_update_thread_over_staging(tmp_path: Path) -> None:
    """Delay the update thread: the backward thread must not wait for staging that only the update thread gives back."""
    iterate, wait = JobFeed.__iter__, BackwardStep._wait_for_others
    num_waited = 0

    def late(feed: JobFeed) -> Iterator[Job | None]:
        for job in iterate(feed):
            if job is not None:
                time.sleep(0.05)
            yield job

    def count(step: BackwardStep, *args: object) -> None:
        nonlocal num_waited
        num_waited += step._queued_nbytes > 0
        wait(step, *args)

    expected = train(**TIGHT, nvme=tmp_path)
    with (
        on_fake_device(),
        mock.patch.object(JobFeed, "__iter__", late),
        mock.patch.object(BackwardStep, "_wait_for_others", count),
    ):
        ours = train(**TIGHT, nvme=tmp_path, step_in_backward=True, device="cuda", update_on="host")
    assert num_waited > 0
    for mine, other in zip(ours, expected, strict=True):
        assert torch.equal(mine, other)
