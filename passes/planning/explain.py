"""``plan.explain``: where one parameter or value lives, when it moves, what that costs, and what other homes would cost."""

import difflib
from collections.abc import Iterator, Sequence

from zinf_compile.errors import ConfigError
from zinf_compile.facts import GraphFacts, OpFact, ValueFact
from zinf_compile.hardware import Hardware, route_name
from zinf_compile.passes.planning.costs import op_seconds, seconds_expression
from zinf_compile.passes.planning.planner import Request
from zinf_compile.passes.planning.questions import request_of
from zinf_compile.plans import GatherTransfer, Placement, Plan
from zinf_compile.simulate import Timeline, simulate
from zinf_compile.sizes import Size
from zinf_compile.terms import Tier, format_bytes
from zinf_compile.world import Leg, World


def explain(plan: Plan, name: str) -> str:
    """Return what the plan does with a parameter, or with a value that compute makes, and why, in lines of text.

    ConfigError for a name that is neither, with the nearest ones.
    """
    request = request_of(plan)
    graph, captured = _chosen(plan, request)
    for placement in plan.placements:
        if placement.parameter == name:
            return "\n".join([name, *_explain_parameter(plan, placement)])
    for value in graph.values:
        if value.name == name:
            op = next(op for op in captured.ops if op.tick == value.live.start)
            return "\n".join([name, *_explain_value(plan, graph, value, op)])
    known = [*(placement.parameter for placement in plan.placements), *(value.name for value in graph.values)]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "print(plan) lists the largest of both"
    raise ConfigError(f"{plan.name} has no parameter or value {name!r}; {hint}")


def _chosen(plan: Plan, request: Request) -> tuple[GraphFacts, GraphFacts[Size]]:
    """Return the graph that the plan is for, in numbers and in symbols."""
    captured = request.captured or request.candidates
    pairs = zip(request.candidates, captured, strict=True)
    return next(pair for pair in pairs if pair[0].policy is plan.activations.policy)


def _explain_parameter(plan: Plan, placement: Placement) -> Iterator[str]:
    copies = (
        ("compute copy", placement.compute, placement.compute_nbytes),
        ("master copy", placement.master, placement.master_nbytes),
        ("gradient", placement.gradient, placement.gradient_nbytes),
        ("optimizer state", placement.optimizer_state, placement.optimizer_state_nbytes),
    )
    for what, home, nbytes in copies:
        if nbytes:
            yield f"  {what}: {format_bytes(nbytes)} on {home}{_elsewhere(plan, home, nbytes)}"
    timeline = simulate(plan)
    moved = [transfer for transfer in plan.transfers if placement.parameter in transfer.parameters]
    for transfer in moved:
        yield f"  {_explain_transfer(plan, timeline, transfer)}"
    for sink in plan.sinks:
        if sink.parameter == placement.parameter:
            legs = _world(plan).gradient_legs(sink.destination, sink.nbytes, is_resident=not moved)
            yield f"  gradient: leaves after tick {sink.tick}, {_tell_way(legs) or 'and stays on the device'}"
    if not any(use.parameter == placement.parameter for use in plan.uses):
        yield "  this graph does not read it"
    elif not moved:
        legs = _world(plan).gather_legs(Tier.HOST, placement.compute_nbytes)
        saved = sum(leg.seconds for leg in legs)
        yield f"  it is resident, so nothing moves; each gather from host would take {saved:.3g} s"


def _explain_transfer(plan: Plan, timeline: Timeline, transfer: GatherTransfer) -> str:
    way = _tell_way(_world(plan).gather_legs(transfer.source, transfer.nbytes))
    stalls = sum(stall.seconds for stall in timeline.stalls_in(transfer.phase) if stall.name == transfer.name)
    together = f" with {len(transfer.parameters) - 1} more" if len(transfer.parameters) > 1 else ""
    return (
        f"{transfer.phase}: moves{together}, {way}, issued at {timeline.seconds_at(transfer.issue):.3g} s, needed at "
        f"{timeline.seconds_at(transfer.need_by):.3g} s, {f'stalls {stalls:.3g} s' if stalls else 'stalls nothing'}"
    )


def _explain_value(plan: Plan, graph: GraphFacts, value: ValueFact, op: OpFact[Size]) -> Iterator[str]:
    made = next(each for each in graph.ops if each.tick == value.live.start)
    held = "saved for backward" if value.saved else "not saved"
    yield f"  {format_bytes(value.nbytes)} from {op.op} in {op.module}, ticks {value.live.start} to {value.live.end}, {held}"
    again = next((each for each in plan.activations.recomputed if each.value == value.name), None)
    if again is not None and not value.saved:
        yield (
            f"  made again in backward, at tick {again.tick}, in {again.seconds:.3g} s and what it is made from: "
            f"{format_bytes(again.nbytes)} need not rest until then"
        )
    bound = next((each for each in plan.bound if each.name == value.name), None)
    swap = next((each for each in plan.swaps if each.value == value.name), None)
    if swap is not None:
        yield f"  leaves for {swap.destination} after tick {swap.out}, gone by {swap.gone}, comes back at {swap.issue}"
    elif bound is not None:
        yield f"  bound to the arena's bytes from {bound.offset:,}"
    else:
        yield "  allocated by torch"
    formula = seconds_expression(op, plan.hardware)
    in_symbols = f", {formula.evalf(3)} for other sizes" if formula.free_symbols else ""
    yield f"  computing it takes {op_seconds(made, plan.hardware):.3g} s{in_symbols}"
    if value.idle is not None and swap is None:
        for tier in (Tier.HOST, Tier.NVME):
            if _has_route(plan.hardware, Tier.DEVICE, tier):
                away = _route_seconds(plan.hardware, Tier.DEVICE, tier, value.nbytes)
                back = _route_seconds(plan.hardware, tier, Tier.DEVICE, value.nbytes)
                yield f"  swapping it to {tier} would take {away + back:.3g} s on the way there and back"


def _world(plan: Plan) -> World:
    return World(hardware=plan.hardware, num_ranks=plan.num_ranks)


def _tell_way(legs: Sequence[Leg]) -> str:
    """Return what moves over which routes, one after another, and how long it takes."""
    return ", then ".join(f"{format_bytes(leg.nbytes)} {leg.route.name} in {leg.seconds:.3g} s" for leg in legs)


def _elsewhere(plan: Plan, home: Tier, nbytes: int) -> str:
    """Return why a copy is not on a faster tier: what is free there now, or what moving from there would take."""
    reasons = []
    for tier in list(Tier)[: list(Tier).index(home)]:
        planned = plan.tier(tier)
        if planned.capacity is None:
            continue
        free = planned.capacity - planned.predicted_peak
        reasons.append(f"{format_bytes(free)} of {tier} is free" + ("" if free < nbytes else ", which would hold it"))
    return f" ({'; '.join(reasons)})" if reasons else ""


def _has_route(hardware: Hardware, source: Tier, destination: Tier) -> bool:
    return any(route.name == route_name(source, destination) for route in hardware.routes)


def _route_seconds(hardware: Hardware, source: Tier, destination: Tier, nbytes: int) -> float:
    if source is destination:
        return 0.0
    route = hardware.route(source, destination)
    return route.latency_seconds + nbytes / route.bytes_per_second
