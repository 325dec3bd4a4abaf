"""Compute the wide activations between the layers of an MLP one tile of rows at a time, and recompute them in backward.

Emitted for two tiles of rows::

    x_tiles     = split(x, [256, 256], 0)
    up_tile_0   = linear(x_tile_0, up_weight)          recomputed in backward, not saved
    gelu_tile_0 = gelu(up_tile_0)
    down_tile_0 = linear(gelu_tile_0, down_weight)
    ...
    down_whole  = cat([down_tile_0, down_tile_1], 0)
"""

from collections.abc import Iterator

from torch import fx

from zinf_compile.passes.contract import Pass, TileInputs
from zinf_compile.passes.transforms.tiling.chains import find_chains
from zinf_compile.passes.transforms.tiling.tile_chain import Chain, tile_chain
from zinf_compile.passes.transforms.tiling.tilings import Combine

_ROWS = "rows"


def find_row_chains(graph: fx.Graph) -> Iterator[Chain]:
    """Yield chains along rows that share no call; of those that end at the same call, the one with the most rows."""
    by_result: dict[fx.Node, Chain] = {}
    for chain in find_chains(graph):
        tiling = chain.result.tiling
        if tiling.axis != _ROWS or tiling.combine is not Combine.CONCATENATE:
            continue
        known = by_result.get(chain.result.node)
        if known is None or tiling.size > known.result.tiling.size:
            by_result[chain.result.node] = chain
    taken: set[fx.Node] = set()
    for chain in by_result.values():
        nodes = {link.node for link in chain.links}
        if not nodes & taken:
            taken |= nodes
            yield chain


def _run(graph_module: fx.GraphModule, inputs: TileInputs) -> None:
    if inputs.chain_tiles > 1:
        for chain in list(find_row_chains(graph_module.graph)):
            tile_chain(chain, min(inputs.chain_tiles, chain.result.tiling.size), recompute=True)


TILE_CHAINS: Pass[TileInputs] = Pass(name="tile_chains", run=_run)
