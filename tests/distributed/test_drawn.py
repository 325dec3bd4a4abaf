"""Drawn budgets and options, bit by bit, and many ranks."""

import random
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.workloads import (
    KIB,
    Loop,
    build_frozen,
    build_gpt,
    of_rank,
    placements,
    train_alone,
    train_on_ranks,
)
from tests.support.rank_pool import RankPool
from tests.support.swapping import swapping
from tests.support.traces import Trace, assert_same
from zinf_compile.ir.glossary import Tier


def draw_loop(draw: random.Random) -> Loop:
    """Return a loop, with any optimizer and either model."""
    optimizer, options = draw.choice(
        [
            ("AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
            ("Adam", {"lr": 1e-2, "amsgrad": True}),
            ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
            ("RMSprop", {"lr": 1e-3}),
        ]
    )
    return Loop(
        build=draw.choice([build_gpt, build_gpt, build_frozen]),
        num_steps=2,
        num_accumulated=draw.choice([1, 1, 2]),
        optimizer=optimizer,
        optimizer_options=options,
    )


def draw_options(draw: random.Random, loop: Loop) -> dict[str, Any]:
    """Return budgets from tight to roomy, and when transfers, updates and reductions run."""
    options: dict[str, Any] = {
        "compute": "aten",
        "reserve_memory": 0,
        "streams": draw.random() < 0.7,
        "device_memory": draw.randrange(560, 1600) * KIB,
        "host_memory": draw.randrange(600, 4000) * KIB,
        "prefetch_memory": draw.choice([None, 0, 100 * KIB, 200 * KIB]),
        "recompute": draw.choice([None, True, False]),
        "swaps": draw.choice([None, "host", "nvme"]),
    }
    step = draw.choice(["beside forward", "at once", "in backward"])
    if step == "at once":
        options["overlap_step"] = False
    if step == "in backward" and loop.num_accumulated == 1:
        options["step_in_backward"] = True
    return options


def train_drawn(loop: Loop, options: Mapping[str, Any]) -> tuple[Trace, int]:
    """Return the numbers of a rank, and how many of the plans that it made offload activations."""
    given = dict(options)
    swaps = given.pop("swaps")
    with ExitStack() as stack:
        made: list[object] = []
        if swaps is not None:
            tier = Tier(swaps)
            made = stack.enter_context(swapping(lambda number, _: tier if number % 2 else None, at_least=1 * KIB))
        return train_on_ranks(loop, given), len(made)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(14))
def test_drawn_loops_keep_their_bits(seed: int, two: RankPool, tmp_path: Path) -> None:
    draw = random.Random(seed)
    loop = draw_loop(draw)
    options = draw_options(draw, loop) | {"nvme": str(tmp_path)}
    plain = train_alone(loop, 2)
    if options.get("step_in_backward"):
        plain.gradients = []
    for rank, (ours, num_swapped) in enumerate(two.run(train_drawn, loop, options)):
        assert_same(ours, of_rank(plain, rank, 2))
        assert (num_swapped > 0) == (options["swaps"] is not None and rank == 0)  # which plans for both


@pytest.mark.long
@pytest.mark.parametrize("placement", ["nvme", "resident"])
def test_eight_ranks(placement: str, tmp_path: Path) -> None:
    loop, pool = Loop(num_steps=2), RankPool(8)
    options = placements(str(tmp_path))[placement]
    try:
        plain = train_alone(loop, 8)
        for rank, ours in enumerate(pool.run(train_on_ranks, loop, options)):
            assert_same(ours, of_rank(plain, rank, 8))
    finally:
        pool.stop()
