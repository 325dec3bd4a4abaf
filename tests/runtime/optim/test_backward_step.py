"""The step inside backward with tight staging: gradients too large to copy are updated beside copies of others."""

import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import zinf_compile
from tests.support.fake_device import on_fake_device
from tests.support.small_training import Net, train
from zinf_compile.ir.errors import CapacityError
from zinf_compile.runtime.optim.backward_step import BackwardStep, JobFeed
from zinf_compile.runtime.optim.step_jobs import Job
from zinf_compile.runtime.transfer.link import Link
from zinf_compile.runtime.transfer.tensor_io import TensorIO

KIB = 2**10
BUDGETS = {"device_memory": 900 * KIB, "host_memory": 3000 * KIB, "tiles": False}
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


def test_a_gradient_that_cannot_leave_takes_no_room_for_ever(tmp_path: Path) -> None:
    """Later gradients would wait for its room without an end."""
    torch._dynamo.reset()
    with on_fake_device():
        model = zinf_compile.optimize(Net(96, 2), nvme=tmp_path, device="cuda", step_in_backward=True, **BUDGETS)
        adamw = torch.optim.AdamW(model.parameters())
        model(torch.randn(16, 96)).backward()
        adamw.step()
        adamw.zero_grad()
        refused = mock.Mock(side_effect=torch.OutOfMemoryError("no room for a copy"))
        with mock.patch.object(TensorIO, "copy_out", refused), pytest.raises(CapacityError, match="no room for a copy"):
            model(torch.randn(16, 96)).backward()
        step = next(model.parameters())._zinf_record.store.early_step  # type: ignore[attr-defined]
        assert isinstance(step, BackwardStep)
        assert step._queued_nbytes == 0
        zinf_compile.close(model)


@pytest.mark.parametrize("budgets", [BUDGETS, {**BUDGETS, "device_memory": 1600 * KIB, "host_memory": 700 * KIB}])
def test_gradients_of_eager_code_are_the_hosts_and_do_not_cross_the_link(
    budgets: dict[str, object], tmp_path: Path
) -> None:
    """Autograd accumulates on the device of the parameter, here the host: nothing leaves the device."""
    width = 96 if budgets is BUDGETS else 192
    expected = train(width=width, depth=2, nvme=tmp_path, capture=False, **budgets)
    taken = []
    original = Link.take

    def take(link: Link, source: torch.Tensor, *args: object, **kwargs: object) -> object:
        taken.append(source)
        return original(link, source, *args, **kwargs)  # type: ignore[arg-type]

    with on_fake_device(), mock.patch.object(Link, "take", take), mock.patch.object(Link, "let_go") as let_go:
        given = {"capture": False, "step_in_backward": True, "device": "cuda", "update_on": "host"}
        ours = train(width=width, depth=2, nvme=tmp_path, **budgets, **given)
    assert not taken
    assert not let_go.called
    for mine, other in zip(ours, expected, strict=True):
        assert torch.equal(mine, other)
