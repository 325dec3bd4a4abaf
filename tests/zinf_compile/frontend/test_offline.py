"""``plan`` gives the plan that ``optimize`` would use, without parameter values; its errors and notes."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import zinf_compile
from examples.gpt import GPT, GPTConfig
from zinf_compile.driver import planning
from zinf_compile.frontend import offline
from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.config import make_config
from zinf_compile.ir.errors import CapacityError, ConfigError, UnsupportedError, VerifyError
from zinf_compile.ir.facts import GraphFacts
from zinf_compile.ir.glossary import Phase, Tier, format_bytes
from zinf_compile.ir.hardware import DEVICE_LINKS, NODE_LINKS, Hardware, Rate, TierSize, make_route
from zinf_compile.ir.plan import Plan, TierPart
from zinf_compile.ir.transfers import Transfer
from zinf_compile.passes.planner.search import planner
from zinf_compile.passes.planner.search.build import Groundwork
from zinf_compile.passes.planner.search.planner import Request, make_plan
from zinf_compile.passes.planner.search.search import Front, search_front
from zinf_compile.passes.planner.search.updates_ahead import updates_to_compare
from zinf_compile.passes.planner.search.verify import verify_plan
from zinf_compile.passes.planner.simulator.simulate import simulate
from zinf_compile.runtime.native.compiled import find_compiler

MIB = 2**20
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on the PATH")
ROUTES = (
    ("host", "device"),
    ("device", "host"),
    ("nvme", "device"),
    ("device", "nvme"),
    ("nvme", "host"),
    ("host", "nvme"),
)
HARDWARE = Hardware(
    name="paper",
    unified=True,
    flops=(Rate(name="float32", per_second=1e12),),
    memory_bytes_per_second=1e11,
    routes=tuple(make_route(Tier(source), Tier(target), 1e10) for source, target in ROUTES),
    optimizer_elements_per_second=1e9,
    tiers=tuple(TierSize(tier=tier, nbytes=2 ** (30 + 4 * power)) for power, tier in enumerate(Tier)),
)


def make_gpt(layers: int = 1, hidden: int = 64) -> GPT:
    return GPT(GPTConfig(vocab_size=64, layers=layers, hidden=hidden, heads=4, seq=32))


def tokens(batch: int = 2, seq: int = 32) -> Tensor:
    return torch.zeros(batch, seq, dtype=torch.int64)


class Layers(nn.Module):
    """Three linear layers and a function between the first and the others."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(self.second(self.between(self.first(x))))
        return y


def mlp() -> tuple[nn.Module, Any]:
    return nn.Sequential(*(Block(256) for _ in range(3))), (torch.randn(8, 256),)


def gpt() -> tuple[nn.Module, Any]:
    return make_gpt(layers=2, hidden=128), (tokens(), tokens())


