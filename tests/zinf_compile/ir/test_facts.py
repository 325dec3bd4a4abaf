"""Symbolic facts are evaluated to numbers."""

import pytest

from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.facts import GraphFacts, OpFact, ValueFact, at_sizes, is_within, join_sizes
from zinf_compile.ir.glossary import ActivationPolicy, LiveRange
from zinf_compile.ir.schedule import Schedule
from zinf_compile.ir.sizes import ShapeSymbol, Size, evaluate_sizes, size_symbol

BATCH, SEQUENCE = size_symbol("batch"), size_symbol("sequence")


def _make_facts() -> GraphFacts[Size]:
    """Return facts of one matrix product over tokens, and a value of fixed size."""
    product: OpFact[Size] = OpFact(
        tick=0,
        name="mm",
        op="aten.mm.default",
        module="layers.0",
        dtype="float32",
        num_flops=2 * 64 * 32 * BATCH * SEQUENCE,
        nbytes_accessed=4 * (96 * BATCH * SEQUENCE + 64 * 32),
        inputs=(),
    )
    values: tuple[ValueFact[Size], ...] = (
        ValueFact(name="mm", nbytes=4 * 32 * BATCH * SEQUENCE, live=LiveRange(start=0, end=1), saved=True),
        ValueFact(name="seed", nbytes=16, live=LiveRange(start=0, end=1), saved=True),
    )
    return GraphFacts(
        name="graph",
        policy=ActivationPolicy.SAVE,
        schedule=Schedule.of_one_graph(1, 1),
        ops=(product,),
        values=values,
        uses=(),
        gradients=(),
        symbols=(ShapeSymbol(name="batch", value=2), ShapeSymbol(name="sequence", value=10)),
    )


def test_without_sizes_facts_are_as_captured() -> None:
    facts = at_sizes(_make_facts())
    assert (facts.ops[0].num_flops, facts.ops[0].nbytes_accessed) == (2 * 64 * 32 * 20, 4 * (96 * 20 + 64 * 32))
    assert [value.nbytes for value in facts.values] == [4 * 32 * 20, 16]
    assert all(type(size) is int for size in (facts.ops[0].num_flops, facts.values[0].nbytes))


def test_sizes_left_out_are_as_captured_and_those_given_are_noted() -> None:
    facts = at_sizes(_make_facts(), {"batch": 3})
    assert [value.nbytes for value in facts.values] == [4 * 32 * 30, 16]
    assert facts.symbols == (ShapeSymbol(name="batch", value=3), ShapeSymbol(name="sequence", value=10))


def test_facts_of_numbers_stay_as_they_are() -> None:
    facts = at_sizes(_make_facts())
    assert at_sizes(facts) == facts


def test_fractions_are_rounded_up() -> None:
    third = BATCH / 3
    assert evaluate_sizes([third, 7], {"batch": 7}) == {third: 3}


def test_products_beyond_what_a_float_holds_are_exact() -> None:
    product = (2 * BATCH + 1) * SEQUENCE
    assert evaluate_sizes([product], {"batch": 2**40, "sequence": 2**40 + 1}) == {product: (2**41 + 1) * (2**40 + 1)}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"bach": 3}, "'bach' is no symbol of this capture; did you mean 'batch'"),
        ({"height": 3}, "its symbols: batch, sequence"),
        ({"batch": 0}, "batch=0 is no size of a dimension"),
        ({"batch": True}, "batch=True is no size"),
        ({"batch": 2.5}, r"batch=2\.5 is no size"),
    ],
)
def test_what_is_no_size_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        at_sizes(_make_facts(), sizes)


def test_a_graph_of_fixed_shapes_has_no_symbols() -> None:
    facts = GraphFacts(
        name="graph",
        policy=ActivationPolicy.SAVE,
        schedule=Schedule.of_one_graph(0, 0),
        ops=(),
        values=(),
        uses=(),
        gradients=(),
    )
    with pytest.raises(ConfigError, match="all of its shapes are fixed"):
        at_sizes(facts, {"batch": 2})


def test_a_plan_holds_for_sizes_at_which_no_value_is_larger() -> None:
    planned = at_sizes(_make_facts(), {"batch": 4, "sequence": 100})
    assert is_within(at_sizes(_make_facts(), {"batch": 2, "sequence": 200}), planned)
    assert not is_within(at_sizes(_make_facts(), {"batch": 2, "sequence": 201}), planned)


def test_joined_facts_have_room_for_both_and_not_for_their_product() -> None:
    wide, long = (at_sizes(_make_facts(), sizes) for sizes in ({"batch": 64, "sequence": 8}, {"sequence": 512}))
    joined = join_sizes(wide, long)
    assert is_within(wide, joined)
    assert is_within(long, joined)
    assert joined.values[0].nbytes == max(wide.values[0].nbytes, long.values[0].nbytes)
    assert joined.ops[0].num_flops == max(wide.ops[0].num_flops, long.ops[0].num_flops)
    assert [(symbol.name, symbol.value) for symbol in joined.symbols] == [("batch", 64), ("sequence", 512)]
