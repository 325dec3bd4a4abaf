"""What goes wrong on one rank is an error on every rank, within seconds, that names ranks and what to do."""

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zinf_compile
from tests.distributed.workloads import (
    Loop,
    batch_of,
    build_gpt,
    full,
    optimize,
    placements,
    train_alone,
    train_step,
)
from tests.support.rank_pool import Died, Raised, RankPool
from tests.support.traces import Trace
from zinf_compile.checkpoint.checkpoint_folder import read_manifest
from zinf_compile.driver import session
from zinf_compile.ir.errors import StoreError
from zinf_compile.runtime.calibration.calibrate import measure_hardware
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.store.store import Store, store_of

SOON = 20.0  # seconds; gloo's own timeout is minutes


def build_and_close(build: Callable[[], nn.Module], options: Mapping[str, Any]) -> str:
    """Optimize a model on each rank, take a step, and return how much memory the device has."""
    model = optimize(build(), options)
    model(**batch_of(0, dist.get_rank())).backward()
    budget = str(zinf_compile.report(model).tiers[0].capacity)
    zinf_compile.close(model)
    return budget


def with_other_option(options: Mapping[str, Any], name: str, value: object) -> str:
    """Give rank 1 another option."""
    return build_and_close(build_gpt, {**options, name: value} if dist.get_rank() == 1 else options)


def with_other_seed(options: Mapping[str, Any]) -> str:
    """Give rank 1 other first values."""
    return build_and_close(lambda: build_gpt(dist.get_rank()), options)


def with_other_model(options: Mapping[str, Any]) -> str:
    """Give rank 1 a head that is not tied, so that it has one parameter more."""
    model = build_gpt()
    if dist.get_rank() == 1:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return build_and_close(lambda: model, options)


class FailsToFill(nn.Linear):
    """A layer whose first values fail on rank 1."""

    def reset_parameters(self) -> None:
        """Raise on rank 1, once the layer is built."""
        if not self.weight.is_meta and dist.get_rank() == 1:
            raise ValueError("no values")
        super().reset_parameters()


def fail_to_place(options: Mapping[str, Any], where: str) -> None:
    """Fail on rank 1 before or while parameters move, where the other rank does not."""
    options, model = dict(options), build_gpt()
    is_second = dist.get_rank() == 1
    if where == "option" and is_second:
        options["device_memory"] = "much"
    if where == "folder":
        Path(options["nvme"], "0").mkdir(exist_ok=True)
        options["nvme"] += "/{rank}"
    if where == "init":
        with torch.device("meta"):
            model = FailsToFill(64, 64)
        options["init"] = "reset"
    with mock.patch.object(Store, "add", _fail_to_read) if where == "disk" and is_second else nullcontext():
        model = optimize(model, options)


@pytest.mark.parametrize(
    ("where", "on_it", "elsewhere"),
    [
        ("option", "ConfigError", "reading options failed on rank 1; rank 1: ConfigError: device_memory"),
        ("folder", "ConfigError", "reading options failed on rank 1; rank 1: ConfigError: nvme="),
        ("disk", "StoreError", "rank 1: reading failed: Input/output error"),
        ("init", "ValueError", "rank 1: placing parameters: ValueError: no values"),
    ],
)
def test_what_goes_wrong_in_optimize_on_one_rank_ends_all(
    two: RankPool, options: Mapping[str, Any], where: str, on_it: str, elsewhere: str
) -> None:
    start = time.monotonic()
    first, second = two.outcomes(fail_to_place, options, where, seconds=60.0)
    assert time.monotonic() - start < 60.0
    assert (first.kind, second.kind) == ("RankError", on_it), (first, second)
    assert elsewhere in first.message


@pytest.fixture
def options(tmp_path: Path) -> Mapping[str, Any]:
    """Return budgets in which parameters are streamed."""
    return placements(str(tmp_path))["nvme"]


def messages(outcomes: list[Any]) -> list[str]:
    """Return the messages of ranks that all raise RankError."""
    assert [each.kind for each in outcomes] == ["RankError"] * len(outcomes), outcomes
    return [each.message for each in outcomes]


def test_options_that_differ_are_named(two: RankPool, options: Mapping[str, Any]) -> None:
    for message in messages(two.outcomes(with_other_option, options, "recompute", True)):
        assert "options differ: 'recompute' is None on rank 0 and True on rank 1" in message


def test_the_smallest_budget_is_used(two: RankPool, options: Mapping[str, Any]) -> None:
    less = options["device_memory"] - 8192
    assert two.run(with_other_option, options, "device_memory", less) == [str(less)] * 2


