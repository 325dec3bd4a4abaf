"""Sizes that depend on input shapes: whole numbers, or sympy expressions in named symbols such as ``batch``."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from typing_extensions import TypeVar

from zinf_compile.ir.errors import ConfigError

if TYPE_CHECKING:
    import sympy  # imported where it is used: a plan is looked at without it


class Expression(Protocol):
    """A sympy expression. Sympy has no types, and as ``Any`` it would pass for a number everywhere."""

    @property
    def free_symbols(self) -> set[Any]:
        """Return the sympy symbols in it."""

    def evalf(self, digits: int) -> "Expression":
        """Return it with its numbers rounded to so many digits."""


Size: TypeAlias = int | Expression
# Facts of sizes: ``GraphFacts[Size]`` is what capture gives, ``GraphFacts`` has numbers only and is what planning takes.
SizeT_co = TypeVar("SizeT_co", bound=Size, covariant=True, default=int)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeSymbol:
    """A dimension of a graph's inputs that may change from call to call, and what it was at capture."""

    name: str  # "batch", "sequence", else Dynamo's: "s2"
    value: int


def size_symbol(name: str) -> "sympy.Symbol":
    """Return the sympy symbol of a shape symbol: a whole number of at least 1."""
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


def complete_sizes(symbols: Iterable[ShapeSymbol], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return a value for every symbol: the one in ``sizes``, else that at capture.

    Raises ConfigError for a name that is no symbol and for a value that is no size.
    """
    values = {symbol.name: symbol.value for symbol in symbols}
    for name, value in sizes.items():
        if name not in values:
            near = difflib.get_close_matches(name, values, n=1, cutoff=0.5)
            known = f"its symbols: {', '.join(values)}" if values else "all of its shapes are fixed"
            raise ConfigError(
                f"{name!r} is no symbol of this capture; {f'did you mean {near[0]!r}?' if near else known}"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} is no size of a dimension; give a whole number of at least 1")
    return {**values, **sizes}


def evaluate_sizes(expressions: Iterable[Size], sizes: Mapping[str, int]) -> dict[Size, int]:
    """Return the value of each distinct expression with ``sizes`` put in for its symbols, rounded up."""
    distinct = tuple(dict.fromkeys(size for size in expressions if not isinstance(size, int)))
    values = _compile(tuple(sorted(sizes)), distinct)(*(sizes[name] for name in sorted(sizes)))
    return {expression: ceil(value) for expression, value in zip(distinct, values, strict=True)}


@lru_cache(maxsize=64)  # searching for the largest batch evaluates the same expressions again and again
def _compile(names: tuple[str, ...], expressions: tuple[Expression, ...]) -> Callable[..., list[Any]]:
    import sympy

    function: Callable[..., list[Any]] = sympy.lambdify(
        [size_symbol(name) for name in names], list(expressions), modules="math"
    )
    return function
