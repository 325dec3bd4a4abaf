"""A simulated step as a networkx graph, for views and for the algorithms of networkx."""

from typing import TypeAlias

import networkx as nx

from zinf_compile.ir.timeline import Timeline

StepGraph: TypeAlias = "nx.DiGraph[int]"


def build_step_graph(timeline: Timeline) -> StepGraph:
    """Return a graph of the timeline's nodes, by index, with an edge to each node from those it had to wait for.

    Nodes have ``lane``, ``name``, ``nbytes`` and ``seconds``. Edges have the ``seconds`` of the node they leave, so that
    ``networkx.dag_longest_path_length(graph, weight="seconds")`` and the last node's seconds are the step's.
    """
    graph: StepGraph = nx.DiGraph()
    for index, node in enumerate(timeline.nodes):
        graph.add_node(index, lane=node.lane, name=node.name, nbytes=node.nbytes, seconds=node.seconds)
        for before in node.after:
            graph.add_edge(before, index, seconds=timeline.nodes[before].seconds)
    return graph
