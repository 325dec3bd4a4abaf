"""The differences between two plans as text, one line per change."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace

from zinf_compile.inspect.arena_chart import bound_region
from zinf_compile.inspect.text.plan_names import NamePattern, name_pattern, summarize_names
from zinf_compile.ir.glossary import Phase, format_bytes, format_seconds, printable
from zinf_compile.ir.hardware import OpRate, Rate, Route, TierSize
from zinf_compile.ir.plan import Placement, Plan, RecomputedValue
from zinf_compile.ir.transfers import Swap, Transfer
from zinf_compile.passes.planner.simulator.simulate import Timeline, simulate

_PLACEMENT_FIELDS = (
    *("compute", "master", "gradient", "optimizer_state", "compute_dtype", "compute_nbytes", "master_nbytes"),
    *("gradient_nbytes", "gradient_dtype", "optimizer_state_nbytes", "tile_of"),
)


def dump_plan_difference(a: Plan, b: Plan) -> str:
    """Return the differences from ``a`` to ``b``, one line each; ``"the plans are equal"`` if there are none."""
    if a == b:
        return "the plans are equal"
    scalars = ("version", "name", "compute_dtype", "arena_nbytes", "prefetch_nbytes")
    counted = [field.name for field in fields(a.activations) if field.name != "recomputed"]
    tiers = {tier.tier: tier for tier in b.tiers}
    lines = [
        *_changes("", a, b, (*scalars, "num_ranks", "num_replicas", "is_reduced_in_order", "notes")),
        *(
            line
            for phase in (Phase.FORWARD, Phase.BACKWARD)
            for line in _change(f"ticks of {phase}", "", len(a.schedule.ticks(phase)), len(b.schedule.ticks(phase)))
        ),
        *_changes("hardware ", a.hardware, b.hardware),
        *(line for tier in a.tiers if tier.tier in tiers for line in _changes(f"{tier.tier} ", tier, tiers[tier.tier])),
        *_changed_placements(a, b),
        *_changes("activations ", a.activations, b.activations, counted),
        *_changed_movements("values recomputed in backward", a.activations.recomputed, b.activations.recomputed),
        *_changes("step ", a.step, b.step),
        *_changed_movements("transfers", a.gathers, b.gathers),
        *_changed_bound(a, b),
        *_changed_movements("activations that leave the device", a.swaps, b.swaps),
        *_changed_movements("gradients that leave the device", a.sinks, b.sinks),
    ]
    for name, before, after in (
        ("uses", set(a.uses), set(b.uses)),
        ("spans", set(a.spans), set(b.spans)),
        ("tiers", {tier.tier for tier in a.tiers}, set(tiers)),
    ):
        if before != after:
            lines.append(f"{name}: {len(before)} -> {len(after)} records, not the same ones")
    lines += _changed_seconds(simulate(a), simulate(b))
    return "\n".join(printable(line) for line in lines or ["the plans list the same records in another order"])


def _changes(label: str, a: object, b: object, names: Sequence[str] = ()) -> list[str]:
    """Return a line for each field of two records of one class that differs."""
    lines = []
    for name in names or [field.name for field in fields(a)]:  # type: ignore[arg-type]  # records are dataclasses
        before, after = getattr(a, name), getattr(b, name)
        if isinstance(before, tuple):
            first, second = dict(map(_name_amount, before)), dict(map(_name_amount, after))
            for each in dict.fromkeys([*first, *second]):
                lines += _change(f"{label}{name.removesuffix('s')} {each}", name, first.get(each), second.get(each))
        else:
            lines += _change(f"{label}{name.removesuffix('_nbytes').replace('_', ' ')}", name, before, after)
    return lines


def _change(label: str, field: str, before: object, after: object) -> list[str]:
    if before == after:
        return []
    texts = [_format_field(field, value) for value in (before, after)]
    if texts[0] == texts[1]:  # rounding hides the difference
        texts = [str(before), str(after)]
    return [f"{label}: {texts[0]} -> {texts[1]}"]


def _name_amount(item: Rate | OpRate | Route | TierSize | tuple[str, int] | str) -> tuple[str, object]:
    """Return the name and value of a hardware rate, of a part of a tier, or of a plain text."""
    if isinstance(item, tuple):
        return item
    if isinstance(item, str):
        return item, "given"
    if isinstance(item, OpRate):
        return f"{item.kind} {item.dtype}", item.bytes_per_second
    if isinstance(item, TierSize):
        return item.tier, item.nbytes
    return item.name, item.per_second if isinstance(item, Rate) else item.bytes_per_second


def _format_field(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and ("nbytes" in name or name in ("capacity", "predicted_peak", "parts", "tiers")):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.4g}/s"  # the only ones are rates
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else str(value)


def _changed_placements(a: Plan, b: Plan) -> list[str]:
    before = {placement.parameter: placement for placement in a.placements}
    after = {placement.parameter: placement for placement in b.placements}
    changes: dict[tuple[NamePattern, str], list[str]] = defaultdict(list)
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            changes[name_pattern(name), _describe_move(before.get(name), after.get(name))].append(name)
    lines = [f"{summarize_names(names)}: {change}" for (_, change), names in changes.items()]
    if not lines and a.placements != b.placements:
        lines.append("placements: in another order")
    return lines


def _describe_move(before: Placement | None, after: Placement | None) -> str:
    if before is None or after is None:
        return "only in the second plan" if before is None else "only in the first plan"
    lines = _changes("", before, after, _PLACEMENT_FIELDS)
    return ", ".join(line.replace(":", "", 1) for line in lines) or "its copies are other slices or states"


def _changed_movements(
    label: str,
    a: Sequence[Transfer | Swap | RecomputedValue],
    b: Sequence[Transfer | Swap | RecomputedValue],
) -> list[str]:
    if a == b:
        return []
    totals = [format_bytes(sum(item.nbytes for item in items)) for items in (a, b)]
    line = f"{label}: {len(a)} of {totals[0]} -> {len(b)} of {totals[1]}"
    kept = len(set(a) & set(b))
    return [f"{line}; {kept} are the same" if kept else line]


def _changed_bound(a: Plan, b: Plan) -> list[str]:
    """Return the difference of bound values; values that only moved with the whole region count as equal."""
    if a.bound == b.bound:
        return []
    regions = bound_region(a), bound_region(b)
    texts = [
        f"{len(plan.bound)} in {format_bytes(region.nbytes if region else 0)}"
        for plan, region in zip((a, b), regions, strict=True)
    ]
    moved_by = regions[1].start - regions[0].start if regions[0] and regions[1] else 0
    kept = len({replace(value, offset=value.offset + moved_by) for value in a.bound} & set(b.bound))
    line = f"bound values: {texts[0]} -> {texts[1]}"
    if kept:
        line += f"; {kept} are the same"
    if moved_by:
        line += f", {format_bytes(abs(moved_by))} {'further on' if moved_by > 0 else 'further to the front'}"
    return [line]


def _changed_seconds(a: Timeline, b: Timeline) -> list[str]:
    before, after = dict(a.phase_seconds), dict(b.phase_seconds)
    pairs = [(str(phase), before.get(phase), after.get(phase)) for phase in dict.fromkeys([*before, *after])]
    pairs += [("stalls", a.stall_seconds, b.stall_seconds), ("total", a.step_seconds, b.step_seconds)]
    lines = []
    for name, first, second in pairs:
        if first is None or second is None or not math.isclose(first, second, rel_tol=1e-9):
            texts = ["none" if seconds is None else format_seconds(seconds) for seconds in (first, second)]
            change = f" ({second / first - 1:+.1%})" if first and second is not None else ""
            lines.append(f"predicted {name}: {texts[0]} -> {texts[1]}{change}")
    return lines
