"""Which values are recomputed: those that save the most bytes per second of recomputation. The facts are hand-made."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest

from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.ir.facts import GraphFacts, OpFact, ValueFact
from zinf_compile.ir.glossary import ActivationPolicy, LiveRange, Phase
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.schedule import Schedule
from zinf_compile.passes.planner.cost.costs import op_seconds
from zinf_compile.passes.planner.memory import recompute
from zinf_compile.passes.planner.memory.recompute import (
    RecomputeLevel,
    find_recomputed,
    policy_levels,
    recompute_levels,
    recomputed_ops,
)

MIB = 2**20
HARDWARE: Hardware = load_hardware("laptop-16g")
BLOCKS = 2
# Each block: a norm of its input, a wide matrix product, an element-wise op, and a matrix product back to the first width.
NAMES = ("norm", "up", "gelu", "down")
INPUTS = {"norm": "down", "up": "norm", "gelu": "up", "down": "gelu"}
OPS = {
    "norm": "aten.native_layer_norm.default",
    "up": "aten.mm.default",
    "gelu": "aten.gelu.default",
    "down": "aten.mm.default",
}


def make_graph(
    *, saved: Iterable[str] = NAMES, not_repeatable: str = "", gathers_again: bool = True, num_flops: int = 10**10
) -> GraphFacts:
    """Return two blocks of four ops, forward and backward. Each forward op has one op in backward that reads its result."""
    forward = ["x", "weight", *(f"{name}_{block}" for block in range(BLOCKS) for name in NAMES), "output"]
    backward = [
        *(name for name in forward if name.rpartition("_")[0] in saved),
        "x",
        *(["weight"] if gathers_again else []),
        *(f"grad_{name}" for name in reversed(forward[2:-1])),
        "output_1",
    ]
    ticks = {name: tick for tick, name in enumerate(forward)}

    def forward_op(tick: int, name: str) -> OpFact:
        kind, _, block = name.rpartition("_")
        before = ticks.get(f"{INPUTS[kind]}_{int(block) - (kind == 'norm')}", 0) if kind else 0
        inputs = () if not kind else (1, before) if kind in ("up", "down") else (before,)
        return OpFact(
            tick=tick,
            name=name,
            op={"weight": "zinf.gather.default", "output": "output"}.get(name, OPS.get(kind, name)),
            module=f"layers.{block}" if kind else "model",
            dtype="float32",
            num_flops=num_flops if kind in ("up", "down") else 0,
            nbytes_accessed=2 * MIB,
            inputs=tuple(sorted(inputs)),
            repeatable=bool(kind) and kind != not_repeatable,
        )

    def backward_op(tick: int, name: str) -> OpFact:
        source = name.removeprefix("grad_")
        is_made = name.startswith("grad_")
        return OpFact(
            tick=tick,
            name=name,
            op="aten.mul.Tensor"
            if is_made
            else {"weight": "zinf.gather.default", "output_1": "output"}.get(name, name),
            module=f"layers.{source.rpartition('_')[2]}" if source != "weight" else "model",
            dtype="float32",
            num_flops=0,
            nbytes_accessed=MIB,
            inputs=(ticks[source],) if is_made else (),
        )

    ops = [forward_op(tick, name) for tick, name in enumerate(forward)]
    ops += [backward_op(tick, name) for tick, name in enumerate(backward, start=len(forward))]
    last_read = {tick: op.tick for op in ops for tick in op.inputs}
    values = [
        ValueFact(
            name=op.name,
            nbytes=MIB * (4 if op.name.startswith(("up", "gelu")) else 1),
            live=LiveRange(start=op.tick, end=last_read[op.tick] + 1),
            saved=op.name.rpartition("_")[0] in saved,
        )
        for op in ops[2 : len(forward) - 1]
    ]
    return GraphFacts(
        name="graph",
        policy=ActivationPolicy.SAVE,
        schedule=Schedule.of_one_graph(len(forward), len(ops)),
        ops=tuple(ops),
        values=tuple(values),
        uses=(),
        gradients=(),
    )


def kinds_in_order(graph: GraphFacts) -> list[str]:
    """Return the names of the recomputed ops, in the order in which the levels add them."""
    chosen: list[str] = []
    for level in recompute_levels(graph, HARDWARE):
        chosen += sorted({name.rpartition("_")[0] for name in level.values} - set(chosen))
    return chosen


def test_what_gives_the_most_bytes_for_a_second_comes_first() -> None:
    assert kinds_in_order(make_graph())[:3] == ["gelu", "norm", "up"]


def test_alike_values_of_all_blocks_are_decided_together() -> None:
    first = next(recompute_levels(make_graph(), HARDWARE))
    assert first.values == {"gelu_0", "gelu_1"}
    assert len(first.kinds) == 1


def test_levels_grow_in_bytes_and_in_seconds() -> None:
    levels = list(recompute_levels(make_graph(), HARDWARE))
    for lower, higher in pairwise(levels):
        assert lower.kinds < higher.kinds
        assert lower.values < higher.values
        assert lower.nbytes < higher.nbytes
        assert lower.seconds <= higher.seconds


def test_no_way_back_leads_into_another_block() -> None:
    """If the input of a block were recomputed as well, all earlier blocks would have to be recomputed for it."""
    graph = make_graph(saved=("gelu", "down"))
    *_, last = recompute_levels(graph, HARDWARE)
    assert "down_0" not in last.values
    assert recomputed_ops(graph, last.kinds) >= {"norm_0", "up_0", "gelu_0", "norm_1", "up_1", "gelu_1"}
    assert "down_0" not in recomputed_ops(graph, last.kinds)


def with_modules(graph: GraphFacts) -> GraphFacts:
    """Return the graph with every op in a numbered module of its own, as the layers of a plain sequence."""
    half = graph.schedule.ticks(Phase.FORWARD).stop
    ops = tuple(replace(op, module=f"layers.{op.tick}") for op in graph.ops[:half])
    return replace(graph, ops=(*ops, *graph.ops[half:]))


def test_in_a_plain_sequence_only_what_makes_no_chain_is_made_again() -> None:
    """Each product could be recomputed from the previous one if that were saved. With none saved, all are recomputed."""
    graph = with_modules(make_graph())
    assert kinds_in_order(graph) == ["gelu", "norm", "up"]
    assert kinds_in_order(with_modules(make_graph(saved=("down",)))) == []


def test_an_op_runs_again_for_the_rest_of_what_it_returns() -> None:
    """The statistics of a norm are saved and its output is not: recomputing what reads the output needs the norm again."""
    graph = make_graph()
    (first, *_) = (value for value in graph.values if value.name == "norm_0")
    rest = replace(first, name="norm_0.1", saved=False)
    *_, last = recompute_levels(graph, HARDWARE)
    up = {kind for kind in last.kinds if kind.op == OPS["up"] and kind.nbytes == 4 * MIB}
    assert recomputed_ops(graph, up) == {"up_0", "up_1"}
    assert recomputed_ops(replace(graph, values=(*graph.values, rest)), up) == {"norm_0", "up_0", "up_1"}


def test_what_the_caller_holds_is_not_made_again() -> None:
    graph = make_graph()
    values = tuple(
        replace(value, live=replace(value.live, end=graph.num_ticks)) if value.name == "gelu_1" else value
        for value in graph.values
    )
    *_, last = recompute_levels(replace(graph, values=values), HARDWARE)
    assert "gelu_0" in last.values
    assert "gelu_1" not in last.values


def test_what_backward_does_not_read_of_the_inputs_may_be_gone_by_then() -> None:
    graph = make_graph()
    gone = tuple(
        replace(op, name="y", op="y") if op.name == "x" and op.tick in graph.schedule.ticks(Phase.BACKWARD) else op
        for op in graph.ops
    )
    assert "norm" in kinds_in_order(graph)
    assert "norm" not in kinds_in_order(replace(graph, ops=gone))


def test_what_may_differ_the_second_time_is_not_made_again() -> None:
    assert "up" not in kinds_in_order(make_graph(not_repeatable="up"))
    # The product is neither saved nor repeatable, so what is computed from it cannot be recomputed either.
    graph = make_graph(saved=("norm", "gelu", "down"), not_repeatable="up")
    assert "gelu" not in kinds_in_order(graph)


def test_no_parameter_is_gathered_for_it_that_backward_does_not_gather_anyway() -> None:
    assert "up" in kinds_in_order(make_graph())
    graph = make_graph(gathers_again=False)
    assert "up" not in kinds_in_order(graph)
    small = tuple(replace(op, nbytes_accessed=1024) if op.name == "weight" else op for op in graph.ops)
    assert "up" in kinds_in_order(replace(graph, ops=small))  # a parameter this small is usually resident


def test_only_what_is_idle_at_the_peak_counts() -> None:
    graph = make_graph()  # memory peaks while the last product of forward reads its input
    assert next(recompute_levels(graph, HARDWARE)).nbytes == 4 * MIB
    end = graph.schedule.ticks(Phase.FORWARD)[-1]
    large = ValueFact(name="large", nbytes=100 * MIB, live=LiveRange(start=end, end=end + 1), saved=False)
    peaks_later = replace(graph, values=(*graph.values, large))
    assert next(recompute_levels(peaks_later, HARDWARE)).nbytes == 8 * MIB


def test_what_is_cheap_costs_little() -> None:
    cheap = policy_levels(make_graph(), HARDWARE)[ActivationPolicy.RECOMPUTE_VALUES]
    assert {name.rpartition("_")[0] for name in cheap.values} == {"gelu", "norm"}
    alike = policy_levels(make_graph(num_flops=0), HARDWARE)
    assert ActivationPolicy.RECOMPUTE_VALUES not in alike  # the other values are as cheap as they are


def test_a_policy_that_would_make_nothing_more_again_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = list(recompute_levels(make_graph(), HARDWARE))
    cheap, more = levels[1], levels[-1]
    assert cheap.values < more.values

    def policies(first: float, second: float) -> dict[ActivationPolicy, RecomputeLevel]:
        whole = sum(op_seconds(op, HARDWARE) for op in make_graph().ops)
        shares = {ActivationPolicy.RECOMPUTE_VALUES: first / whole, ActivationPolicy.RECOMPUTE_MORE: second / whole}
        monkeypatch.setattr(recompute, "_SHARES", shares)
        return policy_levels(make_graph(), HARDWARE)

    assert policies(cheap.seconds, more.seconds) == {
        ActivationPolicy.RECOMPUTE_VALUES: cheap,
        ActivationPolicy.RECOMPUTE_MORE: more,
    }
    assert policies(cheap.seconds, 1.01 * cheap.seconds) == {ActivationPolicy.RECOMPUTE_VALUES: cheap}
    assert policies(0.0, 2 * more.seconds) == {ActivationPolicy.RECOMPUTE_MORE: more}


def test_recomputed_values_are_found_by_name() -> None:
    graph = make_graph(saved=("down",))
    assert find_recomputed(graph, HARDWARE) == ()
    tick = graph.num_ticks - 2
    ops = (*graph.ops[:tick], replace(graph.ops[tick], name="gelu_0", op=OPS["gelu"]), graph.ops[-1])
    live = LiveRange(start=tick, end=tick + 1)
    again = ValueFact(name="gelu_0", nbytes=4 * MIB, live=live, saved=False)
    both = (
        replace(again, name="gelu_0_workspace", live=LiveRange(start=4, end=5)),
        replace(again, name="gelu_0_workspace"),
    )
    (found,) = find_recomputed(replace(graph, ops=ops, values=(*graph.values, again, *both)), HARDWARE)
    assert (found.value, found.nbytes, found.tick) == ("gelu_0", 4 * MIB, tick)
    assert found.seconds > 0
