"""Saved values that may be offloaded, and the ticks during which nothing reads them."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from zinf_compile.ir.glossary import LiveRange, Phase
from zinf_compile.ir.schedule import Schedule
from zinf_compile.passes.analysis.collectives import reads_of
from zinf_compile.passes.analysis.out_forms import is_dense
from zinf_compile.passes.analysis.shapes import symbols_in
from zinf_compile.passes.analysis.storages import StorageRoot
from zinf_compile.passes.contract import node_facts


def find_idle(
    nodes: Sequence[fx.Node],
    roots: Mapping[fx.Node, StorageRoot],
    saved: Collection[StorageRoot],
    schedule: Schedule,
) -> dict[StorageRoot, LiveRange]:
    """Return the ticks from the last use in forward to the first in backward, for values that own all of their bytes.

    A value that is modified in place after it was computed is left out: offloading starts when it is computed.
    """
    touched: dict[StorageRoot, list[int]] = defaultdict(list)
    written: set[StorageRoot] = set()
    for node in nodes:
        tick = node_facts(node).tick
        if node.op != "call_function" or tick is None:
            continue  # the output of forward and the inputs of backward only pass a saved value on
        used = {roots[source] for source in node.all_input_nodes}
        for root in {roots[source] for source in reads_of(node)} | {roots[node]}:
            touched[root].append(tick)
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            written |= used
    idle = {}
    ticks = schedule.ticks(Phase.FORWARD)
    for root in saved:
        forward = [tick for tick in touched[root] if tick in ticks]
        backward = [tick for tick in touched[root] if tick not in ticks]
        if forward and backward and root not in written and _owns_its_bytes(root):
            idle[root] = LiveRange(start=forward[-1] + 1, end=backward[0])
    return idle


def _owns_its_bytes(root: StorageRoot) -> bool:
    """Return whether a value is a tensor of fixed sizes that fills its whole storage."""
    value = root.value
    if symbols_in(value):  # lowering writes the shape of a reloaded value as numbers
        return False
    return isinstance(value, torch.Tensor) and not root.is_gathered and value.storage_offset() == 0 and is_dense(value)
