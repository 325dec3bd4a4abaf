"""Properties of graphs, each with its check."""

import operator
from collections import Counter
from itertools import pairwise

from torch import fx

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.ops import (
    GATHER,
    ISSUE_GATHER,
    ISSUE_SWAP_IN,
    LAUNCH_GATHER,
    RELEASE,
    SINK_GRAD,
    STORE_GRAD,
    SWAP_OUT,
    WAIT_GATHER,
    WAIT_SINKS,
    WAIT_SWAP_IN,
    WAIT_SWAP_OUT,
)
from zinf_compile.passes.contract import Property, node_facts
from zinf_compile.passes.fx_edit import view_source


def _check_values_known(graph_module: fx.GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            raise VerifyError(f"node '{node.name}' ({node.target}) has no meta['val']")


def _check_parameters_gathered(graph_module: fx.GraphModule) -> None:
    """No op reads a parameter as a plain input any more."""
    for node in graph_module.graph.find_nodes(op="placeholder"):
        if node.meta.get("is_parameter", False) and node.users:
            raise VerifyError(f"parameter placeholder '{node.name}' is still read by '{next(iter(node.users)).name}'")


def _check_one_gradient_each(graph_module: fx.GraphModule) -> None:
    """No parameter's gradient is stored twice in one backward, unless in parts with different numbers."""
    seen: dict[object, fx.Node] = {}
    for node in graph_module.graph.find_nodes(op="call_function", target=STORE_GRAD):
        stored = node.args[1:]
        if stored in seen:
            raise VerifyError(f"'{node.name}' stores a gradient that '{seen[stored].name}' stores already")
        seen[stored] = node


def _check_stored_last(graph_module: fx.GraphModule) -> None:
    """Nothing reads a parameter, views of it included, once the last of its gradients is stored."""
    left = Counter(node.args[1] for node in graph_module.graph.find_nodes(op="call_function", target=STORE_GRAD))
    stored: set[object] = set()
    reads: dict[fx.Node, object] = {}  # nodes that hold bytes of a parameter
    for node in graph_module.graph.nodes:
        for source in node.all_input_nodes:
            if reads.get(source) in stored and node.op != "output":
                raise VerifyError(f"'{node.name}' reads '{source.name}' after the gradient of its parameter was stored")
        source = view_source(node)
        if node.target is GATHER:
            reads[node] = node.args[1]
        elif source in reads:
            reads[node] = reads[source]
        elif node.target is STORE_GRAD:
            left[node.args[1]] -= 1
            if not left[node.args[1]]:
                stored.add(node.args[1])


def _check_gradients_sunk(graph_module: fx.GraphModule) -> None:
    nodes = list(graph_module.graph.nodes)
    for node in nodes:
        if node.target is STORE_GRAD:
            raise VerifyError(f"gradient '{node.name}' is still stored synchronously")
    sinks = [index for index, node in enumerate(nodes) if node.target is SINK_GRAD]
    waits = [index for index, node in enumerate(nodes) if node.target is WAIT_SINKS]
    if sinks and (not waits or waits[-1] < sinks[-1]):
        raise VerifyError(f"gradient sink '{nodes[sinks[-1]].name}' is not followed by a wait")


def _check_transfers_started(graph_module: fx.GraphModule) -> None:
    """Every remaining gather is of a resident parameter, and every wait depends on an issue."""
    for node in graph_module.graph.nodes:
        if node.target is WAIT_GATHER and node.args[0].target is not ISSUE_GATHER:
            raise VerifyError(f"wait '{node.name}' does not depend on an issue_gather but on '{node.args[0]}'")
        if node.target is WAIT_SWAP_IN and node.args[0].target is not ISSUE_SWAP_IN:
            raise VerifyError(f"wait '{node.name}' does not depend on an issue_swap_in but on '{node.args[0]}'")


def _check_launches_in_order(graph_module: fx.GraphModule) -> None:
    """Gathers are exchanged between ranks in the order in which they are waited for, and before."""
    first: dict[fx.Node, int] = {}
    waited: dict[fx.Node, int] = {}
    for position, node in enumerate(graph_module.graph.nodes):
        if node.target in (LAUNCH_GATHER, WAIT_GATHER):
            first.setdefault(node.args[0], position)
        if node.target is WAIT_GATHER:
            waited.setdefault(node.args[0], position)
    order = [ticket for ticket in sorted(first, key=first.__getitem__) if ticket in waited]
    for before, after in pairwise(order):
        if waited[after] < waited[before]:
            raise VerifyError(f"'{after.name}' is launched after '{before.name}', and waited for before it")


def _check_transfers_released(graph_module: fx.GraphModule) -> None:
    """Every transfer is released exactly once, after the last node that reads its bytes, views of them included."""
    position = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    for ticket in (node for node in position if node.target in (ISSUE_GATHER, ISSUE_SWAP_IN)):
        releases = [user for user in ticket.users if user.target is RELEASE]
        if len(releases) != 1:
            raise VerifyError(f"transfer '{ticket.name}' is released {len(releases)} times instead of once")
        for wait in ticket.users:
            for reader in _readers(wait) if wait.target in (WAIT_GATHER, WAIT_SWAP_IN) else ():
                if position[reader] > position[releases[0]]:
                    raise VerifyError(f"'{reader.name}' reads '{wait.name}' after its release")


def _check_swaps_gone(graph_module: fx.GraphModule) -> None:
    """An offload is waited for once; after that neither the value nor a view of it is read or returned."""
    position = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    for token in graph_module.graph.find_nodes(op="call_function", target=SWAP_OUT):
        waits = [user for user in token.users if user.target is WAIT_SWAP_OUT]
        if len(waits) != 1:
            raise VerifyError(f"'{token.name}' is waited for {len(waits)} times instead of once")
        for reader in _readers(token.args[0]):
            if position[reader] > position[waits[0]]:
                raise VerifyError(f"'{reader.name}' reads '{token.args[0].name}' after it was offloaded")


def _readers(node: fx.Node) -> list[fx.Node]:
    readers = []
    for user in node.users:
        readers.append(user)
        if view_source(user) is node or user.target is operator.getitem:
            readers.extend(_readers(user))
    return readers


def _check_ticks_in_order(graph_module: fx.GraphModule) -> None:
    """Lowering never reorders the nodes it was given: the plan's ticks still say what happens before what."""
    last = -1
    for node in graph_module.graph.nodes:
        tick = node_facts(node).tick
        if tick is None:
            continue
        if tick < last:
            raise VerifyError(f"node '{node.name}' of tick {tick} comes after tick {last}")
        last = tick


VALUES_KNOWN = Property(name="values_known", check=_check_values_known)
PARAMETERS_GATHERED = Property(name="parameters_gathered", check=_check_parameters_gathered)
STORED_LAST = Property(name="stored_last", check=_check_stored_last)
ONE_GRADIENT_EACH = Property(name="one_gradient_each", check=_check_one_gradient_each)
GRADIENTS_SUNK = Property(name="gradients_sunk", check=_check_gradients_sunk)
TRANSFERS_STARTED = Property(name="transfers_started", check=_check_transfers_started)
LAUNCHES_IN_ORDER = Property(name="launches_in_order", check=_check_launches_in_order)
TRANSFERS_RELEASED = Property(name="transfers_released", check=_check_transfers_released)
SWAPS_GONE = Property(name="swaps_gone", check=_check_swaps_gone)
TICKS_IN_ORDER = Property(name="ticks_in_order", check=_check_ticks_in_order)
