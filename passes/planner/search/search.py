"""The search for the plan of one graph: greedy filling, and steps to neighbouring choices, judged by the simulator.

Device budgets are tried on a ladder from the smallest that works. The rungs, and what is tried on each, do not depend
on the budget of the request: with more memory the search only continues. So more device memory never makes a plan
slower.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.facts import GraphFacts
from zinf_compile.ir.glossary import Tier, format_bytes
from zinf_compile.ir.plan import Plan, TierPart
from zinf_compile.ir.transfers import Transfer
from zinf_compile.passes.planner.memory.arena import align
from zinf_compile.passes.planner.placement.homes import with_device_memory
from zinf_compile.passes.planner.search.build import Choice, Groundwork, LookAhead, PlanBuilder, Request
from zinf_compile.passes.planner.search.updates_ahead import updates_to_compare
from zinf_compile.passes.planner.simulator.bound import least_seconds
from zinf_compile.passes.planner.simulator.simulate import simulate, simulate_within
from zinf_compile.passes.planner.simulator.summary import NO_WEAR, Wear, measure_wear
from zinf_compile.passes.planner.simulator.ways import Ways

_MIB = 2**20


def _look_ahead(nbytes: int) -> LookAhead:
    return LookAhead(prefetch_nbytes=nbytes, group_nbytes=nbytes // 4)


# Widest first. A group is a quarter of the look-ahead, so that several transfers are in flight. The last entry gathers
# every parameter by itself, only when it is needed, which takes the least memory.
_LOOK_AHEADS = tuple(_look_ahead(size * _MIB) for size in (256, 128, 64, 32, 16, 8, 0))
# Rungs per doubling of the bytes beyond the smallest budget. Bytes between a budget and the highest rung below it are not
# used: on average 8 % of those beyond the smallest budget.
_RUNGS_PER_DOUBLING = 4
_FEW_RUNGS_PER_DOUBLING = 1  # if activations are offloaded: one of several searches for the same graph
_FIRST_RUNG = 64  # the first rung is this fraction above the smallest budget
_STEPS_PER_RUNG = 3
# Relative to the fastest. Steps that differ by less than the simulator's accuracy count as equally long.
EQUALLY_FAST = 1.005
# A block that is recomputed uses its weights twice, with most of its other weights in between.
_HELD_PAST = (1, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The quality of a plan: seconds of its step, then bytes moved, then disk space of shadows, then memory used.

    Steps that differ by less than the simulator's accuracy count as equally long. Then the plan that moves fewer bytes
    is better, since disks wear and buses are shared.
    """

    nanoseconds: int
    nbytes_moved: int  # by transfers, gradients and updates
    nbytes_shadowed: int  # beside the old copies, by updates ahead of step()
    nbytes_away: int  # of compute copies that are not resident: another graph may read them
    peak_nbytes: int
    wear: Wear = NO_WEAR  # of the disk, which may be limited

    @property
    def key(self) -> tuple[int, int, int, int, int]:
        """Return the sort key among equally fast plans; smaller is better."""
        return self.nbytes_moved, self.nbytes_shadowed, self.nanoseconds, self.nbytes_away, self.peak_nbytes

    def beats(self, other: "Score") -> bool:
        """Return whether this score is at least as good in every respect."""
        return self.key <= other.key and self.nanoseconds <= other.nanoseconds


def score_plan(plan: Plan) -> Score:
    """Return the score of a plan, by the simulator."""
    timeline = simulate(plan)
    return replace(score_in(plan, timeline.step_seconds), wear=measure_wear(timeline))


