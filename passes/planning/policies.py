"""Which activation policies of a graph are looked at, ahead of the machine and on it: one rule for both.

What recomputes is worth a plan only if it could be faster than the best so far: a step takes at least as long as its graph
computes. On the machine splitting a graph takes a while, so what it would compute is first estimated from another split.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zinf_compile.facts import GraphFacts
from zinf_compile.hardware import Hardware
from zinf_compile.passes.planning.costs import ops_seconds
from zinf_compile.passes.planning.recompute import ops_made_again, policy_levels
from zinf_compile.plans import Plan
from zinf_compile.simulate import simulate
from zinf_compile.terms import ActivationPolicy, Phase

# Of what a block computes in forward. What gives its result is not run again, which is a third of a transformer's.
_LEAST_SHARE_RECOMPUTED = 0.5
_LONGER = 1.005  # steps that differ by less may count as equally long, and the one that moves fewer bytes is taken


def allowed_policies(recompute: bool | None) -> tuple[ActivationPolicy, ...]:
    """Return what the option allows, in the order in which it is tried: torch's own choice of what to save comes first."""
    if recompute is None:
        return tuple(ActivationPolicy)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSplit:
    """A way to split a graph that may be faster than to save all: what the joint passes are told."""

    policy: ActivationPolicy
    made_again: frozenset[str] = frozenset()  # names of forward ops, under policies by value


def other_splits(
    policies: Iterable[ActivationPolicy], saving: GraphFacts, hardware: Hardware, plan: Plan | None
) -> Iterator[OtherSplit]:
    """Yield the splits under ``policies`` that could have a plan to prefer to ``plan``, which is that of ``saving``."""
    levels = policy_levels(saving, hardware)
    for policy in policies:
        if policy is ActivationPolicy.RECOMPUTE_BLOCKS:
            if may_be_faster(least_recompute_seconds(saving, hardware), plan):
                yield OtherSplit(policy=policy)
        elif policy in levels:
            level = levels[policy]
            if may_be_faster(compute_seconds(saving, hardware) + level.seconds, plan):
                yield OtherSplit(policy=policy, made_again=ops_made_again(saving, level.kinds))
