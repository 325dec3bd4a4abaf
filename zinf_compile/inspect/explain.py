"""``plan.explain``: where a value is stored, when it moves, what that costs, and what other homes would cost."""

import difflib
from collections.abc import Iterator, Sequence

from zinf_compile.hardware.world import Leg, World
from zinf_compile.inspect.printing import tell_codes, tell_rows
from zinf_compile.ir.copies import Role
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.facts import GraphFacts, OpFact, ValueFact
from zinf_compile.ir.glossary import Tier, format_bytes, printable
from zinf_compile.ir.hardware import Hardware, route_name
from zinf_compile.ir.plan import Placement, Plan
from zinf_compile.ir.sizes import Size
from zinf_compile.ir.transfers import Transfer
from zinf_compile.passes.planner.cost.costs import op_seconds, seconds_expression
from zinf_compile.passes.planner.search.planner import Request
from zinf_compile.passes.planner.simulator.simulate import Timeline, simulate


def explain(plan: Plan, request: Request, name: str) -> str:
    """Return, as text, what the plan does with a parameter or an activation, and why.

    ConfigError for a name that is neither, with the nearest ones.
    """
    graph, captured = _chosen(plan, request)
    for placement in plan.placements:
        if placement.parameter == name:
            return _join([name, *_explain_parameter(plan, placement)])
    for value in graph.values:
        if value.name == name:
            op = next(op for op in captured.ops if op.tick == value.live.start)
            return _join([name, *_explain_value(plan, graph, value, op)])
    known = [*(placement.parameter for placement in plan.placements), *(value.name for value in graph.values)]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "print(plan) lists the largest of both"
    raise ConfigError(f"{plan.name} has no parameter or value {name!r}; {hint}")


def _join(lines: Sequence[str]) -> str:
    return "\n".join(printable(line) for line in lines)


def _chosen(plan: Plan, request: Request) -> tuple[GraphFacts, GraphFacts[Size]]:
    """Return the graph that the plan is for, with numbers and with symbols as sizes."""
    captured = request.captured or request.candidates
    pairs = zip(request.candidates, captured, strict=True)
    return next(pair for pair in pairs if pair[0].policy is plan.activations.policy)


def _explain_parameter(plan: Plan, placement: Placement) -> Iterator[str]:
    for role, copies in placement.by_role.items():
        home, nbytes = copies[0].tier, placement.nbytes_of(role)
        yield f"  {role.label}: {format_bytes(nbytes)} on {home}{_elsewhere(plan, home, nbytes)}"
    yield from (f"  optimizer state as {told}" for told in tell_codes([placement]))
    yield from (f"  frozen weight as {told}" for told in tell_rows([placement]))
    timeline = simulate(plan)
    gathers = plan.by_tick.gathers_of(placement.parameter)
    for gather in gathers:
        yield f"  {_explain_gather(plan, timeline, gather)}"
    for sink in plan.sinks:
        if sink.name == placement.parameter:
            legs = World.of_plan(plan).legs(sink, is_resident=not gathers)
            yield f"  gradient: leaves after tick {sink.made_at}, {_tell_way(legs) or 'and stays on the device'}"
    if not any(use.parameter == placement.parameter for use in plan.uses):
        yield "  this graph does not read it"
    elif not gathers:
        away = placement.moved({Role.COMPUTE: Tier.HOST})
        nbytes, decoded = away.nbytes_of(Role.COMPUTE), away.decoded(away.compute_dtype)
        legs = World.of_plan(plan).gather_legs(Tier.HOST, nbytes, decoded)
        saved = sum(leg.seconds for leg in legs)
        yield f"  it is resident, so nothing moves; each gather from host would take {saved:.3g} s"


def _explain_gather(plan: Plan, timeline: Timeline, transfer: Transfer) -> str:
    way, phase = _tell_way(World.of_plan(plan).legs(transfer)), plan.schedule.phase_of(transfer.issue)
    stalls = sum(stall.seconds for stall in timeline.stalls_in(phase) if stall.name == transfer.name)
    together = f" with {len(transfer.parameters) - 1} more" if len(transfer.parameters) > 1 else ""
    if transfer.ends is not None:
        together += f" of the experts that have rows, an expected {transfer.share:.0%}, known at tick {transfer.ends}"
    return (
        f"{phase}: moves{together}, {way}, issued at {timeline.seconds_at(transfer.issue):.3g} s, needed at "
        f"{timeline.seconds_at(transfer.need_by):.3g} s, {f'stalls {stalls:.3g} s' if stalls else 'stalls nothing'}"
    )


def _explain_value(plan: Plan, graph: GraphFacts, value: ValueFact, op: OpFact[Size]) -> Iterator[str]:
    made = next(each for each in graph.ops if each.tick == value.live.start)
    held = "saved for backward" if value.saved else "not saved"
    yield f"  {format_bytes(value.nbytes)} from {op.op} in {op.module}, ticks {value.live.start} to {value.live.end}, {held}"
    again = next((each for each in plan.activations.recomputed if each.value == value.name), None)
    if again is not None and not value.saved:
        yield (
            f"  recomputed in backward, at tick {again.tick}, in {again.seconds:.3g} s, with what it is computed from: "
            f"{format_bytes(again.nbytes)} need not be kept until then"
        )
    bound = next((each for each in plan.bound if each.name == value.name), None)
    swap = next((each for each in plan.swaps if each.value == value.name), None)
    if swap is not None:
        offload, reload = swap
        yield (
            f"  leaves for {swap.rests_on} after tick {offload.made_at}, gone by {offload.need_by}, "
            f"{'is read there' if reload.stays else 'comes back'} at {reload.issue}"
        )
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


def _tell_way(legs: Sequence[Leg]) -> str:
    """Return the legs of a transfer as text: bytes, route and seconds of each."""
    return ", then ".join(f"{format_bytes(leg.nbytes)} {leg.route.name} in {leg.seconds:.3g} s" for leg in legs)


def _elsewhere(plan: Plan, home: Tier, nbytes: int) -> str:
    """Return why a copy is not on a faster tier: the free bytes there, and the time of moving from there."""
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
