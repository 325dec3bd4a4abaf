"""The planner is never worse than simple baselines: all parameters on one tier, activations kept or recomputed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zinf_compile
from benchmarks.oracles.baselines import Baseline, baseline_plans
from examples.gpt import GPT, GPTConfig
from tests.support.examples import examples
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.config import parse_size
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import ActivationPolicy, Tier
from zinf_compile.passes.planner.memory.recompute import policy_levels
from zinf_compile.passes.planner.search.planner import Request, make_plan, minimum_device_memory
from zinf_compile.passes.planner.search.search import EQUALLY_FAST, score_plan
from zinf_compile.passes.planner.search.verify import verify_plan
from zinf_compile.passes.planner.simulator.simulate import simulate

Function = Callable[..., Any]
MIB = 2**20


def with_options(request: Request, **options: object) -> Request:
    return replace(request, config=replace(request.config, **options))


def check_never_worse(request: Request) -> list[Baseline]:
    """Plan, assert that no baseline is better, and return the baselines that fit."""
    found = score_plan(make_plan(request))
    baselines = list(baseline_plans(request))
    for baseline in baselines:
        verify_plan(baseline.plan)
        score = score_plan(baseline.plan)
        message = f"{baseline.home}, {baseline.policy}: {score}, planned {found}"
        assert found.nanoseconds <= EQUALLY_FAST * score.nanoseconds, message
        assert found.nanoseconds < score.nanoseconds or found.nbytes_moved <= score.nbytes_moved, message
    return baselines


@pytest.mark.parametrize("overlap", [True, False])
@examples(60)
@given(
    seed=st.integers(0, 10**6),
    host=st.sampled_from((MIB, 4 * MIB, 16 * MIB, 64 * MIB)),
    share=st.floats(1, 8),
)
def test_on_random_models(request_of: Function, seed: int, host: int, share: float, *, overlap: bool) -> None:
    request = with_options(request_of(seed, host=host), overlap_step=overlap)
    check_never_worse(with_options(request, device_memory=int(minimum_device_memory(request) * share)))


def test_with_room_for_all_every_baseline_fits(request_of: Function) -> None:
    baselines = check_never_worse(request_of(1))
    policies = {graph.policy for graph in request_of(1).candidates}
    assert {(item.home, item.policy) for item in baselines} == {(home, policy) for home in Tier for policy in policies}


def test_without_nvme_nothing_is_on_it(request_of: Function) -> None:
    assert {item.home for item in baseline_plans(request_of(1, nvme=False))} == {Tier.DEVICE, Tier.HOST}


@pytest.mark.parametrize("share", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("host_memory", ["64MiB", "1MiB"])
def test_on_a_captured_gpt(gpt: Request, host_memory: str, share: float) -> None:
    request = with_options(gpt, host_memory=parse_size(host_memory, option="host_memory"))
    baselines = check_never_worse(with_options(request, device_memory=int(minimum_device_memory(request) * share)))
    if share == 3.0:
        homes = {Tier.NVME} if host_memory == "1MiB" else {Tier.NVME, Tier.HOST}
        assert {item.policy for item in baselines} == set(ActivationPolicy)
        assert {item.home for item in baselines} >= homes


def test_values_made_again_fit_where_saving_does_not_and_are_faster_than_blocks(gpt: Request) -> None:
    """If no other tier has room for activations, the planner recomputes single values: between saving and whole blocks."""
    without_disk = with_options(gpt, nvme=None, nvme_memory=None, host_memory=6 * MIB)
    alone = {graph.policy: replace(without_disk, candidates=(graph,), captured=()) for graph in gpt.candidates}
    smallest = {policy: minimum_device_memory(request) for policy, request in alone.items()}
    save, values, more, blocks = (smallest[policy] for policy in ActivationPolicy)
    assert blocks < more < values < save
    budget = {"device_memory": (values + save) // 2}
    with pytest.raises(CapacityError):
        make_plan(with_options(alone[ActivationPolicy.SAVE], **budget))
    plan = make_plan(with_options(without_disk, **budget))
    assert plan.activations.policy is ActivationPolicy.RECOMPUTE_VALUES
    assert plan.tier(Tier.DEVICE).predicted_peak <= budget["device_memory"]
    in_blocks = make_plan(with_options(alone[ActivationPolicy.RECOMPUTE_BLOCKS], **budget))
    assert simulate(plan).step_seconds < simulate(in_blocks).step_seconds
    again = next(value for value in plan.activations.recomputed if value.value.startswith("gelu"))
    view = PlanView(plan, with_options(without_disk, **budget))
    assert f"recomputed in backward, at tick {again.tick}" in view.explain(again.value)
    assert f"{len(plan.activations.recomputed)} values of" in str(view)


def test_what_was_decided_to_be_made_again_is_not_saved_and_nothing_else_is_in_its_place(gpt: Request) -> None:
    graphs = {graph.policy: graph for graph in gpt.candidates}
    levels = policy_levels(graphs[ActivationPolicy.SAVE], gpt.hardware)
    assert list(levels) == [ActivationPolicy.RECOMPUTE_VALUES, ActivationPolicy.RECOMPUTE_MORE]
    saved = {
        # The random state of attention, a few bytes, is saved under every policy.
        policy: {value.name for value in graph.values if value.saved and "rng_state" not in value.name}
        for policy, graph in graphs.items()
    }
    for policy, level in levels.items():
        assert level.values <= saved[ActivationPolicy.SAVE]
        assert saved[policy] <= saved[ActivationPolicy.SAVE] - level.values


@pytest.fixture(scope="module")
def gpt() -> Request:
    """Return the planning request of a small GPT, with a candidate for every policy."""
    model = GPT(GPTConfig(vocab_size=64, layers=4, hidden=64, heads=4, seq=32))
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    request = zinf_compile.plan(model, (tokens, tokens), hardware="laptop-16g").request
    assert isinstance(request, Request)
    return request
