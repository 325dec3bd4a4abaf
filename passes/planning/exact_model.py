"""All homes and transfers of one graph as a mixed-integer program, whose optimum no plan is faster than.

It chooses a home for every copy of every parameter, which uses share a residency, and the tick at which each transfer is
issued; within the room of every tier at every tick, and with the seconds of ``simulate``'s synchronous step. Whatever is
issued at tick ``a`` or later and needed by tick ``b`` moves in between, so that for every lane and every pair of ticks

    compute leaves b - compute comes to a  >=  seconds of what is issued from a on and needed by b

which is all that a lane asks for if it may put one transfer aside for another that is due earlier. In four ways this allows
more than a plan may do: lanes may put transfers aside; what is in the arena may lie in pieces, anywhere; gathers have no
latency, nor has the step, as though all moved at once; and an activation that leaves is gone after its last use in forward,
though it may still be on its way, and takes nothing of the device until it is read again. What is recomputed is given with
the graph.

A transfer is issued when something has been released, or when its phase begins: between two such ticks bytes are only
taken, so that what is issued later in between could be issued then, and would be no later.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from zinf_compile.facts import GraphFacts, ParameterFact, ValueFact, working_set
from zinf_compile.hardware import Route, route_name
from zinf_compile.passes.planning.activations import bind_values, unbound_values
from zinf_compile.passes.planning.arena import align
from zinf_compile.passes.planning.build import Request
from zinf_compile.passes.planning.costs import plan_spans
from zinf_compile.passes.planning.linear import Program, Solution, Sum, add_up
from zinf_compile.passes.planning.placement import make_placement, slot_nbytes
from zinf_compile.passes.planning.prefetch import Residency
from zinf_compile.passes.planning.prices import COMPUTE, MASTER, ROLES
from zinf_compile.plans import Placement
from zinf_compile.terms import LiveRange, Tier

_GRADIENT = ROLES.index("gradient")
_PAGE = 4096  # bytes are counted in these, so that a byte is more than rounding; seconds in hundredths of what compute takes
_ONE = Sum(constant=1.0)
_YES = 0.5  # what a solver says of 0 and 1 is 0 and 1 but for rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """A parameter, and where each of its copies may be."""

    fact: ParameterFact
    read: int  # the role of the copy that is gathered
    nbytes: tuple[int, ...]  # by role
    homes: tuple[Mapping[Tier, Sum], ...]  # by role: whether it is there; nowhere, for a copy that it does not have

    @property
    def arena_nbytes(self) -> int:
        """Return what it takes of the arena, and a gather moves."""
        return align(self.nbytes[self.read])

    def is_updated(self, role: int, *, is_read: bool) -> bool:
        """Return whether an optimizer step reads a copy where it lives, or else writes it there."""
        if not self.fact.trainable:
            return False
        if role == _GRADIENT:
            return is_read
        # A compute copy beside a master copy is written with it, and not read.
        return not is_read or role != COMPUTE or not self.nbytes[MASTER]

    @property
    def is_resident(self) -> Sum:
        """Return whether it is never moved."""
        return self.homes[self.read][Tier.DEVICE]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """Something that may move, to be there when compute goes on at tick ``due``."""

    route: Route
    seconds: float
    due: int
    points: tuple[int, ...]  # ticks at which it may be issued
    issued: tuple[Sum, ...]  # whether it moves and is issued at that point or a later one

    def issued_from(self, tick: int) -> Sum:
        """Return whether it moves and is issued at a tick or later."""
        index = bisect_left(self.points, tick)
        return self.issued[index] if index < len(self.points) else Sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A tick that reads a parameter, which is resident, or held since the use before, or moved for it from a tier."""

    parameter: _Parameter
    tick: int
    start: int  # the first tick at which it can be there for this use
    moves: Mapping[Tier, _Move]
    is_held: Sum

    def is_live(self, start: int, end: int) -> Sum:
        """Return whether it takes arena bytes just before tick ``end``, where nothing is released after ``start``."""
        if not self.start <= start <= self.tick:
            return Sum()
        if end > self.tick:
            return _ONE - self.parameter.is_resident
        return self.is_held + add_up(move.issued[0] - move.issued_from(end) for move in self.moves.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Swap:
    """A value that may leave the device between forward and backward."""

    value: ValueFact
    idle: LiveRange
    destinations: Mapping[Tier, Sum]  # whether it leaves for there

    @property
    def nbytes(self) -> int:
        """Return what moves, and rests."""
        return align(self.value.nbytes)

    @property
    def is_swapped(self) -> Sum:
        """Return whether it leaves."""
        return add_up(self.destinations.values())


class ExactModel:
    """The program of one graph, and what its solutions mean. ``objective`` is the step, in ``unit_seconds``.

    ``room`` is what the device has for parameters.
    """

    def __init__(self, request: Request, graph: GraphFacts, *, room: int) -> None:
        self.program = Program()
        self._graph = graph
        self._routes = {route.name: route for route in request.hardware.routes}
        spans = plan_spans(graph, request.hardware)
        paces = (span.seconds / (span.end - span.start) for span in spans for _ in range(span.start, span.end))
        self._reached = tuple(accumulate(paces, initial=0.0))
        is_trained = graph.num_ticks > graph.num_forward_ticks
        num_elements = sum(item.num_elements for item in request.parameters if item.trainable and is_trained)
        update = num_elements / request.hardware.optimizer_elements_per_second
        self.unit_seconds = (self._reached[-1] + update) / 100
        self._tiers = tuple(tier for tier in Tier if tier is not Tier.NVME or request.config.nvme is not None)
        read = {use.parameter: use.dtype for use in graph.uses}
        self._parameters = {fact.name: self._add_parameter(fact, read) for fact in request.parameters}
        self._releases = sorted({0, graph.num_forward_ticks} | {tick + 1 for use in graph.uses for tick in use.ticks})
        self._uses = [
            use for each in graph.uses for use in self._add_uses(self._parameters[each.parameter], each.ticks)
        ]
        self._swaps = [self._add_swap(item, item.idle) for item in graph.values if item.idle is not None]
        self._bound_memory(request, room)
        self.objective = self._add_clock()
        if is_trained:
            self.objective += self._add_step(update / self.unit_seconds)

    def placements(self, solution: Solution) -> tuple[Placement, ...]:
        """Return the homes of all parameters in a solution."""
        return tuple(
            make_placement(
                parameter.fact,
                [
                    next((tier for tier, home in homes.items() if solution.value(home) > _YES), Tier.NVME)
                    for homes in parameter.homes
                ],
                parameter.nbytes,
            )
            for parameter in self._parameters.values()
        )

    def destinations(self, solution: Solution) -> dict[str, Tier]:
        """Return where the values that leave the device go in a solution."""
        return {
            swap.value.name: tier
            for swap in self._swaps
            for tier, is_there in swap.destinations.items()
            if solution.value(is_there) > _YES
        }

    def residencies(self, solution: Solution) -> Iterator[tuple[Residency, int]]:
        """Yield the residencies of a solution, one for each transfer, with the tick at which it is issued."""
        runs: list[list[_Use]] = []  # uses that share a residency
        for use in self._uses:
            if solution.value(use.is_held) > _YES:
                runs[-1].append(use)
            elif solution.value(use.parameter.is_resident) < _YES:
                runs.append([use])
        for run in runs:
            parameter = run[0].parameter
            source, move = max(run[0].moves.items(), key=lambda item: solution.value(item[1].issued[0]))
            residency = Residency(
                name=parameter.fact.name,
                phase=self._graph.phase_of(run[0].tick),
                source=source,
                parameters=(parameter.fact.name,),
                sizes=(parameter.arena_nbytes,),
                need_by=run[0].tick,
                release=run[-1].tick + 1,
            )
            issued = (
                point
                for point, is_later in zip(move.points, move.issued, strict=True)
                if solution.value(is_later) > _YES
            )
            yield residency, max(issued)

    def _add_parameter(self, fact: ParameterFact, read: Mapping[str, str]) -> _Parameter:
        is_master_read = fact.has_two_copies and read.get(fact.name, fact.compute_dtype) != fact.compute_dtype
        nbytes = slot_nbytes(fact)
        homes = tuple({tier: self.program.add_binary() for tier in self._tiers} if size else {} for size in nbytes)
        for each in filter(None, homes):
            self.program.equal(add_up(each.values()), 1.0)
        return _Parameter(fact=fact, read=MASTER if is_master_read else COMPUTE, nbytes=nbytes, homes=homes)

    def _add_uses(self, parameter: _Parameter, ticks: Sequence[int]) -> Iterator[_Use]:
        """Yield the uses of a parameter. Nothing is held from forward to backward."""
        before: int | None = None
        for tick in ticks:
            is_first = before is None or self._graph.phase_of(before) is not self._graph.phase_of(tick)
            start = self._phase(tick).start if before is None or is_first else before + 1
            moves: dict[Tier, _Move] = {
                tier: self._add_move(parameter, home, tier, LiveRange(start=start, end=tick))
                for tier, home in parameter.homes[parameter.read].items()
                if tier is not Tier.DEVICE
            }
            is_held = _ONE - parameter.is_resident - add_up(move.issued[0] for move in moves.values())
            self.program.at_least(is_held, 0.0)
            if is_first:
                self.program.at_least(Sum(), is_held)
            yield _Use(parameter=parameter, tick=tick, start=start, moves=moves, is_held=is_held)
            before = tick

    def _add_move(self, parameter: _Parameter, home: Sum, source: Tier, window: LiveRange) -> _Move:
        """Return the move of a parameter to the device that may be issued in a window, and is due at its end."""
        points = tuple(point for point in self._releases if window.start <= point <= window.end)
        issued = tuple(self.program.add_binary() for _ in points)
        for earlier, later in pairwise((home, *issued)):
            self.program.at_least(earlier, later)
        route = self._routes[route_name(source, Tier.DEVICE)]
        return _Move(
            route=route,
            seconds=parameter.arena_nbytes / route.bytes_per_second,
            due=window.end,
            points=points,
            issued=issued,
        )

    def _add_swap(self, value: ValueFact, idle: LiveRange) -> _Swap:
        destinations: dict[Tier, Sum] = {
            tier: self.program.add_binary() for tier in self._tiers if tier is not Tier.DEVICE
        }
        swap = _Swap(value=value, idle=idle, destinations=destinations)
        self.program.at_least(_ONE, swap.is_swapped)
        return swap

    def _swap_moves(self) -> Iterator[_Move]:
        """Yield the ways out and back: out from the tick after birth, until forward returns; back from there on."""
        half = self._graph.num_forward_ticks
        for swap in self._swaps:
            for tier, is_there in swap.destinations.items():
                for ends, start, due in (
                    ((Tier.DEVICE, tier), swap.value.live.start + 1, half - 1),
                    ((tier, Tier.DEVICE), half, swap.idle.end),
                ):
                    route = self._routes[route_name(*ends)]
                    seconds = route.latency_seconds + swap.nbytes / route.bytes_per_second
                    yield _Move(route=route, seconds=seconds, due=due, points=(start,), issued=(is_there,))

    def _sinks(self) -> Iterator[_Move]:
        """Yield the ways of gradients to their homes."""
        for gradient in self._graph.gradients:
            for tier, home in self._parameters[gradient.parameter].homes[_GRADIENT].items():
                if tier is not Tier.DEVICE:
                    route = self._routes[route_name(Tier.DEVICE, tier)]
                    yield _Move(
                        route=route,
                        seconds=route.latency_seconds + gradient.nbytes / route.bytes_per_second,
                        due=self._graph.num_ticks,
                        points=(gradient.tick + 1,),
                        issued=(home,),
                    )

    def _phase(self, tick: int) -> LiveRange:
        half, end = self._graph.num_forward_ticks, self._graph.num_ticks
        return LiveRange(start=0, end=half) if tick < half else LiveRange(start=half, end=end)

    def _bound_memory(self, request: Request, room: int) -> None:
        """Demand that homes fit their tiers, and beside those on the device what is live at every tick.

        What is live only grows from one release to the next, so that it is the most just before each.
        """
        config = request.config
        at_home = {
            tier: add_up(
                homes[tier] * (nbytes / _PAGE)
                for parameter in self._parameters.values()
                for homes, nbytes in zip(parameter.homes, parameter.nbytes, strict=True)
                if tier in homes
            )
            for tier in Tier
        }
        for swap in self._swaps:
            for tier, is_there in swap.destinations.items():
                at_home[tier] += is_there * (swap.nbytes / _PAGE)
        self._keep_within(config.host_memory - config.staging_memory, at_home[Tier.HOST])
        if config.nvme_memory is not None:
            self._keep_within(config.nvme_memory, at_home[Tier.NVME])
        computed = self._add_computed()
        for start, end in pairwise([*self._releases, self._graph.num_ticks]):
            live = add_up(use.is_live(start, end) * (use.parameter.arena_nbytes / _PAGE) for use in self._uses)
            self._keep_within(room, at_home[Tier.DEVICE] + live + computed)

    def _add_computed(self) -> Sum:
        """Return the device bytes of what compute makes, beyond those when nothing leaves; what leaves takes less."""
        if not self._swaps:
            return Sum()
        graph, demand = self._graph, self.program.at_least
        unbound = working_set(unbound_values(graph), graph.num_ticks)
        every = working_set(graph.values, graph.num_ticks)
        peak, bound = self.program.add_real(), self.program.add_real()
        bound_nbytes = bind_values(graph, base=0).nbytes
        # Where nothing leaves, bound values lie as they do without swaps.
        demand(bound, (_ONE - add_up(swap.is_swapped for swap in self._swaps)) * (bound_nbytes / _PAGE))
        for tick in range(graph.num_ticks):
            gone = (swap for swap in self._swaps if swap.idle.start <= tick < swap.value.live.end)
            back = (swap for swap in self._swaps if swap.idle.end <= tick < swap.value.live.end)
            demand(peak, Sum(constant=unbound[tick] / _PAGE) - add_up(_pages(swap.value.nbytes, swap) for swap in gone))
            bound_now = Sum(constant=(every[tick] - unbound[tick]) / _PAGE)
            demand(bound, bound_now + add_up(_pages(swap.nbytes, swap) for swap in back))
        return peak + bound - (max(unbound) + bound_nbytes) / _PAGE

    def _keep_within(self, nbytes: int, taken: Sum) -> None:
        self.program.at_least(Sum(constant=nbytes / _PAGE), taken)

    def _add_clock(self) -> Sum:
        """Return when the last tick has ended and every gradient is home; demand the time for all that moves."""
        end = self._graph.num_ticks
        moves = [*(move for use in self._uses for move in use.moves.values()), *self._swap_moves(), *self._sinks()]
        ticks = sorted({*self._releases, *(move.due for move in moves), *(move.points[-1] for move in moves), end})
        come, comes, leaves = Sum(), {}, {}
        for tick, following in pairwise((*ticks, end)):
            comes[tick], leaves[tick] = come, self.program.add_real()
            self.program.at_least(leaves[tick], come)
            come = leaves[tick] + (self._reached[following] - self._reached[tick]) / self.unit_seconds
        by_lane = defaultdict(list)
        for move in sorted(moves, key=lambda move: move.due):
            for lane in move.route.lanes:
                by_lane[lane, self._phase(move.due).start].append(move)
        for (_, first), sharing in by_lane.items():
            for start in (tick for tick in ticks if first <= tick <= sharing[-1].due):
                moved = Sum()
                for due, group in groupby(sharing, key=lambda move: move.due):
                    if due >= start:
                        moved += add_up(move.issued_from(start) * (move.seconds / self.unit_seconds) for move in group)
                        self.program.at_least(leaves[due] - comes[start], moved)
        return leaves[end]

    def _add_step(self, update: float) -> Sum:
        """Return the time of the optimizer step: of the updates, or of what moves between host and nvme meanwhile."""
        step = self.program.add_real()
        self.program.at_least(step, update)
        moved = defaultdict(list)  # by lane
        for source, destination in ((Tier.NVME, Tier.HOST), (Tier.HOST, Tier.NVME)):
            route = self._routes.get(route_name(source, destination))
            if route is not None:
                on_disk = self._in_step(is_read=source is Tier.NVME)
                seconds = on_disk * (1 / route.bytes_per_second / self.unit_seconds)
                for lane in route.lanes:
                    moved[lane].append(seconds)
        for each in moved.values():
            self.program.at_least(step, add_up(each))
        return step

    def _in_step(self, *, is_read: bool) -> Sum:
        """Return the bytes that the step reads from nvme, gradients included, or else that it writes there."""
        return add_up(
            parameter.homes[role][Tier.NVME] * float(nbytes)
            for parameter in self._parameters.values()
            for role, nbytes in enumerate(parameter.nbytes)
            if Tier.NVME in parameter.homes[role] and parameter.is_updated(role, is_read=is_read)
        )


def _pages(nbytes: int, swap: _Swap) -> Sum:
    return swap.is_swapped * (nbytes / _PAGE)
