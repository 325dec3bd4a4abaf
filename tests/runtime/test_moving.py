"""Homes change places within the budgets: memory never holds more than it may, on the way either."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from zinf_compile.plans import Placement
from zinf_compile.runtime.moving import move_homes
from zinf_compile.runtime.store import Store
from zinf_compile.terms import Tier

WIDTH = 512  # a weight of 1 MiB
NUM_LAYERS = 8


def placed(placement: Placement, tier: Tier) -> Placement:
    return replace(placement, compute=tier, master=tier, gradient=tier, optimizer_state=tier)


def in_memory(store: Store) -> int:
    return store.nbytes_on(Tier.DEVICE) + store.nbytes_on(Tier.HOST)


def test_as_much_goes_out_as_comes_in(
    optimize: Callable[..., nn.Module],
    store_of: Callable[[nn.Module], Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    expected = [layer.weight.detach().clone() for layer in model]
    # Weight and gradient are 1 MiB each: memory has room for those of half of the layers, and for one more.
    optimize(model, device_memory="5376KiB", host_memory="8MiB", nvme=tmp_path)
    store = store_of(model)
    first = tuple(store.placements.values())
    half = NUM_LAYERS // 2
    there = [placed(item, Tier.HOST if index < half else Tier.NVME) for index, item in enumerate(first)]
    back = [placed(item, Tier.NVME if index < half else Tier.DEVICE) for index, item in enumerate(first)]
    move_homes(store, there)
    peaks = []
    count_home = store.count_home

    def count(tier: Tier, nbytes: int) -> None:
        count_home(tier, nbytes)
        peaks.append(in_memory(store))

    monkeypatch.setattr(store, "count_home", count)
    before, end = in_memory(store), store.layout.end
    move_homes(store, back)
    assert in_memory(store) == before == NUM_LAYERS // 2 * 2 * 2**20
    assert max(peaks) <= store.config.device_memory + store.config.host_memory - store.config.staging_memory
    assert max(peaks) > before, "what fits comes in before room is made"
    assert store.layout.end <= end + 2 * 2**20
    for layer, value in zip(model, expected, strict=True):
        assert torch.equal(layer.weight, value)
    assert tuple(store.placements.values()) == tuple(back)
