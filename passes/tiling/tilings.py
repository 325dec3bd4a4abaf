"""The words of tiling: an axis, what is cut along it, how pieces combine, and what keeps its bits. No torch."""

from dataclasses import dataclass
from enum import StrEnum

OUTPUT = "output"


class Combine(StrEnum):
    """How the results of the pieces give that of the op."""

    CONCATENATE = "concatenate"
    ADD = "add"
    SELECT = "select"  # each row of the result comes from the one piece that has it


class Pieces(StrEnum):
    """What a piece is, beside the op on the cut operands."""

    ALIKE = "alike"  # nothing else
    BIAS_ONCE = "bias_once"  # pieces are added: only the first one gets the bias
    GROUPS = "groups"  # a convolution of that many groups
    VOCABULARY = "vocabulary"  # an embedding of those indices that are in its part of the table
    CAUSAL = "causal"  # attention of a block of queries, to no key behind the block


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """An operand is cut along one of its dimensions, ``unit`` indices to one of the axis."""

    operand: str
    dim: int
    unit: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """One legal way to tile an op, into any number of tiles up to ``size``.

    ``exact`` names the results that keep their bits: the output, or an operand, meaning its gradient. All others are
    equal to rounding: sums are taken in another order, by the pieces or by the kernel that another shape chooses.
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
        """Return how many indices of the axis each tile has; they differ by one at most.

        Raises ValueError for a number of tiles that is not from 1 to ``size``.
        """
        if not 1 <= num_tiles <= self.size:
            raise ValueError(f"axis '{self.axis}' has {self.size} indices and cannot have {num_tiles} tiles")
        least, larger = divmod(self.size, num_tiles)
        return (least + 1,) * larger + (least,) * (num_tiles - larger)
