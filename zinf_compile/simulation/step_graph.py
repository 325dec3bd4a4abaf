"""A simulated step as a networkx graph, for views and for everything that networkx can ask of a graph."""

from typing import TypeAlias

import networkx as nx

from zinf_compile.simulation.timeline import Timeline

StepGraph: TypeAlias = "nx.DiGraph[int]"


def build_step_graph(timeline: Timeline) -> StepGraph:
    """Return a graph with a node for each of the timeline's, by index, and an edge from each that one came after.

    Nodes have ``lane``, ``name``, ``nbytes`` and ``seconds``. Edges have the ``seconds`` of the node they leave, so that
    ``networkx.dag_longest_path_length(graph, weight="seconds")`` and the last node's seconds are the step's.
    """
    graph: StepGraph = nx.DiGraph()
    for index, node in enumerate(timeline.nodes):
        graph.add_node(index, lane=node.lane, name=node.name, nbytes=node.nbytes, seconds=node.seconds)
        for before in node.after:
            graph.add_edge(before, index, seconds=timeline.nodes[before].seconds)
    return graph
