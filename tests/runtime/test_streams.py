"""A device with streams: whatever plans say, no two streams touch the same bytes unordered; and what would is found."""

import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from tests.fake_device import FakeDevice, FakeEvent, on_fake_device
from tests.races import Races, watching_races
from zinf_compile.runtime.device_updates import DeviceUpdates
from zinf_compile.runtime.in_flight import LinkFiller
from zinf_compile.runtime.link import Link

STEPS = 3
KIB, MIB = 2**10, 2**20
SMALL = {"width": 96, "depth": 2, "device_memory": 900 * KIB, "host_memory": 3 * MIB}


class Net(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def train(width: int, depth: int, *, num_micro_steps: int = 1, **options: Any) -> list[Tensor]:
    """Return the losses and the parameters at the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zinf_compile.optimize(Net(width, depth), tiles=False, **options)
    try:
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(STEPS):
            for _ in range(num_micro_steps):
                loss = model(torch.randn(16, width, dtype=options.get("compute_dtype")))
                loss.backward()
                losses.append(loss.detach().clone())
            adamw.step()
            adamw.zero_grad()
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]
    finally:
        zinf_compile.close(model)


def options_of(seed: int) -> dict[str, Any]:
    """Return a model's sizes and the options to train it with, from tight budgets to those that hold half of it."""
    draw = random.Random(seed)
    width, depth = draw.choice([64, 80, 96]), draw.randint(2, 3)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    weights = depth * 4 * width**2 * dtype.itemsize  # as compute reads them
    options: dict[str, Any] = {
        "width": width,
        "depth": depth,
        "device_memory": int(draw.uniform(0.3, 0.9) * weights + 640 * KIB),
        "host_memory": int(draw.uniform(1.2, 4) * MIB),
        "prefetch_memory": draw.choice([None, 0, 64 * KIB]),
        "compute_dtype": dtype,
        "recompute": draw.choice([None, True]),
        "update_on": draw.choice(["host", "device"]),
        "num_micro_steps": draw.choice([1, 1, 2]),
    }
    step = draw.choice(["overlapped", "synchronous", "in_backward"])
    if step == "synchronous":
        options["overlap_step"] = False
    if step == "in_backward":
        options["step_in_backward"] = True
        options["num_micro_steps"] = 1
    return options


@pytest.mark.parametrize("seed", range(8))
def test_bits_are_those_of_the_cpu_and_nothing_races(tmp_path: Path, seed: int) -> None:
    options = options_of(seed)
    on_cpu = {name: option for name, option in options.items() if name != "update_on"}
    plain = train(**on_cpu, nvme=tmp_path)
    with on_fake_device(FakeDevice(seed=seed)) as device, watching_races() as races:
        ours = train(**options, nvme=tmp_path, device="cuda")
        assert device.pinned == {}, "what was pinned is unpinned when the model is closed"
    assert races.found == []
    for ours_now, plain_now in zip(ours, plain, strict=True):
        assert torch.equal(ours_now, plain_now)
    touched = set(races.num_accesses)
    assert {"the to-device stream, writing", "the to-host stream, reading", "compute, at a new value"} <= touched
    assert any("update on the device" in what for what in touched) == (options["update_on"] == "device")


def races_with(tmp_path: Path, device: FakeDevice | None = None, **changed: Any) -> Races:
    """Return the races of a small model, whatever becomes of its numbers."""
    with on_fake_device(device), watching_races() as races:
        train(**{**SMALL, "nvme": tmp_path, "device": "cuda", **changed})
    return races


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    with mock.patch.object(owner, name, make(getattr(owner, name))):
        yield


def test_the_small_model_has_no_race(tmp_path: Path) -> None:
    assert races_with(tmp_path).found == []


def test_a_copy_that_does_not_wait_for_compute_is_found(tmp_path: Path) -> None:
    def at_once(original: Any) -> Any:
        first: list[FakeEvent] = []

        def mark(link: Link) -> Any:
            first.append(original(link)) if not first else None
            return first[0]  # the point that compute had been told up to at the first copy

        return mark

    with patched(Link, "mark", at_once):
        found = races_with(tmp_path).found
    assert any("the to-device stream, writing and compute" in race for race in found)


def test_compute_that_does_not_wait_for_a_copy_is_found(tmp_path: Path) -> None:
    def join(link: Link, event: FakeEvent) -> None:
        event.done.wait()  # as long as it takes, and no stream is told

    with mock.patch.object(Link, "join", join):
        found = races_with(tmp_path).found
    assert any("compute" in race and "the to-device stream, writing" in race for race in found)


def test_a_gradient_that_is_freed_too_early_is_found(tmp_path: Path) -> None:
    def at_once(link: Link, value: Tensor) -> None:
        """Hold nothing."""

    with mock.patch.object(Link, "let_go", at_once):
        found = [race for seed in range(3) for race in races_with(tmp_path, width=96 + 16 * seed, device_memory=2 * MIB).found]
    assert any("the to-host stream, reading" in race and "compute, at a new value" in race for race in found)


def test_a_gradient_that_leaves_before_it_is_computed_is_found(tmp_path: Path) -> None:
    def take(original: Any) -> Any:
        def call(link: Link, source: Tensor, destination: Tensor, *, behind: Any = None) -> Any:
            return original(link, source, destination, behind=behind or FakeDevice().compute.record())

        return call

    with patched(Link, "take", take):
        found = races_with(tmp_path, update_on="host").found
    assert any("the to-host stream, reading and compute" in race for race in found)


def test_an_update_that_does_not_wait_for_its_chunk_is_found(tmp_path: Path) -> None:
    device = FakeDevice()
    device.update.wait = lambda event: event.done.wait()  # as long as it takes, and the stream is not told
    found = races_with(tmp_path, device, update_on="device").found
    assert any("the update on the device" in race and "the to-device stream, writing" in race for race in found)


def test_staging_that_is_returned_before_it_has_left_is_found(tmp_path: Path) -> None:
    def send(original: Any) -> Any:
        def call(filler: LinkFiller, moving: Any, piece: Any, lease: Any, error: Any) -> None:
            bring = filler._bring

            def landed_at_once(*args: Any) -> Future[None]:
                bring(*args)
                done: Future[None] = Future()
                done.set_result(None)
                return done

            with mock.patch.object(filler, "_bring", landed_at_once):
                original(filler, moving, piece, lease, error)

        return call

    with patched(LinkFiller, "_send", send):
        found = races_with(tmp_path, width=128, device_memory=1100 * KIB, host_memory=700 * KIB).found
    assert any("the to-device stream, reading" in race for race in found)


def test_buffers_of_updates_that_are_filled_before_they_are_free_are_found(tmp_path: Path) -> None:
    def run(original: Any) -> Any:
        def call(updates: DeviceUpdates, host: Mapping[str, Tensor], *rest: Any) -> Any:
            for buffers in updates._sets:
                buffers.free = FakeDevice().compute.record()
            return original(updates, host, *rest)

        return call

    with patched(DeviceUpdates, "run", run):
        found = races_with(tmp_path, update_on="device").found
    assert any("the to-device stream, writing and the to-host stream, reading" in race for race in found)
