"""Which saved values tensor-parallel ranks divide, so that each moves and keeps a part of what leaves their devices.

Each rank plans by itself. So they first plan without dividing anything, and say what would leave the device. Then they
plan again with the same values divided on all of them, because backward gathers these by a collective: if any leaves, all
that can be divided, since others would leave instead of those that take less memory then.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.passes.contract import Division, TensorGroup
from zinf_compile.runtime.ranks.ranks import Ranks, TensorRanks


class Leaving(NamedTuple):
    """Whether anything leaves the device of a rank in a plan, of what ranks can divide."""

    policy: ActivationPolicy
    leaves: bool = False


class Planned(Protocol):
    """A graph that was planned."""

    leaving: Leaving
    divided: tuple[str, ...]  # saved values of which each rank has a part


PlannedT = TypeVar("PlannedT", bound=Planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dividing:
    """The ranks that may divide saved values of a graph, and what is the same on all of them."""

    ranks: TensorRanks
    recompute: bool | None  # the option
    alike: Container[int] = frozenset()
    are_inputs_alike: bool = False

    def fit(
        self, data_ranks: Ranks, fit: Callable[[Division], tuple[PlannedT, Callable[..., Any]]]
    ) -> tuple[PlannedT, Callable[..., Any]]:
        """Return what ``fit`` makes of a graph, with what leaves the device divided if ranks can divide it.

        ``fit`` raises CapacityError if a graph does not fit; so does this, if it fits neither divided nor whole everywhere.
        """
        whole = self._division(frozenset())
        refused: list[CapacityError] = []
        fitted: list[tuple[PlannedT, Callable[..., Any]]] = []

        def try_whole() -> Leaving | None:
            try:
                fitted.append(fit(whole))
            except CapacityError as error:
                refused.append(error.with_traceback(None))  # whose frames keep all that was captured
                return None
            return fitted[0][0].leaving

        given = self.ranks.share_alike("planning", try_whole)
        division = self._agree(given)
        if division is None:
            return fitted[0]
        fitted.clear()  # what was captured takes memory
        while division is not None:
            try:
                program, compiled = data_ranks.do_alike_beside("planning", partial(fit, division))
            except CapacityError:
                break
            divided = self.ranks.exchange("divided activations", program.divided)
            if len(set(divided)) == 1 and divided[0]:
                return program, compiled
            # Parts of unequal sizes may make ranks save other values.
            names = frozenset.intersection(*map(frozenset, divided))
            division = replace(division, names=names) if names else None

        def fit_whole() -> tuple[PlannedT, Callable[..., Any]]:
            if refused:  # dividing may need more: what is gathered takes memory beside the part
                raise refused[0]
            return fit(whole)  # again: divided, other homes were planned

        return data_ranks.do_alike_beside("planning", fit_whole)

    def _agree(self, given: Sequence[Leaving | None]) -> Division | None:
        """Return what to divide, by what leaves the device of each rank; None if nothing does.

        None stands for a rank on which the graph does not fit whole.
        """
        if all(each is not None and not each.leaves for each in given):
            return None
        policies = [None if each is None else each.policy for each in given]
        return self._division(None, policy_of_all(policies, recompute=self.recompute))

    def _division(self, names: frozenset[str] | None, policy: ActivationPolicy | None = None) -> Division:
        assert self.ranks.group_name is not None
        group = TensorGroup(name=self.ranks.group_name, size=self.ranks.mesh_size, rank=self.ranks.mesh_rank)
        return Division(
            groups={group.name: group},
            names=names,
            policy=policy,
            alike=self.alike,
            are_inputs_alike=self.are_inputs_alike,
        )


def policy_of_all(policies: Sequence[ActivationPolicy | None], *, recompute: bool | None) -> ActivationPolicy:
    """Return the policy under which ranks divide what they save, by those of their plans; None stands for no plan.

    Under other policies than these two, values are recomputed by measured times, which are each rank's own.
    """
    saves = all(policy is ActivationPolicy.SAVE for policy in policies)
    if recompute is False or (recompute is None and saves):
        return ActivationPolicy.SAVE
    return ActivationPolicy.RECOMPUTE_BLOCKS


def notes_of(division: Division | None) -> Iterable[str]:
    """Yield a sentence for the report if tensor-parallel ranks divide what is saved."""
    for group in division.groups.values() if division is not None and division.names != frozenset() else ():
        yield (
            f"each of {group.size} tensor-parallel ranks saves a part of activations that are the same on all of them, and "
            "backward gathers them"
        )
