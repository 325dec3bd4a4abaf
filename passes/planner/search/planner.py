"""Facts, budgets and rates in; the Plan out. Pure: the same input gives the same plan on every machine and rank.

Candidate graphs differ in their activation policy, and in whether none, half or all of their activations are offloaded.
The plan with the shortest simulated step wins. It is written into the graphs by the passes in ``passes/pipeline.py``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from zinf_compile.ir.errors import CapacityError, DeviceCapacityError
from zinf_compile.ir.facts import GraphFacts, working_set
from zinf_compile.ir.glossary import format_bytes
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.transfers import Transfer
from zinf_compile.passes.planner.cost.op_kinds import keeps_kernels
from zinf_compile.passes.planner.memory.policies import compute_seconds, may_be_faster
from zinf_compile.passes.planner.schedule.leaving import count_resting, leaving_levels, waiting_level
from zinf_compile.passes.planner.schedule.swaps import least_seconds, without_swapped
from zinf_compile.passes.planner.search.build import Groundwork, PlanBuilder, Request
from zinf_compile.passes.planner.search.search import Front, find_plan, minimum_memory, search_front
from zinf_compile.passes.planner.simulator.simulate import simulate

__all__ = ["Request", "Searches", "check_fits", "does_fit", "lay_groundworks", "make_plan", "minimum_device_memory"]

_MIB = 2**20
# Share of a step. If compute stalls no more than this, activations are not offloaded: that would only wear the disk.
NEGLIGIBLE_STALLS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """A graph with some of its activations offloaded, and a builder for the rest of its plan."""

    request: Request
    graph: GraphFacts
    swaps: tuple[Transfer, ...]  # offloads and reloads
    groundwork: Groundwork

    def with_swaps(self, swaps: tuple[Transfer, ...]) -> "_Level":
        """Return the level of the same graph with these offloads and reloads; this one has none."""
        resting = count_resting(swaps, num_forwards=1 + self.request.num_open)
        asked = replace(self.request, config=resting.taken_from(self.request.config))
        return replace(self, request=asked, swaps=swaps, groundwork=self.groundwork.for_level())

    def waiting(self) -> "_Level | None":
        """Return the level on which activations leave one at a time; None if it is no other than the last."""
        request, seconds = self.request, self.groundwork.seconds_of_ops
        swaps = waiting_level(self.graph, request.config, request.hardware, seconds, num_forwards=1 + request.num_open)
        return self.with_swaps(swaps) if swaps else None

    @property
    def least_device_nbytes(self) -> int:
        """Return a lower bound of the device bytes of any plan."""
        return PlanBuilder(self.request, self.graph, self.swaps, self.groundwork).least_device_nbytes

    @property
    def least_seconds(self) -> float:
        """Return a lower bound of the seconds of a step."""
        return least_seconds(self.graph, self.swaps, self.request.hardware, self.groundwork.seconds_of_ops)


class _Search:
    """A level, and what the search of its plans finds, worked out when asked for."""

    def __init__(self, level: _Level) -> None:
        self.level = level

    @cached_property
    def found(self) -> Front | CapacityError:
        """Return the plans that fit, or why host and nvme cannot hold what the device does not."""
        level = self.level
        try:
            return search_front(level.request, level.graph, level.swaps, level.groundwork)
        except CapacityError as error:
            return error.with_traceback(None)  # its frames hold all that the search made


class _Searched:
    """The levels of one graph for one request, each with its search; worked out when asked for."""

    def __init__(self, request: Request, graph: GraphFacts) -> None:
        self.request, self.graph = request, graph
        self._to_come = map(_Search, _levels(request, graph, Groundwork(request, graph)))
        self._looked_at: list[_Search] = []

    def __iter__(self) -> Iterator[_Search]:
        yield from self._looked_at
        for search in self._to_come:
            self._looked_at.append(search)
            yield search


class Searches:
    """Remembers what searches found, for requests that differ only in their candidates: each graph is searched once."""

    def __init__(self) -> None:
        self._made: list[_Searched] = []

    def of(self, request: Request, graph: GraphFacts) -> _Searched:
        """Return the search of a graph: that of an equal request, as far as it went, or a new one."""
        asked = replace(request, candidates=(graph,), captured=())
        for made in self._made:
            if made.graph is graph and made.request == asked:
                return made
        self._made.append(_Searched(asked, graph))
        return self._made[-1]


def make_plan(request: Request, searches: Searches | None = None) -> Plan:
    """Return the plan with the shortest simulated step of those that fit.

    ``searches`` has what was found for other requests, and remembers what is found for this one.
    Raises CapacityError, with the smallest budgets that work, when none does, or when all write more to nvme than
    ``nvme_write_budget``.
    """
    searches = searches or Searches()
    front = Front(request.config.nvme_write_budget)
    failure: CapacityError | None = None
    looked_at: list[_Level] = []
    for graph in request.candidates:
        if not may_be_faster(compute_seconds(graph, request.hardware), None if front.best is None else front.best.plan):
            continue
        for search in searches.of(request, graph):
            level = search.level
            if not may_be_faster(level.least_seconds, None if front.best is None else front.best.plan):
                continue
            found = search.found
            looked_at.append(level)
            if isinstance(found, CapacityError):
                if not level.swaps:  # offloading activations would leave even less of the other tiers
                    failure = failure or found
                continue
            front.join(found)
            if found.best is not None and _waits_for_little(found.best.plan):
                break
    if front.best is not None:
        return front.best.plan
    front.check_written()
    raise failure or _capacity_error(request, looked_at)


def check_fits(request: Request, more: Callable[[], Request] | None = None) -> None:
    """Raise what ``make_plan`` would raise, without searching for the best plan unless writes are limited.

    If the request does not fit, ``more`` returns one with further candidates, which is then what has to fit.
    """
    if request.config.nvme_write_budget is not None:
        if not does_fit(request):
            make_plan(request if more is None else more())
        return
    failure: CapacityError | None = None
    levels: list[_Level] = []
    requests = (ask() for ask in (lambda: request, *(() if more is None else (more,))))
    for asked in requests:
        known = {id(level.graph) for level in levels}
        candidates = tuple(graph for graph in asked.candidates if id(graph) not in known)
        for level in _all_levels(replace(asked, candidates=candidates)):
            levels.append(level)
            try:
                if find_plan(level.request, level.graph, level.swaps, level.groundwork) is not None:
                    return
            except CapacityError as error:
                if not level.swaps:
                    failure = failure or error.with_traceback(None)
    raise failure or _capacity_error(request, levels)


def lay_groundworks(request: Request) -> tuple[Groundwork, ...]:
    """Return the groundwork of each candidate, which is the same for any device budget."""
    return tuple(Groundwork(request, graph) for graph in request.candidates)


def does_fit(request: Request, groundworks: Sequence[Groundwork] | None = None) -> bool:
    """Return whether ``make_plan`` succeeds, without searching for the best plan.

    For repeated calls with other device budgets pass ``lay_groundworks``, whose results are reused.
    """
    for level in _all_levels(request, groundworks):
        with suppress(CapacityError):
            if find_plan(level.request, level.graph, level.swaps, level.groundwork) is not None:
                return True
    return False


def minimum_device_memory(request: Request) -> int:
    """Return the bytes of the smallest device budget with which ``make_plan`` succeeds."""
    return _find_least(list(_all_levels(request)))[0]


def _levels(request: Request, graph: GraphFacts, groundwork: Groundwork) -> Iterator[_Level]:
    alone = _Level(request=request, graph=graph, swaps=(), groundwork=groundwork)
    yield alone
    forwards = 1 + request.num_open
    levels = leaving_levels(graph, request.config, request.hardware, groundwork.seconds_of_ops, num_forwards=forwards)
    yield from (alone.with_swaps(swaps) for swaps in levels)
    if request.waits_for_activations and (last := alone.waiting()) is not None:
        yield last


def _all_levels(request: Request, groundworks: Sequence[Groundwork] | None = None) -> Iterator[_Level]:
    for graph, groundwork in zip(request.candidates, groundworks or lay_groundworks(request), strict=True):
        yield from _levels(request, graph, groundwork)


def _find_least(levels: Sequence[_Level]) -> tuple[int, _Level]:
    """Return the smallest device budget for any of some levels, and the first level that it is enough for.

    A level needs at least what its activations do, so that others need not be looked at any more.
    """
    bounds = (each.least_device_nbytes for each in levels)
    least: tuple[float, int] = math.inf, len(levels)
    for bound, index in sorted(zip(bounds, range(len(levels)), strict=True)):
        if bound > least[0]:
            break
        least = min(least, (_minimum(levels[index]), index))
    minimum, index = least
    return int(minimum), levels[index]  # finite for the level that offloads nothing


def _minimum(level: _Level) -> float:
    """Return the smallest device budget for a level; infinity if offloaded activations do not fit beside everything else."""
    nbytes = minimum_memory(level.request, level.graph, level.swaps, level.groundwork)
    if level.swaps:
        request = replace(level.request, config=replace(level.request.config, device_memory=nbytes))
        with suppress(CapacityError):
            if find_plan(request, level.graph, level.swaps, level.groundwork) is not None:
                return nbytes
        return math.inf
    return nbytes


def _waits_for_little(plan: Plan) -> bool:
    timeline = simulate(plan)
    return timeline.stall_seconds <= NEGLIGIBLE_STALLS * timeline.step_seconds


def _capacity_error(request: Request, levels: Sequence[_Level]) -> CapacityError:
    """Return the error that says why no level of a request fits."""
    minimum, level = _find_least(levels)
    graph = without_swapped(level.graph, level.swaps)
    live = working_set(graph.values, graph.num_ticks)
    peak_tick = max(range(len(live)), key=live.__getitem__)
    at_peak = [value for value in graph.values if value.live.start <= peak_tick < value.live.end]
    largest = sorted(at_peak, key=lambda value: (-value.nbytes, value.name))[:3]
    peak_op = next(op for op in graph.ops if op.tick == peak_tick)
    return DeviceCapacityError(
        f"{request.name} needs {format_bytes(minimum)} on device, device_memory is "
        f"{format_bytes(request.config.device_memory)}; its activations alone peak at {format_bytes(live[peak_tick])} "
        f"(in {peak_op.module}, at {peak_op.name}), largest: "
        + ", ".join(f"{value.name} {format_bytes(value.nbytes)}" for value in largest)
        + f"; raise device_memory to {-(-minimum // _MIB)}MiB or make the batch smaller"
        + _describe_reserve(request)
        + _describe_kernels(request),
        needed_nbytes=minimum,
        activations_nbytes=live[peak_tick],
        waiting_helps=not request.waits_for_activations
        and any(
            (waiting := level.waiting()) is not None and waiting.least_device_nbytes < minimum
            for level in levels
            if not level.swaps
        ),
    )


def _describe_reserve(request: Request) -> str:
    """Return a clause on the reserved part of the budget, and how to turn it off."""
    config = request.config
    if not config.reserve_memory:
        return ""
    of_process = (
        "" if not config.measures_reserve else ", as measured; reserve_memory=0 keeps budgets for the model only"
    )
    return (
        f"; {format_bytes(config.reserve_memory)} of that are reserve_memory, for Python, torch and captured graphs, so "
        f"that the whole process stays within device_memory and host_memory{of_process}"
    )


def _describe_kernels(request: Request) -> str:
    """Return a clause on how to limit cached kernels, if the graph has ops that need one per number of rows."""
    if not request.kernel_cache_nbytes or not any(map(keeps_kernels, request.candidates[0].ops)):
        return ""
    return (
        f", or start with ONEDNN_PRIMITIVE_CACHE_CAPACITY=64 LRU_CACHE_CAPACITY=64: of it all, "
        f"{format_bytes(request.kernel_cache_nbytes)} are kernels for the rows of experts that may be kept"
    )
