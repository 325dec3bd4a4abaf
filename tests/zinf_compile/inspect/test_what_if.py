"""What-if queries on a plan, answered by planning again; what they report as fitting does fit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.inspect.what_if import largest_that_fits
from zinf_compile.ir.errors import CapacityError, ConfigError, UnsupportedError
from zinf_compile.ir.facts import GraphFacts, ValueFact, at_sizes
from zinf_compile.ir.glossary import LiveRange, Tier
from zinf_compile.ir.sizes import ShapeSymbol, Size, size_symbol
from zinf_compile.passes.planner.cost.costs import op_seconds, seconds_expression
from zinf_compile.passes.planner.search.planner import Request, make_plan
from zinf_compile.passes.planner.simulator.simulate import simulate
from zinf_compile.passes.planner.simulator.summary import count_disk_stalls

MIB = 2**20
Function = Callable[..., Any]


def view_of(request: Request) -> PlanView:
    return PlanView(make_plan(request), request)


def make_captured(parameter: Function, graph: Function) -> tuple[tuple[Any, ...], GraphFacts[Size]]:
    """Return four layers, and a graph in which every op saves 40 KiB per batch element for backward."""
    parameters = tuple(parameter(f"layers.{index}.weight", 100_000) for index in range(4))
    uses = {item.name: [index + 1, 11 - index - 1] for index, item in enumerate(parameters)}
    batch = size_symbol("batch")
    values = [
        ValueFact(name=f"mm_{tick}", nbytes=40_960 * batch, live=LiveRange(start=tick, end=12 - tick), saved=True)
        for tick in range(1, 5)
    ]
    facts = graph(uses, num_forward_ticks=6, num_ticks=12, values=values)
    names = ("mm", "_scaled_dot_product_flash_attention_for_cpu", "exp", "add.Tensor", "view")
    ops = tuple(
        replace(op, num_flops=10**6 * batch, nbytes_accessed=10**5 * op.tick * batch, op=f"aten.{names[op.tick % 5]}")
        for op in facts.ops
    )
    return parameters, replace(facts, ops=ops, symbols=(ShapeSymbol(name="batch", value=4),))


@pytest.fixture
def make_symbolic(parameter: Function, graph: Function, request_of: Function) -> Callable[..., PlanView]:
    """Return ``make_symbolic(**budgets)``, the plan of four layers at a batch of 4."""

    def make(**budgets: Any) -> PlanView:
        parameters, captured = make_captured(parameter, graph)
        template: Request = request_of(0)
        config = replace(template.config, **{"device_memory": 4 * MIB, "host_memory": 64 * MIB, **budgets})
        return view_of(
            replace(
                template,
                candidates=(at_sizes(captured),),
                captured=(captured,),
                parameters=parameters,
                config=replace(config, compute_dtype=None),
            )
        )

    return make


def test_other_sizes_change_what_follows_them_alone(make_symbolic: Function) -> None:
    plan = make_symbolic()
    doubled = plan.what_if(batch=8)
    assert doubled.activations.saved_nbytes == 2 * plan.activations.saved_nbytes
    compute = [sum(span.seconds for span in each.spans) for each in (plan, doubled)]
    assert compute[1] > 1.9 * compute[0]
    assert plan.what_if(batch=4) == plan
    assert doubled.what_if(batch=4) == plan  # and back


def test_other_budgets_and_rates(make_symbolic: Function) -> None:
    plan = make_symbolic(device_memory=2 * MIB, host_memory=MIB // 2)
    assert plan.gathers
    assert not plan.what_if(device_memory="64MiB").gathers
    assert plan.what_if(device_memory="64MiB").tier(Tier.DEVICE).capacity == 64 * MIB
    slow = plan.what_if(nvme_read="10 MB/s")
    assert simulate(slow.plan).step_seconds > simulate(plan.plan).step_seconds
    assert slow.hardware.route(Tier.NVME, Tier.DEVICE).bytes_per_second == 1e7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bach": 8}, "what_if does not know 'bach'; did you mean 'batch'"),
        ({"nvme_raed": "7GB/s"}, "did you mean 'nvme_read'"),
        ({"colour": 1}, "known: batch, device_memory"),
        ({"device_memory": "lots"}, "device_memory='lots' is not a size"),
        ({"overlap_step": 1}, "overlap_step=1 is neither True nor False"),
        ({"batch": 0}, "batch=0 is no size"),
        ({"nvme_read": "fast"}, "nvme_read='fast' is not"),
    ],
)
def test_what_cannot_be_is_refused(make_symbolic: Function, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_symbolic().what_if(**changes)


def test_the_largest_batch_fits_and_one_more_does_not(make_symbolic: Function) -> None:
    plan = make_symbolic()
    largest = plan.max_batch()
    assert largest > 4
    plan.what_if(batch=largest)
    with pytest.raises(CapacityError, match="raise device_memory"):
        plan.what_if(batch=largest + 1)


def test_a_fixed_batch_has_no_largest(request_of: Function) -> None:
    plan = view_of(request_of(0))
    for ask in (plan.max_batch, plan.tokens_to_hide_disk):
        with pytest.raises(UnsupportedError, match="captured for one batch only"):
            ask()


def disk_stalls(plan: PlanView) -> float:
    """Return the share of a step in which compute waits and the disk is busy."""
    timeline = simulate(plan.plan)
    return count_disk_stalls(timeline) / timeline.step_seconds


def test_so_many_tokens_hide_the_disk_and_fewer_do_not(make_symbolic: Function) -> None:
    """Compute takes 40 ms for each element of a batch, and the disk 60 ms and more for the parameters."""
    plan = make_symbolic(host_memory=MIB // 2).what_if(flops="0.3 GFLOP/s", nvme_read="100 MB/s", nvme_write="100 MB/s")
    tokens = plan.tokens_to_hide_disk()
    assert tokens is not None
    assert 1 < tokens <= plan.max_batch()
    assert disk_stalls(plan.what_if(batch=tokens)) <= 0.02 < disk_stalls(plan.what_if(batch=tokens - 1))


def test_a_disk_that_no_batch_hides(make_symbolic: Function) -> None:
    plan = make_symbolic(device_memory=2 * MIB, host_memory=MIB // 2).what_if(
        nvme_read="100 MB/s", nvme_write="100 MB/s"
    )
    assert plan.tokens_to_hide_disk() is None
    assert disk_stalls(plan.what_if(batch=plan.max_batch())) > 0.02


def test_a_disk_without_bytes_is_hidden(make_symbolic: Function) -> None:
    assert make_symbolic(device_memory=64 * MIB).tokens_to_hide_disk() == 1


def test_what_is_bought_first_saves_the_most_for_its_price(make_symbolic: Function) -> None:
    """With half a MiB of RAM states are on a slow disk, and a faster processor would hardly help."""
    plan = make_symbolic(host_memory=MIB // 2).what_if(nvme_read="100 MB/s", nvme_write="100 MB/s")
    before = simulate(plan.plan).step_seconds
    found = {each.name: each for each in plan.what_to_buy()}
    assert found.keys() == {"ram", "disk", "device"}  # of a CPU both budgets are RAM, and there is no link
    for each in found.values():
        assert each.saved_seconds == pytest.approx(max(0.0, before - each.step_seconds), abs=0.005 * before)
        assert each.price is None
    assert 0.45 * before < found["disk"].saved_seconds <= 0.5 * before
    assert found["disk"].step_seconds == simulate(plan.what_if(nvme_read=2e8, nvme_write=2e8).plan).step_seconds
    assert found["device"].saved_seconds < found["disk"].saved_seconds / 10
    assert found["ram"].saved_seconds > 0
    dear, cheap = (plan.what_to_buy({"disk": price, "ram": 1000.0}) for price in (1e6, 1.0))
    assert [each.name for each in dear[:2]] == ["ram", "disk"]
    assert [each.name for each in cheap[:2]] == ["disk", "ram"]
    assert cheap[1].price == pytest.approx(1000 * 4.5 / 1024)  # 4.5 MiB more
    assert cheap[0].saved_per_price == cheap[0].saved_seconds
    assert [each.price for each in cheap[2:]] == [None]


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ({"ram": 0}, "the price of 'ram', 0, is not a number above 0"),
        ({"rma": 1.0}, "a price list does not know 'rma'; did you mean 'ram'"),
        ({"yacht": 1.0}, "known: ram, device_memory, disk, device, link"),
        ({"disk": True}, "the price of 'disk', True, is not"),
    ],
)
def test_a_price_list_that_cannot_be_used_is_refused(
    make_symbolic: Function, prices: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_symbolic().what_to_buy(prices)


@examples(25)
@given(seed=st.integers(0, 10**6), host=st.sampled_from((4 * MIB, 64 * MIB)))
def test_the_smallest_budget_works_and_a_page_less_does_not(request_of: Function, seed: int, host: int) -> None:
    plan = view_of(request_of(seed, host=host))
    smallest = plan.min_device_memory()
    assert smallest % 4096 == 0
    fitting = plan.what_if(device_memory=smallest)
    assert fitting.tier(Tier.DEVICE).predicted_peak <= smallest
    with pytest.raises(CapacityError):
        plan.what_if(device_memory=smallest - 4096)


def test_a_loaded_plan_cannot_be_asked(make_symbolic: Function, tmp_path: Path) -> None:
    plan = make_symbolic()
    plan.save(tmp_path / "plan.json")
    loaded = PlanView.load(tmp_path / "plan.json")
    assert loaded == plan  # the request is not part of the value
    assert hash(loaded) == hash(plan)
    for ask in (
        loaded.max_batch,
        loaded.what_to_buy,
        loaded.min_device_memory,
        lambda: loaded.explain("mm_1"),
        loaded.what_if,
    ):
        with pytest.raises(ConfigError, match=r"read from a file.*make it again, with zinf_compile\.plan"):
            ask()


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 1000, 2**31 - 1])
def test_the_search_finds_any_limit(limit: int) -> None:
    assert largest_that_fits(lambda size: size <= limit) == limit


def test_the_search_ends_where_nothing_is_too_large() -> None:
    assert largest_that_fits(lambda size: True) == 2**31


def test_seconds_in_symbols_are_those_of_every_size(parameter: Function, graph: Function, request_of: Function) -> None:
    _, captured = make_captured(parameter, graph)
    hardware = replace(request_of(0).hardware, op_overhead_seconds=1e-5)
    (batch,) = seconds_expression(captured.ops[0], hardware).free_symbols
    for size in (1, 3, 1000):
        for op, numeric in zip(captured.ops, at_sizes(captured, {"batch": size}).ops, strict=True):
            seconds = sympy.N(seconds_expression(op, hardware).subs({batch: size}))
            assert float(seconds) == pytest.approx(op_seconds(numeric, hardware), rel=1e-12)


def test_a_parameter_is_explained(make_symbolic: Function) -> None:
    plan = make_symbolic(device_memory=2 * MIB, host_memory=2 * MIB)
    transfer = plan.gathers[0]
    rate = plan.hardware.bytes_per_second(transfer.source, Tier.DEVICE)
    text = plan.explain(transfer.parameters[0])
    assert text.startswith(f"{transfer.parameters[0]}\n")
    assert f"compute copy: 390.6 KiB on {transfer.source}" in text
    assert f"{transfer.source} -> device in {transfer.nbytes / rate:.3g} s" in text
    assert "optimizer state: 781.2 KiB on" in text
    assert "of device is free" in text
    assert "gradient: leaves after tick" not in text  # this graph computes no gradient


def test_a_resident_parameter_is_explained(make_symbolic: Function) -> None:
    text = make_symbolic(device_memory=64 * MIB).explain("layers.0.weight")
    assert "compute copy: 390.6 KiB on device\n" in text
    assert f"each gather from host would take {400_000 / 8e9:.3g} s" in text


def test_a_value_is_explained(make_symbolic: Function) -> None:
    text = make_symbolic().explain("mm_2")
    assert "160.0 KiB from aten.exp in layers.0, ticks 2 to 10, saved for backward" in text
    assert f"computing it takes {4 * 10**6 / 1e10:.3g} s, 0.0001*batch for other sizes" in text


def test_an_unknown_name_is_refused_with_the_nearest(make_symbolic: Function) -> None:
    with pytest.raises(ConfigError, match=r"no parameter or value 'layers\.1\.wait'; did you mean 'layers\.1\.weight'"):
        make_symbolic().explain("layers.1.wait")
