"""Which activation policies of a graph are planned; the same rule applies with and without the machine.

A policy that recomputes is planned only if it could be faster than the best plan so far, since a step takes at least as
long as its graph computes. On the machine splitting a graph takes time, so its compute time is first estimated from
another split.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zinf_compile.ir.facts import GraphFacts
from zinf_compile.ir.glossary import ActivationPolicy, Phase
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.cost.costs import ops_seconds
from zinf_compile.passes.planner.memory.recompute import Kind, policy_levels
from zinf_compile.passes.planner.simulator.simulate import simulate

# The least share of a block's forward compute that is recomputed. The ops that only compute its result are not: a third
# of a transformer block.
_LEAST_SHARE_RECOMPUTED = 0.5
_LONGER = 1.005  # steps that differ by less may count as equally fast; then the plan that moves fewer bytes is chosen


def allowed_policies(recompute: bool | None) -> tuple[ActivationPolicy, ...]:
    """Return the policies that the option allows, in the order of trying: torch's own choice of saved values is first."""
    if recompute is None:
        return tuple(ActivationPolicy)
    return (ActivationPolicy.RECOMPUTE_BLOCKS if recompute else ActivationPolicy.SAVE,)


def may_be_faster(compute_seconds: float, best: Plan | None) -> bool:
    """Return whether a graph with this compute time could have a better plan than ``best``; True if that is None."""
    return best is None or compute_seconds < _LONGER * simulate(best).step_seconds


def compute_seconds(graph: GraphFacts, hardware: Hardware) -> float:
    """Return the compute seconds of forward and backward of a graph."""
    return sum(ops_seconds(graph.ops, hardware))


def least_recompute_seconds(saving: GraphFacts, hardware: Hardware) -> float:
    """Return a lower estimate of compute seconds if every block is recomputed, from the facts under ``save``."""
    in_blocks = (
        op
        for op in saving.ops
        if saving.schedule.phase_of(op.tick) is Phase.FORWARD and _is_in_repeated_block(op.module)
    )
    again = sum(ops_seconds(in_blocks, hardware))
    return compute_seconds(saving, hardware) + _LEAST_SHARE_RECOMPUTED * again


def _is_in_repeated_block(module: str) -> bool:
    return any(part.isdigit() for part in module.split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSplit:
    """A split of a graph that may be faster than saving everything."""

    policy: ActivationPolicy
    kinds: frozenset[Kind] = frozenset()  # of the values to recompute, under policies by value


def other_splits(
    policies: Iterable[ActivationPolicy], saving: GraphFacts, hardware: Hardware, plan: Plan | None
) -> Iterator[OtherSplit]:
    """Yield the splits under ``policies`` that may have a better plan than ``plan``, the plan of ``saving``."""
    levels = policy_levels(saving, hardware)
    for policy in policies:
        if policy is ActivationPolicy.RECOMPUTE_BLOCKS:
            if may_be_faster(least_recompute_seconds(saving, hardware), plan):
                yield OtherSplit(policy=policy)
        elif policy in levels:
            level = levels[policy]
            if may_be_faster(compute_seconds(saving, hardware) + level.seconds, plan):
                yield OtherSplit(policy=policy, kinds=level.kinds)
