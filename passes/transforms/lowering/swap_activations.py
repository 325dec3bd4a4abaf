"""Offload saved values in forward and reload them in backward, as the plan says.

Emitted in forward::

    gelu_token = zinf.swap_out(gelu, store, "gelu", "nvme", stride)     right after the node that computes it
    ...
    gelu_gone = zinf.wait_swap_out(gelu_token, store)                   before the tick at which its bytes are reused
    return (loss, gelu_token)                                           instead of the value, and of saved views of it

and in backward, where the placeholder is now the token::

    gelu_swap = zinf.issue_swap_in(gelu, store, offset)                 at the swap's issue tick
    ...
    gelu_back = zinf.wait_swap_in(gelu_swap, store, offset, ...)        before its first reader; likewise for each saved view

or, where an integrated device reads it in host memory::

    gelu_back = zinf.read_swapped(gelu, store, ...)                     before its first reader; likewise for each saved view

The number and order of saved values stay the same, as AOTAutograd relies on them.
"""

import bisect
from collections import defaultdict

import torch
from torch import fx

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.ops import ISSUE_SWAP_IN, READ_SWAPPED, SWAP_OUT, WAIT_SWAP_IN, WAIT_SWAP_OUT
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.transfers import Transfer
from zinf_compile.passes.analysis.collectives import is_under_way
from zinf_compile.passes.analysis.storages import find_roots
from zinf_compile.passes.contract import NODE_FACTS, LowerInputs, NodeFacts, Pass, node_facts
from zinf_compile.passes.fx_edit import insert_call
from zinf_compile.passes.properties import SWAPS_GONE, TICKS_IN_ORDER, VALUES_KNOWN


def swapped_inputs(backward: fx.Graph, plan: Plan) -> frozenset[int]:
    """Return which inputs of a backward graph are tokens of offloaded activations."""
    swapped = {swap.value for swap in plan.swaps}
    placeholders = backward.find_nodes(op="placeholder")
    return frozenset(index for index, node in enumerate(placeholders) if node_facts(node).value in swapped)


def _run(graph_module: fx.GraphModule, inputs: LowerInputs) -> None:
    _Swapper(graph_module.graph, inputs).run()


class _Swapper:
    """One run of the pass over one graph."""

    def __init__(self, graph: fx.Graph, inputs: LowerInputs) -> None:
        self._graph = graph
        self._store_id = inputs.store_id
        self._transfers = inputs.plan.transfers
        # A reload cannot start before the inputs, because its token is one of them.
        self._first_op = min(_tick(node) for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
        numbered = [(tick, node) for node in graph.nodes if (tick := node_facts(node).tick) is not None]
        self._ticks = [tick for tick, _ in numbered]
        self._nodes: list[fx.Node] = [node for _, node in numbered]

    def run(self) -> None:
        """Offload the values that this graph computes, and reload those that it receives as tokens."""
        first, last = self._ticks[0], self._ticks[-1]
        offloads = [each for each in self._transfers if each.is_offload and first <= each.made_at <= last]
        reloads = [each for each in self._transfers if each.is_reload and first <= each.need_by <= last]
        if offloads:
            self._offload(offloads)
        if reloads:
            inputs: dict[str, list[fx.Node]] = defaultdict(list)
            for node in self._graph.find_nodes(op="placeholder"):
                if (value := node_facts(node).value) is not None:
                    inputs[value].append(node)
            for transfer in reloads:
                self._reload(transfer, inputs[transfer.name])

    def _at(self, tick: int) -> fx.Node:
        return self._nodes[bisect.bisect_left(self._ticks, tick)]

    def _offload(self, offloads: list[Transfer]) -> None:
        roots = find_roots(self._graph)
        births: dict[str, fx.Node] = {}
        for node, root in roots.items():
            if not is_under_way(node):
                births.setdefault(root.name, node)
        tokens: dict[str, fx.Node] = {}
        for transfer in offloads:
            name = transfer.name
            value = births.get(name)
            if value is None or _tick(roots[value].node) != transfer.made_at:
                raise VerifyError(f"'{name}' is to be offloaded at tick {transfer.made_at}, but is not computed there")
            stride = list(value.meta["val"].stride())
            args = (value, self._store_id, name, str(transfer.destination), stride)
            token = insert_call(self._graph, value.next, SWAP_OUT, args, name=f"{name}_token")
            gone = (token, self._store_id)
            insert_call(self._graph, self._at(transfer.need_by), WAIT_SWAP_OUT, gone, name=f"{name}_gone")
            tokens[name] = token
        output = self._graph.output_node()
        for node in output.all_input_nodes:
            if roots[node].name in tokens:
                output.replace_input_with(node, tokens[roots[node].name])

    def _reload(self, transfer: Transfer, inputs: list[fx.Node]) -> None:
        if not inputs:
            raise VerifyError(f"'{transfer.name}' is to be reloaded, but is not an input of backward")
        readers = {node: list(node.users) for node in inputs}
        values = {node: node.meta["val"] for node in inputs}
        for node in inputs:
            node.meta["val"] = node.meta["val"].new_empty(1, dtype=torch.int64)
        ticket = None if transfer.stays else self._issue(transfer, inputs[0])
        for node, users in readers.items():
            if not users:
                continue
            reader = min(users, key=_tick)
            if _tick(reader) < transfer.need_by:
                raise VerifyError(
                    f"'{reader.name}' reads '{node.name}' before it is reloaded, at tick {transfer.need_by}"
                )
            value = values[node]
            place = (list(value.shape), list(value.stride()), value.storage_offset(), value.dtype, value.device)
            name = f"{node.name}_back"
            if ticket is None:
                back = insert_call(self._graph, reader, READ_SWAPPED, (node, self._store_id, *place), name=name)
            else:
                args = (ticket, self._store_id, transfer.offset, *place)
                back = insert_call(self._graph, reader, WAIT_SWAP_IN, args, name=name)
            for user in users:
                user.replace_input_with(node, back)

    def _issue(self, transfer: Transfer, token: fx.Node) -> fx.Node:
        before = self._at(max(transfer.issue, self._first_op))
        args = (token, self._store_id, transfer.offset)
        ticket = insert_call(self._graph, before, ISSUE_SWAP_IN, args, name=f"{transfer.name}_swap")
        ticket.meta[NODE_FACTS] = NodeFacts(transfer=transfer)
        return ticket


def _tick(node: fx.Node) -> int:
    tick = node_facts(node).tick
    assert tick is not None
    return tick


SWAP_ACTIVATIONS: Pass[LowerInputs] = Pass(
    name="swap_activations",
    run=_run,
    requires=frozenset({VALUES_KNOWN}),
    establishes=frozenset({SWAPS_GONE, TICKS_IN_ORDER}),
)
