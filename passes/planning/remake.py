"""A plan again, by what its first steps have shown: their times replace estimates, and homes are free to change.

The plan that is there is judged by the same observed rates. It stays unless another is faster by more than what steps differ
by anyhow; where compute hardly waits under it, no other is looked for.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

from zinf_compile.errors import CapacityError
from zinf_compile.observed import Observed, with_observed
from zinf_compile.passes.planning.planner import NEGLIGIBLE_STALLS, Request, make_plan
from zinf_compile.plans import OPEN_PART, Plan
from zinf_compile.simulate import simulate
from zinf_compile.simulation.timeline import Timeline
from zinf_compile.terms import Phase, Tier

_LEAST_GAIN = 0.03  # of a step: moving homes takes a while, and measured rates are not exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Remade:
    """The plan to go on with, under observed rates, and what to say about it."""

    plan: Plan
    is_new: bool  # False: it is the plan that was there, which now predicts by observed rates
    sentence: str


def remake_plan(plan: Plan, request: Request, observed: Observed) -> Remade:
    """Return the best plan by what was observed under ``plan``, which was made by the hardware that it names.

    ``request`` is what to plan again; its hardware is replaced.
    """
    predicted = simulate(plan)
    factor = _compute_factor(plan, predicted, observed)
    hardware = with_observed(plan.hardware, observed, compute_factor=factor)
    request = replace(request, hardware=hardware)
    spans = tuple(replace(span, seconds=span.seconds * factor) for span in plan.spans)
    kept = replace(plan, hardware=hardware, spans=spans, request=request)
    timeline = simulate(kept)
    what = (
        f"after step {observed.num_steps}: predicted {predicted.step_seconds:.3g} s, "
        f"measured {observed.step_seconds:.3g} s"
    )
    if timeline.stall_seconds > NEGLIGIBLE_STALLS * timeline.step_seconds:
        with suppress(CapacityError):  # where only the homes that were chosen before other facts were known fit
            made = make_plan(request)
            seconds = simulate(made).step_seconds
            if seconds < (1 - _LEAST_GAIN) * timeline.step_seconds:
                sentence = (
                    f"{plan.name}: planned again {what}, {timeline.step_seconds:.3g} s by measured rates; "
                    f"new plan {seconds:.3g} s"
                )
                return Remade(plan=made, is_new=True, sentence=sentence)
    sentence = f"{plan.name}: its plan stays {what}, {timeline.step_seconds:.3g} s by measured rates"
    return Remade(plan=replace(kept, notes=(*plan.notes, f"{sentence}.")), is_new=False, sentence=sentence)


def with_open_forwards(plan: Plan, request: Request) -> Plan | None:
    """Return ``plan`` as it is, beside the open forwards that ``request`` says; None if that is over its capacity."""
    device = plan.tier(Tier.DEVICE)
    parts = (*(part for part in device.parts if part[0] != OPEN_PART), (OPEN_PART, request.open_nbytes))
    peak = sum(nbytes for _, nbytes in parts)
    if device.capacity is not None and peak > device.capacity:
        return None
    grown = replace(device, parts=parts, predicted_peak=peak)
    tiers = tuple(grown if tier is device else tier for tier in plan.tiers)
    return replace(plan, tiers=tiers, request=request)


def _compute_factor(plan: Plan, predicted: Timeline, observed: Observed) -> float:
    """Return how many times as long as predicted the ops took.

    What updates take of compute beside it is predicted apart, and stays; of what was observed, half at most.
    """
    ops = sum(span.seconds for span in plan.spans)
    stalls = sum(stall.seconds for phase in (Phase.FORWARD, Phase.BACKWARD) for stall in predicted.stalls_in(phase))
    phases = sum(seconds for phase, seconds in predicted.phase_seconds if phase is not Phase.STEP)
    lost = max(0.0, phases - stalls - ops)
    return max(observed.compute_seconds - lost, observed.compute_seconds / 2) / ops
