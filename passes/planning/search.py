"""The search for the plan of one graph: greedy filling, and steps to neighbouring choices, judged by the simulator.

Budgets are climbed on a ladder from the smallest that works. Which rungs there are, and what is tried on each, does not
depend on the budget of the request: with more memory the search goes on where it ended with less, and keeps what it had.
So more device memory never makes a plan slower.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from zinf_compile.errors import CapacityError
from zinf_compile.facts import GraphFacts
from zinf_compile.passes.planning.arena import align
from zinf_compile.passes.planning.build import Choice, Groundwork, LookAhead, PlanBuilder, Request
from zinf_compile.passes.planning.placement import with_device_memory
from zinf_compile.plans import ActivationSwap, Plan
from zinf_compile.simulate import simulate
from zinf_compile.simulation.bound import least_seconds
from zinf_compile.terms import Tier
from zinf_compile.world import shard_parameter

_MIB = 2**20


def _look_ahead(nbytes: int) -> LookAhead:
    return LookAhead(prefetch_nbytes=nbytes, group_nbytes=nbytes // 4)


# Widest first. A group is a quarter of the look-ahead, so that several transfers are in flight; the last entry moves
# every parameter alone, at the moment it is needed: the least memory a plan can do with.
_LOOK_AHEADS = tuple(_look_ahead(size * _MIB) for size in (256, 128, 64, 32, 16, 8, 0))
# Rungs lie so close by what is beyond the smallest budget. What lies above the highest rung below a budget is not used: on
# average 8 % of what is beyond.
_RUNGS_PER_DOUBLING = 4
_FEW_RUNGS_PER_DOUBLING = 1  # where activations leave the device: one search of several for the same graph
_FIRST_RUNG = 64  # of the smallest budget, beyond it
_STEPS_PER_RUNG = 3
# Times the fastest. Steps that differ by less than the simulator can tell are equally long.
EQUALLY_FAST = 1.005
# A block that is recomputed uses its weights twice, with most of its other weights in between.
_HELD_PAST = (1, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How good a plan is: the seconds of its step; then the bytes it moves, which may be late; then what it takes.

    Steps that differ by less than the simulator can tell count as equally long: then what moves less is better, since a disk
    wears and a bus is shared.
    """

    nanoseconds: int
    nbytes_moved: int  # by transfers, gradients and updates
    nbytes_away: int  # of compute copies that are not resident: another graph may read them
    peak_nbytes: int

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Return what the best of equally fast plans has the least of."""
        return self.nbytes_moved, self.nanoseconds, self.nbytes_away, self.peak_nbytes

    def beats(self, other: "Score") -> bool:
        """Return whether a plan with this score is as good in everything."""
        return self.key <= other.key and self.nanoseconds <= other.nanoseconds


def score_plan(plan: Plan) -> Score:
    """Return the score of a plan, by the simulator."""
    return _score(plan, simulate(plan).step_seconds)


def least_score(plan: Plan) -> Score:
    """Return a score that that of a plan is no better than, without simulating it."""
    return _score(plan, least_seconds(plan))


def _score(plan: Plan, step_seconds: float) -> Score:
    return Score(
        nanoseconds=round(step_seconds * 1e9),
        nbytes_moved=sum(transfer.nbytes for transfer in plan.transfers)
        + sum(sink.nbytes for sink in plan.sinks if sink.destination is not Tier.DEVICE)
        + plan.step.nbytes_read
        + plan.step.nbytes_written,
        nbytes_away=sum(item.compute_nbytes for item in plan.placements if item.compute is not Tier.DEVICE),
        peak_nbytes=plan.tier(Tier.DEVICE).predicted_peak,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan with the choice that led to it."""

    choice: Choice
    plan: Plan
    score: Score


class Front:
    """Plans of which none moves fewer bytes in less time than another. The best moves the fewest of those equally fast."""

    def __init__(self) -> None:
        self._found: list[Found] = []

    @property
    def longest_ns(self) -> float:
        """Return the nanoseconds up to which a plan is as fast as the fastest; infinity before there is any."""
        return EQUALLY_FAST * min((item.score.nanoseconds for item in self._found), default=math.inf)

    @property
    def best(self) -> Found | None:
        """Return the best; None before there is any."""
        longest = self.longest_ns
        fast = (item for item in self._found if item.score.nanoseconds <= longest)
        return min(fast, key=lambda item: item.score.key, default=None)

    def may_have(self, score: Score) -> bool:
        """Return whether a plan with a score that is no better than this one could be on the front, and fast enough."""
        return score.nanoseconds <= self.longest_ns and not any(item.score.beats(score) for item in self._found)

    def add(self, found: Found | None) -> None:
        """Take in a plan, in place of those that it beats."""
        if found is not None and self.may_have(found.score):
            self._found = [item for item in self._found if not found.score.beats(item.score)] + [found]

    def join(self, other: "Front") -> None:
        """Take in all plans of another front: if each front gave its best alone, half a percent would be lost twice."""
        for found in other._found:
            self.add(found)


