"""Which activation policies of a graph are looked at, ahead of the machine and on it: one rule for both.

What recomputes is worth a plan only if it could be faster than the best so far: a step takes at least as long as its graph
computes. On the machine splitting a graph takes a while, so what it would compute is first estimated from another split.
"""

from zinf_compile.facts import GraphFacts
from zinf_compile.hardware import Hardware
from zinf_compile.passes.planning.costs import ops_seconds
from zinf_compile.plans import Plan
from zinf_compile.simulate import simulate
from zinf_compile.terms import ActivationPolicy, Phase

# Of what a block computes in forward. What gives its result is not run again, which is a third of a transformer's.
_LEAST_SHARE_RECOMPUTED = 0.5
_LONGER = 1.005  # steps that differ by less may count as equally long, and the one that moves fewer bytes is taken


def allowed_policies(recompute: bool | None) -> tuple[ActivationPolicy, ...]:
    """Return what the option allows, in the order in which it is tried: torch's own choice of what to save comes first."""
    if recompute is None:
        return (ActivationPolicy.SAVE, ActivationPolicy.RECOMPUTE_BLOCKS)
    return (ActivationPolicy.RECOMPUTE_BLOCKS if recompute else ActivationPolicy.SAVE,)


def may_be_faster(compute_seconds: float, best: Plan | None) -> bool:
    """Return whether a graph that computes for so long could have a plan to prefer to ``best``; True if that is None."""
    return best is None or compute_seconds < _LONGER * simulate(best).step_seconds


def compute_seconds(graph: GraphFacts, hardware: Hardware) -> float:
    """Return how long forward and backward of a graph compute."""
    return sum(ops_seconds(graph.ops, hardware))


def least_recompute_seconds(saving: GraphFacts, hardware: Hardware) -> float:
    """Return about the least that a graph would compute with every block recomputed, by its facts under ``save``."""
    in_blocks = (
        op for op in saving.ops if saving.phase_of(op.tick) is Phase.FORWARD and _is_in_repeated_block(op.module)
    )
    again = sum(ops_seconds(in_blocks, hardware))
    return compute_seconds(saving, hardware) + _LEAST_SHARE_RECOMPUTED * again


def _is_in_repeated_block(module: str) -> bool:
    return any(part.isdigit() for part in module.split("."))
