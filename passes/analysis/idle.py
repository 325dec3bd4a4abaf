"""Saved values that may leave the device, and the ticks in which nothing reads them."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from zinf_compile.passes.analysis.shapes import symbols_in
from zinf_compile.passes.analysis.storages import StorageRoot
from zinf_compile.passes.contract import node_facts
from zinf_compile.passes.out_forms import is_dense
from zinf_compile.terms import LiveRange


def find_idle(
    nodes: Sequence[fx.Node],
    roots: Mapping[fx.Node, StorageRoot],
    saved: Collection[StorageRoot],
    num_forward_ticks: int,
) -> dict[StorageRoot, LiveRange]:
    """Return the ticks from the last use in forward to the first in backward, for values that own all of their bytes.

    A value that is written to again after its birth stays: what leaves is what was born.
    """
    touched: dict[StorageRoot, list[int]] = defaultdict(list)
    written: set[StorageRoot] = set()
    for node in nodes:
        tick = node_facts(node).tick
        if node.op != "call_function" or tick is None:
            continue  # forward's output and backward's inputs only hand a saved value on
        used = {roots[source] for source in node.all_input_nodes}
        for root in used | {roots[node]}:
            touched[root].append(tick)
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            written |= used
    idle = {}
    for root in saved:
        forward = [tick for tick in touched[root] if tick < num_forward_ticks]
        backward = [tick for tick in touched[root] if tick >= num_forward_ticks]
        if forward and backward and root not in written and _owns_its_bytes(root):
            idle[root] = LiveRange(start=forward[-1] + 1, end=backward[0])
    return idle


def _owns_its_bytes(root: StorageRoot) -> bool:
    """Return whether a value is a tensor, of sizes that are numbers, that fills its storage from first byte to last."""
    value = root.value
    if symbols_in(value):  # lowering writes the shape of what comes back as numbers
        return False
    return isinstance(value, torch.Tensor) and not root.is_gathered and value.storage_offset() == 0 and is_dense(value)