def score_in(plan: Plan, step_seconds: float) -> Score:
    """Return the score of a plan whose step takes some seconds."""
    updates = plan.device_updates
    return Score(
        nanoseconds=_nanoseconds(step_seconds),
        nbytes_moved=sum(transfer.moved_nbytes for transfer in plan.gathers)
        + sum(sink.moved_nbytes for sink in plan.sinks if not sink.stays)
        + plan.step.nbytes_read
        + plan.step.nbytes_written
        + updates.nbytes_in
        + updates.nbytes_out,
        nbytes_shadowed=plan.tier(plan.shadow_tier).nbytes_of(TierPart.SHADOWS),
        nbytes_away=sum(item.compute_nbytes for item in plan.placements if item.compute is not Tier.DEVICE),
        peak_nbytes=plan.tier(Tier.DEVICE).predicted_peak,
    )


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan with the choice that led to it."""

    choice: Choice
    plan: Plan
    score: Score


class Front:
    """The Pareto front of plans by time and bytes moved. The best is the one of the fastest that moves the fewest bytes.

    Plans that would write more to nvme per day than ``nvme_write_budget`` are not on it.
    """

    def __init__(self, write_budget: int | None = None) -> None:
        self._found: list[Found] = []
        self._write_budget = write_budget
        self._least_written: Wear | None = None  # of the plans that write too much

    @property
    def longest_ns(self) -> float:
        """Return the longest step, in ns, that counts as equal to the fastest; infinity if there is no plan yet."""
        return EQUALLY_FAST * min((item.score.nanoseconds for item in self._found), default=math.inf)

    @property
    def best(self) -> Found | None:
        """Return the best; None before there is any."""
        longest = self.longest_ns
        fast = (item for item in self._found if item.score.nanoseconds <= longest)
        return min(fast, key=lambda item: item.score.key, default=None)

    def may_have(self, score: Score) -> bool:
        """Return whether a plan with this lower bound could be on the front, and fast enough."""
        return score.nanoseconds <= self.longest_ns and not any(item.score.beats(score) for item in self._found)

    def add(self, found: Found) -> None:
        """Add a plan, and remove those that it dominates."""
        if self.may_have(found.score) and not self._writes_too_much(found.score.wear):
            self._found = [item for item in self._found if not found.score.beats(item.score)] + [found]

    def check_written(self) -> None:
        """Raise CapacityError, for a front without plans, if some were refused for what they write to nvme."""
        least = self._least_written
        if least is None:
            return
        assert self._write_budget is not None
        raise CapacityError(
            f"nvme_write_budget is {format_bytes(self._write_budget)} per day, and the plan that writes the least writes "
            f"{format_bytes(least.nbytes_per_step)} per step, {format_bytes(least.nbytes_per_day)} per day of such steps; "
            f"raise it to '{math.ceil(least.nbytes_per_day / 10**9)}GB/day', raise host_memory, or let a step have more "
            "tokens"
        )

    def join(self, other: "Front") -> None:
        """Add all plans of another front. Joining only the best of each would lose the half percent of tolerance twice."""
        for found in other._found:
            self.add(found)
        if other._least_written is not None:
            self._refuse(other._least_written)

    def _writes_too_much(self, wear: Wear) -> bool:
        if self._write_budget is None or wear.nbytes_per_day <= self._write_budget:
            return False
        self._refuse(wear)
        return True

    def _refuse(self, wear: Wear) -> None:
        if self._least_written is None or wear.nbytes_per_day < self._least_written.nbytes_per_day:
            self._least_written = wear


def search_front(
    request: Request, graph: GraphFacts, swaps: tuple[Transfer, ...] = (), groundwork: Groundwork | None = None
) -> Front:
    """Return the plans found for one graph; none if none fits the device. Join the fronts of several graphs to compare them.

    Raises CapacityError when host and nvme cannot hold what the device does not.
    """
    builder = PlanBuilder(request, graph, swaps, groundwork)
    builder.place_unseen(request.config)  # this choice places the most on host and nvme
    if builder.least_device_nbytes > request.config.device_memory:
        return Front()
    if request.placements is not None and (kept := _keep_homes(request, builder)).best is not None:
        return kept
    front = Front(request.config.nvme_write_budget)
    turn = 0
    starts = _starts(request, builder)
    for memory in _rungs(
        request, builder, starts, per_doubling=_FEW_RUNGS_PER_DOUBLING if swaps else _RUNGS_PER_DOUBLING
    ):
        choices = [choice for start in starts if start.nbytes == memory for choice in start.choices]
        if front.best is not None:
            choices += _neighbours(replace(front.best.choice, by_expert=False), request, turn)
            turn += _STEPS_PER_RUNG
        rung = _Rung(request, front)
        for choice in _by_experts(choices, request, builder):
            with suppress(CapacityError):  # with less on the device there may be too much for the other tiers
                rung.compare(choice, builder.build(choice, memory))
        rung.compare_ahead()
    if front.best is None:  # host and nvme can hold the rest only if all of the device is used
        again = PlanBuilder(request, graph, swaps, groundwork)  # plans that the disk had no room for are built again
        for found in _find_plans(request, again, starts):
            front.add(found)
    return front


def find_plan(
    request: Request, graph: GraphFacts, swaps: tuple[Transfer, ...] = (), groundwork: Groundwork | None = None
) -> Found | None:
    """Return any plan for one graph, or None if none fits the device. Without a search unless writes are limited.

    Raises CapacityError when ``search_front`` does.
    """
    if request.config.nvme_write_budget is not None:
        return search_front(request, graph, swaps, groundwork).best
    builder = PlanBuilder(request, graph, swaps, groundwork)
    builder.place_unseen(request.config)  # like the search, so that both find a plan in the same cases
    if builder.least_device_nbytes > request.config.device_memory:
        return None
    if request.placements is not None and (kept := _keep_homes(request, builder).best) is not None:
        return kept
    return next(_find_plans(request, builder, _starts(request, builder)), None)


def _find_plans(request: Request, builder: PlanBuilder, starts: Sequence["_Start"]) -> Iterator[Found]:
    """Yield the first plan that fits, without and with updates ahead of ``step()``; nothing if none fits the device."""
    for start in sorted(starts, key=lambda start: start.nbytes):
        choices = [choice for choice in start.choices if choice.uses_host]
        for choice in (*_by_experts(choices, request, builder), *choices):
            plan = builder.build(choice, request.config.device_memory)
            if plan is not None:
                for each in updates_to_compare(plan, request.config):
                    yield Found(choice=choice, plan=each, score=score_plan(each))
                return


def minimum_memory(
    request: Request, graph: GraphFacts, swaps: tuple[Transfer, ...] = (), groundwork: Groundwork | None = None
) -> int:
    """Return the bytes of the smallest device budget in which some plan of a graph fits."""
    return min(start.nbytes for start in _starts(request, PlanBuilder(request, graph, swaps, groundwork)))


def _bare_nbytes(request: Request, builder: PlanBuilder, look_ahead: LookAhead, small_nbytes: int) -> int:
    """Return the smallest device budget for a look-ahead with only ``small_nbytes`` of small parameters resident."""
    config = with_device_memory(request.config, builder.floor_nbytes)
    return builder.least_nbytes(builder.place_small(config, small_nbytes), look_ahead)


def _is_held_elsewhere(request: Request, builder: PlanBuilder, small_nbytes: int) -> bool:
    """Return whether host and nvme can hold everything but ``small_nbytes`` of small parameters."""
    try:
        builder.place_unseen(request.config, small_nbytes)
    except CapacityError:
        return False
    return True


def _streaming_nbytes(request: Request, builder: PlanBuilder, look_ahead: LookAhead) -> int:
    """Return the smallest device budget for a look-ahead with only small parameters resident.

    Small parameters may use an eighth of the budget, so the budget is found by search.
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
    """A simple plan to start from, at the smallest budget it fits in. The search never returns a worse plan."""

    nbytes: int
    choices: tuple[Choice, ...]


