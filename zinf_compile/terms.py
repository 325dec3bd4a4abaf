"""The glossary: one word, one meaning. Read this file first.

value          a tensor the plan manages, known by a stable name (``layers.3.mlp.up.weight``)
tier           where bytes rest: device, host or nvme. On a CPU machine the device tier is a budgeted share of RAM
home           the tier a value rests in between uses
slot           one stored tensor with its home; a parameter has up to five kinds of them
role           what a slot is to its parameter: compute copy, master copy, gradient, or the name of optimizer state
home tensor    what people see of a slot: a tensor in RAM, or a mapping of the store file
torn           holding neither the old nor the new value, after an update that began and did not finish
lent           held in memory by ``full_parameters`` for a while, as a plain parameter
gather         make the full value of a parameter ready on the device
release        give a gathered value's bytes back
transfer       one asynchronous movement; it has an issue point, a need-by point and a release point
swap           an activation leaves the device between forward and backward: it goes out, is gone, and comes back
prefetch       to issue a transfer before its first use
route          the pair of tiers a transfer moves between
staging buffer page-aligned host memory, leased for a movement and returned
arena          one allocation on the device, divided by planned offsets
tick           a position in the step's flattened node order: forward nodes first, then backward nodes
live range     half-open [start, end) in ticks
working set    the bytes live on a tier at a tick; its maximum is the peak
chunk          one piece of a parameter and its optimizer state in the streamed step
master copy    what the optimizer updates, in the parameter's own dtype
compute copy   what a gather moves, in ``compute_dtype``; the master copy itself where the dtypes agree
resident       home tier is the device: used in place, never moved
block          the repeated module a parameter belongs to (``layers.3``); a block's small parameters move together
stall          seconds that compute waits for a transfer
step           one optimizer step
"""

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Where bytes rest, from fastest and smallest to slowest and largest."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Phase(StrEnum):
    """The parts of a training step, in order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class ActivationPolicy(StrEnum):
    """How the values that backward needs are had again."""

    SAVE = "save"  # torch's min-cut choice: save, recomputing only what is nearly free
    RECOMPUTE_VALUES = "recompute_values"  # of what that saves, make again in backward what is cheap for its bytes
    RECOMPUTE_MORE = "recompute_more"  # the same with more of them, those next in price
    RECOMPUTE_BLOCKS = "recompute_blocks"  # save what enters each block, recompute the block in backward

    @property
    def is_by_value(self) -> bool:
        """Return whether it is told what to make again, value by value."""
        return self in (ActivationPolicy.RECOMPUTE_VALUES, ActivationPolicy.RECOMPUTE_MORE)


class StepTiming(StrEnum):
    """When the updates of an optimizer step run."""

    SYNCHRONOUS = "synchronous"  # step() returns when all are home
    OVERLAPPED = "overlapped"  # beside the next forward, in the order in which that gathers
    IN_BACKWARD = "in_backward"  # each as soon as its gradient is complete, which never rests


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LiveRange:
    """Half-open interval of ticks in which bytes hold something that is still needed."""

    start: int
    end: int

    def overlaps(self, other: "LiveRange") -> bool:
        """Return whether both are live at some tick."""
        return self.start < other.end and other.start < self.end


def dtype_name(dtype: object) -> str:
    """Return the name by which facts, plans and options know a dtype of torch, as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def format_bytes(nbytes: float) -> str:
    """Return a size as a person reads it: ``1536`` gives ``'1.5 KiB'``."""
    size = float(nbytes)
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2)):
        if abs(size) < 1024:
            return f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Return a duration as a person reads it: ``0.0123`` gives ``'12.3 ms'``."""
    if seconds == 0:
        return "0 s"
    factor, unit = next(
        ((factor, unit) for factor, unit in ((1.0, "s"), (1e-3, "ms")) if abs(seconds) >= factor), (1e-6, "us")
    )
    size = seconds / factor
    return f"{size:.{2 if abs(size) < 10 else 1 if abs(size) < 100 else 0}f} {unit}"
