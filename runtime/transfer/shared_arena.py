"""Where the shards of a gather arrive in the arena, and where those of all ranks are gathered.

Shards are rows, and those of all ranks side by side are the whole value, with padding at its end. They arrive in scratch
behind the whole values, since disks want whole sectors::

    | value a, all ranks' rows | padding | value b ...        | our rows of a | our rows of b |
    ^ planned offset of a                ^ planned offset of b ^ scratch
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.ranks.ranks import Ranks
from zinf_compile.runtime.storage.engine import whole_sectors


class Moved(Protocol):
    """What is moved of a parameter."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def tensor(self) -> torch.Tensor:
        """Its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedArena:
    """The arena bytes of one parameter in a gather of several ranks."""

    offset: int  # of the whole value
    shard_offset: int
    num_elements: int  # of a shard, padded: the same on all ranks
    dtype: torch.dtype
    whole_nbytes: int

    @property
    def end(self) -> int:
        """Return the offset behind its shard."""
        return self.shard_offset + whole_sectors(self.num_elements * self.dtype.itemsize)


def share_arena(
    ranks: Ranks, moved: Sequence[Moved], shapes: Sequence[torch.Size], offsets: Sequence[int]
) -> list[SharedArena]:
    """Return where each parameter of a gather is, whose whole values of these shapes are planned at these offsets."""
    counts = [
        Slice.of_whole(each.name, shape).among(ranks.size).num_elements
        for each, shape in zip(moved, shapes, strict=True)
    ]
    cursor = offsets[-1] + whole_sectors(ranks.size * counts[-1] * moved[-1].tensor.dtype.itemsize)
    shared: list[SharedArena] = []
    for each, offset, count in zip(moved, offsets, counts, strict=True):
        size = count * each.tensor.dtype.itemsize
        shared.append(
            SharedArena(
                offset=offset,
                shard_offset=cursor,
                num_elements=count,
                dtype=each.tensor.dtype,
                whole_nbytes=ranks.size * size,
            )
        )
        cursor = shared[-1].end
    return shared
