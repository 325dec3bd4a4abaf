"""Properties of every plan, on random models: it verifies, it fits, and the remedy in an error message works."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zinf_compile.ir.config import Config, parse_size
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.facts import ValueFact
from zinf_compile.ir.glossary import ActivationPolicy, LiveRange, Tier
from zinf_compile.ir.hardware import Hardware, OpKind, OpRate, Rate, make_route
from zinf_compile.ir.plan import Plan, TierPart
from zinf_compile.passes.planner.cost.costs import op_seconds, seconds_expression
from zinf_compile.passes.planner.placement.budgets import check_budgets
from zinf_compile.passes.planner.placement.homes import plan_placement
from zinf_compile.passes.planner.schedule.spans import plan_spans
from zinf_compile.passes.planner.search.planner import (
    NEGLIGIBLE_STALLS,
    Request,
    lay_groundworks,
    make_plan,
    minimum_device_memory,
)
from zinf_compile.passes.planner.search.remake import with_open_forwards
from zinf_compile.passes.planner.search.search import EQUALLY_FAST, search_front
from zinf_compile.passes.planner.search.verify import verify_plan
from zinf_compile.passes.planner.simulator.simulate import simulate

Function = Callable[..., Any]
MIB = 2**20
seeds = st.integers(0, 10**6)
hosts = st.sampled_from((MIB, 4 * MIB, 64 * MIB))  # less than 1 MiB is too little for staging
few = examples(40)


def with_options(request: Request, **options: int | None) -> Request:
    return replace(request, config=replace(request.config, **options))


def with_share(request: Request, share: float) -> Request:
    """Return the request with ``share`` times the least device memory that it needs."""
    return with_options(request, device_memory=int(minimum_device_memory(request) * share))


@few
@given(seed=seeds, host=hosts, share=st.floats(1, 8))
def test_every_plan_holds_and_fits(request_of: Function, seed: int, host: int, share: float) -> None:
    request = with_share(request_of(seed, host=host), share)
    plan = make_plan(request)
    verify_plan(plan)
    for tier, capacity in ((Tier.DEVICE, request.config.device_memory), (Tier.HOST, request.config.host_memory)):
        assert plan.tier(tier).predicted_peak <= capacity
    assert plan.arena_nbytes >= max((item.offset + item.nbytes for item in plan.gathers), default=0)
    assert plan.placements == tuple(plan.placement(fact.name) for fact in request.parameters)


@few
@given(seed=seeds, share=st.floats(1, 4))
def test_plans_are_deterministic(request_of: Function, seed: int, share: float) -> None:
    request = with_share(request_of(seed, host=4 * MIB), share)
    first, second = make_plan(request), make_plan(with_share(request_of(seed, host=4 * MIB), share))
    assert first == second
    assert hash(first) == hash(second)
    assert str(first) == str(second)


@few
@given(seed=seeds, host=hosts)
def test_the_minimum_is_enough_and_less_is_not(request_of: Function, seed: int, host: int) -> None:
    request = request_of(seed, host=host)
    minimum = minimum_device_memory(request)
    make_plan(with_options(request, device_memory=minimum))
    with pytest.raises(CapacityError):
        make_plan(with_options(request, device_memory=minimum // 2))


@examples(24)  # each plans 16 times
@given(seed=seeds, host=hosts)
def test_more_device_memory_never_costs_time(request_of: Function, seed: int, host: int) -> None:
    request = request_of(seed, host=host)
    minimum = minimum_device_memory(request)
    requests = [with_options(request, device_memory=int(minimum * share)) for share in (1, 1.1, 1.3, 1.6, 2, 3, 5, 100)]
    seconds = [simulate(make_plan(each)).step_seconds for each in requests]
    # If activations stay because compute hardly waits, a smaller budget may have been faster by this little.
    least = seconds[0]
    for each in seconds:
        assert each * (1 - NEGLIGIBLE_STALLS) <= least * EQUALLY_FAST
        least = min(least, each)
    fitting = [each for each in _staying(requests) if each is not None]
    for index, each in enumerate(fitting):
        assert each <= EQUALLY_FAST * min(fitting[: index + 1])


def _staying(requests: Sequence[Request]) -> Iterator[int | None]:
    """Yield the simulated nanoseconds of each request without offloaded activations; None if that does not fit.

    The requests differ only in the device budget, so they share the start of planning.
    """
    groundworks = lay_groundworks(requests[0])
    for request in requests:
        graphs = zip(request.candidates, groundworks, strict=True)
        found = [
            best for graph, ground in graphs if (best := search_front(request, graph, (), ground).best) is not None
        ]
        yield min((best.score.nanoseconds for best in found), default=None)


@few
@given(seed=seeds)
def test_with_room_for_all_nothing_moves(request_of: Function, seed: int) -> None:
    plan = make_plan(request_of(seed))
    assert plan.gathers == ()
    assert {placement.compute for placement in plan.placements} == {Tier.DEVICE}


def find_error(plan: Callable[[Request], object], request: Request) -> str | None:
    """Return the error message; None if there is no error."""
    try:
        plan(request)
    except CapacityError as error:
        return str(error)
    return None


def adopt(request: Request) -> None:
    """Plan homes as ``optimize`` does before it has captured a graph."""
    check_budgets(request.parameters, plan_placement(request.parameters, request.config), request.config)


@pytest.mark.parametrize("plan", [adopt, make_plan])
@examples(120)
@given(
    seed=seeds,
    device=st.sampled_from((0, MIB // 4, MIB, 4 * MIB, 64 * MIB)),
    host=st.sampled_from((0, MIB // 4, MIB, 4 * MIB, 16 * MIB)),
    nvme_memory=st.sampled_from((None, 0, MIB, 16 * MIB)),
    nvme=st.booleans(),
)
def test_remedies_work(
    request_of: Function,
    plan: Callable[[Request], object],
    seed: int,
    device: int,
    host: int,
    nvme_memory: int | None,
    *,
    nvme: bool,
) -> None:
    request = with_options(request_of(seed, device=device, host=host, nvme=nvme), nvme_memory=nvme_memory)
    last = None
    for _ in range(8):
        error = find_error(plan, request)
        if error is None:
            return
        ((option, size),) = re.findall(r"raise (device_memory|host_memory|nvme_memory) to (\w+)", error)
        assert option != last, error  # one remedy fixes one budget; another one may be too small as well
        last = option
        request = with_options(request, **{option: parse_size(size, option=option)})
    pytest.fail("eight remedies in a row were not enough")


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("device_memory", {"device_memory": 0}),
        ("host_memory", {"host_memory": 0, "nvme": None}),
        ("nvme_memory", {"host_memory": 2 * MIB, "nvme_memory": 0}),
        ("host_memory", {"host_memory": 0}),  # staging for the step
    ],
    ids=["device", "host", "nvme", "staging"],
)
def test_the_named_budget_is_enough(parameter: Function, graph: Function, option: str, options: dict[str, Any]) -> None:
    parameters = tuple(parameter(f"layers.{index}.weight", 100_000) for index in range(4))
    facts = graph({item.name: [index + 1] for index, item in enumerate(parameters)}, num_forward_ticks=6, num_ticks=6)
    request = _make_request(parameters, facts, **options)
    with pytest.raises(CapacityError) as caught:
        make_plan(request)
    match = re.search(rf"raise {option} to (\w+)", str(caught.value))
    assert match is not None, caught.value
    verify_plan(make_plan(with_options(request, **{option: parse_size(match[1], option=option)})))


def _make_request(parameters: tuple[Any, ...], *graphs: Any, **options: Any) -> Request:
    budgets = {"device_memory": MIB, "host_memory": 64 * MIB, "nvme": "/disk", "nvme_memory": None, **options}
    return Request(
        name="model graph 0",
        candidates=graphs,
        parameters=parameters,
        config=Config(**budgets),
        hardware=_hardware(),
    )


def _hardware() -> Hardware:
    return Hardware(
        name="paper",
        unified=True,
        flops=(Rate(name="float32", per_second=1e9),),
        memory_bytes_per_second=1e9,
        routes=tuple(make_route(source, target, 1e8) for source in Tier for target in Tier),
        optimizer_elements_per_second=1e8,
    )


def test_a_graph_that_needs_exactly_the_budget_fits(graph: Function) -> None:
    facts = graph({}, num_forward_ticks=3, num_ticks=3)
    make_plan(_make_request((), facts, device_memory=0))


def test_of_two_policies_the_faster_plan_is_taken(parameter: Function, graph: Function) -> None:
    parameters = (parameter("up.weight", 100_000),)

    def candidate(policy: ActivationPolicy, nbytes: int, num_ticks: int) -> Any:
        value = ValueFact(name="x", nbytes=nbytes, live=LiveRange(start=1, end=num_ticks), saved=True)
        uses = {"up.weight": [1, num_ticks - 2]}
        return graph(uses, num_forward_ticks=4, num_ticks=num_ticks, values=[value], policy=policy)

    save = candidate(ActivationPolicy.SAVE, 8 * MIB, 8)
    recompute = candidate(ActivationPolicy.RECOMPUTE_BLOCKS, 1000, 40)  # more ticks: more compute
    for device_memory, policy in ((64 * MIB, ActivationPolicy.SAVE), (2 * MIB, ActivationPolicy.RECOMPUTE_BLOCKS)):
        plan = make_plan(_make_request(parameters, save, recompute, device_memory=device_memory))
        assert plan.activations.policy is policy


def test_the_homes_of_other_graphs_are_kept_where_they_fit(parameter: Function, graph: Function) -> None:
    parameters = tuple(parameter(f"layers.{index}.weight", 100_000) for index in range(4))
    facts = graph({item.name: [index + 1] for index, item in enumerate(parameters)}, num_forward_ticks=6, num_ticks=6)
    tight = make_plan(_make_request(parameters, facts, device_memory=MIB))
    wide = _make_request(parameters, facts, device_memory=64 * MIB)
    assert make_plan(replace(wide, placements=tight.placements)).placements == tight.placements
    assert make_plan(wide).placements != tight.placements
    moved = replace(_make_request(parameters, facts, device_memory=MIB), placements=make_plan(wide).placements)
    assert make_plan(moved).placements == tight.placements  # activations do not fit, so parameters are offloaded


def test_a_look_ahead_that_is_given_is_a_limit(parameter: Function, graph: Function) -> None:
    parameters = tuple(parameter(f"layers.{index}.weight", 100_000) for index in range(6))
    facts = graph({item.name: [index + 1] for index, item in enumerate(parameters)}, num_forward_ticks=8, num_ticks=8)
    for prefetch in (0, 500_000, 900_000):
        plan = make_plan(_make_request(parameters, facts, device_memory=2 * MIB, prefetch_memory=prefetch))
        assert plan.prefetch_nbytes in (0, prefetch)
        assert _most_ahead(plan) <= prefetch


def _most_ahead(plan: Plan) -> int:
    """Return the maximum over ticks of the bytes of transfers that are issued and needed later than that tick."""
    ticks = {transfer.issue for transfer in plan.gathers}
    return max(sum(item.nbytes for item in plan.gathers if item.issue <= tick < item.need_by) for tick in ticks)


def test_an_op_takes_the_longer_of_arithmetic_and_traffic(graph: Function) -> None:
    op = graph({}, num_forward_ticks=1, num_ticks=1).ops[0]
    hardware = _hardware()
    assert op_seconds(replace(op, num_flops=10**9, nbytes_accessed=0), hardware) == 1.0
    assert op_seconds(replace(op, num_flops=10**9, nbytes_accessed=3 * 10**9), hardware) == 3.0
    assert op_seconds(replace(op, num_flops=0, nbytes_accessed=0), hardware) == 0.0


def test_an_op_goes_at_the_rate_of_its_kind_and_dtype(graph: Function) -> None:
    op = replace(
        graph({}, num_forward_ticks=1, num_ticks=1).ops[0], dtype="float32", num_flops=0, nbytes_accessed=10**9
    )
    hardware = replace(
        _hardware(),
        attention_flops=(Rate(name="float32", per_second=1e8),),
        op_rates=(
            OpRate(kind=OpKind.TRANSCENDENTAL, dtype="float32", bytes_per_second=5e8),
            OpRate(kind=OpKind.TRANSCENDENTAL, dtype="bfloat16", bytes_per_second=2.5e8),
        ),
        op_overhead_seconds=0.5,
    )
    gelu = replace(op, op="aten.gelu.default")
    assert op_seconds(gelu, hardware) == 2.5
    assert op_seconds(replace(gelu, dtype="bfloat16"), hardware) == 4.5
    assert op_seconds(replace(gelu, dtype="float64"), hardware) == 4.5  # the slowest known rate
    assert op_seconds(replace(op, op="aten.mul.Tensor"), hardware) == 1.5  # that of memory copies: an unknown kind
    assert op_seconds(replace(op, op="aten.view.default", nbytes_accessed=0), hardware) == 0.5
    assert op_seconds(replace(op, op="tokens", nbytes_accessed=0), hardware) == 0.0  # a placeholder does not compute
    attention = replace(op, op="aten._scaled_dot_product_flash_attention_for_cpu.default", num_flops=10**9)
    assert op_seconds(attention, hardware) == 10.5


def test_launches_overlap_with_compute_on_a_device_of_its_own(graph: Function) -> None:
    op = replace(graph({}, num_forward_ticks=1, num_ticks=1).ops[0], op="aten.mm.default", nbytes_accessed=0)
    segment = replace(op, op="zinf.run_segment.default", num_flops=0, inner=(replace(op, num_flops=10**9),))
    on_cpu = replace(_hardware(), op_overhead_seconds=0.25)
    on_gpu = replace(on_cpu, unified=False)
    for num_flops, launched_first, beside in ((10**9, 1.25, 1.0), (10**8, 0.35, 0.25)):
        each = replace(op, num_flops=num_flops)
        for hardware, seconds in ((on_cpu, launched_first), (on_gpu, beside)):
            assert op_seconds(each, hardware) == pytest.approx(seconds)
            assert float(seconds_expression(each, hardware)) == pytest.approx(seconds)
    assert op_seconds(segment, on_cpu) == pytest.approx(1.5)
    assert op_seconds(segment, on_gpu) == pytest.approx(1.25)  # the segment's launch, and the product


def test_spans_cover_every_tick_and_split_at_backward(graph: Function) -> None:
    facts = graph({}, num_forward_ticks=6, num_ticks=10)  # modules change every four ticks
    spans = plan_spans(facts, _hardware())
    assert [(span.module, span.phase, span.start, span.end) for span in spans] == [
        ("layers.0", "forward", 0, 4),
        ("layers.1", "forward", 4, 6),
        ("layers.1", "backward", 6, 8),
        ("layers.2", "backward", 8, 10),
    ]
    assert sum(span.seconds for span in spans) == pytest.approx(sum(op_seconds(op, _hardware()) for op in facts.ops))


def test_planning_needs_no_torch() -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        "from zinf_compile.passes import planner\n"
        "for module in pkgutil.walk_packages(planner.__path__, 'zinf_compile.passes.planner.'):\n"
        "    importlib.import_module(module.name)\n"
        "    assert 'torch' not in sys.modules, module.name\n"
        "assert 'zinf_compile.passes.planner.search.planner' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("dtype", "is_counted"), [("bfloat16", True), ("float32", False)])
def test_kernels_of_experts_are_a_part_of_the_device(graph: Function, dtype: str, is_counted: bool) -> None:
    facts = graph({}, num_forward_ticks=3, num_ticks=3)
    experts = replace(facts, ops=(replace(facts.ops[0], op="aten._grouped_mm.default", dtype=dtype), *facts.ops[1:]))
    request = replace(_make_request((), experts, device_memory=8 * MIB), kernel_cache_nbytes=5 * MIB)
    device = make_plan(request).tier(Tier.DEVICE)
    assert device.nbytes_of(TierPart.KERNELS) == device.predicted_peak == (5 * MIB if is_counted else 0)
    less = replace(request, config=replace(request.config, device_memory=4 * MIB))
    if is_counted:
        with pytest.raises(
            CapacityError, match=r"raise device_memory to 5MiB .* LRU_CACHE_CAPACITY=64: of it all, 5\.0 MiB"
        ):
            make_plan(less)
    else:
        make_plan(less)


def test_open_forwards_are_a_part_of_the_device(graph: Function) -> None:
    request = replace(
        _make_request((), graph({}, num_forward_ticks=3, num_ticks=3), device_memory=8 * MIB), open_nbytes=5 * MIB
    )
    plan = make_plan(request)
    assert plan.tier(Tier.DEVICE).nbytes_of(TierPart.OPEN) == plan.tier(Tier.DEVICE).predicted_peak == 5 * MIB
    with pytest.raises(CapacityError, match="raise device_memory to 5MiB"):
        make_plan(replace(request, config=replace(request.config, device_memory=4 * MIB)))
    grown = with_open_forwards(plan, replace(request, open_nbytes=7 * MIB))
    assert grown == make_plan(replace(request, open_nbytes=7 * MIB))
    assert with_open_forwards(plan, replace(request, open_nbytes=9 * MIB)) is None


@pytest.mark.parametrize("is_measured", [False, True])
def test_what_is_reserved_is_a_part_of_the_budget_that_an_error_names(graph: Function, *, is_measured: bool) -> None:
    value = ValueFact(name="x", nbytes=3 * MIB, live=LiveRange(start=0, end=2), saved=False)
    facts = graph({}, num_forward_ticks=3, num_ticks=3, values=[value])
    request = with_options(
        _make_request((), facts, device_memory=160 * MIB),
        reserve_memory=200 * MIB,
        measures_reserve=is_measured,
    )
    with pytest.raises(CapacityError) as caught:
        make_plan(request)
    advice = re.search(r"needs (\S+ MiB) on device, .*; raise device_memory to (\w+) ", str(caught.value))
    assert advice is not None
    assert advice[1] == "203.0 MiB"
    assert "; 200.0 MiB of that are reserve_memory, for Python, torch and captured graphs" in str(caught.value)
    ends = "as measured; reserve_memory=0 keeps budgets for the model only"
    assert str(caught.value).endswith(ends if is_measured else "stays within device_memory and host_memory")
    plan = make_plan(with_options(request, device_memory=parse_size(advice[2], option="device_memory")))
    assert plan.tier(Tier.DEVICE).nbytes_of(TierPart.RESERVE) == 200 * MIB
    assert make_plan(with_options(request, reserve_memory=0))