def test_first_values_that_differ_are_named(two: RankPool, options: Mapping[str, Any]) -> None:
    for message in messages(two.outcomes(with_other_seed, options)):
        assert "first values differ: 'embed.weight' is" in message
        assert "on rank 1; every rank builds the same model with the same options and seed" in message


def test_models_that_differ_are_named(two: RankPool, options: Mapping[str, Any]) -> None:
    for message in messages(two.outcomes(with_other_model, options)):
        assert (
            "parameters differ: 'head.weight' is missing on rank 0 and (51, 60) of torch.float32 on rank 1" in message
        )


def other_loop(options: Mapping[str, Any]) -> None:
    """Let rank 1 skip a backward."""
    model = optimize(build_gpt(), options)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(**batch_of(0, 0))
    if dist.get_rank() == 0:
        loss.backward()
    optimizer.step()


def test_loops_that_differ_are_named(two: RankPool, options: Mapping[str, Any]) -> None:
    for message in messages(two.outcomes(other_loop, options)):
        assert "ranks do different things at the same time: rank 0: a backward of TinyGPT graph 0" in message
        assert "rank 1: an optimizer step" in message


def other_options(options: Mapping[str, Any], value: Any) -> tuple[list[str], list[bytes]]:
    """Give a step another learning rate on rank 1, and then the same again; return errors, and the losses."""
    model = optimize(build_gpt(), options)
    weights, others = [
        [each for each in model.parameters() if (each.dim() > 1) is is_weight] for is_weight in (True, False)
    ]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": others, "note": dist.get_rank()}], lr=value)
    errors, losses = [], []
    for step in range(3):
        loss = model(**batch_of(step, dist.get_rank()))
        loss.backward()
        losses.append(loss.detach().numpy().tobytes())
        try:
            is_other = isinstance(value, float) and (step, dist.get_rank()) == (1, 1)
            optimizer.param_groups[1]["lr"] = 2e-3 if is_other else value
            optimizer.step()
        except zinf_compile.ZinfError as error:
            errors.append(str(error))
            optimizer.param_groups[1]["lr"] = value
            optimizer.step()
        optimizer.zero_grad()
    zinf_compile.close(model)
    return errors, losses


def test_options_of_a_step_that_differ_are_named(two: RankPool, options: Mapping[str, Any]) -> None:
    outcomes = two.run(other_options, options, 1e-2)
    undisturbed = two.run(other_options, options, torch.tensor(1e-2, dtype=torch.float64))
    for (errors, losses), (nothing, expected) in zip(outcomes, undisturbed, strict=True):
        (error,) = errors
        assert (
            "different options for a step of AdamW of 27 parameters from 'embed.weight' on: lr of group 1 is" in error
        )
        assert "0.01 on rank 0, 0.002 on rank 1; give every rank the same" in error
        assert "nothing was updated" in error
        assert (nothing, losses) == ([], expected)


def other_order(options: Mapping[str, Any]) -> None:
    """Step two optimizers, of other options each, in another order on each rank."""
    model = optimize(build_gpt(), options)
    optimizers = [torch.optim.SGD([each], lr=0.01 * number) for number, each in enumerate(model.parameters())]
    for step in range(2):
        model(**batch_of(step, dist.get_rank())).backward()
        for optimizer in optimizers if dist.get_rank() == 0 else reversed(optimizers):
            optimizer.step()


def test_options_of_other_optimizers_are_not_compared(two: RankPool, options: Mapping[str, Any]) -> None:
    two.run(other_order, options)


def other_shapes(options: Mapping[str, Any]) -> None:
    """Let the last batch of rank 1 be shorter."""
    model = optimize(build_gpt(), options)
    for step in range(2):
        batch = batch_of(step, 0)
        if (dist.get_rank(), step) == (1, 1):
            batch = {name: tokens[:1] for name, tokens in batch.items()}
        model(**batch).backward()


@pytest.mark.long
def test_batches_of_other_shapes_are_named(two: RankPool, options: Mapping[str, Any]) -> None:
    for message in messages(two.outcomes(other_shapes, options)):
        assert "rank 1: capture of TinyGPT graph 1" in message
        assert "pad the last one" in message


