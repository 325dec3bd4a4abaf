"""Buffers of updates on a device."""

import torch

from tests.support.fake_device import FakeDevice
from zinf_compile.ir.copies import MASTER
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.transfer.device_updates import DeviceUpdates


def test_buffers_that_are_too_small_are_freed_after_their_copies() -> None:
    """Else the allocator gives away memory that is still being copied to the host."""
    device = FakeDevice(most_seconds=0.02)
    updates = DeviceUpdates(device, Meter())
    homes = [torch.zeros(1024 * 2**number) for number in range(8)]  # each needs larger buffers than those before it
    for home in homes:
        updates.make_room(home.nbytes)
        updates.run(
            "weight",
            {MASTER: home},
            updates.form_of({MASTER: home}, [MASTER], {MASTER: home}),
            {MASTER: home},
            lambda there: there[MASTER].add_(1.0),
            here={},
            before=device.compute.record(),
        )
    updates.close()  # frees all others
    device.synchronize()  # raises what the streams found
    device.close()
    assert all(torch.equal(home, torch.ones_like(home)) for home in homes)