def llama() -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    ids = tokens(seq=8)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def check_plans_agree(
    make: Callable[[], tuple[nn.Module, Any]],
    device_memory: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> PlanView:
    """Return the offline plan of a model; assert that the model itself gets the same."""
    monkeypatch.setattr(
        "zinf_compile.driver.session.measure_hardware", lambda *_: HARDWARE
    )  # rates decide which plan is best
    budgets: dict[str, Any] = {"device_memory": device_memory, "host_memory": "1MiB", **options}
    model, inputs = make()
    offline = zinf_compile.plan(model, inputs, hardware=HARDWARE, **budgets)
    zinf_compile.optimize(model, nvme=tmp_path, **budgets)
    if isinstance(inputs, dict):
        model(**inputs)
    else:
        model(*inputs)
    (online,) = zinf_compile.report(model).plans
    zinf_compile.close(model)
    assert offline.gathers
    ignored = {"notes", "hardware", "tiers"}  # a measured profile does not say how much memory the machine has
    for part in fields(offline.plan):
        if part.name not in ignored:
            assert getattr(offline.plan, part.name) == getattr(online.plan, part.name), part.name
    assert [tier.parts for tier in offline.tiers] == [tier.parts for tier in online.tiers]
    assert [tier.predicted_peak for tier in offline.tiers] == [tier.predicted_peak for tier in online.tiers]
    return offline


@pytest.mark.parametrize("compute", ["aten", pytest.param("inductor", marks=needs_compiler)])
@pytest.mark.parametrize(
    ("make", "device_memory", "options"),
    [
        (mlp, "900KiB", {}),
        pytest.param(gpt, "1500KiB", {"recompute": True, "compute_dtype": torch.bfloat16}, marks=pytest.mark.long),
        pytest.param(gpt, "1500KiB", {"compute_dtype": torch.bfloat16}, marks=pytest.mark.long),
        pytest.param(llama, "1000KiB", {}, marks=pytest.mark.long),
    ],
)
def test_the_plan_is_the_one_that_the_model_itself_gets(
    make: Callable[[], tuple[nn.Module, Any]],
    device_memory: str,
    options: dict[str, Any],
    compute: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offline = check_plans_agree(make, device_memory, {"compute": compute, **options}, tmp_path, monkeypatch)
    assert offline.request is not None
    segments = [op for op in offline.request.candidates[0].ops if op.op == "zinf.run_segment.default"]
    assert bool(segments) == (compute == "inductor")


@pytest.mark.long
def test_tiles_are_those_that_the_model_itself_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = check_plans_agree(gpt, "1500KiB", {"compute": "aten"}, tmp_path, monkeypatch)
    assert any(item.tile_of is not None for item in plan.placements)


@needs_compiler
@pytest.mark.long
def test_a_deep_model_in_segments_is_planned_by_a_few_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = make_gpt(layers=7)
    options: dict[str, Any] = {"hardware": "laptop-16g", "device_memory": "2MiB", "compute": "inductor"}
    deep = zinf_compile.plan(model, (tokens(), tokens()), **options)
    assert "The 7 blocks of blocks are alike" in deep.notes[0]
    monkeypatch.setattr("zinf_compile.passes.capture.offline.deep.find_runs", lambda *_, **__: ())
    whole = zinf_compile.plan(model, (tokens(), tokens()), **options)
    assert deep.request is not None
    assert any(op.op == "zinf.run_segment.default" for op in deep.request.candidates[0].ops)
    assert deep.placements == whole.placements
    unnamed = [[replace(transfer, name="") for transfer in plan.transfers] for plan in (deep, whole)]
    assert unnamed[0] == unnamed[1]  # names of activations come from the graph
    assert deep.gathers == whole.gathers
    assert deep.spans == whole.spans
    assert deep.tiers == whole.tiers


def test_without_a_compiler_this_machine_is_planned_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinf_compile.driver.segmented.find_compiler", lambda: None)
    monkeypatch.setattr(offline, "_find_hardware", lambda *_: HARDWARE)
    plan = zinf_compile.plan(Layers(), torch.randn(8, 64), compute="inductor")
    assert "computes op by op: Inductor needs a C++ compiler" in plan.notes[0]
    elsewhere = zinf_compile.plan(Layers(), torch.randn(8, 64), hardware=HARDWARE, compute="inductor")
    assert elsewhere.notes == ()


@pytest.mark.long
def test_values_do_not_matter() -> None:
    model = make_gpt()
    inputs = {"tokens": tokens(), "targets": tokens()}
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    plan = zinf_compile.plan(model, inputs, hardware=HARDWARE)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(type(module).__dict__.get("weight") is None for module in model.modules())
    with FakeTensorMode():
        fake, fake_tokens = make_gpt(), (tokens(), tokens())
    assert zinf_compile.plan(fake, fake_tokens, hardware=HARDWARE) == plan
    with torch.device("meta"):
        meta, meta_tokens = make_gpt(), [tokens(), tokens()]
    assert zinf_compile.plan(meta, meta_tokens, hardware=HARDWARE) == plan


def test_budgets_not_stated_are_those_of_the_hardware() -> None:
    plan = zinf_compile.plan(Layers(), torch.randn(8, 64), hardware=HARDWARE, host_memory="3GiB")
    assert [tier.capacity for tier in plan.tiers] == [2**30, 3 * 2**30, 2**38]


def test_state_is_counted_as_the_optimizer_keeps_it() -> None:
    def state_nbytes(plan: PlanView) -> int:
        return sum(placement.optimizer_state_nbytes for placement in plan.placements)

    nbytes = sum(parameter.nbytes for parameter in Layers().parameters())
    x = torch.randn(8, 64)
    assert state_nbytes(zinf_compile.plan(Layers(), x, hardware=HARDWARE)) == 2 * nbytes
    assert state_nbytes(zinf_compile.plan(Layers(), x, hardware=HARDWARE, optimizer=torch.optim.SGD)) == 0


def test_a_model_that_runs_is_planned_for_the_state_of_adamw(tmp_path: Path) -> None:
    """It is planned before its optimizer is known; docs/limits.md says so."""
    model = Layers()
    options: dict[str, Any] = {"device_memory": "1MiB", "host_memory": "1MiB"}
    zinf_compile.optimize(model, nvme=tmp_path, **options)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
    (running,) = zinf_compile.report(model).plans
    zinf_compile.close(model)
    for make, is_same in ((torch.optim.AdamW, True), (torch.optim.SGD, False)):
        plan = zinf_compile.plan(Layers(), torch.ones(4, 64), hardware=HARDWARE, optimizer=make, **options)
        states = [[placement.optimizer_state_nbytes for placement in each.placements] for each in (running, plan)]
        assert (states[0] == states[1]) == is_same


def test_a_dynamic_plan_answers_for_other_batches() -> None:
    def peaks(plan: PlanView) -> list[int]:
        return [tier.predicted_peak for tier in plan.tiers]

    dynamic = zinf_compile.plan(make_gpt(), (tokens(), tokens()), hardware=HARDWARE, dynamic=True)
    larger = zinf_compile.plan(make_gpt(), (tokens(8), tokens(8)), hardware=HARDWARE)
    assert peaks(dynamic.what_if(batch=8)) == peaks(larger)


def test_a_tensor_passed_twice_is_one_input() -> None:
    once = tokens()
    plan = zinf_compile.plan(make_gpt(), (once, once), hardware=HARDWARE)
    assert plan.num_ticks == zinf_compile.plan(make_gpt(), (tokens(), tokens()), hardware=HARDWARE).num_ticks - 1


def test_ranks_keep_shards_of_what_one_keeps_in_full() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    options = {"hardware": "dgx2", "device_memory": "30MiB", "update_on": "host"}
    plans = [zinf_compile.plan(model, torch.zeros(2, 1024), **options, world=ranks) for ranks in (1, 16)]
    assert [plan.num_ranks for plan in plans] == [1, 16]
    pairs = zip(*(plan.placements for plan in plans), strict=True)
    streamed = [pair for pair in pairs if {placement.compute for placement in pair} == {Tier.HOST}]
    assert streamed
    for alone, shard in streamed:
        assert alone.nbytes_on(Tier.HOST) == 16 * shard.nbytes_on(Tier.HOST) > 0


def test_replicas_keep_what_their_ranks_do_and_count_the_seconds_between_them() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    options = {"hardware": "dgx2", "device_memory": "40MiB", "update_on": "host"}
    plans = [
        zinf_compile.plan(model, torch.zeros(2, 1024), **options, world=64, replicas=4, reduce=reduce)
        for reduce in ("ordered", "fast")
    ]
    shard = 4 * 1024 * 1024 // 16
    # Three hops and two rounds back; in a ring of four, three quarters there and three quarters back.
    for plan, passes in zip(plans, (5, 1.5), strict=True):
        assert (plan.num_ranks, plan.num_replicas, plan.hardware.num_nodes) == (16, 4, 4)
        assert [item.gradient_nbytes for item in plan.placements] == [shard] * 4
        timeline = simulate(plan.plan)
        between = [event for event in timeline.events if event.lane == NODE_LINKS]
        assert [event.nbytes for event in between] == [passes * shard] * 4
        assert [event.seconds for event in between] == pytest.approx([passes * shard * 16 / 100e9] * 4)
        assert timeline.step_seconds > simulate(replace(plan.plan, num_replicas=1)).step_seconds
        assert f"{format_bytes(int(passes * shard))} node links in" in plan.explain("0.weight")
        assert not any("replica" in note for note in plan.notes)


def test_data_parallel_ranks_keep_everything() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    alone, parallel = (
        zinf_compile.plan(model, torch.zeros(2, 64), hardware="dgx2", world=ranks, replicas=ranks) for ranks in (1, 8)
    )
    assert (parallel.num_ranks, parallel.num_replicas) == (1, 8)
    assert parallel.placements == alone.placements
    moved = [event for event in simulate(parallel.plan).events if event.lane == DEVICE_LINKS]
    assert [event.nbytes for event in moved] == [(7 + 3) * 4 * 64 * 64] * 2  # seven hops, and three rounds back


@pytest.mark.parametrize(
    ("world", "replicas", "message"),
    [
        (16, 3, "16 ranks do not make 3 replicas of equally many ranks; give a number of replicas that divides 16"),
        (16, 0, "a world of 0 replicas is none"),
        (48, 4, "4 replicas of 12 ranks each are spread unevenly over nodes of dgx2"),
    ],
)
def test_a_world_and_replicas_have_to_fit(world: int, replicas: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zinf_compile.plan(nn.Linear(4, 4), torch.zeros(2, 4), hardware="dgx2", world=world, replicas=replicas)


def test_a_preset_by_its_name() -> None:
    with torch.device("meta"):  # the context in which the model may be built
        plan = zinf_compile.plan(Layers(), torch.randn(8, 64), hardware="h200")
    assert plan.hardware.name == "h200"
    (note,) = plan.notes
    assert re.match(
        r"131\.3\d GiB of the device stay unused: master copies and gradients, 97\.5 KiB, live in host", note
    )


def test_a_loss_is_planned_with_the_forward() -> None:
    x = torch.randn(8, 64)
    without = zinf_compile.plan(Layers(), x, hardware=HARDWARE)
    with_loss = zinf_compile.plan(Layers(), x, hardware=HARDWARE, loss=lambda y: y.square().mean())
    assert len(with_loss.schedule.ticks(Phase.FORWARD)) > len(without.schedule.ticks(Phase.FORWARD))
    assert {use.parameter for use in with_loss.uses} == {use.parameter for use in without.uses}


def test_what_a_loss_outside_of_the_graph_holds_is_counted() -> None:
    """Four copies of the result, less the kernels' workspace, which is free at that time."""
    wide, x = nn.Linear(8, 2**16, bias=False), torch.zeros(16, 8)
    parts = dict(zinf_compile.plan(wide, x, hardware=HARDWARE).tier(Tier.DEVICE).parts)
    result, parameter = 16 * 2**16 * 4, 8 * 2**16 * 4
    inside = parts["activations"] + parts["workspace"]
    assert parts["workspace"] == parameter
    assert inside + parts["loss outside"] == result + 4 * result + 4 * result // 64
    computed_inside = zinf_compile.plan(wide, x, hardware=HARDWARE, loss=lambda y: y.square().mean())
    assert "loss outside" not in dict(computed_inside.tier(Tier.DEVICE).parts)


def test_a_forward_alone() -> None:
    plan = zinf_compile.plan(Layers().requires_grad_(False), torch.randn(8, 64), hardware=HARDWARE, train=False)
    assert not plan.schedule.is_training
    assert plan.sinks == ()


def test_notes_describe_the_other_graphs() -> None:
    def between(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    plan = zinf_compile.plan(Layers(between), torch.randn(8, 64), hardware=HARDWARE)
    assert {sink.name for sink in plan.sinks} == {
        f"{name}.{kind}" for name in ("second", "third") for kind in ("weight", "bias")
    }
    (note,) = plan.notes
    assert note.startswith("Layers graph 0 is planned by itself")
    assert f"{__file__}:" in note


def test_what_depends_on_values_is_told_with_its_line() -> None:
    def between(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    plan = zinf_compile.plan(Layers(between), torch.randn(8, 64), hardware=HARDWARE)
    assert {use.parameter for use in plan.uses} == {"first.weight", "first.bias"}
    line = between.__code__.co_firstlineno + 1
    assert f"What follows could not be planned, since it depends on values: {__file__}:{line}" in plan.notes[-1]


class DependsOnValues(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x.sum() > 0 else self.second(x)


class WrongShapes(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x.view(7, -1))


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (
            Layers(),
            {"device_memory": "2GiB"},
            ConfigError,
            r"is 2\.00 GiB, and one device of paper has 1\.00 GiB; lower",
        ),
        (Layers(), {"reserve_memory": "1GiB"}, ConfigError, r"reserve_memory is 1\.00 GiB, .* is 1\.00 GiB; lower"),
        (Layers(), {"device_memroy": 1}, ConfigError, "did you mean 'device_memory'"),
        (Layers(), {"nvme": "/disk"}, ConfigError, "nvme='/disk' is a folder of this machine, and hardware says"),
        (Layers(), {"loss": lambda y: y}, ConfigError, r"loss returned a tensor float32\[8, 64\]; it has to return"),
        (Layers(), {"loss": lambda y: 3.0}, ConfigError, "loss returned a float"),
        (Layers(), {"device_memory": "4KiB"}, CapacityError, "raise device_memory to 1MiB"),
        (Layers().requires_grad_(False), {}, UnsupportedError, "no training step to plan; say train=False"),
        (DependsOnValues(), {}, UnsupportedError, rf"before any parameter is read .*{__file__}:\d+"),
        (WrongShapes(), {}, UnsupportedError, r"test_offline.py:\d+ it raises .*shape '\[7, -1\]' is invalid"),
        (F.relu, {}, ConfigError, "plan takes a torch.nn.Module, not function"),
    ],
)
def test_refusals(model: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zinf_compile.plan(model, torch.randn(8, 64), hardware=HARDWARE, **options)


def test_contradictions_with_the_hardware() -> None:
    x = torch.randn(8, 64)
    small = replace(HARDWARE, tiers=HARDWARE.tiers[:2])
    with pytest.raises(ConfigError, match=r"nvme_memory is 1\.00 GiB, and one device of paper has no nvme tier"):
        zinf_compile.plan(Layers(), x, hardware=small, nvme_memory="1GiB")
    with pytest.raises(ConfigError, match="does not say how much memory a device has; give device_memory"):
        zinf_compile.plan(Layers(), x, hardware=replace(HARDWARE, tiers=()))
    with pytest.raises(ConfigError, match="inputs is an int; give what the model is called with"):
        zinf_compile.plan(Layers(), 3, hardware=HARDWARE)


def test_an_optimized_model_is_refused(tmp_path: Path) -> None:
    model = zinf_compile.optimize(Layers(), device_memory=MIB, host_memory=MIB, nvme=tmp_path)
    with pytest.raises(ConfigError, match="was optimized already"):
        zinf_compile.plan(model, torch.randn(8, 64), hardware=HARDWARE)
    zinf_compile.close(model)


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.up(x))


class LanguageModel(torch.nn.Module):
    def __init__(self, vocabulary: int, num_layers: int, width: int = 256) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.layers = torch.nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_blocks_behind_which_nothing_follows_are_alike() -> None:
    """The incoming gradient of backward belongs to no block, although the placeholders before it do."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(7)))
    made = zinf_compile.plan(model, torch.empty(2, 64), hardware=HARDWARE, device_memory="64KiB")
    assert "The 7 blocks of the model are alike" in made.notes[0]


def test_parameters_larger_than_the_device_are_planned_by_tiles() -> None:
    """The embedding is 256 MiB. The repeated blocks are captured only in part, and have no tiles."""
    with torch.device("meta"):
        model = LanguageModel(2**18, 7)
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    made = zinf_compile.plan(model, tokens, hardware="laptop-16g", device_memory="250MiB")
    assert made.tier(Tier.DEVICE).predicted_peak <= 250 * 2**20
    tiled = [placement for placement in made.placements if placement.tile_of is not None]
    assert {placement.tile_of for placement in tiled} == {"embed.weight", "head.weight"}
    assert sum(placement.compute_nbytes for placement in tiled) == 2 * 2**28
    assert any("embed.weight is gathered in" in note for note in made.notes)
    assert any("blocks of layers are alike" in note for note in made.notes)  # though no module has the loss
    with pytest.raises(CapacityError, match=r"needs .* on device"):
        zinf_compile.plan(model, tokens, hardware="laptop-16g", device_memory="250MiB", tiles=False)


@pytest.mark.long
def test_what_runs_by_tiles_is_planned_by_the_same_tiles(tmp_path: Path) -> None:
    options = {"device_memory": "4MiB", "tile_memory": "1MiB"}
    model, tokens = LanguageModel(4096, 6), torch.zeros(1, 64, dtype=torch.int64)
    made = zinf_compile.plan(model, tokens, hardware="laptop-16g", **options)
    zinf_compile.optimize(model, host_memory="96MiB", **options)
    model(tokens)
    (ran,) = zinf_compile.report(model).plans
    zinf_compile.close(model)
    sizes = [[(item.parameter, item.compute_nbytes) for item in plan.placements] for plan in (made, ran)]
    assert sizes[0] == sizes[1]
    assert sum(item.tile_of is not None for item in made.placements) >= 8


@pytest.mark.long
def test_tiles_do_not_keep_a_plan_from_being_asked_about_other_batches() -> None:
    model, tokens = LanguageModel(4096, 1), torch.zeros(2, 64, dtype=torch.int64)
    options = {"hardware": "laptop-16g", "device_memory": "14MiB"}
    plans = [zinf_compile.plan(model, tokens, dynamic=dynamic, **options) for dynamic in (False, True)]
    tiles = [[item.parameter for item in plan.placements if item.tile_of is not None] for plan in plans]
    assert tiles[0] == tiles[1]
    assert len(tiles[0]) >= 4
    dynamic = plans[1]
    assert dynamic.what_if(batch=1).tier(Tier.DEVICE).predicted_peak <= 14 * 2**20
    assert dynamic.max_batch() >= 2


@pytest.mark.long
def test_logits_are_recomputed_where_the_gradients_of_one_pass_do_not_fit() -> None:
    model, tokens = LanguageModel(32768, 1), torch.zeros(4, 1024, dtype=torch.int64)  # logits of 512 MiB

    def notes(device_memory: str) -> str:
        return "".join(zinf_compile.plan(model, tokens, hardware="laptop-16g", device_memory=device_memory).notes)

    assert notes("4GiB") == ""
    one_pass, recomputed = notes("160MiB"), notes("120MiB")
    assert "logits never exist whole: " in one_pass
    assert "logits never exist whole and are recomputed in backward: " in recomputed
    assert "tiles" not in one_pass + recomputed


def test_the_choice_of_tiles_that_fits_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By some policies before the choices are compared, by the others after that, and then in segments."""
    with torch.device("meta"):
        model = LanguageModel(64, 6, width=1024)
    searched: list[tuple[GraphFacts, tuple[Transfer, ...], int]] = []

    def search(request: Request, graph: GraphFacts, swaps: tuple[Transfer, ...], groundwork: Groundwork) -> Front:
        front = search_front(request, graph, swaps, groundwork)
        if front.best is not None:
            searched.append((graph, swaps, request.config.host_memory))
        return front

    monkeypatch.setattr(planner, "search_front", search)
    zinf_compile.plan(model, tokens(), hardware="laptop-16g", device_memory="12MiB")
    assert len(searched) > 3
    assert len({(id(graph), *others) for graph, *others in searched}) == len(searched)


@pytest.mark.long
def test_what_few_blocks_do_not_fit_is_refused_before_the_whole_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = LanguageModel(64, 6, width=1024)
    asked: list[Request] = []
    monkeypatch.setattr(planning, "make_plan", lambda request, _: asked.append(request) or make_plan(request))
    plan = zinf_compile.plan(model, tokens(), hardware="laptop-16g", device_memory="12MiB")
    assert {item.tile_of for item in plan.placements} >= {f"layers.{block}.up.weight" for block in range(6)}
    assert len(asked) <= 3, "only the tiling that fits, the next finer one, and the better of the two in full"


@pytest.mark.long
def test_a_deep_model_that_nothing_helps_is_told_the_bytes_of_all_its_blocks() -> None:
    model, given = LanguageModel(64, 8), torch.zeros(8, 64, dtype=torch.int64)
    options = {"hardware": "laptop-16g", "host_memory": "64MiB", "nvme_memory": "1MiB", "recompute": False}
    with pytest.raises(CapacityError) as refused:
        zinf_compile.plan(model, given, device_memory="64KiB", **options)
    needed = int(re.findall(r"raise device_memory to (\d+)MiB", str(refused.value))[0])
    assert zinf_compile.plan(model, given, device_memory=f"{needed}MiB", **options)
    with pytest.raises(CapacityError, match=f"raise device_memory to {needed}MiB"):
        zinf_compile.plan(model, given, device_memory=f"{needed - 1}MiB", **options)


def test_a_gpu_that_computes_in_host_memory_is_planned_as_one_pool() -> None:
    """As a GB10 does: no copy crosses a link, so that masters and gradients reside too, and updates need no buffers."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    shared = replace(load_hardware("rtx4090"), unified=True)
    plan = zinf_compile.plan(model, torch.empty(16, 256, device="meta"), hardware=shared, device_memory=16 * MIB)
    assert {placement.master for placement in plan.placements} == {Tier.DEVICE}
    assert all(placement.master_nbytes == 0 for placement in plan.placements), "the compute copy is the master copy"
    assert plan.step.device_share == 0.0
    with pytest.raises(ConfigError, match="update_on='device' needs a device with memory of its own"):
        zinf_compile.plan(model, torch.empty(16, 256, device="meta"), hardware=shared, update_on="device")


def test_on_a_gpu_updates_begin_ahead_of_the_step_while_the_link_rests() -> None:
    """Where the step is shorter for it, and the states have no room on the GPU: shadows then are in host memory."""

    def plan_of(device_memory: int = 760, **options: Any) -> Plan:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
        given = {"hardware": "h200", "device_memory": device_memory * MIB, "host_memory": "4GiB", "compute": "inductor"}
        return zinf_compile.plan(model, torch.empty(8192, 2048, device="meta"), **{**given, **options}).plan

    plan, never = plan_of(), plan_of(speculate=False)
    assert never.step.ahead == ()
    assert 0 < never.step.device_share < 1
    assert simulate(plan).step_seconds < 0.9 * simulate(never).step_seconds
    assert plan.step.device_share == 0, "what is not ahead is the host's"
    homes = [plan.placement(name) for name in plan.step.ahead]
    assert not any(home.has_device_state or home.nbytes_on(Tier.NVME) for home in homes)
    shadows = plan.tier(Tier.HOST).nbytes_of(TierPart.SHADOWS)
    assert shadows == sum(home.shadow_nbytes for home in homes) > 0
    moved = sum(home.update_nbytes_to_device + home.reloaded_nbytes(Tier.HOST) for home in homes)
    assert plan.device_updates.nbytes_in == moved
    verify_plan(plan)
    lie = replace(plan, step=replace(plan.step, ahead=plan.step.ahead[1:]))
    with pytest.raises(VerifyError, match="host: part 'shadows' says"):
        verify_plan(lie)

    assert plan_of(speculate=True, update_on="device").step.device_share == 1.0, "results are to be the GPU's"
    on_host = plan_of(speculate=True, update_on="host")
    assert (on_host.step.ahead, on_host.step.device_share) == ((), 0.0)
    assert plan_of(device_memory=4000).step.ahead == (), "states fit"

    bare = replace(never, step=replace(never.step, device_share=0.5))
    full = tuple(
        replace(tier, capacity=tier.predicted_peak + 4096) if tier.tier is Tier.HOST else tier for tier in bare.tiers
    )
    asked = make_config({"device": "cuda", "device_memory": 760 * MIB, "host_memory": "4GiB", "speculate": True})
    with pytest.raises(
        CapacityError, match=r"of host memory, and host_memory leaves .*; raise it to \d+MiB, or say speculate='auto'"
    ):
        updates_to_compare(replace(bare, tiers=full), asked)


def test_on_a_gpu_compute_copies_and_state_reside_and_updates_take_room() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    on_gpu = {"hardware": "rtx4090", "device_memory": 16 * MIB}
    plan = zinf_compile.plan(model, torch.empty(16, 256, device="meta"), **on_gpu)
    assert {placement.compute for placement in plan.placements} == {Tier.DEVICE}
    for placement in plan.placements:
        assert {placement.master, placement.gradient} == {Tier.HOST}, "users see these"
        assert placement.optimizer_state is Tier.DEVICE
        assert placement.master_nbytes == placement.compute_nbytes
    parts = dict(plan.tier(Tier.DEVICE).parts)
    assert parts["leaving"] == 2 * 256 * 256 * 4
    assert parts["updates"] > 0
    assert plan.step.device_share == 1.0
    assert "of the device stay unused" in plan.notes[0]
    assert "100% of the elements updated on the device" in str(plan)
    on_host = zinf_compile.plan(model, torch.empty(16, 256, device="meta"), **on_gpu, update_on="host")
    assert "updates" not in dict(on_host.tier(Tier.DEVICE).parts)
    assert on_host.step.device_share == 0.0
    assert on_host.notes == (), "host was requested"
    assert {placement.optimizer_state for placement in on_host.placements} == {Tier.HOST}
    tight = zinf_compile.plan(model, torch.empty(16, 256, device="meta"), **{**on_gpu, "device_memory": 2 * MIB})
    assert Tier.HOST in {placement.optimizer_state for placement in tight.placements}, "not all states fit"
    assert tight.notes == ()