def train_until(options: Mapping[str, Any], happens: str, rank: int, count: int) -> float:
    """Train, until something happens on a rank at a gradient; return the seconds the others took to notice."""
    model = optimize(build_gpt(), options)
    optimizer = torch.optim.AdamW(model.parameters())
    store = next(store_of(record) for each in model.parameters() if (record := record_of(each)) is not None)
    is_here = dist.get_rank() == rank
    if happens == "capture" and is_here:
        assert store.engine is not None
        store.engine.read = _fail_to_read  # type: ignore[method-assign]
    measure = measure_hardware if happens == "capture" else session.measure_hardware  # which a run of tests does once
    try:
        for step in range(4):
            batch = batch_of(step, dist.get_rank())
            if step == count and is_here:
                if happens == "death":
                    model.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda _: os._exit(3))
                elif happens == "error":
                    batch["tokens"][0, 0] = 10**6
                elif happens == "disk":
                    assert store.engine is not None
                    store.engine.read = _fail_to_read  # type: ignore[method-assign]
                elif happens == "absence":
                    return 0.0
            store.ranks.timeout_seconds = 3.0 if happens == "absence" and step == count else math.inf
            with mock.patch.object(session, "measure_hardware", measure):
                model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    except StoreError:
        with pytest.raises(StoreError):  # and again, at once
            model(**batch_of(0, 0))
        raise
    return 0.0


def _fail_to_read(*_: object) -> None:
    raise StoreError("reading failed: Input/output error")


@pytest.mark.parametrize(
    ("happens", "on_it", "elsewhere"),
    [
        pytest.param("death", Died, "another rank is gone", marks=pytest.mark.long),
        pytest.param(
            *("error", "IndexError", "rank 1: a forward broke off: IndexError: index out of range"),
            marks=pytest.mark.long,
        ),
        ("disk", "StoreError", "reading failed: Input/output error"),
        pytest.param(
            *("capture", "StoreError", "rank 1: capturing broke off: StoreError: calibration: reading failed"),
            marks=pytest.mark.long,
        ),
        pytest.param("absence", None, "rank 1 had not come to a forward of TinyGPT graph 0", marks=pytest.mark.long),
    ],
)
def test_what_happens_on_one_rank_ends_all_within_seconds(
    happens: str, on_it: Any, elsewhere: str, three: RankPool, options: Mapping[str, Any]
) -> None:
    start = time.monotonic()
    outcomes = three.outcomes(train_until, {**options, "overlap_step": False}, happens, 1, 2)
    assert time.monotonic() - start < SOON + 60  # the processes, and capturing, take most of it
    if isinstance(on_it, str):
        assert outcomes[1].kind == on_it
    elif on_it is None:
        assert outcomes[1] == 0.0
    else:
        assert isinstance(outcomes[1], on_it)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], Raised), outcomes[rank]
        assert outcomes[rank].kind == "RankError"
        assert elsewhere in outcomes[rank].message
        assert "restart all ranks" in outcomes[rank].message


