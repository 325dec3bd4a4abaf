"""Plans of many ranks: shards in homes, full values in the arena, and the largest models on the papers' nodes."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.oracles.closed_forms import PARAMETERS, RANKS, ZERO_NBYTES, ZeroStage
from tests.support.hand_made_plans import with_transfers
from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.ir.config import Config
from zinf_compile.ir.errors import CapacityError, VerifyError
from zinf_compile.ir.facts import GradientFact, GraphFacts, ParameterFact, ValueFact
from zinf_compile.ir.glossary import ActivationPolicy, LiveRange, Tier
from zinf_compile.ir.plan import Plan, TierPart
from zinf_compile.passes.planner.search.planner import Request, does_fit, make_plan, minimum_device_memory
from zinf_compile.passes.planner.search.verify import verify_plan
from zinf_compile.passes.planner.simulator.simulate import simulate
from zinf_compile.passes.planner.simulator.summary import measure_links

DGX2 = load_hardware("dgx2")
SIZES = {tier.tier: tier.nbytes for tier in DGX2.tiers}
SEQUENCE = 1024
BLOCK = {"qkv": 3, "out": 1, "up": 4, "down": 4}  # of hidden**2


def with_ranks(request: Request, num_ranks: int, num_replicas: int = 1) -> Request:
    """Return the request for many ranks, on the hand-made hardware with links."""
    linked = replace(
        request.hardware,
        devices_per_node=4,
        device_link_bytes_per_second=20e9,
        node_link_bytes_per_second=10e9,
    )
    hardware = linked.with_world(num_ranks, num_replicas)
    return replace(request, hardware=hardware, num_ranks=num_ranks, num_replicas=num_replicas)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_plans_of_ranks_are_proved_and_within_budgets(
    request_of: Callable[..., Request], seed: int, num_ranks: int
) -> None:
    request = with_ranks(request_of(seed, device=12 * 2**20, host=2**23), num_ranks)
    plan = make_plan(request)
    verify_plan(plan)
    assert plan.num_ranks == num_ranks
    assert sum(seconds for _, seconds in simulate(plan).phase_seconds) > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(1, 4), (2, 2), (4, 2)])
@pytest.mark.parametrize("reduce", ["ordered", "fast"])
def test_plans_of_replicas_are_proved_and_count_the_seconds_between_them(
    request_of: Callable[..., Request], seed: int, num_ranks: int, num_replicas: int, reduce: str
) -> None:
    request = with_ranks(request_of(seed, device=12 * 2**20, host=2**23), num_ranks, num_replicas)
    plan = make_plan(replace(request, config=replace(request.config, reduce=reduce)))
    verify_plan(plan)
    assert (plan.num_ranks, plan.num_replicas, plan.mesh_size) == (num_ranks, num_replicas, num_ranks * num_replicas)
    assert plan.is_reduced_in_order == (reduce == "ordered")
    assert plan.sinks
    alone = replace(plan, num_replicas=1)
    assert measure_links(simulate(plan)).seconds > measure_links(simulate(alone)).seconds
    assert simulate(plan).step_seconds >= simulate(alone).step_seconds


@pytest.mark.parametrize("seed", range(8))
def test_with_more_ranks_each_keeps_less(request_of: Callable[..., Request], seed: int) -> None:
    plans = [make_plan(with_ranks(request_of(seed, device=12 * 2**20), ranks)) for ranks in (1, 2, 4, 8, 64)]
    homes = [sum(item.nbytes_on(Tier.HOST) + item.nbytes_on(Tier.NVME) for item in plan.placements) for plan in plans]
    assert homes == sorted(homes, reverse=True)
    assert homes[-1] < homes[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_plans_of_replicas_have_room_for_reductions(
    parameter: Callable[..., ParameterFact], graph: Callable[..., GraphFacts], num_ranks: int
) -> None:
    request = make_transformer(parameter, graph, 2, 1024, num_ranks)
    alone, replicated = (make_plan(replace(request, num_replicas=number)) for number in (1, 2))
    largest = max(item.gradient_nbytes for item in request.parameters)
    assert replicated.tier(Tier.DEVICE).nbytes_of(TierPart.REDUCTIONS) == 2 * largest
    assert alone.tier(Tier.DEVICE).nbytes_of(TierPart.REDUCTIONS) == (0 if num_ranks == 1 else 2 * largest)


def test_an_arena_that_holds_only_shards_is_refused(
    parameter: Callable[..., ParameterFact], graph: Callable[..., GraphFacts]
) -> None:
    plan = streamed_plan(make_transformer(parameter, graph, 2, 1024, 4))
    transfer = max(plan.gathers, key=lambda item: item.nbytes)
    shard = replace(transfer, nbytes=transfer.nbytes // 4)
    cut = tuple(shard if item is transfer else item for item in plan.gathers)
    with pytest.raises(VerifyError, match="does not fit its transfer"):
        verify_plan(with_transfers(plan, gathers=cut))


def test_a_small_resident_is_replicated_and_its_states_are_not(
    parameter: Callable[..., ParameterFact], graph: Callable[..., GraphFacts]
) -> None:
    bias = parameter("bias", 1001, compute_dtype="bfloat16")
    facts = graph({"bias": [0, 3]}, num_forward_ticks=2, num_ticks=4, dtype="bfloat16")
    request = Request(
        name="bias",
        candidates=(facts,),
        parameters=(bias,),
        config=Config(device_memory=2**20, host_memory=2**20, nvme=None, nvme_memory=None, compute_dtype="bfloat16"),
        hardware=DGX2.with_world(16),
        num_ranks=16,
    )
    placement = make_plan(request).placements[0]
    shard = 63  # of 1001 elements on 16 ranks
    assert placement.compute is Tier.DEVICE
    assert (placement.compute_nbytes, placement.gradient_nbytes) == (2 * 1001, 2 * shard)
    assert (placement.master_nbytes, placement.optimizer_state_nbytes) == (4 * shard, 8 * shard)


def make_transformer(
    parameter: Callable[..., ParameterFact], graph: Callable[..., GraphFacts], layers: int, hidden: int, num_ranks: int
) -> Request:
    """Return a transformer of the paper on DGX-2 nodes: one sequence per device, a checkpoint before each block."""
    fp16 = "bfloat16"  # the two-byte dtype that ``parameter`` knows
    parameters, uses, gradients = [], {}, []
    forward = 4 * layers
    for layer in range(layers):
        for place, (name, factor) in enumerate(BLOCK.items()):
            full = f"blocks.{layer}.{name}"
            made = parameter(full, factor * hidden**2, block=f"blocks.{layer}", compute_dtype=fp16)
            again = forward + 8 * (layers - 1 - layer)  # backward: four recomputed ops, four gradients
            parameters.append(made)
            uses[full] = [4 * layer + place, again + place, again + 7 - place]
            gradients.append(GradientFact(parameter=full, tick=again + 7 - place, nbytes=made.gradient_nbytes))
    values = [
        *(
            ValueFact(
                name=f"checkpoint_{layer}",
                nbytes=2 * SEQUENCE * hidden,
                live=LiveRange(start=4 * layer, end=forward + 8 * (layers - layer)),
                saved=True,
            )
            for layer in range(layers)
        ),
        *(
            ValueFact(
                name=f"gradient_{item.parameter}",
                nbytes=item.nbytes,
                live=LiveRange(start=item.tick, end=item.tick + 1),
                saved=False,
            )
            for item in gradients
        ),
    ]
    facts = graph(
        uses,
        num_forward_ticks=forward,
        num_ticks=3 * forward,
        values=values,
        gradients=gradients,
        dtype=fp16,
        policy=ActivationPolicy.RECOMPUTE_BLOCKS,
    )
    return Request(
        name=f"{layers} x {hidden}",
        candidates=(facts,),
        parameters=tuple(parameters),
        config=Config(
            device_memory=SIZES[Tier.DEVICE],
            host_memory=SIZES[Tier.HOST],
            nvme="/disk",
            nvme_memory=SIZES[Tier.NVME],
            compute_dtype=fp16,
        ),
        hardware=DGX2.with_world(num_ranks),
        num_ranks=num_ranks,
    )


@pytest.mark.parametrize(
    ("layers", "hidden", "num_ranks", "fits"),
    [
        (128, 25600, 16, True),  # 1.01 T on one node, which is the paper's headline
        (128, 25600, 8, False),
        (195, 65536, 16, False),  # 10.05 T
        (195, 65536, 512, False),  # its largest layer, its gradient and room to compute with it are 3 x 32 GiB
    ],
)
def test_one_node_holds_a_trillion_parameters_and_not_ten(
    parameter: Callable[..., ParameterFact],
    graph: Callable[..., GraphFacts],
    layers: int,
    hidden: int,
    num_ranks: int,
    fits: bool,
) -> None:
    assert does_fit(make_transformer(parameter, graph, layers, hidden, num_ranks)) is fits


def test_a_layer_that_no_device_holds_is_told_with_numbers(
    parameter: Callable[..., ParameterFact], graph: Callable[..., GraphFacts]
) -> None:
    with pytest.raises(CapacityError, match=r"needs \d+\.\d+ GiB on device, device_memory is 32.00 GiB"):
        make_plan(make_transformer(parameter, graph, 8, 65536, 512))


@pytest.mark.parametrize("num_ranks", [16, 64, 512])
def test_a_rank_keeps_what_zero_says(
    parameter: Callable[..., ParameterFact], graph: Callable[..., GraphFacts], num_ranks: int
) -> None:
    request = make_transformer(parameter, graph, 12, 8192, num_ranks)
    # Just enough device memory for transient values, so that no large parameter is replicated.
    plan = streamed_plan(request)
    elements = sum(item.num_elements for item in request.parameters)
    zero = float(ZERO_NBYTES[ZeroStage.PARAMETERS].subs({PARAMETERS: elements, RANKS: num_ranks}))
    kept = sum(item.nbytes_on(tier) for item in plan.placements for tier in Tier)
    assert kept == pytest.approx(zero, rel=1e-6)


@pytest.mark.parametrize("room", [1.5, 2.0])
def test_links_that_are_as_busy_as_compute_are_hidden_behind_it(
    parameter: Callable[..., ParameterFact], graph: Callable[..., GraphFacts], room: float
) -> None:
    """Two gathers and a reduction of each parameter take as long as all of compute; an op takes a millisecond."""
    request = make_transformer(parameter, graph, 16, 1024, 4)
    rates = tuple(replace(rate, per_second=1e9) for rate in DGX2.flops)
    request = replace(request, hardware=replace(request.hardware, flops=rates, optimizer_elements_per_second=1e15))
    seconds = sum(span.seconds for span in make_plan(request).spans)
    nbytes = 3 * 2 * sum(item.num_elements for item in request.parameters)
    speed = nbytes * 3 / 4 / seconds  # a rank has a fourth of what it receives
    routes = tuple(
        route if Tier.NVME in route.name.split() else replace(route, bytes_per_second=1e12)
        for route in request.hardware.routes
    )
    balanced = replace(request.hardware, device_link_bytes_per_second=speed, routes=routes)
    request = replace(request, hardware=balanced)
    config = replace(request.config, device_memory=int(room * minimum_device_memory(request)))
    plan = make_plan(replace(request, config=config))
    timeline = simulate(plan)
    links = measure_links(timeline)
    assert len(plan.gathers) > 2 * 16  # it does stream
    assert links.seconds >= 0.95 * seconds
    assert 0 < links.exposed_seconds <= 0.15 * timeline.step_seconds


def test_planning_for_many_ranks_takes_no_longer(
    parameter: Callable[..., ParameterFact], graph: Callable[..., GraphFacts]
) -> None:
    """In seconds of this process on a processor, which others on the machine do not change much."""
    seconds = []
    for num_ranks in (1, 512):
        request = make_transformer(parameter, graph, 24, 4096, num_ranks)
        start = time.process_time()
        assert make_plan(request).num_ranks == num_ranks
        seconds.append(time.process_time() - start)
    assert seconds[1] < seconds[0] + 2.0


def streamed_plan(request: Request) -> Plan:
    """Return a plan with the least device memory."""
    config = replace(request.config, device_memory=minimum_device_memory(request))
    return make_plan(replace(request, config=config))
