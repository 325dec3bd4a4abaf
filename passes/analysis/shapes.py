"""The symbols in a graph's shapes: readable names for them, and the input that each can be read from.

Torch writes sizes as sympy expressions in symbols such as ``s27``, with its own division functions. Facts use plain
sympy with named symbols: ``batch`` is the first dimension of every input, ``sequence`` the second dimension of integer
inputs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils._sympy import functions

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.ir.sizes import ShapeSymbol, Size, size_symbol

_BATCH, _SEQUENCE = "batch", "sequence"

# Torch's functions of sizes, in plain sympy. Sizes are never negative.
_PLAIN: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (functions.FloorDiv, lambda a, b: sympy.floor(a / b)),
    (functions.CleanDiv, lambda a, b: a / b),
    (functions.CeilDiv, lambda a, b: sympy.ceiling(a / b)),
    (functions.IntTrueDiv, lambda a, b: a / b),
    (functions.FloatTrueDiv, lambda a, b: a / b),
    (functions.ModularIndexing, lambda a, b, c: sympy.Mod(sympy.floor(a / b), c)),
    (functions.Mod, sympy.Mod),
    (functions.PythonMod, sympy.Mod),
    (functions.Max, sympy.Max),
    (functions.Min, sympy.Min),
    (functions.Where, lambda condition, a, b: sympy.Piecewise((a, condition), (b, True))),
    (functions.ToFloat, lambda a: a),
    (functions.Identity, lambda a: a),
    (functions.FloorToInt, sympy.floor),
    (functions.TruncToInt, sympy.floor),
    (functions.TruncToFloat, sympy.floor),
    (functions.CeilToInt, sympy.ceiling),
    (functions.RoundToInt, lambda a: sympy.floor(a + sympy.Rational(1, 2))),
    (functions.PowByNatural, sympy.Pow),
    (functions.FloatPow, sympy.Pow),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSource:
    """The graph input from which a symbol's value is read: an integer, or one dimension of a tensor."""

    symbol: Any  # torch's sympy symbol
    position: int
    dim: int | None

    def read(self, inputs: list[Any]) -> int:
        """Return the symbol's value in the inputs of a call."""
        shown = inputs[self.position]
        return int(shown if self.dim is None else shown.shape[self.dim])


def find_sources(graph: fx.Graph) -> tuple[SizeSource, ...]:
    """Return the source of each symbol, integers first; symbols that no input has are left out."""
    numbers, dimensions = [], []
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        if (symbol := _symbol(value)) is not None:
            numbers.append(SizeSource(symbol=symbol, position=position, dim=None))
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if (symbol := _symbol(size)) is not None:
                dimensions.append(SizeSource(symbol=symbol, position=position, dim=dim))
    first: dict[Any, SizeSource] = {}
    for source in (*numbers, *dimensions):
        first.setdefault(source.symbol, source)
    return tuple(first.values())


def symbols_in(value: object) -> set[Any]:
    """Return torch's symbols in a size, or in a tensor's shape and strides."""
    return {symbol for size in _changing_sizes(value) for symbol in size.node.expr.free_symbols}


def _changing_sizes(value: object) -> list[torch.SymInt]:
    """Return the symbolic sizes whose symbols stand for shapes, not for values."""
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return [size for size in sizes if isinstance(size, torch.SymInt) and size.node.hint is not None]


def _find_hints(graph: fx.Graph) -> dict[Any, int]:
    """Return every symbol that is itself a size of some value in a graph, with its value at capture."""
    values = (value for node in graph.nodes for value in tree_leaves(node.meta.get("val")))
    return _hints(size for value in values for size in _changing_sizes(value))