def search_plan(
    request: Request, graph: GraphFacts, swaps: tuple[ActivationSwap, ...] = (), groundwork: Groundwork | None = None
) -> Found | None:
    """Return the best plan found for one graph, or None if none fits the device.

    Raises CapacityError when host and nvme cannot hold what the device does not.
    """
    return search_front(request, graph, swaps, groundwork).best


def search_front(
    request: Request, graph: GraphFacts, swaps: tuple[ActivationSwap, ...] = (), groundwork: Groundwork | None = None
) -> Front:
    """Return the plans found for one graph; none if none fits the device. Of several graphs the best is that of all fronts.

    Raises CapacityError when host and nvme cannot hold what the device does not.
    """
    builder = PlanBuilder(request, graph, swaps, groundwork)
    builder.place_unseen(request.config)  # of all it leaves the most to host and nvme
    if builder.floor_nbytes > request.config.device_memory:
        return Front()
    if request.placements is not None and (kept := _keep_homes(request, builder)).best is not None:
        return kept
    front = Front()
    turn = 0
    starts = _starts(request, builder)
    for memory in _rungs(
        request, builder, starts, per_doubling=_FEW_RUNGS_PER_DOUBLING if swaps else _RUNGS_PER_DOUBLING
    ):
        choices = [choice for start in starts if start.nbytes == memory for choice in start.choices]
        if front.best is not None:
            choices += _neighbours(front.best.choice, request, turn)
            turn += _STEPS_PER_RUNG
        for choice in choices:
            _try(builder, choice, memory, front)
    if front.best is None:  # the other tiers hold the rest only beside all of this device, if at all
        front.add(_find_plan(request, builder, starts))
    return front


def find_plan(
    request: Request, graph: GraphFacts, swaps: tuple[ActivationSwap, ...] = (), groundwork: Groundwork | None = None
) -> Found | None:
    """Return some plan for one graph, without a search, or None if none fits the device.

    Raises CapacityError when host and nvme cannot hold what the device does not.
    """
    builder = PlanBuilder(request, graph, swaps, groundwork)
    builder.place_unseen(request.config)  # as a search begins, so that it finds a plan whenever there is one here
    if builder.floor_nbytes > request.config.device_memory:
        return None
    if request.placements is not None and (kept := _keep_homes(request, builder).best) is not None:
        return kept
    return _find_plan(request, builder, _starts(request, builder))


def _find_plan(request: Request, builder: PlanBuilder, starts: Sequence["_Start"]) -> Found | None:
    for start in sorted(starts, key=lambda start: start.nbytes):
        for choice in (choice for choice in start.choices if choice.uses_host):
            plan = builder.build(choice, request.config.device_memory)
            if plan is not None:
                return Found(choice=choice, plan=plan, score=score_plan(plan))
    return None


def minimum_memory(
    request: Request, graph: GraphFacts, swaps: tuple[ActivationSwap, ...] = (), groundwork: Groundwork | None = None
) -> int:
    """Return the bytes of the smallest device budget in which some plan of a graph fits."""
    return min(start.nbytes for start in _starts(request, PlanBuilder(request, graph, swaps, groundwork)))


def _bare_nbytes(request: Request, builder: PlanBuilder, look_ahead: LookAhead, small_nbytes: int) -> int:
    """Return the smallest device budget for a look-ahead when nothing is resident but so many bytes of small parameters."""
    config = with_device_memory(request.config, builder.floor_nbytes)
    return builder.least_nbytes(builder.place_unseen(config, small_nbytes), look_ahead)


def _is_held_elsewhere(request: Request, builder: PlanBuilder, small_nbytes: int) -> bool:
    """Return whether host and nvme have room for all but so many bytes of small parameters."""
    try:
        builder.place_unseen(request.config, small_nbytes)
    except CapacityError:
        return False
    return True


