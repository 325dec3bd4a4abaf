"""State in fewer bits on ranks: each encodes the rows that it has, and training has the bits of plain PyTorch with that."""

import copy
import io
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

import zinf_compile
from tests.distributed import test_torch_checkpoints as of_torch
from tests.distributed.workloads import (
    KIB,
    Loop,
    TinyGPT,
    batch_of,
    check_at_rest,
    full,
    of_rank,
    optimize,
    train_alone,
    train_on_ranks,
    train_step,
    values_of,
)
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace, assert_same
from zinf_compile.ir.copies import LEAST_CODED, Code
from zinf_compile.runtime.storage.state_codes import decode, encode

CODES = [Code.INT8, pytest.param(Code.BFLOAT16, marks=pytest.mark.long)]


class Wide(nn.Module):
    """A model whose weights have rows of whole blocks of 256 elements, so that blocks lie alike for any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(51, 256)
        self.up, self.down = nn.Linear(256, 24), nn.Linear(24, 256)
        self.head = nn.Linear(256, 51, bias=False)
        self.scale = nn.Parameter(torch.ones(2, 2304))  # of four ranks two have no row
        self.few = nn.Parameter(torch.zeros(4095))  # exact: by the whole parameter, and so on every rank

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        hidden = self.embed(tokens)
        hidden = hidden + self.down(functional.gelu(self.up(hidden)))
        hidden = hidden * self.scale.sum(0)[:256] + self.scale[1, 7::9] + self.few[:256]
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def build_uneven() -> nn.Module:
    """Return a TinyGPT of 300,000 parameters, which ranks do not divide evenly."""
    torch.manual_seed(0)
    return TinyGPT(width=124)


def build_wide() -> nn.Module:
    """Return a Wide, the same on every rank."""
    torch.manual_seed(0)
    return Wide()


def round_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, code: Code, num_ranks: int, skips: str
) -> None:
    """Do to the state of a plain optimizer what storing it does on so many ranks."""
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value.numel() < LEAST_CODED or (skips and skips in name):
                continue
            before = float(step if "step" in optimizer.state[parameter] else 0)
            seed, first = zlib.crc32(f"{name}/{key}/{before}".encode()), 0
            for rows, drawn in zip(value.chunk(num_ranks), parameter.detach().chunk(num_ranks), strict=True):
                pages = torch.empty(code.nbytes(rows.numel()), dtype=torch.uint8)
                encode(code, rows.reshape(-1), pages, first=first, seed=seed, drawn_from=drawn.reshape(-1))
                decode(code, pages, rows.view(-1))
                first += rows.numel()


def train_rounded(
    loop: Loop,
    num_ranks: int,
    code: Code,
    *,
    num_shards: int | None = None,
    skips: str = "",
    reduces_once: bool = False,
) -> Trace:
    """Return the numbers of plain PyTorch with the batches of so many ranks, whose state is rounded after each step."""
    after = partial(round_state, code=code, num_ranks=num_shards or num_ranks, skips=skips)
    return train_alone(loop, num_ranks, reduces_once=reduces_once, after_step=after)


def check(pool: RankPool, loop: Loop, options: Mapping[str, Any], plain: Trace) -> None:
    if options.get("step_in_backward"):
        plain.gradients.clear()
    for rank, trace in enumerate(pool.run(train_on_ranks, loop, options)):
        assert_same(trace, of_rank(plain, rank, pool.size))


def budgets(folder: str) -> dict[str, Mapping[str, Any]]:
    """Return budgets that put the state of an uneven model on each tier. Staging holds chunks of whole pages."""
    common = {"compute": "aten", "reserve_memory": 0, "nvme": folder}
    return {
        "nvme": {**common, "streams": True, "device_memory": 1536 * KIB, "host_memory": 1920 * KIB},
        "host": {**common, "streams": True, "device_memory": 1536 * KIB, "host_memory": 16 * 1024 * KIB},
        "resident": {**common, "device_memory": 16 * 1024 * KIB, "host_memory": 4 * 1024 * KIB},
    }


@pytest.mark.parametrize(
    "placement",
    ["nvme", pytest.param("host", marks=pytest.mark.long), pytest.param("resident", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("code", CODES)
def test_ranks_encode_their_rows(code: Code, placement: str, two: RankPool, tmp_path: Path) -> None:
    """No size is even: blocks of int8 begin with the rows of each rank."""
    loop = Loop(build=build_uneven)
    options = {**budgets(str(tmp_path))[placement], "state_dtype": str(code)}
    check(two, loop, options, train_rounded(loop, 2, code))


ENOUGH: dict[str, Any] = {"compute": "aten", "reserve_memory": 0, "device_memory": "16MiB", "host_memory": "8MiB"}
WIDE = Loop(build=build_wide)
WAYS: dict[str, tuple[Loop, Mapping[str, Any]]] = {
    "eager": (WIDE, {"capture": False}),
    "stage 1": (replace(WIDE, num_accumulated=2), {"stage": 1}),
    "stage 2": (WIDE, {"stage": 2}),
    "streams": (WIDE, {"streams": True}),
    "in backward": (WIDE, {"step_in_backward": True}),
    "at step": (WIDE, {"overlap_step": False}),
    "sgd": (replace(WIDE, optimizer="SGD", optimizer_options={"lr": 0.1, "momentum": 0.9}), {}),
    "amsgrad": (replace(WIDE, optimizer="Adam", optimizer_options={"lr": 0.01, "amsgrad": True}), {}),
    "exact head": (WIDE, {"exact_state": "*head*"}),
}
QUICK = ("eager", "stage 1", "in backward")


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.long) for way in WAYS])
@pytest.mark.parametrize("code", CODES)
def test_rows_of_whole_blocks_give_the_bits_of_one_process(code: Code, way: str, two: RankPool) -> None:
    loop, options = WAYS[way]
    plain = train_rounded(
        loop, 2, code, num_shards=1, reduces_once=way == "stage 1", skips=options.get("exact_state", "").strip("*")
    )
    check(two, loop, {**ENOUGH, **options, "state_dtype": str(code)}, plain)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("mesh", [None, pytest.param((2, 2), marks=pytest.mark.long)])
def test_four_ranks_give_the_bits_of_one_process(code: Code, mesh: tuple[int, int] | None, four: RankPool) -> None:
    """Two of them have no row of a parameter; or they are two replicas of two."""
    check(four, WIDE, {**ENOUGH, "mesh": mesh, "state_dtype": str(code)}, train_rounded(WIDE, 4, code, num_shards=1))


@pytest.mark.long
def test_clipping_agrees_to_rounding(two: RankPool) -> None:
    loop = replace(WIDE, clip=0.01)
    options = {**ENOUGH, "state_dtype": "int8"}
    plain = train_rounded(loop, 2, Code.INT8, num_shards=1)
    for trace, again in zip(*(two.run(train_on_ranks, loop, options) for _ in range(2)), strict=True):
        assert_same(trace, again)
        for name, value in trace.parameters[-1].items():
            torch.testing.assert_close(value, plain.parameters[-1][name], rtol=1e-4, atol=1e-6)


# What users see


WRITES: dict[str, Callable[[Tensor], object]] = {
    "all": lambda state: state.zero_(),
    "view": lambda state: state.view(-1).zero_(),
    "detached": lambda state: state.detach().zero_(),
    "data": lambda state: state.data.zero_(),
    "local": lambda state: state.to_local().zero_(),
    "row of local": lambda state: [row.zero_() for row in state.to_local()],
    "local of detached": lambda state: state.detach().to_local().zero_(),
    "list": lambda state: torch._foreach_zero_([state]),
}


def look(code: str) -> list[str]:
    """Look at states in many ways, and write to them; return what is wrong."""
    model = optimize(build_wide(), {**ENOUGH, "state_dtype": code})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = model(**batch_of(0, dist.get_rank()))
    loss.backward()
    optimizer.step()
    shown = optimizer.state[model.down.weight]["exp_avg"]
    local = shown.to_local().clone()
    value = shown.full_tensor()
    rows = 256 // dist.get_world_size()
    wrong = []

    def expect(what: str, *, holds: bool) -> None:
        if not holds:
            wrong.append(what)

    expect("type", holds=isinstance(shown, DTensor) and type(value) is Tensor and type(local) is Tensor)
    expect("shape", holds=(shown.shape, local.shape, value.shape) == ((256, 24), (rows, 24), (256, 24)))
    expect("value", holds=bool(value.any()) and torch.equal(local, value.narrow(0, rows * dist.get_rank(), rows)))
    expect("sum", holds=torch.equal((shown + 1).full_tensor(), value + 1))
    expect("norm", holds=torch.allclose(shown.norm().full_tensor(), value.norm()))
    expect("repr", holds="DTensor" in repr(shown) and repr(shown.to_local()) == repr(local))
    expect("clone", holds=torch.equal(shown.clone().full_tensor(), value))
    expect("copy", holds=torch.equal(copy.deepcopy(shown).full_tensor(), value))
    expect("double", holds=torch.equal(shown.to(torch.float64).full_tensor(), value.double()))
    expect("replicated", holds=torch.equal(shown.redistribute(placements=[Replicate()]).to_local(), value))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    read = torch.load(buffer, weights_only=False)["state"]
    number = [name for name, _ in model.named_parameters()].index("down.weight")
    expect("pickle", holds=torch.equal(read[number]["exp_avg"].full_tensor(), value))
    for name, write in WRITES.items():
        write(shown)
        expect(name, holds=not shown.full_tensor().any())
        shown.copy_(DTensor.from_local(local, shown.device_mesh, shown.placements, shape=shown.shape, stride=(24, 1)))
        expect(f"copied after {name}", holds=torch.equal(shown.full_tensor(), value))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": read})
    expect("loaded", holds=torch.equal(optimizer.state[model.down.weight]["exp_avg"].full_tensor(), value))
    whole = {key: {name: full(each) for name, each in state.items()} for key, state in read.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": whole})
    optimizer.zero_grad()
    model(**batch_of(1, dist.get_rank())).backward()
    optimizer.step()
    expect("a home again", holds=optimizer.state[model.down.weight]["exp_avg"].__class__ is shown.__class__)
    check_at_rest(model)
    zinf_compile.close(model)
    return wrong


@pytest.mark.parametrize("code", CODES)
def test_state_shows_values_and_takes_writes(code: Code, two: RankPool) -> None:
    assert two.run(look, str(code)) == [[], []]


# Checkpoints


Saved = tuple[dict[str, Tensor], list[Tensor], list[str]]


def resume(
    build: Callable[[], nn.Module], options: Mapping[str, Any], *, load: str | None = None, save: str | None = None
) -> Saved:
    """Train two steps on each rank, or in one process on all of their batches, and save; or load and train two more.

    Returns the values that were saved or loaded, the full parameters after training, and what was said of conversions.
    """
    loop, said = Loop(build=build), list[str]()
    logger = logging.getLogger("zinf_compile.checkpoint.load")
    logger.addHandler(handler := Saying(said))
    logger.setLevel(logging.INFO)
    model = optimize(build(), options)
    optimizer = loop.make_optimizer(model)
    values: dict[str, Tensor] = {}
    if load is not None:
        zinf_compile.load(load, model, optimizer)
        values = values_of(model, optimizer)
    for step in range(2) if load is None else range(2, 4):
        if dist.is_initialized():
            train_step(loop, model, optimizer, step, Trace(), looks_at_gradients=False)
            continue
        for rank in range(2):
            (model(**batch_of(step, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    if save is not None:
        zinf_compile.save(save, model, optimizer)
        values = values_of(model, optimizer)
    parameters = [full(parameter) for parameter in model.parameters()]
    if dist.is_initialized():
        check_at_rest(model)
    zinf_compile.close(model)
    logger.removeHandler(handler)
    return values, parameters, said


class Saying(logging.Handler):
    """Keeps messages in a list."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self._said.append(record.getMessage())