class GraphShapes:
    """The symbols of one captured graph, by the inputs of its forward, and its sizes in terms of them."""

    def __init__(self, forward: fx.Graph, backward: fx.Graph | None = None) -> None:
        """``backward`` is only needed for sizes in it."""
        placeholders = forward.find_nodes(op="placeholder")
        self._sources = find_sources(forward)
        self._names = _name_symbols(placeholders, [source.symbol for source in self._sources])
        shown = {symbol for node in placeholders for symbol in symbols_in(node.meta.get("val"))}
        # For example a random state: no input has this symbol, so it keeps its value at capture.
        constants = {
            symbol: sympy.Integer(hint)
            for graph in (forward, backward)
            for symbol, hint in (_find_hints(graph) if graph is not None else {}).items()
            if symbol not in shown
        }
        self._renamed = constants | {symbol: size_symbol(name) for symbol, name in self._names.items()}
        self._known: dict[Any, Size] = {}
        self.symbols = tuple(
            ShapeSymbol(name=name, value=size)
            for name, size in self.read([_at_hint(node.meta.get("val")) for node in placeholders]).items()
        )

    def read(self, inputs: list[Any]) -> dict[str, int]:
        """Return the value of every symbol in the inputs of a call; for dimensions with the same name, the largest.

        All are at least 1: a dimension of 0 needs no memory, and an integer that is not a dimension may have any value.
        """
        sizes: dict[str, int] = {}
        for source in self._sources:
            name = self._names[source.symbol]
            sizes[name] = max(sizes.get(name, 1), source.read(inputs))
        return sizes

    def size(self, size: Size) -> Size:
        """Return a size with torch's symbols and functions as one with named symbols and plain sympy.

        UnsupportedError for a symbol that no input has.
        """
        if isinstance(size, int):
            return size
        if size not in self._known:
            self._known[size] = self._translate(size)
        return self._known[size]

    def _translate(self, size: Any) -> Size:
        hidden = sorted(str(symbol) for symbol in size.free_symbols - self._renamed.keys())
        if hidden:
            raise UnsupportedError(
                f"a size of the graph is {size}, and none of its inputs shows {', '.join(hidden)}; fix that dimension with "
                "torch._dynamo.mark_static"
            )
        for function, plain in _PLAIN:
            size = size.replace(function, plain)
        names = [self._names[symbol] for symbol in size.free_symbols if symbol in self._names]
        if len(names) > len(set(names)):  # dimensions with the same name may differ in a call: the largest counts
            size = size.replace(lambda part: part.is_Add, _without_negative_terms)
        size = size.xreplace(self._renamed)
        plain_size: Size = int(size) if size.is_Integer else size
        return plain_size


def _without_negative_terms(total: Any) -> Any:
    return sympy.Add(*(term for term in total.args if not term.could_extract_minus_sign()))


def _at_hint(value: object) -> Any:
    """Return an input with its sizes at capture; a tensor is returned on the meta device."""
    if isinstance(value, torch.SymInt):
        return int(value.node.hint)
    if isinstance(value, torch.Tensor):
        return torch.empty([_at_hint(size) for size in value.shape], device="meta")
    return value


def _name_symbols(placeholders: list[fx.Node], symbols: list[Any]) -> dict[Any, str]:
    """Return a name for each symbol; a name that dimensions of different sizes would share is given to none of them.

    Dynamo has a symbol for each dimension of each input, even if all have the same batch size.
    """
    tensors = [node.meta["val"] for node in placeholders if isinstance(node.meta.get("val"), torch.Tensor)]
    firsts = _hints(tensor.shape[0] for tensor in tensors if tensor.dim() > 0)
    seconds = _hints(tensor.shape[1] for tensor in tensors if tensor.dim() > 1 and _is_whole(tensor))
    seconds = {symbol: hint for symbol, hint in seconds.items() if symbol not in firsts}
    names = {symbol: str(symbol) for symbol in symbols}
    for claiming, name in ((firsts, _BATCH), (seconds, _SEQUENCE)):
        if len(set(claiming.values())) == 1:
            names |= dict.fromkeys(claiming, name)
    return names


def _hints(sizes: Iterable[object]) -> dict[Any, int]:
    """Return the symbols that are themselves sizes, with their values at capture."""
    changing = (size for size in sizes if isinstance(size, torch.SymInt))
    return {symbol: int(size.node.hint) for size in changing if (symbol := _symbol(size)) is not None}


def _symbol(size: object) -> Any:
    """Return the symbol that a size consists of; None for a fixed or composed size, and for other objects."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    return expression if expression is not None and expression.is_Symbol else None


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
