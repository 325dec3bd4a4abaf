"""Finds chains of matrix products and element-wise ops that can be tiled along one axis, such as an MLP, gated or not.

The axis is the rows, or the hidden features, which are output features of the first layers and input features of the
last. The wide activations in between are then computed one tile at a time.
"""

from collections.abc import Iterator

from torch import fx

from zinf_compile.passes.transforms.tiling.calls import ELEMENT_WISE, arguments_of, read_call
from zinf_compile.passes.transforms.tiling.order import may_run_later
from zinf_compile.passes.transforms.tiling.table import legal_tilings
from zinf_compile.passes.transforms.tiling.tile_chain import Chain, Link
from zinf_compile.passes.transforms.tiling.tilings import Combine, Pieces, Tiling

_PRODUCTS = ("linear", "matmul")


def find_chains(graph: fx.Graph) -> Iterator[Chain]:
    """Yield every chain that ends at a product and begins at the nearest products before it."""
    for node in graph.nodes:
        if _op_of(node) not in _PRODUCTS:
            continue
        for tiling in legal_tilings(node):
            chain = _carry_back(node, tiling)
            num_products = sum(_op_of(link.node) in _PRODUCTS for link in chain.links)
            if num_products > 1 and may_run_later(chain.links[0].node, chain.result.node):
                yield chain


def _op_of(node: fx.Node) -> str | None:
    call = read_call(node)
    return None if call is None else call.op


def _carry_back(last: fx.Node, tiling: Tiling) -> Chain:
    """Return the longest chain that ends with a call tiled like this and begins at products, whose inputs are split."""
    links = {last: tiling}
    cut_inputs = _cut_inputs(last, tiling)
    node = last.prev
    while cut_inputs and node.op != "root":
        dim = cut_inputs.pop(node, None)
        op = _op_of(node)
        if dim is not None and (op == ELEMENT_WISE or op in _PRODUCTS) and _only_read_cut(node, links, dim):
            matching = _tiling_along(node, dim)
            if matching is not None:
                links[node] = matching
                if op == ELEMENT_WISE:
                    cut_inputs |= _cut_inputs(node, matching)
        node = node.prev
    ordered = reversed(links.items())  # they were found from the last to the first
    return Chain(links=tuple(Link(node=node, tiling=tiling) for node, tiling in ordered))


def _cut_inputs(node: fx.Node, tiling: Tiling) -> dict[fx.Node, int]:
    arguments = arguments_of(node)
    return {arguments[cut.operand]: cut.dim for cut in tiling.cuts if cut.unit == 1}


def _only_read_cut(node: fx.Node, links: dict[fx.Node, Tiling], dim: int) -> bool:
    """Return whether only the chain reads a node, and always cuts it along this dimension."""
    for user in node.users:
        if user not in links:
            return False
        for operand, argument in arguments_of(user).items():
            cut = links[user].cut_of(operand)
            if argument is node and (cut is None or cut.dim != dim):
                return False
    return True


def _tiling_along(node: fx.Node, dim: int) -> Tiling | None:
    """Return the tiling of a node whose pieces are concatenated along a dimension."""
    return next(
        (
            tiling
            for tiling in legal_tilings(node)
            if tiling.combine is Combine.CONCATENATE and tiling.dim == dim and tiling.pieces is Pieces.ALIKE
        ),
        None,
    )
