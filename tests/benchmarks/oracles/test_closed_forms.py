"""The papers' own tables, recomputed: exact to the printed digit where they come from formulas."""

from decimal import ROUND_HALF_UP, Decimal

import pytest

from benchmarks.oracles.closed_forms import (
    ACTIVATION_NBYTES,
    ACTIVATION_WORKING_NBYTES,
    CHECKPOINT_NBYTES,
    FLOPS_PER_STEP,
    MODEL_STATE_NBYTES,
    NUM_PARAMETERS,
    PARAMETERS,
    RANKS,
    STATE_WORKING_NBYTES,
    ZERO_ELEMENTS_SENT,
    ZERO_NBYTES,
    NodeMemory,
    Strategy,
    TransformerShape,
    ZeroStage,
    at_shape,
    largest_model,
)

GIB, TIB = 2**30, 2**40
DGX2 = NodeMemory(devices=16, device_nbytes=32 * 10**9, host_nbytes=1500 * 10**9, nvme_nbytes=28 * 10**12)


def rounded(number: float) -> str:
    """Return a number as the paper prints it, with two decimals."""
    return str(Decimal(repr(number)).quantize(Decimal("0.01"), rounding=ROUND_HALF_UP))


# Figure 2a of ZeRO-Infinity. Hidden sizes are multiples of 1024 ("10K"); 16 GPUs a node, sequences of 1024.
# layers, hidden, heads: parameters (T), model states (TiB), activations and checkpoints per node (TiB), working memory of
# states and of activations per GPU (GiB). For the smallest model, the working memory of states is from the formula.
@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "printed"),
    [
        (80, 10, 128, ("0.10", "1.83", "2.03", "0.05", "1.56", "1.63")),
        (100, 20, 160, ("0.50", "9.16", "3.91", "0.12", "6.25", "2.50")),
        (128, 25, 256, ("1.01", "18.31", "7.13", "0.20", "9.77", "3.56")),
        (195, 64, 512, ("10.05", "182.81", "24.38", "0.76", "64.00", "8.00")),
        (315, 160, 1024, ("101.47", "1845.70", "88.59", "3.08", "400.00", "18.00")),
    ],
)
def test_the_memory_table_to_the_printed_digit(layers: int, hidden: int, heads: int, printed: tuple[str, ...]) -> None:
    on_gpu = TransformerShape(layers=layers, hidden=hidden * 1024, heads=heads, batch=4, sequence=1024)
    on_node = TransformerShape(layers=layers, hidden=hidden * 1024, heads=heads, batch=32, sequence=1024)
    computed = (
        at_shape(NUM_PARAMETERS, on_gpu) / 1e12,
        at_shape(MODEL_STATE_NBYTES, on_gpu) / TIB,
        16 * at_shape(ACTIVATION_NBYTES, on_gpu) / TIB,
        at_shape(CHECKPOINT_NBYTES, on_node) / TIB,
        at_shape(STATE_WORKING_NBYTES, on_gpu) / GIB,
        at_shape(ACTIVATION_WORKING_NBYTES, on_gpu) / GIB,
    )
    assert tuple(map(rounded, computed)) == printed


# Figure 6a of ZeRO-Infinity: the largest model on one DGX-2, with hidden sizes typical for these model sizes.
LADDER = [
    (Strategy.DATA_PARALLEL, 1.4e9, 1536, 16),
    (Strategy.ZERO_OFFLOAD, 13e9, 4096, 32),
    (Strategy.ZERO_3, 20e9, 4096, 32),
    (Strategy.THREE_D, 20e9, 4096, 32),
    (Strategy.INFINITY_HOST, 70e9, 8192, 64),
    (Strategy.INFINITY_NVME, 1e12, 25600, 256),
]
RUNGS = (1.4e9, 13e9, 20e9, 70e9, 0.1e12, 0.5e12, 1e12, 10e12)  # sizes that the paper trained or planned


@pytest.mark.parametrize(("strategy", "reported", "hidden", "heads"), LADDER)
def test_the_largest_model_on_one_node(strategy: Strategy, reported: float, hidden: int, heads: int) -> None:
    shape = TransformerShape(layers=1, hidden=hidden, heads=heads, batch=4, sequence=1024)
    largest = largest_model(strategy, DGX2, shape)
    assert max(rung for rung in RUNGS if rung <= largest) == reported
    if strategy is Strategy.INFINITY_NVME:
        # 28 TB hold 1.4 T parameters of 20 bytes each; the paper's next larger model has 10 T.
        assert largest == pytest.approx(1.4e12)
    else:
        assert reported <= largest <= 1.25 * reported


def test_a_device_that_does_not_hold_the_working_memory_trains_nothing() -> None:
    shape = TransformerShape(layers=1, hidden=160 * 1024, heads=1024, batch=4, sequence=1024)
    assert largest_model(Strategy.INFINITY_NVME, DGX2, shape) == 0.0


# ZeRO, figure 1: 7.5 B parameters on 64 ranks, in GB; and section 7.2: elements sent per step.
@pytest.mark.parametrize(
    ("stage", "printed", "sent"),
    [
        (ZeroStage.NONE, "120.0", 2),
        (ZeroStage.OPTIMIZER_STATES, "31.4", 2),
        (ZeroStage.GRADIENTS, "16.6", 2),
        (ZeroStage.PARAMETERS, "1.9", 3),
    ],
)
def test_the_zero_stages(stage: ZeroStage, printed: str, sent: int) -> None:
    nbytes = float(ZERO_NBYTES[stage].subs({PARAMETERS: 7.5e9, RANKS: 64}))
    assert f"{nbytes / 1e9:.1f}" == printed
    assert ZERO_ELEMENTS_SENT[stage] / PARAMETERS == sent


def test_arithmetic_of_a_step() -> None:
    """Section 4: 2 x 4 x parameters x tokens."""
    shape = TransformerShape(layers=128, hidden=25600, heads=256, batch=1, sequence=1)
    assert at_shape(FLOPS_PER_STEP, shape) == 8 * 12 * 128 * 25600**2
