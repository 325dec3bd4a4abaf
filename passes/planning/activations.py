"""What backward's inputs cost under one activation policy."""

from zinf_compile.facts import GraphFacts
from zinf_compile.plan import ActivationPlan


def plan_activations(graph: GraphFacts) -> ActivationPlan:
    """Return the bytes saved for backward and the peak of all that compute allocates, with its tick."""
    live = graph.live_nbytes()
    peak_tick = max(range(len(live)), key=live.__getitem__, default=0)
    return ActivationPlan(
        policy=graph.policy,
        saved_nbytes=sum(value.nbytes for value in graph.values if value.saved),
        peak_nbytes=live[peak_tick] if live else 0,
        peak_tick=peak_tick,
    )
