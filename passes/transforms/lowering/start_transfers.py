"""Replace gathers of streamed parameters by transfers that start early and waits at first use.

Emitted::

    layers_1 = zinf.issue_gather(store, [params], [dtypes], [offsets])      at the transfer's issue tick
    ...
    layers_1_up_weight = zinf.wait_gather(layers_1, store, offset, ...)     before its first reader in this residency
    t = aten.t(layers_1_up_weight)                                          views are recomputed for each residency
    mm = aten.mm(x, t)

Of experts of which only those move that have rows, the issue also reads what says so::

    layers_1 = zinf.issue_gather(store, [params], [dtypes], [offsets], cumsum)

Gathers of resident parameters stay as they are: nothing moves. So do gathers whose value the graph returns.
"""

import bisect
import operator

from torch import fx

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.glossary import Tier, dtype_name
from zinf_compile.ir.ops import GATHER, ISSUE_GATHER, WAIT_GATHER
from zinf_compile.ir.transfers import Transfer
from zinf_compile.passes.contract import NODE_FACTS, LowerInputs, NodeFacts, Pass, node_facts
from zinf_compile.passes.fx_edit import insert_call, view_source
from zinf_compile.passes.properties import TICKS_IN_ORDER, TRANSFERS_STARTED, VALUES_KNOWN


def _run(graph_module: fx.GraphModule, inputs: LowerInputs) -> None:
    _Starter(graph_module.graph, inputs).run()


class _Starter:
    """One run of the pass over one graph."""

    def __init__(self, graph: fx.Graph, inputs: LowerInputs) -> None:
        self._graph = graph
        self._inputs = inputs
        numbered = [(tick, node) for node in graph.nodes if (tick := node_facts(node).tick) is not None]
        self._ticks = [tick for tick, _ in numbered]
        self._nodes = [node for _, node in numbered]
        self._dtypes = {node_facts(node).parameter: node.args[3] for node in self._nodes if node.target is GATHER}
        self._tickets: dict[Transfer, fx.Node] = {}
        self._bound: dict[tuple[fx.Node, Transfer], fx.Node] = {}
        exchanged = sorted(inputs.plan.gathers, key=lambda each: (each.launched_at, each.need_by))
        self._exchanged = {transfer: number for number, transfer in enumerate(exchanged)}

    def run(self) -> None:
        """Issue every gather whose ticks are in this graph, then bind every reader to the transfer that covers it.

        A reader of several transfers waits for them in the order in which ranks exchange their shards.
        """
        first, last = self._ticks[0], self._ticks[-1]
        for transfer in self._inputs.plan.gathers:
            if first <= transfer.need_by <= last:
                self._issue(transfer)
        streamed = self._streamed_values()
        for node in self._nodes:
            # Gathers and views of them are recomputed where they are read; what the graph returns must outlive the
            # arena's bytes.
            if node in streamed or node.op == "output":
                continue
            read = [(self._covering(streamed[used], node), used) for used in node.all_input_nodes if used in streamed]
            for transfer, used in sorted(read, key=lambda pair: self._exchanged[pair[0]]):
                node.replace_input_with(used, self._bind(used, transfer, node))
        for node in reversed(self._nodes):
            if node in streamed and not node.users:
                self._graph.erase_node(node)

    def _issue(self, transfer: Transfer) -> None:
        params = [self._inputs.param_ids[name] for name in transfer.parameters]
        before = self._nodes[bisect.bisect_left(self._ticks, transfer.issue)]
        dtypes = [dtype_name(self._dtypes[name]) for name in transfer.parameters]
        args: tuple[object, ...] = (self._inputs.store_id, params, dtypes, list(transfer.offsets))
        if transfer.ends is not None:
            args = (*args, self._nodes[bisect.bisect_left(self._ticks, transfer.ends)])
        ticket = insert_call(self._graph, before, ISSUE_GATHER, args, name=f"{transfer.name}_transfer")
        ticket.meta[NODE_FACTS] = NodeFacts(transfer=transfer)
        self._tickets[transfer] = ticket

    def _streamed_values(self) -> dict[fx.Node, str]:
        """Return the gathers to replace, and all views of them, with their parameter."""
        read = {use.parameter: use.dtype for use in self._inputs.plan.uses}
        placements = [item for item in self._inputs.plan.placements if item.parameter in read]
        homes = {item.parameter: item.home_read(read[item.parameter]) for item in placements}
        streamed: dict[fx.Node, str] = {}
        for node in self._nodes:
            parameter = node_facts(node).parameter
            if node.target is GATHER and parameter is not None:
                if homes.get(parameter, Tier.DEVICE) is not Tier.DEVICE:
                    streamed[node] = parameter
                continue
            source = node.args[0] if node.target is operator.getitem else view_source(node)
            if isinstance(source, fx.Node) and source in streamed:
                streamed[node] = streamed[source]
        return streamed

    def _covering(self, parameter: str, reader: fx.Node) -> Transfer:
        tick = node_facts(reader).tick
        assert tick is not None
        for transfer in self._inputs.plan.by_tick.holding(parameter, tick):
            return transfer
        raise VerifyError(f"'{reader.name}' reads '{parameter}' at tick {tick}, where no transfer holds it")

    def _bind(self, value: fx.Node, transfer: Transfer, before: fx.Node) -> fx.Node:
        """Return ``value`` made from the bytes of ``transfer``: a wait for a gather, a copy of the node for a view."""
        key = (value, transfer)
        if key not in self._bound:
            parameter = node_facts(value).parameter
            if value.target is GATHER and parameter is not None:
                offset = transfer.offsets[transfer.parameters.index(parameter)]
                _, _, shape, dtype, device = value.args
                self._bound[key] = insert_call(
                    self._graph,
                    before,
                    WAIT_GATHER,
                    (self._tickets[transfer], self._inputs.store_id, offset, shape, dtype, device),
                    name=parameter,
                )
            else:
                with self._graph.inserting_before(before):
                    copied = self._graph.node_copy(value, lambda arg: arg)
                copied.meta = {name: fact for name, fact in value.meta.items() if name != NODE_FACTS}
                self._bound[key] = copied
                source = value.args[0]
                assert isinstance(source, fx.Node)
                copied.replace_input_with(source, self._bind(source, transfer, copied))
        return self._bound[key]


START_TRANSFERS: Pass[LowerInputs] = Pass(
    name="start_transfers",
    run=_run,
    requires=frozenset({VALUES_KNOWN}),
    establishes=frozenset({TRANSFERS_STARTED, TICKS_IN_ORDER}),
)
