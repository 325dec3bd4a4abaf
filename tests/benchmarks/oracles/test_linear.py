"""Small programs whose answers are known."""

import pytest

from benchmarks.oracles.linear import Program, Sum, add_up

pytest.importorskip("scipy", reason="scipy, of the extra dev, is not in this environment: make setup")


def test_a_knapsack_is_filled_with_whole_things() -> None:
    program = Program()
    things = [program.add_binary() for _ in range(3)]
    program.at_least(
        Sum(constant=10.0), add_up(thing * size for thing, size in zip(things, (6.0, 5.0, 5.0), strict=True))
    )
    worth = add_up(thing * each for thing, each in zip(things, (7.0, 4.0, 4.0), strict=True))
    solution = program.minimize(Sum(constant=20.0) - worth, seconds=10)
    assert solution is not None
    assert solution.is_optimal
    assert solution.bound == pytest.approx(12.0)  # the LP relaxation gives 9.8
    assert [round(solution.value(thing)) for thing in things] == [0, 1, 1]
    assert solution.value(worth) == pytest.approx(8.0)


def test_weights_of_one_variable_add_up() -> None:
    program = Program()
    x, y = program.add_real(), program.add_real()
    program.at_least(x + x - y, 3.0)
    program.equal(y, 1.0)
    solution = program.minimize(x + y + y, seconds=10)
    assert solution is not None
    assert solution.bound == pytest.approx(4.0)


def test_what_cannot_be_has_no_solution() -> None:
    program = Program()
    x = program.add_binary()
    program.at_least(x, 2.0)
    assert program.minimize(x, seconds=10) is None
