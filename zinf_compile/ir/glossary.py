"""The glossary: the words of this project, one meaning each. Everything else is called what PyTorch calls it.

program and data
    session        one optimized model, or several that share budgets: its store and its programs
    program        one captured graph with its plan and its lowered forward and backward
    store          what owns the stored tensors of a session: file, memory, threads
    anchor         the zero-element input through which all gathers of a captured graph reach the parameters in autograd
    gather         make the full value of a parameter available on the device
    sink           offload a gradient when it is computed
    ticket         the value that ties a transfer to its waits and its release
    token          a tensor that autograd saves in place of an offloaded activation
    segment        the compute of one block between gathers and stores, as one op
    structure      what makes segments identical, so that they are compiled once: ops, arguments, layouts of inputs
    slice          a part of a parameter: indices along one dimension, or elements of the flattened parameter. A part of a
                   slice is a slice
    tile           a slice of rows that is gathered by itself; also a piece of an op
    block          the repeated module that a node or parameter belongs to (``layers.3``)

where bytes are
    tier           device, host or nvme. On a CPU the device tier is a budgeted share of RAM
    home           the tier on which a tensor is stored between uses; also its memory there
    copy           one stored form of a slice: its role, its encoding and its tier
    role           what a copy is to its parameter: compute copy, master copy, gradient or optimizer state
    encoding       how the bytes of a copy hold values: a dtype, or a code
    code           how optimizer state is stored in fewer bits, in pages: each is a sector of codes, and what decodes them
    state spec     one tensor that an optimizer keeps of a parameter: its name, shape and encoding, and whether its numbers
                   belong to elements, rows or the whole
    slot           the memory of a copy at its home, at run time
    compute copy   what a gather moves, in ``compute_dtype``; the master copy itself if the dtypes agree
    master copy    what the optimizer updates, in the parameter's own dtype
    home tensor    what users see of a slot: a tensor in RAM, or a mapping of the store file
    exposed        said of a copy that a plain tensor or array aliases, so that writes to it cannot be observed
    torn           holding neither the old nor the new value, after an update that began and did not finish
    staging buffer page-aligned host memory, leased for a transfer and returned
    arena          one allocation on the device, divided by planned offsets
    bound value    a result that an op writes to a planned offset of the arena
    reserve        the share of the device budget for Python, torch and captured graphs

time
    tick           a position in the node order of a step: forward nodes first, then backward nodes
    span           consecutive ops that are computed together in the simulation
    live range     half-open [start, end) in ticks
    transfer       one asynchronous movement: of parameters, a gradient or an activation. Its ticks are issue (it starts),
                   need-by (compute waits for it) and release (what it takes of the device is free)
    swap           the two transfers of an activation: offloaded in forward, reloaded in backward
    route          the pair of tiers that a transfer moves between
    lane           what routes take turns on: a disk, a link, compute
    leg            the part of a movement on one route
    look-ahead     how many bytes of transfers are issued ahead of compute
    stall          seconds that compute waits for a transfer
    open forward   a forward whose backward has not run yet

the step
    job            one parameter to update, recorded when ``step()`` is called
    chunk          the slice of a parameter, with its gradient and state, that the streamed step updates at once
    shadow         a copy of the user's optimizer that updates one tensor
    owner          of several ranks, the one that updates a parameter whose optimizer needs whole tensors
    round          owners' updates that run side by side, between two exchanges of rows
"""

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Where bytes are stored, from fastest and smallest to slowest and largest."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Phase(StrEnum):
    """The parts of a training step, in order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class ActivationPolicy(StrEnum):
    """How backward obtains the activations it needs: saved, recomputed, or reloaded."""

    SAVE = "save"  # torch's min-cut choice: save, and recompute only what is nearly free
    RECOMPUTE_VALUES = "recompute_values"  # also recompute single values that are cheap for their bytes
    RECOMPUTE_MORE = "recompute_more"  # the same with more values, the next cheapest
    RECOMPUTE_BLOCKS = "recompute_blocks"  # save the inputs of each block, recompute the block in backward

    @property
    def is_by_value(self) -> bool:
        """Return whether the values to recompute are chosen one by one."""
        return self in (ActivationPolicy.RECOMPUTE_VALUES, ActivationPolicy.RECOMPUTE_MORE)


class StepTiming(StrEnum):
    """When the updates of an optimizer step run."""

    SYNCHRONOUS = "synchronous"  # step() returns when all are stored
    OVERLAPPED = "overlapped"  # in the background of the next forward, in the order of its gathers
    IN_BACKWARD = "in_backward"  # each as soon as its gradient is complete; the gradient is never stored


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LiveRange:
    """Half-open interval of ticks during which bytes hold something that is still needed."""

    start: int
    end: int

    def overlaps(self, other: "LiveRange") -> bool:
        """Return whether both are live at some tick."""
        return self.start < other.end and other.start < self.end


def dtype_name(dtype: object) -> str:
    """Return the name of a torch dtype in facts, plans and options, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def printable(text: str) -> str:
    """Return a line that is safe to print: newlines, control, bidirectional and other invisible characters are escaped.

    Names come from users' files and models: unescaped, they could forge a line, move the cursor, or recolour or reorder
    the output.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def format_bytes(nbytes: float) -> str:
    """Return a human-readable size: ``1536`` gives ``'1.5 KiB'``."""
    size = float(nbytes)
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2)):
        if abs(size) < 1024:
            return f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Return a human-readable duration: ``0.0123`` gives ``'12.3 ms'``."""
    if seconds == 0:
        return "0 s"
    factor, unit = next(
        ((factor, unit) for factor, unit in ((1.0, "s"), (1e-3, "ms")) if abs(seconds) >= factor), (1e-6, "us")
    )
    size = seconds / factor
    return f"{size:.{2 if abs(size) < 10 else 1 if abs(size) < 100 else 0}f} {unit}"
