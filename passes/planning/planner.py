"""Facts, budgets and rates in; the Plan out. Pure: the same input gives the same plan on every machine and rank.

Of the candidate graphs, each under its own activation policy, the one whose plan has the shortest simulated step is taken.
"""

from contextlib import suppress
from dataclasses import replace

from zinf_compile.errors import CapacityError
from zinf_compile.facts import working_set
from zinf_compile.passes.planning.build import Request
from zinf_compile.passes.planning.search import find_plan, minimum_memory, search_plan
from zinf_compile.plans import Plan
from zinf_compile.terms import format_bytes

__all__ = ["Request", "does_fit", "make_plan", "minimum_device_memory"]

_MIB = 2**20


def make_plan(request: Request) -> Plan:
    """Return the plan with the shortest simulated step of those that fit.

    Raises CapacityError, with the smallest budgets that work, when none does.
    """
    found = [best for graph in request.candidates if (best := search_plan(request, graph)) is not None]
    if not found:
        raise _capacity_error(request)
    return replace(min(found, key=lambda best: best.score.key).plan, request=request)


def does_fit(request: Request) -> bool:
    """Return whether ``make_plan`` succeeds, without looking for the best plan."""
    with suppress(CapacityError):
        return any(find_plan(request, graph) is not None for graph in request.candidates)
    return False


def minimum_device_memory(request: Request) -> int:
    """Return the bytes of the smallest device budget with which ``make_plan`` succeeds."""
    return min(minimum_memory(request, graph) for graph in request.candidates)


def _capacity_error(request: Request) -> CapacityError:
    graph = min(request.candidates, key=lambda candidate: minimum_memory(request, candidate))
    live = working_set(graph.values, graph.num_ticks)
    peak_tick = max(range(len(live)), key=live.__getitem__)
    at_peak = [value for value in graph.values if value.live.start <= peak_tick < value.live.end]
    largest = sorted(at_peak, key=lambda value: (-value.nbytes, value.name))[:3]
    peak_op = next(op for op in graph.ops if op.tick == peak_tick)
    minimum = minimum_memory(request, graph)
    return CapacityError(
        f"{request.name} needs {format_bytes(minimum)} on device, device_memory is "
        f"{format_bytes(request.config.device_memory)}; its activations alone peak at {format_bytes(live[peak_tick])} "
        f"(in {peak_op.module}, at {peak_op.name}), largest: "
        + ", ".join(f"{value.name} {format_bytes(value.nbytes)}" for value in largest)
        + f"; raise device_memory to {-(-minimum // _MIB)}MiB or make the batch smaller"
    )
