"""Which values are made again: those that give the most bytes for a second, by facts made by hand."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from zinf_compile.facts import GraphFacts, OpFact, ValueFact
from zinf_compile.hardware import Hardware
from zinf_compile.hardware_io import load_hardware
from zinf_compile.passes.planning.recompute import (
    cheap_level,
    find_recomputed,
    ops_made_again,
    recompute_levels,
)
from zinf_compile.terms import ActivationPolicy, LiveRange

MIB = 2**20
HARDWARE: Hardware = load_hardware("laptop-16g")
BLOCKS = 2
# Of each block: what enters it, a norm of that, a wide product of the norm, and what is element by element of the product.
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
    """Return two blocks of four ops, forward and backward; in backward one op reads all that a forward op saved."""
    forward = ["x", "weight", *(f"{name}_{block}" for block in range(BLOCKS) for name in NAMES), "output"]
    backward = [
        *(name for name in forward if name.rpartition("_")[0] in saved),
        *(["weight"] if gathers_again else []),
        *(f"grad_{name}" for name in reversed(forward[2:-1])),
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
            op="aten.mul.Tensor" if is_made else "zinf.gather.default" if name == "weight" else name,
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
        num_forward_ticks=len(forward),
        num_ticks=len(ops),
        ops=tuple(ops),
        values=tuple(values),
        uses=(),
        gradients=(),
    )


def kinds_in_order(graph: GraphFacts) -> list[str]:
    """Return the ops of the kinds in the order in which they come, norms apart from products by name."""
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
    """What enters a block would have to be made from all blocks before it, once everything in those is made again."""
    graph = make_graph(saved=("gelu", "down"))
    *_, last = recompute_levels(graph, HARDWARE)
    assert ops_made_again(graph, last.kinds) == {"norm_0", "up_0", "gelu_0", "norm_1", "up_1", "gelu_1"}


def test_what_may_differ_the_second_time_is_not_made_again() -> None:
    assert "up" not in kinds_in_order(make_graph(not_repeatable="up"))
    # Without the product, which rests nowhere, there is no way back to what is made from it either.
    graph = make_graph(saved=("norm", "gelu", "down"), not_repeatable="up")
    assert "gelu" not in kinds_in_order(graph)


def test_no_parameter_is_gathered_for_it_that_backward_does_not_gather_anyway() -> None:
    assert "up" in kinds_in_order(make_graph())
    assert "up" not in kinds_in_order(make_graph(gathers_again=False))


def test_only_what_is_idle_at_the_peak_counts() -> None:
    graph = make_graph()  # its memory peaks while the last product of forward reads what comes before it
    assert next(recompute_levels(graph, HARDWARE)).nbytes == 4 * MIB
    end = graph.num_forward_ticks - 1
    large = ValueFact(name="large", nbytes=100 * MIB, live=LiveRange(start=end, end=end + 1), saved=False)
    peaks_later = replace(graph, values=(*graph.values, large))
    assert next(recompute_levels(peaks_later, HARDWARE)).nbytes == 8 * MIB


def test_what_is_cheap_costs_little() -> None:
    cheap = cheap_level(make_graph(), HARDWARE)
    assert cheap is not None
    assert {name.rpartition("_")[0] for name in cheap.values} == {"gelu", "norm"}
    assert cheap_level(make_graph(num_flops=0), HARDWARE) is None  # all else takes no longer than they do


def test_what_is_made_again_is_told_by_its_name() -> None:
    graph = make_graph(saved=("down",))
    assert find_recomputed(graph, HARDWARE) == ()
    tick = graph.num_ticks - 1
    again = ValueFact(name="gelu_0", nbytes=4 * MIB, live=LiveRange(start=tick, end=tick + 1), saved=False)
    (found,) = find_recomputed(replace(graph, values=(*graph.values, again)), HARDWARE)
    assert (found.value, found.nbytes, found.tick) == ("gelu_0", 4 * MIB, tick)
    assert found.seconds > 0
