"""The closed forms of ZeRO and ZeRO-Infinity for a transformer. A plan must come close to them.

ZeRO-Infinity: Rajbhandari et al., SC'21, arXiv 2104.07857, sections 3 and 4. ZeRO: Rajbhandari et al., SC'20, arXiv
1910.02054, sections 3 and 5. Everything is a sympy expression in ``LAYERS``, ``HIDDEN``, ...; ``at_shape`` evaluates it.
"""

from dataclasses import dataclass
from enum import StrEnum

import sympy

LAYERS, HIDDEN, HEADS, BATCH, SEQUENCE = sympy.symbols(
    "layers hidden heads batch sequence", positive=True, integer=True
)
BLOCKS_PER_CHECKPOINT = sympy.Symbol("blocks_per_checkpoint", positive=True, integer=True)
PARAMETERS, RANKS = sympy.symbols("parameters ranks", positive=True, integer=True)

# fp16 parameter and gradient, and fp32 parameter, two moments and gradient. Not every system keeps the fp32 gradient.
STATE_BYTES_PER_PARAMETER = 20
FP16_BYTES_PER_PARAMETER = 2

NUM_PARAMETERS = 12 * LAYERS * HIDDEN**2
MODEL_STATE_NBYTES = STATE_BYTES_PER_PARAMETER * NUM_PARAMETERS
CHECKPOINT_NBYTES = 2 * BATCH * SEQUENCE * HIDDEN * LAYERS / BLOCKS_PER_CHECKPOINT
# The largest operator, hidden to 4 hidden: its parameter and its gradient.
STATE_WORKING_NBYTES = 2 * FP16_BYTES_PER_PARAMETER * HIDDEN * 4 * HIDDEN
# Activations between two checkpoints, for the batch of one device.
ACTIVATION_WORKING_NBYTES = BATCH * SEQUENCE * BLOCKS_PER_CHECKPOINT * (16 * HIDDEN + 2 * HEADS * SEQUENCE)
# Without checkpoints, all blocks keep their activations.
ACTIVATION_NBYTES = ACTIVATION_WORKING_NBYTES * LAYERS / BLOCKS_PER_CHECKPOINT
FLOPS_PER_STEP = 2 * 4 * NUM_PARAMETERS * BATCH * SEQUENCE  # forward, recomputed forward, and twice that in backward


class ZeroStage(StrEnum):
    """What is sharded over the ranks."""

    NONE = "none"
    OPTIMIZER_STATES = "optimizer states"  # stage 1
    GRADIENTS = "gradients too"  # stage 2
    PARAMETERS = "parameters too"  # stage 3


_OPTIMIZER_BYTES = 12  # K of the ZeRO paper: fp32 parameter and two moments

# Bytes that a rank keeps, and elements that it sends per step, as functions of the number of parameters.
ZERO_NBYTES = {
    ZeroStage.NONE: (4 + _OPTIMIZER_BYTES) * PARAMETERS,
    ZeroStage.OPTIMIZER_STATES: 4 * PARAMETERS + _OPTIMIZER_BYTES * PARAMETERS / RANKS,
    ZeroStage.GRADIENTS: 2 * PARAMETERS + (2 + _OPTIMIZER_BYTES) * PARAMETERS / RANKS,
    ZeroStage.PARAMETERS: (4 + _OPTIMIZER_BYTES) * PARAMETERS / RANKS,
}
ZERO_ELEMENTS_SENT = {
    ZeroStage.NONE: 2 * PARAMETERS,
    ZeroStage.OPTIMIZER_STATES: 2 * PARAMETERS,
    ZeroStage.GRADIENTS: 2 * PARAMETERS,
    ZeroStage.PARAMETERS: 3 * PARAMETERS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A transformer and its batch. ``batch`` counts the sequences of whatever holds the quantity: a device or a node."""

    layers: int
    hidden: int
    heads: int
    batch: int
    sequence: int
    blocks_per_checkpoint: int = 1


def at_shape(expression: sympy.Expr, shape: TransformerShape) -> float:
    """Return the value of a closed form for one transformer."""
    return float(
        expression.subs(
            {
                LAYERS: shape.layers,
                HIDDEN: shape.hidden,
                HEADS: shape.heads,
                BATCH: shape.batch,
                SEQUENCE: shape.sequence,
                BLOCKS_PER_CHECKPOINT: shape.blocks_per_checkpoint,
            }
        )
    )


class Strategy(StrEnum):
    """Ways to train on one node, from the paper's Fig. 6a."""

    DATA_PARALLEL = "data parallel"
    ZERO_OFFLOAD = "ZeRO-Offload"
    ZERO_3 = "ZeRO-3"
    THREE_D = "3D parallelism"
    INFINITY_HOST = "ZeRO-Infinity CPU"
    INFINITY_NVME = "ZeRO-Infinity NVMe"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """The memory of one node, in bytes."""

    devices: int
    device_nbytes: int  # of one device
    host_nbytes: int
    nvme_nbytes: int


def needs_of(strategy: Strategy, devices: int) -> dict[str, sympy.Expr]:
    """Return the bytes of model states on one device, in host memory and on nvme, in ``PARAMETERS``."""
    states = STATE_BYTES_PER_PARAMETER * PARAMETERS
    none = sympy.Integer(0)
    match strategy:
        case Strategy.DATA_PARALLEL:
            return {"device": states, "host": none, "nvme": none}
        case Strategy.ZERO_OFFLOAD:
            parameters = FP16_BYTES_PER_PARAMETER * PARAMETERS
            return {"device": parameters, "host": states - parameters, "nvme": none}
        case Strategy.ZERO_3 | Strategy.THREE_D:  # both shard all model states evenly
            return {"device": states / devices, "host": none, "nvme": none}
        case Strategy.INFINITY_HOST:
            return {"device": none, "host": states, "nvme": none}
        case Strategy.INFINITY_NVME:
            return {"device": none, "host": none, "nvme": states}


def largest_model(strategy: Strategy, node: NodeMemory, shape: TransformerShape) -> float:
    """Return how many parameters fit a node: the number of blocks is limited by the scarcest memory.

    The hidden size is that of ``shape``. A device also holds the working memory of states and activations, and its
    activation checkpoints. ZeRO-Infinity keeps the checkpoints in host memory (``batch`` sequences for each device).
    """
    infinity = strategy in (Strategy.INFINITY_HOST, Strategy.INFINITY_NVME)
    layers_of = PARAMETERS / NUM_PARAMETERS.subs(LAYERS, 1)
    checkpoints = CHECKPOINT_NBYTES.subs(LAYERS, layers_of)
    working = STATE_WORKING_NBYTES + ACTIVATION_WORKING_NBYTES
    needs = needs_of(strategy, node.devices)
    needs["device"] += working + (0 if infinity else checkpoints)
    needs["host"] += node.devices * checkpoints if infinity else 0
    capacity = {"device": node.device_nbytes, "host": node.host_nbytes, "nvme": node.nvme_nbytes}
    fits = []
    for tier, need in needs.items():
        at_hidden = need.subs(
            {
                HIDDEN: shape.hidden,
                HEADS: shape.heads,
                BATCH: shape.batch,
                SEQUENCE: shape.sequence,
                BLOCKS_PER_CHECKPOINT: shape.blocks_per_checkpoint,
            }
        )
        room = capacity[tier] - at_hidden.subs(PARAMETERS, 0)
        if room < 0:
            return 0.0
        slope = sympy.diff(at_hidden, PARAMETERS)
        if slope != 0:
            fits.append(float(room / slope))
    return min(fits)