def _starts(request: Request, builder: PlanBuilder) -> list[_Start]:
    """Return one start per look-ahead: everything streamed, issued early or late, from host or nvme.

    First come those that may need the least memory: with hardly any small parameter resident, or with all resident.
    Those without residents are at the budget that they need themselves.
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
        # This may be less, since tiny parameters would take whole pages of the arena.
        _Start(nbytes=builder.all_resident_nbytes, choices=(Choice(look_ahead=narrowest),)),
    ]
    for look_ahead in _look_aheads(request):
        choice = Choice(look_ahead=look_ahead, is_eager=True, is_filled=False)  # needs the most memory
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
        for item in (parameter.among(request.num_ranks) for parameter in request.parameters)
    )
    highest = builder.all_resident_nbytes + states
    smallest = min(start.nbytes for start in starts)
    rungs = {highest, *(start.nbytes for start in starts)}
    beyond = max(1.0, smallest / _FIRST_RUNG)  # a graph between graph breaks may need no bytes at all
    while smallest + beyond < highest:
        rungs.add(int(smallest + beyond))
        beyond *= 2 ** (1 / per_doubling)
    yield from (rung for rung in sorted(rungs) if rung <= request.config.device_memory)


def _look_aheads(request: Request) -> Sequence[LookAhead]:
    if request.config.prefetch_memory is not None:
        # Without the last one the smallest budget would depend on how early this machine has to issue transfers.
        return tuple(_look_ahead(nbytes) for nbytes in sorted({request.config.prefetch_memory, 0}, reverse=True))
    largest = max((align(parameter.compute_nbytes) for parameter in request.parameters), default=0)
    if largest <= _LOOK_AHEADS[0].prefetch_nbytes:
        return _LOOK_AHEADS
    # None of these would allow prefetching the largest parameter.
    return (*(_look_ahead(times * largest) for times in (4, 2, 1)), _LOOK_AHEADS[0], _LOOK_AHEADS[-1])


def _keep_homes(request: Request, builder: PlanBuilder) -> Front:
    """Return the plans that keep the homes that other graphs of the model use, so that nothing has to move."""
    assert request.placements is not None
    front = Front(request.config.nvme_write_budget)
    rung = _Rung(request, front)
    for look_ahead in _look_aheads(request):
        for choice in _by_experts([Choice(look_ahead=look_ahead)], request, builder):
            with suppress(CapacityError):  # no room on the disk for updates ahead of step()
                rung.compare(choice, builder.build_at(request.placements, choice))
    rung.compare_ahead()
    return front


def _by_experts(choices: Sequence[Choice], request: Request, builder: PlanBuilder) -> list[Choice]:
    """Return the choices, and each again with gathers of only the experts that have rows, where that is possible."""
    asked = request.config.gather_by_expert
    if not builder.has_routed or asked is False:
        return list(choices)
    by_expert = [replace(choice, by_expert=True) for choice in choices]
    return by_expert if asked else [*choices, *by_expert]


def _neighbours(choice: Choice, request: Request, turn: int) -> Iterator[Choice]:
    """Yield the choice itself, to be filled again, and some of those that differ in one respect, varied by ``turn``."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """The fastest plan of a rung so far, and its variants with updates ahead of ``step()``."""

    choice: Choice
    plan: Plan
    ahead: Sequence[Plan]
    nanoseconds: int
    is_bound: bool  # the nanoseconds are a lower bound, because the plan was not simulated

    def step_nanoseconds(self) -> int:
        """Return the nanoseconds of its step."""
        return score_plan(self.plan).nanoseconds if self.is_bound else self.nanoseconds


class _Rung:
    """Plans for one budget. The fastest of them is compared with updates ahead of ``step()`` too."""

    def __init__(self, request: Request, front: Front) -> None:
        self._request = request
        self._front = front
        self._fastest: _Judged | None = None

    def compare(self, choice: Choice, plan: Plan | None) -> None:
        """Add a plan to the front, unless its lower bound says that others there are better.

        Raises CapacityError if ``speculate=True`` and there is no room for the shadows of updates ahead of ``step()``.
        """
        if plan is not None:
            plan, *ahead = updates_to_compare(plan, self._request.config)
            nanoseconds, is_bound = self._add(choice, plan, to_the_end=bool(ahead))
            if ahead and (self._fastest is None or nanoseconds < self._fastest.nanoseconds):
                self._fastest = _Judged(
                    choice=choice, plan=plan, ahead=ahead, nanoseconds=nanoseconds, is_bound=is_bound
                )

    def compare_ahead(self) -> None:
        """Add the fastest plan with updates ahead of ``step()``, if these make it faster: they take memory or disk."""
        if self._fastest is not None:
            below = self._fastest.step_nanoseconds() / EQUALLY_FAST
            for plan in self._fastest.ahead:
                self._add(self._fastest.choice, plan, below=below)

    def _add(
        self, choice: Choice, plan: Plan, *, below: float = math.inf, to_the_end: bool = False
    ) -> tuple[int, bool]:
        """Add a plan of fewer nanoseconds than ``below``; stop simulating it once it is known to be too long.

        Returns its nanoseconds or a lower bound of them, and whether it is the bound. With ``to_the_end``, a plan that
        the bound does not rule out is simulated completely. A plan that is too long is never counted as one that writes
        too much: ``Front.add`` looks at the time first.
        """
        ways = Ways(plan)
        least = least_seconds(plan, ways)
        bound = score_in(plan, least.step)
        if bound.nanoseconds >= below or not self._front.may_have(bound):
            return bound.nanoseconds, True
        allowed = math.inf if to_the_end else (min(below, self._front.longest_ns) + 1) / 1e9
        timeline = simulate_within(plan, allowed, least.after_forward, ways)
        if timeline is None:
            return bound.nanoseconds, True
        score = replace(bound, nanoseconds=_nanoseconds(timeline.step_seconds), wear=measure_wear(timeline))
        if score.nanoseconds < below:
            self._front.add(Found(choice=choice, plan=plan, score=score))
        return score.nanoseconds, False
