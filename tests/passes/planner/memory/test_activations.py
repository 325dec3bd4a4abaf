"""Memory of computed values, in the arena and outside of it."""

from collections.abc import Callable

from zinf_compile.ir.facts import GraphFacts, ValueFact
from zinf_compile.ir.glossary import LiveRange
from zinf_compile.passes.planner.memory.activations import bind_values, plan_activations

KIB = 2**10


def make_value(
    name: str, nbytes: int, start: int, end: int, *, saved: bool = False, bindable: bool = False
) -> ValueFact:
    return ValueFact(name=name, nbytes=nbytes, live=LiveRange(start=start, end=end), saved=saved, bindable=bindable)


def test_the_peak_is_where_most_bytes_are_live(graph: Callable[..., GraphFacts]) -> None:
    values = [make_value("a", 100, 0, 3), make_value("b", 50, 2, 4, saved=True), make_value("c", 120, 3, 5)]
    plan = plan_activations(graph({}, num_forward_ticks=3, num_ticks=6, values=values))
    assert (plan.peak_nbytes, plan.peak_tick, plan.saved_nbytes) == (170, 3, 50)


def test_a_graph_without_values_takes_nothing(graph: Callable[..., GraphFacts]) -> None:
    plan = plan_activations(graph({}, num_forward_ticks=2, num_ticks=2))
    assert (plan.peak_nbytes, plan.saved_nbytes) == (0, 0)


def test_a_bound_value_is_counted_in_the_arena_alone(graph: Callable[..., GraphFacts]) -> None:
    values = [make_value("large", 128 * KIB, 0, 2, bindable=True), make_value("other", 128 * KIB, 1, 3)]
    facts = graph({}, num_forward_ticks=4, num_ticks=4, values=values)
    bound = bind_values(facts, base=4096)
    assert [(value.name, value.offset, value.nbytes) for value in bound.values] == [("large", 4096, 128 * KIB)]
    assert bound.nbytes == 128 * KIB
    assert plan_activations(facts).peak_nbytes == 128 * KIB


def test_small_and_saved_values_are_left_to_torch(graph: Callable[..., GraphFacts]) -> None:
    values = [make_value("small", 64 * KIB - 1, 0, 2, bindable=True), make_value("saved", 128 * KIB, 0, 4, saved=True)]
    facts = graph({}, num_forward_ticks=4, num_ticks=4, values=values)
    assert bind_values(facts, base=0).values == ()
    assert plan_activations(facts).peak_nbytes == 192 * KIB - 1
