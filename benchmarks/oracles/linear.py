"""A small modelling layer for mixed-integer linear programs, solved by HiGHS through scipy."""

from collections.abc import Iterable
from dataclasses import dataclass

from zinf_compile.ir.errors import VerifyError

# The tolerance of HiGHS for integrality and for constraints.
TOLERANCE = 1e-6
_OPTIMAL, _LIMIT, _INFEASIBLE = 0, 1, 2  # status codes of scipy.optimize.milp


@dataclass(frozen=True, slots=True)
class Sum:
    """A linear expression: weighted variables plus a constant. Weights of the same variable add up."""

    terms: tuple[tuple[int, float], ...] = ()
    constant: float = 0.0

    def __add__(self, other: "Sum | float") -> "Sum":
        other = _as_sum(other)
        return Sum((*self.terms, *other.terms), self.constant + other.constant)

    def __sub__(self, other: "Sum | float") -> "Sum":
        return self + _as_sum(other) * -1.0

    def __mul__(self, weight: float) -> "Sum":
        return Sum(tuple((variable, weight * each) for variable, each in self.terms), weight * self.constant)


def add_up(sums: Iterable[Sum]) -> Sum:
    """Return the sum of sums."""
    parts = list(sums)
    return Sum(tuple(term for part in parts for term in part.terms), sum(part.constant for part in parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best solution found, and a lower bound on all solutions."""

    values: tuple[float, ...] | None  # None if no solution was found in time
    bound: float  # no solution is below it
    is_optimal: bool

    def value(self, of: Sum) -> float:
        """Return the value of a sum."""
        assert self.values is not None
        return of.constant + sum(weight * self.values[variable] for variable, weight in of.terms)


class Program:
    """A minimisation problem over nonnegative variables."""

    def __init__(self) -> None:
        self._upper: list[float] = []
        self._whole: list[int] = []
        self._rows: list[Sum] = []  # each at least 0

    def add_binary(self) -> Sum:
        """Return a new variable that is 0 or 1."""
        return self._add(1.0, is_whole=True)

    def add_real(self) -> Sum:
        """Return a new variable of 0 or more."""
        return self._add(float("inf"), is_whole=False)

    def at_least(self, left: Sum, right: Sum | float) -> None:
        """Add the constraint ``left >= right``."""
        self._rows.append(left - right)

    def equal(self, left: Sum, right: Sum | float) -> None:
        """Add the constraint ``left == right``."""
        self.at_least(left, right)
        self.at_least(_as_sum(right), left)

    def minimize(self, objective: Sum, *, seconds: float) -> Solution | None:
        """Minimise ``objective`` within a time limit; None if the program is infeasible."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        num_variables = len(self._upper)
        entries = [(row, *term) for row, each in enumerate(self._rows) for term in each.terms]
        rows, columns, weights = zip(*entries, strict=True) if entries else ((), (), ())
        matrix = csr_matrix((weights, (rows, columns)), shape=(len(self._rows), num_variables))
        costs = np.zeros(num_variables)
        np.add.at(costs, [variable for variable, _ in objective.terms], [weight for _, weight in objective.terms])
        result = milp(
            costs,
            integrality=np.array(self._whole),
            bounds=Bounds(0.0, np.array(self._upper)),
            constraints=LinearConstraint(matrix, lb=[-row.constant for row in self._rows]),
            options={"time_limit": seconds, "mip_rel_gap": TOLERANCE},
        )
        if result.status == _INFEASIBLE:
            return None
        if result.status not in (_OPTIMAL, _LIMIT):
            raise VerifyError(f"a program of {num_variables} variables is not solved: {result.message}")
        bound = result.mip_dual_bound
        if bound is None:  # no integer variables, or no bound yet
            bound = result.fun if result.status == _OPTIMAL else -float("inf")
        return Solution(
            values=None if result.x is None else tuple(result.x.tolist()),
            bound=objective.constant + bound,
            is_optimal=result.status == _OPTIMAL,
        )

    def _add(self, upper: float, *, is_whole: bool) -> Sum:
        self._upper.append(upper)
        self._whole.append(int(is_whole))
        return Sum(((len(self._upper) - 1, 1.0),))


def _as_sum(value: Sum | float) -> Sum:
    return value if isinstance(value, Sum) else Sum(constant=value)
