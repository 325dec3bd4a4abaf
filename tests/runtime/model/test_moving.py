"""Homes move between tiers within the budgets: memory never exceeds its limit, even on the way."""

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from zinf_compile.ir.copies import Role
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Placement
from zinf_compile.runtime.model.moving import move_homes
from zinf_compile.runtime.storage.nvme import posix
from zinf_compile.runtime.storage.nvme.posix import PosixEngine
from zinf_compile.runtime.store.store import Store

WIDTH = 512  # a weight of 1 MiB
NUM_LAYERS = 8


def placed(placement: Placement, tier: Tier) -> Placement:
    return placement.moved(dict.fromkeys(Role, tier))


def in_memory(store: Store) -> int:
    return store.held.nbytes_on(Tier.DEVICE) + store.held.nbytes_on(Tier.HOST)


def test_as_much_goes_out_as_comes_in(
    optimize: Callable[..., nn.Module],
    store_of: Callable[[nn.Module], Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    expected = [layer.weight.detach().clone() for layer in model]
    # Weight and gradient are 1 MiB each: memory has room for half of the layers, plus one.
    optimize(model, device_memory="5376KiB", host_memory="8MiB", nvme=tmp_path)
    store = store_of(model)
    first = tuple(store.placements.values())
    half = NUM_LAYERS // 2
    there = [placed(item, Tier.HOST if index < half else Tier.NVME) for index, item in enumerate(first)]
    back = [placed(item, Tier.NVME if index < half else Tier.DEVICE) for index, item in enumerate(first)]
    move_homes(store, there)
    peaks = []
    count_home = store.held.count_home

    def count(tier: Tier, nbytes: int) -> None:
        count_home(tier, nbytes)
        peaks.append(in_memory(store))

    monkeypatch.setattr(store.held, "count_home", count)
    before, taken = in_memory(store), store.layout.taken_nbytes
    move_homes(store, back)
    assert in_memory(store) == before == NUM_LAYERS // 2 * 2 * 2**20
    assert max(peaks) <= store.config.device_memory + store.config.host_memory - store.config.staging_memory
    assert max(peaks) > before, "what fits moves in before other homes move out"
    assert store.layout.taken_nbytes <= taken + 2 * 2**20
    for layer, value in zip(model, expected, strict=True):
        assert torch.equal(layer.weight, value)
    assert tuple(store.placements.values()) == tuple(back)


def blocks(store: Store) -> int:
    """Return the bytes that the store's file occupies on disk."""
    assert isinstance(store.engine, PosixEngine)
    return os.fstat(store.engine._buffered_fd).st_blocks * 512


def test_what_homes_leave_in_the_file_is_given_back_to_the_disk(
    optimize: Callable[..., nn.Module], store_of: Callable[[nn.Module], Store], tmp_path: Path
) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    expected = [layer.weight.detach().clone() for layer in model]
    optimize(model, device_memory="2MiB", host_memory="16MiB", nvme=tmp_path)
    store = store_of(model)
    first = tuple(store.placements.values())
    on_nvme = [placed(item, Tier.NVME) for item in first]
    move_homes(store, on_nvme)
    odd = [placed(item, Tier.HOST) if index % 4 == 1 else item for index, item in enumerate(on_nvme)]
    for homes in (odd, on_nvme, odd):
        move_homes(store, homes)
        placements = store.placements.values()
        live = sum(2 * item.compute_nbytes for item in placements if item.compute is Tier.NVME)
        assert store.layout.live_nbytes == store.layout.taken_nbytes == live
        # Planned optimizer state that does not exist yet keeps its room; a filesystem adds its own blocks.
        planned = sum(item.file_nbytes for item in placements)
        assert planned <= blocks(store) <= planned + 2**16
        store.check_integrity()
    for layer, value in zip(model, expected, strict=True):
        assert torch.equal(layer.weight, value)


def test_a_filesystem_without_holes_keeps_its_bytes(
    optimize: Callable[..., nn.Module],
    store_of: Callable[[nn.Module], Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    optimize(model, device_memory="2MiB", host_memory="16MiB", nvme=tmp_path)
    store = store_of(model)
    on_nvme = [placed(item, Tier.NVME) for item in store.placements.values()]
    odd = [placed(item, Tier.HOST) if index % 4 == 1 else item for index, item in enumerate(on_nvme)]
    monkeypatch.setattr(posix, "_find_fallocate", lambda: refuse_to_punch)
    move_homes(store, on_nvme)
    end = store.layout.end
    move_homes(store, odd)
    assert store.layout.taken_nbytes == store.layout.end > store.layout.live_nbytes
    move_homes(store, on_nvme)
    assert store.layout.end == end, "free room in the file is used again"


def refuse_to_punch(descriptor: int, mode: int, offset: int, nbytes: int) -> int:
    ctypes.set_errno(errno.EOPNOTSUPP)
    return -1