def _streaming_nbytes(request: Request, builder: PlanBuilder, look_ahead: LookAhead) -> int:
    """Return the smallest device budget for a look-ahead when nothing is resident but the small parameters.

    They may take an eighth of the budget, so the budget they are counted under is searched for.
    """
    needed = builder.floor_nbytes
    while True:
        placed = builder.place_unseen(with_device_memory(request.config, needed))
        least = builder.least_nbytes(placed, look_ahead)
        if least <= needed:
            return needed
        needed = least


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Simple plans to start from, at the smallest budget that they fit in: the search is never worse than any of them."""

    nbytes: int
    choices: tuple[Choice, ...]


def _starts(request: Request, builder: PlanBuilder) -> list[_Start]:
    """Return one start for each look-ahead: all streamed, as early as may be or as late as can be, from host or nvme.

    Before them those that may take the least: hardly a small parameter is resident, or all are. And without any resident,
    each at what it takes itself: where the host holds all, that is everything on the host.
    """
    narrowest = _look_aheads(request)[-1]
    bare = builder.place_unseen(request.config, 0) if _is_held_elsewhere(request, builder, 0) else None
    starts = [
        *(
            _Start(
                nbytes=_bare_nbytes(request, builder, narrowest, small_nbytes),
                choices=(Choice(look_ahead=narrowest, is_filled=False, small_nbytes=small_nbytes),),
            )
            for small_nbytes in (0, builder.tiny_nbytes)
            if _is_held_elsewhere(request, builder, small_nbytes)
        ),
        # Of tiny parameters, which would take whole pages of the arena, this may be less.
        _Start(nbytes=builder.all_resident_nbytes, choices=(Choice(look_ahead=narrowest),)),
    ]
    for look_ahead in _look_aheads(request):
        choice = Choice(look_ahead=look_ahead, is_eager=True, is_filled=False)  # takes the most
        lazy = replace(choice, is_eager=False)
        starts.append(
            _Start(
                nbytes=_streaming_nbytes(request, builder, look_ahead),
                choices=(choice, lazy, replace(choice, uses_host=False), replace(lazy, uses_host=False)),
            )
        )
        if bare is not None:
            for is_eager in (True, False):
                without = replace(choice, is_eager=is_eager, small_nbytes=0)
                starts.append(
                    _Start(nbytes=builder.least_nbytes(bare, look_ahead, is_eager=is_eager), choices=(without,))
                )
    return starts


def _rungs(request: Request, builder: PlanBuilder, starts: Sequence[_Start], *, per_doubling: int) -> Iterator[int]:
    """Yield the device budgets to plan for, up to that of the request.

    Geometric, and those in which a start fits, and those at which compute copies, then all else, may be resident.
    """
    states = sum(
        item.gradient_nbytes + item.optimizer_state_nbytes + item.trainable * item.master_nbytes
        for item in (shard_parameter(parameter, request.num_ranks) for parameter in request.parameters)
    )
    highest = builder.all_resident_nbytes + states
    smallest = min(start.nbytes for start in starts)
    rungs = {highest, *(start.nbytes for start in starts)}
    beyond = smallest / _FIRST_RUNG
    while smallest + beyond < highest:
        rungs.add(int(smallest + beyond))
        beyond *= 2 ** (1 / per_doubling)
    yield from (rung for rung in sorted(rungs) if rung <= request.config.device_memory)


def _look_aheads(request: Request) -> Sequence[LookAhead]:
    if request.config.prefetch_memory is not None:
        # Without the last the smallest budget would depend on how early this machine has to issue a transfer.
        return tuple(_look_ahead(nbytes) for nbytes in sorted({request.config.prefetch_memory, 0}, reverse=True))
    largest = max((align(parameter.compute_nbytes) for parameter in request.parameters), default=0)
    if largest <= _LOOK_AHEADS[0].prefetch_nbytes:
        return _LOOK_AHEADS
    # None of those would let a transfer of the largest parameter start before it is needed.
    return (*(_look_ahead(times * largest) for times in (4, 2, 1)), _LOOK_AHEADS[0], _LOOK_AHEADS[-1])


def _keep_homes(request: Request, builder: PlanBuilder) -> Front:
    """Return the plans with the homes other graphs of the model run with, so that nothing has to move."""
    assert request.placements is not None
    front = Front()
    for look_ahead in _look_aheads(request):
        choice = Choice(look_ahead=look_ahead)
        plan = builder.build_at(request.placements, choice)
        if plan is not None:
            front.add(Found(choice=choice, plan=plan, score=score_plan(plan)))
    return front


def _neighbours(choice: Choice, request: Request, turn: int) -> Iterator[Choice]:
    """Yield the choice itself, to be filled again, and some of those that differ from it in one thing, in turn."""
    yield replace(choice, is_filled=True)
    choice = replace(choice, is_filled=True, small_nbytes=None)
    look_aheads = _look_aheads(request)
    position = next((index for index, each in enumerate(look_aheads) if each == choice.look_ahead), 0)
    near = [
        replace(choice, look_ahead=look_aheads[other])
        for other in (position - 1, position + 1)
        if 0 <= other < len(look_aheads)
    ]
    near += [
        replace(choice, held_past=_HELD_PAST[(_HELD_PAST.index(choice.held_past) + 1) % len(_HELD_PAST)]),
        replace(choice, is_eager=not choice.is_eager),
        *(
            replace(choice, are_transfers_hidden=hidden)
            for hidden in (None, False, True)
            if hidden is not choice.are_transfers_hidden
        ),
        *(replace(choice, resident_share=share) for share in (1.0, 0.5, 0.0) if share != choice.resident_share),
        replace(choice, uses_host=not choice.uses_host),
    ]
    if request.config.prefetch_memory is None:
        group = choice.look_ahead.group_nbytes
        near += [
            replace(choice, look_ahead=replace(choice.look_ahead, group_nbytes=size))
            for size in (group // 4, group * 2)
        ]
    for step in range(_STEPS_PER_RUNG):
        yield near[(turn + step) % len(near)]


def _try(builder: PlanBuilder, choice: Choice, device_memory: int, front: Front) -> None:
    with suppress(CapacityError):  # with less on the device there may be too much for the other tiers
        plan = builder.build(choice, device_memory)
        if plan is not None and front.may_have(least_score(plan)):
            front.add(Found(choice=choice, plan=plan, score=score_plan(plan)))
