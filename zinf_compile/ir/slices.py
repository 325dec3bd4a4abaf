"""Slices: parts of parameters. Tiles, the shards of ranks and the chunks of an optimizer step are all slices.

Tiles are rows of a parameter; those of several ranks are counted in an order of their own (``tiles.py``). Chunks and shards
are elements of the flattened parameter, which is a parameter with one dimension: ``rows.flat`` has the same elements as
``rows``. A part of a slice counts its indices from the whole parameter's first, so that slices of slices can be compared
however they were cut.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Indices [start, start + length) along one dimension of a parameter, or each rank's equal share of these indices."""

    parameter: str
    shape: tuple[int, ...]  # of the whole parameter; (1,) for a scalar
    dim: int = 0
    start: int = 0
    length: int
    num_ranks: int = 1  # that divide the elements among them

    @staticmethod
    def of_whole(parameter: str, shape: Sequence[int]) -> "Slice":
        """Return all of a parameter, as rows."""
        sizes = tuple(shape) or (1,)
        return Slice(parameter=parameter, shape=sizes, length=sizes[0])

    @property
    def stop(self) -> int:
        """Return the index behind the last one."""
        return self.start + self.length

    @property
    def is_whole(self) -> bool:
        """Return whether it has every index, divided among ranks or not."""
        return self.length == self.shape[self.dim]

    @property
    def elements_per_index(self) -> int:
        """Return the elements of the parameter at one index."""
        return math.prod(self.shape[: self.dim]) * math.prod(self.shape[self.dim + 1 :])

    @property
    def num_elements(self) -> int:
        """Return the number of elements, of one rank's share: ranks divide the indices, and the largest share counts."""
        each = 1 if len(self.shape) == 1 else self.elements_per_index
        return shard_size(self.length, self.num_ranks) * each

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the shape of a tensor that holds its indices."""
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    @property
    def is_contiguous(self) -> bool:
        """Return whether its elements are consecutive in the flattened parameter, at a place that is known."""
        return self.num_ranks == 1 and (self.is_whole or math.prod(self.shape[: self.dim]) <= 1)

    @property
    def flat(self) -> "Slice":
        """Return the same elements as indices of the flattened parameter; ValueError if they are not contiguous."""
        return self if len(self.shape) == 1 and self.num_ranks == 1 else _flatten(self)

    def offset_in(self, outer: "Slice") -> int:
        """Return how many elements of a slice come before its own first; ValueError if it is not inside of that slice."""
        inner, around = self.flat, outer.flat
        first = inner.start - around.start
        is_same = inner.parameter == around.parameter and inner.shape == around.shape
        if not is_same or first < 0 or first + inner.length > around.length:
            raise ValueError(f"{self} is not inside of {outer}")
        return first

    @property
    def whole(self) -> "Slice":
        """Return every index of the parameter, divided among the same ranks."""
        return replace(self, start=0, length=self.shape[self.dim])

    def among(self, num_ranks: int) -> "Slice":
        """Return the share of each of some ranks. The shares are equal; the last one is padded."""
        return replace(self, num_ranks=num_ranks)

    def of_rank(self, rank: int) -> "Slice":
        """Return the indices that one of its ranks has: ``torch.chunk``'s, so the last ranks may have fewer, or none."""
        each = shard_size(self.length, self.num_ranks)
        first, last = min(rank * each, self.length), min((rank + 1) * each, self.length)
        return replace(self.part(first, last), num_ranks=1)

    def part(self, start: int, stop: int) -> "Slice":
        """Return indices [start, stop) of this slice, counted from its own first index."""
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"[{start}, {stop}) is not within the {self.length} indices of {self}")
        # Not ``replace``, which takes twice as long: every chunk of an update is a part.
        return Slice(
            parameter=self.parameter,
            shape=self.shape,
            dim=self.dim,
            start=self.start + start,
            length=stop - start,
            num_ranks=self.num_ranks,
        )

    def split(self, num_parts: int, multiple: int = 1) -> tuple["Slice", ...]:
        """Return at most ``num_parts`` parts, equal but for the last, each beginning at a multiple of some indices."""
        size = -(-self.length // (num_parts * multiple)) * multiple
        return tuple(self.pieces(size))

    def pieces(self, length: int) -> Iterator["Slice"]:
        """Yield consecutive parts of ``length`` indices; the last one may have fewer."""
        for start in range(0, self.length, length):
            yield self.part(start, min(self.length, start + length))

    def intersect(self, other: "Slice") -> "Slice | None":
        """Return what both have; None if that is nothing.

        Of slices along different dimensions, or of a parameter and the flattened one, that is a flat slice. ValueError
        where one of these is not contiguous, and for shares of ranks.
        """
        if self.parameter != other.parameter:
            return None
        mine, theirs = self, other
        if (self.shape, self.dim) != (other.shape, other.dim) or max(self.num_ranks, other.num_ranks) > 1:
            mine, theirs = self.flat, other.flat
        start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
        return replace(mine, start=start, length=stop - start) if start < stop else None

    def without(self, others: Iterable["Slice"]) -> Iterator["Slice"]:
        """Yield the parts that none of some slices along the same dimension has, in order."""
        start = self.start
        for common in sorted(
            (each for other in others if (each := self.intersect(other))), key=lambda each: each.start
        ):
            if common.start > start:
                yield replace(self, start=start, length=common.start - start)
            start = max(start, common.stop)
        if start < self.stop:
            yield replace(self, start=start, length=self.stop - start)

    def share_of(self, total: int) -> int:
        """Return its share of ``total`` items that are spread evenly over the parameter; shares of all parts add up."""
        size = self.shape[self.dim]
        if size == 0:
            return 0
        return shard_size(-(-total * self.stop // size) - -(-total * self.start // size), self.num_ranks)

    def __str__(self) -> str:
        where = f"{self.parameter}[{', '.join([*':' * self.dim, f'{self.start}:{self.stop}'])}]"
        return where if self.num_ranks == 1 else f"1/{self.num_ranks} of {where}"


def shard_size(size: int, num_ranks: int) -> int:
    """Return what one rank has of so many indices or bytes: the ranks' shards are equal, the last one padded."""
    return -(-size // num_ranks)


@functools.lru_cache(maxsize=2**14)  # chunks of a step ask for those of their parameters again and again
def _flatten(of: Slice) -> Slice:
    if not of.is_contiguous:
        what = "any rank's share" if of.num_ranks > 1 else f"cut along dimension {of.dim} of {of.shape}"
        raise ValueError(f"{of} is not contiguous in memory: it is {what}")
    size, each = math.prod(of.shape), of.elements_per_index
    length = size if of.is_whole else of.length * each
    return replace(of, shape=(size,), dim=0, start=of.start * each, length=length)
