"""Finds out whether an optimizer's update of one parameter depends on the others.

A shadow sees one parameter at a time, so a norm over all parameters inside ``step`` would be another norm. Three updates
of a small tensor, by itself and beside one in its group and one in another, must give the same bits. And what the
optimizer writes into its group must not come from gradients: a shadow's group is a copy, and the optimizer's own step,
which sees no gradient, is what writes into the real one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zinf_compile.runtime.element_wise import SURPRISES, is_same_value

# Parameters (updated in place), gradients, states (changed in place) -> the options of the group afterwards
GroupUpdate = Callable[[Sequence[Tensor], Sequence[Tensor | None], Sequence[dict[str, Any]]], Mapping[str, Any]]

_GRADIENT_SCALES = (1e-3, 1.0, 1e3)  # below and above where gradients are clipped


def find_coupling(update: GroupUpdate) -> str | None:
    """Return what couples parameters that ``update`` is given together, or an update with the next; None if nothing."""
    alone = _run(update, num_parameters=1, has_gradients=True)
    beside = _run(update, num_parameters=3, has_gradients=True)
    if alone is None or beside is None:
        return None
    if not all(torch.equal(left, right) for left, right in zip(alone.values, beside.values, strict=True)):
        return "its update of one parameter depends on the others"
    without = _run(update, num_parameters=1, has_gradients=False)
    if without is None:
        return None
    for key, value in alone.options.items():
        if not all(is_same_value(value, other.options.get(key)) for other in (beside, without)):
            return f"what it keeps in its parameter group as '{key}' depends on the gradients of all parameters"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The first parameter after each update, and the options of its group in the end."""

    values: list[Tensor]
    options: Mapping[str, Any]


def _run(update: GroupUpdate, *, num_parameters: int, has_gradients: bool) -> _Outcome | None:
    """Return what three updates do; None if they raise, which the optimizer's own step will then do too."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Tensor]:
        return [torch.randn(4, 4, generator=generator) for _ in range(3)][:num_parameters]

    parameters = draw()
    states: list[dict[str, Any]] = [{} for _ in parameters]
    values: list[Tensor] = []
    options: Mapping[str, Any] = {}
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)  # stochastic updates draw the same
            for scale in _GRADIENT_SCALES:
                gradients = [scale * gradient if has_gradients else None for gradient in draw()]
                options = update(parameters, gradients, states)
                values.append(parameters[0].detach().clone())
    except SURPRISES:
        return None
    return _Outcome(values=values, options=options)
