"""All homes and transfers of one graph as a mixed-integer program. Its optimum is a lower bound on every plan.

It chooses a home for every copy of every parameter, which uses share a residency, and the tick at which each transfer is
issued. Constraints are the capacity of every tier at every tick, and the times of ``simulate``'s synchronous step. All
that is issued at tick ``a`` or later and needed by tick ``b`` moves in between. So for every lane and every pair of ticks

    time at which b starts computing - time at which a is reached  >=  seconds of what is issued from a on and needed by b

This is the exact condition for a lane that may preempt a transfer for one with an earlier deadline. The program is a
relaxation in four ways: lanes may preempt transfers; a transfer's bytes need not be contiguous in the arena; gathers and
the step have no latency; and an offloaded activation frees its memory right after its last use in forward, although it
may still be moving, and takes no device memory until it is read again. The graph fixes what is recomputed.

A transfer is issued only at a tick where something has been released, or where its phase begins. Between two such ticks
bytes are only allocated, so a transfer that is issued in between could be issued at the earlier of the two as well.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from benchmarks.oracles.linear import Program, Solution, Sum, add_up
from zinf_compile.ir.copies import Role
from zinf_compile.ir.facts import GraphFacts, ParameterFact, ValueFact, working_set
from zinf_compile.ir.glossary import LiveRange, Phase, Tier
from zinf_compile.ir.hardware import Route, route_name
from zinf_compile.ir.plan import Placement
from zinf_compile.passes.planner.memory.activations import bind_values, unbound_values
from zinf_compile.passes.planner.memory.arena import align
from zinf_compile.passes.planner.placement.homes import make_placement, role_nbytes
from zinf_compile.passes.planner.placement.prices import COMPUTE, MASTER, ROLES
from zinf_compile.passes.planner.schedule.prefetch import Residency
from zinf_compile.passes.planner.schedule.spans import plan_spans
from zinf_compile.passes.planner.search.build import Request

_GRADIENT = ROLES.index(Role.GRADIENT)
_PAGE = 4096  # the unit of bytes, well above the solver's rounding; the unit of seconds is 1/100 of compute
_ONE = Sum(constant=1.0)
_YES = 0.5  # the solver's binary values are 0 and 1 up to rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """A parameter, and the possible homes of each of its copies."""

    fact: ParameterFact
    read: int  # the role of the copy that is gathered
    nbytes: tuple[int, ...]  # by role
    homes: tuple[Mapping[Tier, Sum], ...]  # by role: whether the copy is on each tier; empty if the copy does not exist

    @property
    def arena_nbytes(self) -> int:
        """Return the bytes that it takes in the arena, which a gather moves."""
        return align(self.nbytes[self.read])

    def is_updated(self, role: int, *, is_read: bool) -> bool:
        """Return whether an optimizer step reads a copy at its home if ``is_read``, else whether it writes it there."""
        if not self.fact.trainable:
            return False
        if role == _GRADIENT:
            return is_read
        # With a separate master copy, the compute copy is only written.
        return not is_read or role != COMPUTE or not self.nbytes[MASTER]

    @property
    def is_resident(self) -> Sum:
        """Return whether it is resident on the device."""
        return self.homes[self.read][Tier.DEVICE]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A possible transfer, for which compute waits at tick ``due``."""

    route: Route
    seconds: float
    due: int
    points: tuple[int, ...]  # ticks at which it may be issued
    issued: tuple[Sum, ...]  # whether it happens and is issued at that point or later

    def issued_from(self, tick: int) -> Sum:
        """Return whether it happens and is issued at a tick or later."""
        index = bisect_left(self.points, tick)
        return self.issued[index] if index < len(self.points) else Sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A tick that reads a parameter: resident, held since the previous use, or gathered for this use from a tier."""

    parameter: _Parameter
    tick: int
    start: int  # the first tick at which it can be on the device for this use
    moves: Mapping[Tier, _Move]
    is_held: Sum

    def is_live(self, start: int, end: int) -> Sum:
        """Return whether it takes arena bytes just before tick ``end``, given that nothing is released after ``start``."""
        if not self.start <= start <= self.tick:
            return Sum()
        if end > self.tick:
            return _ONE - self.parameter.is_resident
        return self.is_held + add_up(move.issued[0] - move.issued_from(end) for move in self.moves.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Swap:
    """A value that may be offloaded between forward and backward."""

    value: ValueFact
    idle: LiveRange
    destinations: Mapping[Tier, Sum]  # whether it is offloaded to that tier

    @property
    def nbytes(self) -> int:
        """Return the bytes that move, and that the destination holds."""
        return align(self.value.nbytes)

    @property
    def is_swapped(self) -> Sum:
        """Return whether it is offloaded."""
        return add_up(self.destinations.values())


class ExactModel:
    """The program of one graph, and how to read its solutions. ``objective`` is the time of the step, in ``unit_seconds``.

    ``room`` is the device memory for parameters.
    """

    def __init__(self, request: Request, graph: GraphFacts, *, room: int) -> None:
        self.program = Program()
        self._graph = graph
        self._routes = {route.name: route for route in request.hardware.routes}
        spans = plan_spans(graph, request.hardware)
        paces = (span.seconds / (span.end - span.start) for span in spans for _ in range(span.start, span.end))
        self._reached = tuple(accumulate(paces, initial=0.0))
        is_trained = graph.schedule.is_training
        num_elements = sum(item.num_elements for item in request.parameters if item.trainable and is_trained)
        update = num_elements / request.hardware.optimizer_elements_per_second
        self.unit_seconds = (self._reached[-1] + update) / 100
        self._tiers = tuple(tier for tier in Tier if tier is not Tier.NVME or request.config.nvme is not None)
        read = {use.parameter: use.dtype for use in graph.uses}
        self._parameters = {fact.name: self._add_parameter(fact, read) for fact in request.parameters}
        half = graph.schedule.ticks(Phase.BACKWARD).start
        self._releases = sorted({0, half} | {tick + 1 for use in graph.uses for tick in use.ticks})
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
                {
                    role: next((tier for tier, home in homes.items() if solution.value(home) > _YES), Tier.NVME)
                    for role, homes in zip(ROLES, parameter.homes, strict=True)
                },
            )
            for parameter in self._parameters.values()
        )

    def destinations(self, solution: Solution) -> dict[str, Tier]:
        """Return the destination of each offloaded value in a solution."""
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
                phase=self._graph.schedule.phase_of(run[0].tick),
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
        nbytes = role_nbytes(fact)
        homes = tuple({tier: self.program.add_binary() for tier in self._tiers} if size else {} for size in nbytes)
        for each in filter(None, homes):
            self.program.equal(add_up(each.values()), 1.0)
        return _Parameter(fact=fact, read=MASTER if is_master_read else COMPUTE, nbytes=nbytes, homes=homes)

    def _add_uses(self, parameter: _Parameter, ticks: Sequence[int]) -> Iterator[_Use]:
        """Yield the uses of a parameter. Nothing is held from forward to backward."""
        before: int | None = None
        for tick in ticks:
            is_first = before is None or self._graph.schedule.phase_of(before) is not self._graph.schedule.phase_of(
                tick
            )
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
        """Return a move of a parameter to the device, to be issued within ``window`` and due at its end."""
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
        """Yield the moves of activations: offload from the tick after birth until the end of forward, reload after that."""
        half = self._graph.schedule.ticks(Phase.BACKWARD).start
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
        """Yield the moves of gradients to their homes."""
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
        half, end = self._graph.schedule.ticks(Phase.BACKWARD).start, self._graph.num_ticks
        return LiveRange(start=0, end=half) if tick < half else LiveRange(start=half, end=end)

    def _bound_memory(self, request: Request, room: int) -> None:
        """Require that homes fit their tiers, and that the device also has room for what is live at every tick.

        Live bytes only grow from one release to the next, so it is enough to check just before each release.
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
        """Return the device bytes of computed values relative to a plan without offloads: zero or less."""
        if not self._swaps:
            return Sum()
        graph, demand = self._graph, self.program.at_least
        unbound = working_set(unbound_values(graph), graph.num_ticks)
        every = working_set(graph.values, graph.num_ticks)
        peak, bound = self.program.add_real(), self.program.add_real()
        bound_nbytes = bind_values(graph, base=0).nbytes
        # Without offloads, bound values keep their offsets.
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
        """Return when the last tick has ended and every gradient is stored; add the timing constraints of all moves."""
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
        """Return the time of the optimizer step: the maximum of the updates and of the transfers between host and nvme."""
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
        """Return the bytes that the step reads from nvme, gradients included, or writes there if not ``is_read``."""
        return add_up(
            parameter.homes[role][Tier.NVME] * float(nbytes)
            for parameter in self._parameters.values()
            for role, nbytes in enumerate(parameter.nbytes)
            if Tier.NVME in parameter.homes[role] and parameter.is_updated(role, is_read=is_read)
        )


def _pages(nbytes: int, swap: _Swap) -> Sum:
    return swap.is_swapped * (nbytes / _PAGE)