def save_state(build: Callable[[], nn.Module], options: Mapping[str, Any], folder: str) -> Saved:
    """Train two steps and save."""
    return resume(build, options, save=folder)


def load_state(build: Callable[[], nn.Module], options: Mapping[str, Any], folder: str) -> Saved:
    """Load and train two steps."""
    return resume(build, options, load=folder)


def train_four(build: Callable[[], nn.Module], options: Mapping[str, Any]) -> list[Tensor]:
    """Train four steps without a break; return the full parameters."""
    return list(
        train_on_ranks(Loop(build=build, num_steps=4, looks_at_gradients=False), options).parameters[-1].values()
    )


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the names of values that are not the same."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def are_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("code", CODES)
def test_as_many_ranks_go_on_with_the_same_bits(code: Code, two: RankPool, tmp_path: Path) -> None:
    """Also where no size is even."""
    options, folder = {**budgets(str(tmp_path))["nvme"], "state_dtype": str(code)}, str(tmp_path / "saved")
    expected = two.run(train_four, build_uneven, options)[0]
    values, *_ = two.run(save_state, build_uneven, options, folder)[0]
    for found, parameters, _ in two.run(load_state, build_uneven, options, folder):
        assert not differing(values, found)
        assert are_same(parameters, expected)


@pytest.mark.parametrize("code", CODES)
def test_blocks_that_lie_alike_are_read_exactly(code: Code, two: RankPool, four: RankPool, tmp_path: Path) -> None:
    """By another number of ranks, and by one process; and what one process saved, by ranks."""
    options, folder = {**ENOUGH, "state_dtype": str(code)}, str(tmp_path / "saved")
    values, *_ = four.run(save_state, build_wide, options, folder)[0]
    for found, _, _ in two.run(load_state, build_wide, options, folder):
        assert not differing(values, found)
    found, after, _ = load_state(build_wide, options, folder)
    assert not differing(values, found)
    found, on_ranks, _ = two.run(load_state, build_wide, options, folder)[0]
    assert are_same(on_ranks, after)
    values, *_ = save_state(build_wide, options, folder)
    for found, _, _ in two.run(load_state, build_wide, options, folder):
        assert not differing(values, found)
    plain = build_wide()
    optimizer = WIDE.make_optimizer(plain)
    zinf_compile.load(folder, plain, optimizer)
    assert not differing(values, values_of(plain, optimizer))


