"""Replans with the rates observed in the first steps; placement may change.

The current plan is simulated with the same rates. It stays unless another one is faster by more than the usual
variation of steps. If compute hardly stalls under it, there is no search.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

from zinf_compile.hardware.observed import Observed, with_observed
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Phase, Tier
from zinf_compile.ir.plan import Plan, TierPart
from zinf_compile.ir.timeline import Timeline
from zinf_compile.passes.planner.search.planner import NEGLIGIBLE_STALLS, Request, make_plan
from zinf_compile.passes.planner.simulator.simulate import simulate

_LEAST_GAIN = 0.03  # share of a step: moving parameters takes time, and measured rates are not exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Remade:
    """The plan to continue with, under observed rates, and a sentence about it."""

    plan: Plan
    request: Request  # the request that the plan answers
    is_new: bool  # False: the current plan, with predictions by the observed rates
    sentence: str


def remake_plan(plan: Plan, request: Request, observed: Observed) -> Remade:
    """Return the best plan for the rates that were observed under ``plan``.

    ``request`` is planned again; the observed rates replace those of its hardware.
    """
    predicted = simulate(plan)
    factor = _compute_factor(plan, predicted, observed)
    hardware = with_observed(plan.hardware, observed, compute_factor=factor)
    request = replace(request, hardware=hardware)
    spans = tuple(replace(span, seconds=span.seconds * factor) for span in plan.spans)
    kept = replace(plan, hardware=hardware, spans=spans)
    timeline = simulate(kept)
    what = (
        f"after step {observed.num_steps}: predicted {predicted.step_seconds:.3g} s, "
        f"measured {observed.step_seconds:.3g} s"
    )
    if timeline.stall_seconds > NEGLIGIBLE_STALLS * timeline.step_seconds:
        with suppress(CapacityError):  # only the earlier placement fits
            made = make_plan(request)
            seconds = simulate(made).step_seconds
            if seconds < (1 - _LEAST_GAIN) * timeline.step_seconds:
                sentence = (
                    f"{plan.name}: planned again {what}, {timeline.step_seconds:.3g} s by measured rates; "
                    f"new plan {seconds:.3g} s"
                )
                return Remade(plan=made, request=request, is_new=True, sentence=sentence)
    sentence = f"{plan.name}: its plan stays {what}, {timeline.step_seconds:.3g} s by measured rates"
    kept = replace(kept, notes=(*plan.notes, f"{sentence}."))
    return Remade(plan=kept, request=request, is_new=False, sentence=sentence)


def with_open_forwards(plan: Plan, request: Request) -> Plan | None:
    """Return ``plan`` with the open forwards of ``request`` counted; None if that exceeds its capacity."""
    device = plan.tier(Tier.DEVICE)
    parts = (*(part for part in device.parts if part[0] != TierPart.OPEN), (TierPart.OPEN, request.open_nbytes))
    peak = sum(nbytes for _, nbytes in parts)
    if device.capacity is not None and peak > device.capacity:
        return None
    grown = replace(device, parts=parts, predicted_peak=peak)
    tiers = tuple(grown if tier is device else tier for tier in plan.tiers)
    return replace(plan, tiers=tiers)


def _compute_factor(plan: Plan, predicted: Timeline, observed: Observed) -> float:
    """Return measured over predicted seconds of the ops.

    The predicted share of compute that background updates take is subtracted before, up to half of the measured time.
    """
    ops = sum(span.seconds for span in plan.spans)
    stalls = sum(stall.seconds for phase in (Phase.FORWARD, Phase.BACKWARD) for stall in predicted.stalls_in(phase))
    phases = sum(seconds for phase, seconds in predicted.phase_seconds if phase is not Phase.STEP)
    lost = max(0.0, phases - stalls - ops)
    return max(observed.compute_seconds - lost, observed.compute_seconds / 2) / ops
