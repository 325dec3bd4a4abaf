"""Records of a tiling: an axis, how operands are cut along it, how pieces combine, which results are bitwise equal."""

from dataclasses import dataclass
from enum import StrEnum

OUTPUT = "output"


class Combine(StrEnum):
    """How the results of the pieces are combined to that of the op."""

    CONCATENATE = "concatenate"
    ADD = "add"
    SELECT = "select"  # each row of the result comes from the one piece that has it


class Pieces(StrEnum):
    """How a piece differs from the op on the cut operands."""

    ALIKE = "alike"  # it does not
    BIAS_ONCE = "bias_once"  # pieces are added, so only the first one gets the bias
    GROUPS = "groups"  # a convolution with the number of groups of the tile
    VOCABULARY = "vocabulary"  # an embedding of the indices in its part of the table
    CAUSAL = "causal"  # attention of a block of queries to the keys up to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A cut of an operand along one of its dimensions, with ``unit`` indices per index of the axis."""

    operand: str
    dim: int
    unit: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """One legal way to tile an op, into any number of tiles up to ``size``.

    ``exact`` names the bitwise equal results: the output, or an operand, meaning its gradient. Others are equal to
    rounding: sums are taken in another order, by the pieces or because another shape selects another kernel.
    """

    axis: str
    size: int
    cuts: tuple[Cut, ...]
    combine: Combine
    dim: int = 0  # of the output, where pieces are concatenated
    pieces: Pieces = Pieces.ALIKE
    exact: tuple[str, ...] = ()

    def cut_of(self, operand: str) -> Cut | None:
        """Return how an operand is cut; None if every piece reads all of it."""
        return next((cut for cut in self.cuts if cut.operand == operand), None)

    def tile_sizes(self, num_tiles: int) -> tuple[int, ...]:
        """Return the length of each tile along the axis; lengths differ by at most one.

        Raises ValueError for a number of tiles that is not from 1 to ``size``.
        """
        if not 1 <= num_tiles <= self.size:
            raise ValueError(f"axis '{self.axis}' has {self.size} indices and cannot have {num_tiles} tiles")
        least, larger = divmod(self.size, num_tiles)
        return (least + 1,) * larger + (least,) * (num_tiles - larger)
