"""Gradients that arrive in tiles: each row is written once and then added to, however the tiles are cut."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.execute.gradients import store_gradient
from zinf_compile.runtime.params.records import StoredParameter, record_of
from zinf_compile.runtime.store.store import Store

NUM_ROWS, WIDTH = 160, 160  # 32 rows are whole sectors


@pytest.fixture(params=[True, False], ids=["nvme", "host"])
def record(request: pytest.FixtureRequest, optimize: Callable[..., nn.Module]) -> StoredParameter:
    """Return a weight whose gradient has its home on nvme, or in RAM."""
    model = optimize(nn.Sequential(nn.Linear(WIDTH, NUM_ROWS), nn.Linear(NUM_ROWS, WIDTH)), tiny=request.param)
    found = record_of(dict(model.named_parameters())["0.weight"])
    assert found is not None
    assert found.gradient.slot is not None
    assert (found.gradient.slot.tier is Tier.NVME) == request.param
    return found


def add_ones(record: StoredParameter, *tiles: tuple[int, int]) -> None:
    """Store a gradient of ones for some rows."""
    store = record.store
    assert isinstance(store, Store)
    for number, (start, stop) in enumerate(tiles):
        rows = record.copies.master.slice.part(start, stop)
        tile = store.tile(record, number, rows, rows)
        store_gradient(tile, torch.ones(stop - start, WIDTH))
    store.tensor_io.wait_writes()


def rows_of(record: StoredParameter) -> list[float]:
    assert record.parameter.grad is not None
    assert torch.equal(record.parameter.grad.amin(1), record.parameter.grad.amax(1))
    return record.parameter.grad[:, 0].tolist()


TWO = [(0, 96), (96, 160)]
THREE = [(0, 64), (64, 128), (128, 160)]


@pytest.mark.parametrize("tiles", [TWO, THREE, list(reversed(THREE))])
def test_it_is_complete_with_the_last_rows_and_then_added_to(
    record: StoredParameter, tiles: Sequence[tuple[int, int]]
) -> None:
    add_ones(record, *tiles[:-1])
    assert record.gradient.rows_home is not None
    add_ones(record, tiles[-1])
    assert record.gradient.rows_home is None
    add_ones(record, *TWO)
    assert rows_of(record) == [2.0] * NUM_ROWS


def test_tiles_of_another_cut_are_added_where_there_are_rows_and_written_elsewhere(record: StoredParameter) -> None:
    add_ones(record, TWO[0])  # and then backward raises
    add_ones(record, *THREE)
    assert record.gradient.rows_home is None
    assert rows_of(record) == [2.0] * 96 + [1.0] * 64