class Noisy(torch.optim.Optimizer):
    """It adds noise to parameters."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(torch.randn_like(parameter))


def refusals(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the messages of what is refused on every rank alike."""
    found = {}

    def refused(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except zinf_compile.ZinfError as error:
            found[name] = f"{type(error).__name__}: {error}"

    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pipe", "replicate", "shard"))
    refused("mesh", lambda: zinf_compile.optimize(build_gpt(), mesh=mesh, **_without_streams(options)))
    turned = DeviceMesh("cpu", [1, 0])
    refused("turned", lambda: zinf_compile.optimize(build_gpt(), mesh=turned, **_without_streams(options)))
    tiles = {"tiles": {"embed.weight": 2}}
    refused("tiles", lambda: optimize(build_gpt(), {**options, **tiles, "stage": 2, "device_memory": 2**20}))
    refused("many", lambda: optimize(build_gpt(), {**options, "tiles": {"embed.weight": 27}}))
    refused("stage", lambda: optimize(build_gpt(), {**options, "stage": 0}))
    refused("room", lambda: optimize(build_gpt(), {**options, "stage": 2, "device_memory": 2**16}))
    refused("early", lambda: optimize(build_gpt(), {**options, "stage": 1, "step_in_backward": True}))
    scalar = build_gpt()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    refused("scalar", lambda: optimize(scalar, options))
    early = build_gpt()
    optimizer = torch.optim.AdamW(early.parameters())
    optimize(early, options)
    early(**batch_of(0, 0)).backward()
    refused("optimizer", optimizer.step)
    refused("draws", Noisy(early.parameters()).step)
    zinf_compile.close(early)
    return found


def _without_streams(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "streams"}


def test_what_this_version_cannot_do_on_ranks_is_refused_by_name(two: RankPool, options: Mapping[str, Any]) -> None:
    for found in two.run(refusals, options):
        assert "mesh has 3 dimensions (pipe, replicate, shard)" in found["mesh"]
        assert "such as mesh['replicate', 'shard']" in found["mesh"]
        assert "mesh has its ranks in the order [1, 0]" in found["turned"]
        assert "tiles and tile_memory divide what is gathered, and stage=2 keeps all of it" in found["tiles"]
        assert "asks for 27 tiles of its rows, and it has the shape [51, 60]" in found["many"]
        assert "as many tiles as rows on each of 2 ranks at the most" in found["many"]
        assert "stage=0 is not a stage of ZeRO" in found["stage"]
        assert "stage=2 keeps the copies that compute reads on the device, which needs" in found["room"]
        assert "stage=1 reduces gradients once per step" in found["early"]
        assert "'scale' has no dimension that ranks could divide" in found["scalar"]
        assert "AdamW was made before zinf_compile.optimize(model)" in found["optimizer"]
        assert "Noisy draws random numbers in its step, and each of 2 ranks, which update" in found["draws"]


def interrupt_while_preparing(options: Mapping[str, Any]) -> None:
    """Take a step; then rank 1 is interrupted before its forward runs, after the ranks have agreed to run it."""
    model = optimize(build_gpt(), options)
    model(**batch_of(0, dist.get_rank())).backward()
    store, changed = store_of(record_of(next(model.parameters()))), {}
    if dist.get_rank() == 1:
        changed = {"refresh_stale": mock.Mock(side_effect=KeyboardInterrupt)}
    with mock.patch.multiple(type(store), **changed) if changed else nullcontext():
        model(**batch_of(1, dist.get_rank()))


def test_an_interrupt_before_a_forward_ends_all_within_seconds(two: RankPool, options: Mapping[str, Any]) -> None:
    other, interrupted = two.outcomes(interrupt_while_preparing, options, seconds=60.0)
    assert (interrupted.kind, other.kind) == ("KeyboardInterrupt", "RankError")
    assert "rank 1: a forward broke off: KeyboardInterrupt" in other.message


LOOP = Loop(num_steps=4)
_WAITS_A_STEP = 65  # for collectives, with a save; planning waits as often as another step


def train_and_die(options: Mapping[str, Any], folder: str, seed: int) -> Any:
    """Go on from the last save, if there is one, and save after each step; with a seed, one rank dies on the way."""
    model = optimize(LOOP.build(), options)
    optimizer, trace, first = LOOP.make_optimizer(model), Trace(), 0
    if os.path.isdir(folder) and read_manifest(Path(folder)) is not None:
        first = zinf_compile.load(folder, model, optimizer)["step"]
    generator = random.Random(seed)
    if seed and dist.get_rank() == generator.randrange(dist.get_world_size()):
        _die_at(model, generator.randrange(_WAITS_A_STEP * (LOOP.num_steps - first + 1)))
    for step in range(first, LOOP.num_steps):
        train_step(LOOP, model, optimizer, step, trace)
        zinf_compile.save(folder, model, optimizer, extra={"step": step + 1})
    return first, {name: full(parameter) for name, parameter in model.named_parameters()}


def _die_at(model: nn.Module, count: int) -> None:
    store = next(store_of(record) for each in model.parameters() if (record := record_of(each)) is not None)
    left, wait = [count], store.ranks.wait

    def counted(collective: Any, **given: Any) -> None:
        left[0] -= 1
        if left[0] <= 0:
            os._exit(9)
        wait(collective, **given)

    store.ranks.wait = counted  # type: ignore[method-assign]


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(1, 6), range(6, 11), range(11, 16), range(16, 21)])
def test_killed_ranks_lose_nothing_that_was_saved(
    seeds: Sequence[int], two: RankPool, options: Mapping[str, Any], tmp_path: Path
) -> None:
    """Each run goes on from what those before it have saved until a rank dies; after one that ends, the next begins anew."""
    whole = train_alone(LOOP, 2).parameters[-1]
    folder, num_killed = str(tmp_path / "0"), 0
    for seed in seeds:
        outcomes = two.outcomes(train_and_die, options, folder, seed)
        killed = [rank for rank, each in enumerate(outcomes) if isinstance(each, Died)]
        if killed:
            assert len(killed) == 1, outcomes
            assert [each.kind for each in outcomes if isinstance(each, Raised)] == ["RankError"]
            num_killed += 1
        else:
            folder = str(tmp_path / str(seed))
    assert num_killed > len(seeds) // 2
    (first, values), (other, _) = two.run(train_and_die, options, folder, 0)
    assert first == other <= LOOP.num_steps
    assert all(torch.equal(values[name], value) for name, value in whole.items())


def test_a_group_that_comes_after_optimize_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zinf_compile.optimize(nn.Linear(3, 3), device_memory="16MiB", host_memory="16MiB")
    model(torch.ones(1, 3))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(zinf_compile.RankError, match=r"before zinf_compile\.optimize"):
        model(torch.ones(1, 3))
    monkeypatch.undo()
    model(torch.ones(1, 3))
    zinf_compile.close(model)
