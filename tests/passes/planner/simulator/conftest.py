"""Plans for simulation: the hand-made ones of the folder above, and random ones."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from tests.support.hand_made_plans import make_sink, make_swap
from tests.support.planner_inputs import make_parameter
from zinf_compile.ir.copies import Role
from zinf_compile.ir.facts import UseFact
from zinf_compile.ir.glossary import ActivationPolicy, LiveRange, Phase, StepTiming, Tier
from zinf_compile.ir.hardware import Hardware, Rate, make_route
from zinf_compile.ir.plan import (
    PLAN_VERSION,
    ActivationPlan,
    BoundValue,
    ComputeSpan,
    Plan,
    StepPlan,
    TierPart,
    TierPlan,
)
from zinf_compile.ir.schedule import Schedule
from zinf_compile.ir.transfers import Moved, Transfer, order_transfers
from zinf_compile.passes.planner.placement.homes import make_placement

ROUTES = tuple((source, destination) for source in Tier for destination in Tier if source is not destination)


def make_random_plan(
    seed: int, timing: StepTiming, *, is_duplex: bool = False, world: tuple[int, int] = (1, 1)
) -> Plan:
    """Return a plan that need not be verified, only be simulated: random homes, ticks, bytes and rates.

    ``world`` is the number of ranks that divide the model, and of their replicas. Two ranks share a node.
    """
    random, (num_ranks, num_replicas) = Random(seed), world
    num_forward = random.randint(3, 20)
    num_ticks = num_forward + random.randint(3, 30)
    placements, uses, transfers, sinks = [], [], [], []
    device_share = random.choice((0.0, 0.5, 1.0))
    is_in_place = device_share > 0 and num_ranks == 1 and random.random() < 0.5  # updates in host memory, as on a GB10
    for index in range(random.randint(1, 8)):
        name, home, rest = f"layers.{index}.weight", random.choice(list(Tier)), random.choice((Tier.HOST, Tier.NVME))
        nbytes, is_trainable = 2 * random.randint(1, 250), random.random() < 0.8
        placed = make_placement(
            make_parameter(name, nbytes // 2, compute_dtype="bfloat16", trainable=is_trainable),
            dict.fromkeys(Role, rest) | {Role.COMPUTE: home},
        )
        placements.append(replace(placed, in_place=is_in_place))
        ticks = []
        for start, end in ((0, num_forward), (num_forward, num_ticks)):
            issue, need_by = sorted(random.choices(range(start, end), k=2))
            ticks.append(need_by)
            if home is not Tier.DEVICE:
                transfers.append(
                    Transfer(
                        what=Moved.PARAMETERS,
                        name=f"layers.{index}",
                        parameters=(name,),
                        source=home,
                        destination=Tier.DEVICE,
                        offsets=(0,),
                        nbytes=nbytes,
                        issue=issue,
                        need_by=need_by,
                        launch=random.randint(issue, need_by) if num_ranks > 1 else None,
                        release=random.randint(need_by + 1, end),
                    )
                )
        uses.append(UseFact(parameter=name, dtype="bfloat16", ticks=tuple(ticks)))
        if is_trainable:
            taken = timing is StepTiming.IN_BACKWARD and rest is Tier.NVME
            destination = Tier.HOST if taken else rest
            tick = random.randint(ticks[-1], num_ticks - 1)
            sinks.append(make_sink(name, tick, destination, nbytes, end=num_ticks))
    swaps = []
    for index in range(random.randint(0, 3)):
        out, gone = sorted(random.sample(range(num_forward), 2))
        issue, need_by = sorted(random.choices(range(num_forward, num_ticks), k=2))
        swaps.append(
            make_swap(
                f"gelu_{index}",
                random.choice((Tier.HOST, Tier.NVME)),
                random.randint(1, 500),
                out=out,
                gone=gone,
                issue=issue,
                need_by=need_by,
                release=random.randint(need_by + 1, num_ticks),
            )
        )
    bound = []
    for index in range(random.randint(0, 4)):
        start, end = sorted(random.sample(range(num_ticks + 1), 2))
        bound.append(BoundValue(name=f"mm_{index}", offset=0, nbytes=64, live=LiveRange(start=start, end=end)))
    cuts = sorted({0, num_forward, num_ticks, *random.choices(range(num_ticks), k=6)})
    spans = tuple(
        ComputeSpan(
            module=f"module_{start}",
            phase=Phase.FORWARD if start < num_forward else Phase.BACKWARD,
            start=start,
            end=end,
            seconds=random.choice((0.0, random.uniform(0, 10))),
            peak_nbytes=random.randint(0, 100),
        )
        for start, end in pairwise(cuts)
    )
    peak = max(spans, key=lambda span: span.peak_nbytes)
    trained = [placement for placement in placements if placement.gradient_nbytes]
    taken = random.choice((0.0, 0.3, 1.0))
    plan = Plan(
        version=PLAN_VERSION,
        name="random",
        compute_dtype="bfloat16",
        hardware=Hardware(
            name="random",
            unified=True,
            flops=(Rate(name="bfloat16", per_second=1e12),),
            memory_bytes_per_second=1000.0,
            routes=tuple(
                make_route(
                    *pair,
                    random.uniform(20, 200),
                    latency_seconds=random.choice((0.0, 0.5)),
                    is_duplex=is_duplex,
                    takes_of_compute=taken,
                )
                for pair in ROUTES
            ),
            optimizer_elements_per_second=100.0,
            updates_take_of_compute=random.choice((0.0, 1.0)),
            devices_per_node=2,
            num_nodes=max(1, num_ranks * num_replicas // 2),
            device_link_bytes_per_second=random.uniform(20, 200),
            node_link_bytes_per_second=random.uniform(20, 200),
        ),
        schedule=Schedule.of_one_graph(num_forward, num_ticks),
        placements=tuple(placements),
        uses=tuple(uses),
        transfers=order_transfers(
            (
                *sorted(transfers, key=lambda item: item.need_by),
                *(transfer for swap in swaps for transfer in swap),
                *sinks,
            )
        ),
        bound=tuple(sorted(bound, key=lambda value: value.live.start)),
        spans=spans,
        activations=ActivationPlan(
            policy=ActivationPolicy.SAVE, saved_nbytes=0, peak_nbytes=peak.peak_nbytes, peak_tick=peak.start
        ),
        arena_nbytes=10**5,
        prefetch_nbytes=0,
        step=StepPlan(
            timing=timing,
            chunk_elements=100,
            num_chunks=sum(placement.nbytes_on(Tier.NVME) > 0 for placement in trained),
            staging_nbytes=100,
            nbytes_read=sum(placement.update_nbytes_read for placement in trained),
            nbytes_written=sum(placement.update_nbytes_written for placement in trained),
            num_elements=sum(placement.gradient_nbytes // 2 for placement in trained),
            device_share=device_share,
        ),
        tiers=(),
        num_ranks=num_ranks,
        num_replicas=num_replicas,
        is_reduced_in_order=seed % 2 == 0,
    )
    return replace(plan, tiers=tuple(_make_tier(plan, tier) for tier in Tier))


def _make_tier(plan: Plan, tier: Tier) -> TierPlan:
    homes = sum(placement.nbytes_on(tier) for placement in plan.placements)
    parts = [(TierPart.HOMES, homes), (TierPart.STAGING, 100), (TierPart.SWAPPED, plan.swapped_nbytes(tier))]
    if tier is Tier.DEVICE:
        activations = plan.activations.peak_nbytes
        parts = [
            (TierPart.RESIDENTS, homes),
            (TierPart.ARENA, plan.arena_nbytes),
            (TierPart.ACTIVATIONS, activations),
            (TierPart.WORKSPACE, 7),
        ]
    total = sum(nbytes for _, nbytes in parts)
    return TierPlan(tier=tier, capacity=None, predicted_peak=total, parts=tuple(parts))


@pytest.fixture(scope="session")
def random_plan() -> Callable[..., Plan]:
    """Return the function that makes a plan of a seed."""
    return make_random_plan
