"""Let ops write their results to the arena offsets that the plan gives them, instead of allocating.

Emitted::

    mm_memory = zinf.arena_view(store, offset, shape, stride, dtype, device)
    mm = aten.mm.out(x, t, out=mm_memory)

Symbolic sizes are computed once, at the start, from the sizes of the inputs::

    sym_size = aten.sym_size.int(x, 0)
    mul = 2 * sym_size
    mm_memory = zinf.arena_view(store, offset, [mul, 4], [4, 1], dtype, device)

The plan reserves for every value the bytes that it needs at the largest inputs that the plan allows.

This keeps the memory that compute reuses in one place and in cache. The system's allocator would spread values over
several times as much memory, or return pages to the system and fault them in again.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from zinf_compile.ir.ops import ARENA_VIEW
from zinf_compile.passes.analysis.out_forms import out_form
from zinf_compile.passes.analysis.shapes import find_sources
from zinf_compile.passes.contract import LowerInputs, Pass, node_facts
from zinf_compile.passes.fx_edit import insert_call, set_values_before
from zinf_compile.passes.properties import TRANSFERS_STARTED, VALUES_KNOWN


def _run(graph_module: fx.GraphModule, inputs: LowerInputs) -> None:
    graph = graph_module.graph
    offsets = {bound.live.start: bound.offset for bound in inputs.plan.bound}
    sizes = _Sizes(graph)
    for node in list(graph.nodes):
        tick = node_facts(node).tick
        if tick is None or tick not in offsets:
            continue
        value = node.meta["val"]
        shape, stride = sizes.arguments(value.shape), sizes.arguments(value.stride())
        place = (inputs.store_id, offsets[tick], shape, stride, value.dtype, value.device)
        memory = insert_call(graph, node, ARENA_VIEW, place, name=f"{node.name}_memory")
        form = out_form(node, memory)
        node.target, node.args, node.kwargs = form.target, form.args, form.kwargs


class _Sizes:
    """Sizes of one graph as arguments of calls: numbers, or nodes that compute them at its start."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        placeholders: list[fx.Node] = graph.find_nodes(op="placeholder")
        self._sources = {source.symbol: (placeholders[source.position], source.dim) for source in find_sources(graph)}
        self._start = next(node for node in graph.nodes if node.op != "placeholder")
        self._nodes: dict[Any, fx.Node] = {}

    def arguments(self, sizes: Iterable[int | torch.SymInt]) -> list[int | fx.Node]:
        """Return sizes as arguments; symbolic ones as nodes, which are created at the first call."""
        return [size if isinstance(size, int) else self._argument(size.node.expr) for size in sizes]

    def _argument(self, expression: Any) -> int | fx.Node:
        if expression.is_Integer:
            return int(expression)
        if expression not in self._nodes:
            symbols = {symbol: fx.Proxy(self._symbol(symbol)) for symbol in expression.free_symbols}
            with self._graph.inserting_before(self._start):
                self._nodes[expression] = sympy_interp(PythonReferenceAnalysis, symbols, expression).node
            set_values_before(self._start)
        return self._nodes[expression]

    def _symbol(self, symbol: Any) -> fx.Node:
        placeholder, dim = self._sources[symbol]
        if dim is None:
            return placeholder
        if symbol not in self._nodes:
            sym_size = torch.ops.aten.sym_size.int
            self._nodes[symbol] = insert_call(self._graph, self._start, sym_size, (placeholder, dim), name="sym_size")
        return self._nodes[symbol]


BIND_OUTPUTS: Pass[LowerInputs] = Pass(
    name="bind_outputs",
    run=_run,
    requires=frozenset({VALUES_KNOWN, TRANSFERS_STARTED}),
)