@pytest.mark.parametrize(
    ("before", "after"), [("int8", None), pytest.param(None, "int8", marks=pytest.mark.long), ("int8", "bfloat16")]
)
def test_another_encoding_or_other_blocks_are_converted(
    before: str | None, after: str | None, two: RankPool, three: RankPool, tmp_path: Path
) -> None:
    folder, options = str(tmp_path / "saved"), budgets(str(tmp_path))["resident"]
    values, *_ = two.run(save_state, build_uneven, {**options, "state_dtype": before}, folder)[0]
    for found, _, said in three.run(load_state, build_uneven, {**options, "state_dtype": after}, folder):
        for name in differing(values, found):
            assert after is not None
            assert name.endswith(("exp_avg", "exp_avg_sq"))
            assert (values[name] - found[name]).abs().max() <= 0.02 * values[name].abs().max()
        assert len(said) == (after is not None)


def test_checkpoints_of_torch(two: RankPool, tmp_path: Path) -> None:
    options, folder = {**ENOUGH, "capture": False, "state_dtype": "int8"}, str(tmp_path / "saved")
    saved = two.run(of_torch.save, "zinf", options, folder)
    of_torch.assert_alike(saved, two.run(of_torch.load, "zinf", options, folder))


@pytest.mark.long
def test_asynchronous_checkpoints_of_torch_are_refused(two: RankPool, tmp_path: Path) -> None:
    options = {**ENOUGH, "capture": False, "state_dtype": "int8"}
    for raised in two.outcomes(of_torch.save, "zinf", options, str(tmp_path / "saved"), True):
        assert raised.kind == "UnsupportedError"
        assert "state that is stored as int8 has no memory for 'data_ptr'" in raised.message


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_plan_counts_the_pages_of_a_rank(num_ranks: int) -> None:
    model = nn.Linear(1000, 1000, bias=False)
    plan = zinf_compile.plan(model, torch.zeros(2, 1000), hardware="dgx2", world=num_ranks, state_dtype="int8")
    pages = -(-1000 * 1000 // num_ranks // Code.INT8.page_elements)
    assert plan.placements[0].optimizer_state_nbytes == 2 * 4096 * pages
