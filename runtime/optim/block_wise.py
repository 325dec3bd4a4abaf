"""torchao's optimizers, which keep state in codes of their own, in blocks of elements that share a scale.

Their update of a block depends on that block alone, so a tensor may be cut at multiples of a block. Its bits are those of
the whole tensor: the compiled code computes elements one by one, and the largest of a block, which depends on no order.
Two things differ from other element-wise optimizers:

- State of a parameter is in codes if it has at least 4096 elements, in whole blocks. Where the parameter is cut must not
  decide that, so a chunk is given its state from the first step on, as zeros.
- ``step`` compiles its update for every number of elements it gets. So all chunks but the last of a parameter have
  one size, and nothing is updated in the background: a compilation waits for one on another thread, and the forward may
  be waiting for the update in the middle of its own.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from zinf_compile.ir.copies import BlockKind, Blocks
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.storage.state_blocks import Blocked

_MODULE = "torchao.optim.adam"
_KINDS: Mapping[str, BlockKind] = {
    "Adam8bit": BlockKind.BITS_8,
    "AdamW8bit": BlockKind.BITS_8,
    "Adam4bit": BlockKind.BITS_4,
    "AdamW4bit": BlockKind.BITS_4,
    "AdamFp8": BlockKind.FP8,
    "AdamWFp8": BlockKind.FP8,
}
_LEAST_IN_BLOCKS = 4096  # elements: ``_new_buffer`` of torchao keeps smaller states in the parameter's dtype
# Bytes that the compiled update allocates for each element, beside its results; measured with torch 2.13 on a CPU.
_TEMPORARY_NBYTES: Mapping[BlockKind, int] = {BlockKind.BITS_8: 8, BlockKind.BITS_4: 27, BlockKind.FP8: 1}


class BlockState(NamedTuple):
    """A state tensor that an optimizer keeps of a parameter, and the code that it is in; None: one of the master's dtype."""

    key: str
    code: Blocks | None


def is_block_wise(optimizer: Optimizer) -> bool:
    """Return whether it is one of torchao's whose state is kept in the store in its own codes."""
    return _kind_of(optimizer) is not None


def _kind_of(optimizer: Optimizer) -> BlockKind | None:
    cls = type(optimizer)
    return _KINDS.get(cls.__name__) if cls.__module__ == _MODULE else None


def find_unsupported(optimizer: Optimizer) -> str | None:
    """Return why a block-wise optimizer cannot be streamed, and what to do; None if it can."""
    kind, block = _kind_of(optimizer), optimizer.block_size  # type: ignore[attr-defined]  # one of torchao's
    assert kind is not None
    if not (isinstance(block, int) and block > 0) or block * kind.num_bits % 8:
        return f"block_size={block!r} is no whole number of bytes of {kind.num_bits} bits; leave it out"
    blocks = Blocks(kind=kind, block=block, signed=True)
    if any(group["amsgrad"] for group in optimizer.param_groups) and not _has_maximum(blocks):
        return (
            f"amsgrad=True takes a maximum, for which torchao's {kind} has no code, also without a store; leave it out"
        )
    if blocks.page_elements == 0:
        return (
            f"a block of block_size={block} elements is {blocks.codes_nbytes(block)} bytes of codes, and the store keeps "
            "whole blocks in pages of 4096 bytes, with 4 bytes for a scale; choose a smaller block_size"
        )
    return None


@functools.cache
def _has_maximum(blocks: Blocks) -> bool:
    """Return whether torchao can update state in these codes with amsgrad=True."""
    held = Blocked(code=blocks, slice=Slice.of_whole("", (blocks.block,)))
    state = held.room(blocks.block, torch.device("cpu"))
    try:
        torch.maximum(state.float(), torch.zeros(blocks.block, device="cpu"))
    except NotImplementedError:
        return False
    return True


def find_draws(optimizer: Optimizer, dtypes: set[torch.dtype]) -> bool:
    """Return whether its step draws random numbers for parameters, or master copies, of some of these dtypes."""
    return bool(optimizer.bf16_stochastic_round) and torch.bfloat16 in dtypes  # type: ignore[attr-defined]


def states_of(optimizer: Optimizer, group: Mapping[str, Any], num_elements: int) -> tuple[BlockState, ...]:
    """Return what a block-wise optimizer keeps of a parameter of so many elements, beside its step count."""
    kind, block = _kind_of(optimizer), optimizer.block_size  # type: ignore[attr-defined]
    assert kind is not None
    is_coded = num_elements >= _LEAST_IN_BLOCKS and num_elements % block == 0
    keys = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
    return tuple(
        BlockState(
            key,
            Blocks(kind=kind, block=block, signed=kind is BlockKind.FP8 or key == "exp_avg") if is_coded else None,
        )
        for key in keys
    )


def first_scalars() -> dict[str, Any]:
    """Return what else a state has before the first step."""
    return {"step": torch.tensor(0.0, device="cpu")}


def next_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return what else a state has after a step, from what it has before."""
    return {key: value + 1 if key == "step" else value for key, value in scalars.items()}


def temporary_nbytes(optimizer: Optimizer) -> int:
    """Return the bytes that an update allocates for each element."""
    kind = _kind_of(optimizer)
    assert kind is not None
    return _TEMPORARY_NBYTES[kind]
