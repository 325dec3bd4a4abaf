"""Steps of large runs that others have published. A plan for the same mesh has to come close, and to fall in the same way.

MT-NLG 530B: Smith et al., arXiv 2201.11990, section 2.4: 105 layers, hidden 20,480, 128 heads, sequences of 2,048 tokens,
batches of 1,920 sequences, 8 tensor-parallel ranks in a node of 8 A100 x 35 stages: 280 GPUs for each data-parallel rank.
Its FLOPs are counted as if every activation was recomputed: 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)), Narayanan et al.,
arXiv 2104.04473, section 5.1.

Its attention was made of products and of kernels that write all scores to memory: FlashAttention came later.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep:
    """The step of one run: the nodes of 8 GPUs, the seconds of an iteration, and FLOP/s of each GPU."""

    num_nodes: int
    step_seconds: float
    flops_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model, its batch and its mesh; what the mesh leaves of the GPUs is data-parallel."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    num_sequences: int  # of a batch
    num_tensor_ranks: int
    num_stages: int
    steps: tuple[PublishedStep, ...]


MT_NLG = PublishedModel(
    layers=105,
    hidden=20_480,
    heads=128,
    vocabulary=50_257,
    sequence=2048,
    num_sequences=1920,
    num_tensor_ranks=8,
    num_stages=35,
    steps=(
        PublishedStep(num_nodes=280, step_seconds=60.1, flops_per_second=126e12),
        PublishedStep(num_nodes=350, step_seconds=50.2, flops_per_second=121e12),
        PublishedStep(num_nodes=420, step_seconds=44.4, flops_per_second=113e12),
    ),
)
DEVICES_PER_NODE = 8


def published_flops(model: PublishedModel) -> float:
    """Return the FLOPs of a step by the formula that published rates are counted by."""
    return (
        96
        * model.num_sequences
        * model.sequence
        * model.layers
        * model.hidden**2
        * (1 + model.sequence / (6 * model.hidden) + model.vocabulary / (16 * model.layers * model.hidden))
    )


# How often attention that keeps its scores in memory reads or writes all of them, in elements of two bytes. Forward: queries
# by keys write them (1), softmax (2), dropout with a mask of one byte (2.5), weights by values read them (1). Backward: the
# gradients of values read them (1), those of the weights are written (1), dropout (2.5), softmax reads weights and gradients
# and writes (3), the gradients of queries and of keys read (2).
_FORWARD_PASSES, _BACKWARD_PASSES = 6.5, 9.5
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 4
_COUNTED_BACKWARD_PRODUCTS = 5  # plans count attention that keeps no scores, and half of what is causal


def attention_flops_per_second(model: PublishedModel, flops: float, bytes_per_second: float) -> float:
    """Return the rate, in FLOPs as plans count them, of attention with its scores in memory, each layer computed twice.

    ``flops`` is the rate of matrix products in FLOP/s, ``bytes_per_second`` that of memory.
    """
    scores = model.sequence**2  # of one head; all heads take as much
    product = 2 * scores * (model.hidden // model.heads)
    computed = 2 * _FORWARD_PRODUCTS + _BACKWARD_PRODUCTS
    counted = 2 * _FORWARD_PRODUCTS + _COUNTED_BACKWARD_PRODUCTS
    moved = 2 * scores * (2 * _FORWARD_PASSES + _BACKWARD_PASSES)
    return counted * product / 2 / (computed * product / flops + moved / bytes_per_second)
