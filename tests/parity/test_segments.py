"""Training in compiled segments matches training op by op to rounding, within budgets; more layers compile nothing more."""

import copy
import logging
from collections import Counter
from dataclasses import fields, replace
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zinf_compile
from zinf_compile.driver import segmented
from zinf_compile.driver.planning import GraphPlanner
from zinf_compile.driver.tile_search import TileSearch
from zinf_compile.ir import config
from zinf_compile.ir.config import Config
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.execute import segments
from zinf_compile.runtime.native.compiled import find_compiler

STEPS = 3
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on the PATH")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, layers: int = 2, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


def make(**options: int) -> nn.Module:
    torch.manual_seed(0)
    return Model(**options).double()


def train(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # for dropout, whose random numbers are drawn outside of segments
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randint(256, (4, 32), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return train(make())


def assert_same_to_rounding(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def assert_ops_run(parity, expected, caplog, reason: str) -> None:
    """Check that a model that should be compiled runs op by op, and that the log and the report say so once."""
    with caplog.at_level(logging.WARNING, logger="zinf_compile"):
        model = parity.optimize(make(), compute="inductor", device_memory="8MiB", host_memory="8MiB")
        assert_same_to_rounding(train(model), expected)
    said = [record.message for record in caplog.records if "op by op" in record.message]
    assert len(said) == 1
    assert reason in said[0]
    (sentence,) = zinf_compile.report(model).fallbacks
    assert sentence.startswith(f"Model graph 0: runs op by op: {reason}")


@needs_compiler
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.long)])
def test_training_in_segments_is_the_same_to_rounding(parity, expected, recompute):
    options = {"device_memory": "4MiB", "host_memory": "4MiB", "nvme": parity._folder}
    model = parity.optimize(make(), compute="inductor", recompute=recompute, **options)
    assert_same_to_rounding(train(model), expected)
    report = zinf_compile.report(model)
    (plan,) = report.plans
    (facts,) = plan.request.candidates
    assert sum(op.op == "zinf.run_segment.default" for op in facts.ops) >= 5  # forward and backward of blocks and head
    device = next(tier for tier in report.tiers if tier.tier is Tier.DEVICE)
    assert device.measured_peak <= device.predicted_peak


@needs_compiler
@pytest.mark.long
def test_segments_allocate_no_more_than_the_plan_counts(parity):
    """Count every byte by torch's allocator: the outputs of a segment are allocated before its inputs are freed."""
    options = {"device_memory": "64MiB", "host_memory": "64MiB", "recompute": False, "remake_plan": False}
    model = parity.optimize(make(width=128), compute="inductor", **options)
    tokens = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model(tokens).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model(tokens).backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    (plan,) = zinf_compile.report(model).plans
    counted = dict(plan.tier(Tier.DEVICE).parts)["activations"]
    assert 0.8 * counted < max(live) <= counted


@needs_compiler
@pytest.mark.long
def test_a_deeper_model_has_no_other_segments(parity):
    counts = []
    for layers in (3, 5):
        before = len(segments._segments)
        model = parity.optimize(
            make(layers=layers, width=32), compute="inductor", device_memory="8MiB", host_memory="8MiB"
        )
        model(torch.zeros(1, 8, dtype=torch.int64)).backward()
        counts.append(len(segments._segments) - before)
    assert counts[0] > 3
    assert counts[1] == 0


@needs_compiler
@pytest.mark.parametrize("way_in", ["optimize", "backend"])
def test_blocks_are_compiled_where_nothing_else_is_said(parity, expected, monkeypatch, way_in):
    (default,) = (field.default for field in fields(Config) if field.name == "compute")
    monkeypatch.setattr(config, "DEFAULT_COMPUTE", default)  # the tests override it
    model, budgets = make(), {"device_memory": "8MiB", "host_memory": "8MiB"}
    if way_in == "optimize":
        parity.optimize(model, **budgets)
        assert_same_to_rounding(train(model), expected)
    else:
        parity._models.append(model)
        model.compile(backend="zinf", options=budgets)
        assert_same_to_rounding(train(model), expected)
    (plan,) = zinf_compile.report(model).plans
    assert any(op.op == "zinf.run_segment.default" for op in plan.request.candidates[0].ops)


@needs_compiler
def test_changing_sizes_are_compiled_once(parity):
    """The second shape compiles the graph with symbols; all later shapes reuse it, and stay within the plan."""
    shapes = [(4, 32), (3, 48), (8, 8), (2, 64), (5, 31), (4, 40)]
    plain = make().eval()
    model = parity.optimize(make().eval(), compute="inductor", device_memory="16MiB", host_memory="8MiB")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (plain, model)]
    numbers = []
    for shape in shapes:
        batch = torch.randint(256, shape, generator=torch.Generator().manual_seed(1))
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        numbers.append(len(segments._segments))
    assert_same_to_rounding(*([parameter.detach() for parameter in each.parameters()] for each in (model, plain)))
    report = zinf_compile.report(model)
    assert numbers[0] < numbers[1] == numbers[-1]
    assert [bool(plan.request.captured[0].symbols) for plan in report.plans] == [False, True]
    assert all(any(op.op == "zinf.run_segment.default" for op in plan.request.captured[0].ops) for plan in report.plans)
    device = next(tier for tier in report.tiers if tier.tier is Tier.DEVICE)
    assert device.measured_peak <= device.predicted_peak


class Rolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, count: int) -> Tensor:
        return (self.layer(x).roll(count, 1) * count).square().mean()


@needs_compiler
@pytest.mark.long
def test_a_whole_number_that_is_no_size_may_be_any(parity):
    torch.manual_seed(0)
    plain = Rolled().double()
    model = parity.optimize(copy.deepcopy(plain), compute="inductor", device_memory="8MiB", host_memory="8MiB")
    x = torch.randn(4, 8, dtype=torch.float64)
    for count in (2, 3, 0, -3, 7):
        for each in (plain, model):
            each.zero_grad()
            each(x, count).backward()
        assert_same_to_rounding(_gradients(model), _gradients(plain))
    assert len(zinf_compile.report(model).plans) <= 4  # a guard separates 0 from the others


def _gradients(model: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [gradient for gradient in gradients if gradient is not None]


def test_without_a_compiler_ops_run_and_the_log_says_why(parity, expected, monkeypatch, caplog):
    monkeypatch.setattr(segmented, "find_compiler", lambda: None)
    segmented._say_without_compiler.cache_clear()  # another test may have logged it already
    assert_ops_run(
        parity, expected, caplog, "Inductor needs a C++ compiler, such as g++, and there is none on the PATH"
    )


@needs_compiler
@pytest.mark.long
def test_blocks_that_do_not_fit_are_cut_where_they_gather(parity):
    most_read = []
    for device_memory in ("32MiB", "2200KiB"):
        torch._dynamo.reset()
        options = {"device_memory": device_memory, "host_memory": "32MiB", "tiles": False, "recompute": False}
        model = parity.optimize(make(width=128), compute="inductor", **options)
        model(torch.zeros(1, 8, dtype=torch.int64)).backward()
        (plan,) = zinf_compile.report(model).plans
        assert any(op.op == "zinf.run_segment.default" for op in plan.request.candidates[0].ops)
        large = {item.parameter for item in plan.placements if item.compute_nbytes > 64 * 2**10}
        read = Counter(tick for use in plan.uses if use.parameter in large for tick in use.ticks)
        most_read.append(max(read.values()))
    assert most_read == [2, 1]


@needs_compiler
def test_where_no_segments_fit_ops_run_and_the_log_says_why(parity, expected, monkeypatch, caplog):
    plan_for = GraphPlanner.plan_for

    def refuse_segments(planner, candidates, **of):
        if any(op.op == "zinf.run_segment.default" for facts in candidates for op in facts.ops):
            raise CapacityError(f"{planner.name} needs more")
        return plan_for(planner, candidates, **of)

    monkeypatch.setattr(GraphPlanner, "plan_for", refuse_segments)
    assert_ops_run(parity, expected, caplog, "in segments it does not fit: Model graph 0 needs more")


@pytest.mark.long
@needs_compiler
def test_tiles_are_not_read_together(parity, expected):
    tiles = {"layers.0.up.weight": 2, "layers.1.up.weight": 2, "embed.weight": 2}
    options = {"device_memory": "8MiB", "host_memory": "8MiB", "tiles": tiles}
    model = parity.optimize(make(), compute="inductor", **options)
    assert_same_to_rounding(train(model), expected)
    (plan,) = zinf_compile.report(model).plans
    ticks = {use.parameter: set(use.ticks) for use in plan.uses}
    for name in tiles:
        assert ticks[f"{name}.tile_0"].isdisjoint(ticks[f"{name}.tile_1"])


class Mlps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Tanh(), nn.Linear(128, 32)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@needs_compiler
def test_tiles_of_a_chain_are_segments_of_their_own_and_more_of_them_are_no_other_structures(parity, monkeypatch):
    """Count structures, and run them op by op. Every tile has 64 rows, so that more tiles have the same structures."""
    for name, empty in (("_numbers", {}), ("_segments", {}), ("_compiled", {})):
        monkeypatch.setattr(segments, name, empty)
    monkeypatch.setattr(segments, "_compile", lambda number, segment: None)
    choices = TileSearch.finer_and_finer
    num_calls, num_structures = [], []
    for num_tiles in (4, 8):
        x = torch.randn(64 * num_tiles, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        gradients = []
        for compute in ("aten", "inductor"):
            torch._dynamo.reset()
            monkeypatch.setattr(
                TileSearch,
                "finer_and_finer",
                lambda search, count=num_tiles: iter([replace(next(choices(search)), chain_tiles=count)]),
            )
            torch.manual_seed(0)
            options = {"device_memory": "32MiB", "host_memory": "32MiB", "recompute": False}
            model = parity.optimize(Mlps().double(), compute=compute, **options)
            model(x).backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        assert_same_to_rounding(*gradients)
        (plan,) = zinf_compile.report(model).plans
        num_calls.append(sum(op.op == "zinf.run_segment.default" for op in plan.request.candidates[0].ops))
        num_structures.append(len(segments._segments))
    blocks, phases, more_tiles = 2, 2, 4
    assert num_calls[1] - num_calls[0] == blocks * phases * more_tiles
    assert num_structures[1] - num_structures[0] < num_structures[0]  # ops over all rows differ in size
    assert num_structures[0] < num_calls[0]
