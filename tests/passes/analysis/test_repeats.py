"""Facts expanded from a few blocks, on a hand-made chain of blocks: each has a gather, a product and a saved value."""

from dataclasses import replace

import pytest

from zinf_compile.ir.facts import GradientFact, GraphFacts, OpFact, UseFact, ValueFact
from zinf_compile.ir.glossary import ActivationPolicy, LiveRange, Phase
from zinf_compile.ir.schedule import Schedule
from zinf_compile.passes.analysis.repeats import (
    NUM_TEMPLATES,
    NotRepeatedError,
    Run,
    expand_run,
    expand_runs,
    without_names,
)

RUN = Run(container="layers", first=1, num_blocks=NUM_TEMPLATES)


def make_chain(num_blocks: int) -> GraphFacts:
    """Return facts of a run of blocks, with ``embed`` before it and another module of the same list after it."""
    names = ["embed", *(f"layers.{1 + block}" for block in range(num_blocks)), f"layers.{1 + num_blocks}"]
    ops: list[OpFact] = []

    def add(name: str, op: str, module: str, *inputs: int) -> int:
        ops.append(
            OpFact(tick=len(ops), name=name, op=op, module=module, dtype="float32", num_flops=8, nbytes_accessed=4,
                   inputs=tuple(sorted(inputs)))
        )  # fmt: skip
        return len(ops) - 1

    results, last = [], add("x", "x", "embed")
    for index, name in enumerate(names):
        last = add(f"mm_{index}", "mm", name, last)
        results.append(last)
    forward_output = add("output", "output", names[-1], *results)
    num_forward_ticks = len(ops)
    for index in range(len(names)):
        add(f"mm_{index}", f"mm_{index}", names[-1])
    gradient_ticks = {}
    last = add("tangents", "tangents", names[-1])
    previous: int | None = None
    ends: dict[int, int] = {}
    for index in reversed(range(len(names))):
        last = add(f"mm_back_{index}", "mm", names[index], last, results[index])
        ends[results[index]] = last
        if previous is not None:
            ends[previous] = last
        previous = last
        gradient_ticks[names[index]] = last
    add("output_1", "output", names[0], last)
    values = [
        ValueFact(name=ops[tick].name, nbytes=64, live=LiveRange(start=tick, end=end + 1), saved=tick < forward_output)
        for tick, end in ends.items()
    ]
    return GraphFacts(
        name="chain",
        policy=ActivationPolicy.SAVE,
        schedule=Schedule.of_one_graph(num_forward_ticks, len(ops)),
        ops=tuple(ops),
        values=tuple(sorted(values, key=lambda value: (value.live.start, value.name))),
        uses=tuple(
            sorted(
                (
                    UseFact(parameter=f"{name}.weight", dtype="float32", ticks=(results[index], gradient_ticks[name]))
                    for index, name in enumerate(names)
                ),
                key=lambda use: use.parameter,
            )
        ),
        gradients=tuple(
            GradientFact(parameter=f"{name}.weight", tick=tick, nbytes=64) for name, tick in gradient_ticks.items()
        ),
    )


@pytest.mark.parametrize("num_blocks", [5, 6, 12])
def test_a_chain_is_expanded_to_the_longer_chain(num_blocks: int) -> None:
    expanded = expand_run(make_chain(NUM_TEMPLATES), RUN, num_blocks)
    assert without_names(expanded) == without_names(make_chain(num_blocks))
    names = [op.name for op in expanded.ops[: expanded.schedule.ticks(Phase.FORWARD).stop]]
    assert len(set(names)) == len(names)


def test_expanding_to_what_was_captured_changes_nothing_but_names() -> None:
    facts = make_chain(NUM_TEMPLATES)
    assert without_names(expand_runs(facts, [replace(RUN, num_blocks=4)], [4])) == without_names(facts)


def test_paths_behind_the_run_are_numbered_on() -> None:
    expanded = expand_run(make_chain(NUM_TEMPLATES), RUN, 9)
    assert {use.parameter for use in expanded.uses} == {
        "embed.weight",
        *(f"layers.{block}.weight" for block in range(1, 11)),
    }
    assert expanded.gradients[0].parameter == "layers.10.weight"


def edited(facts: GraphFacts, name: str, **changes: object) -> GraphFacts:
    """Return facts with the fields of one op changed."""
    ops = tuple(replace(op, **changes) if op.name == name and op.op == "mm" else op for op in facts.ops)  # type: ignore[arg-type]
    return replace(facts, ops=ops)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mm_2", {"num_flops": 9}, "mm_2 and mm_3 differ"),
        ("mm_2", {"module": "embed"}, "two blocks of layers have 1 and 3 ops"),
        ("mm_3", {"inputs": (1,)}, "used by blocks at different distances|are not alike"),
        ("mm_3", {"inputs": (1, 3)}, "read different numbers of values"),
        ("mm_5", {"inputs": (3,)}, "is read for one of many blocks"),
    ],
)
def test_blocks_that_are_not_alike_are_not_expanded(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(NotRepeatedError, match=message):
        expand_run(edited(make_chain(NUM_TEMPLATES), name, **changes), RUN, 6)
