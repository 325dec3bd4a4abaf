"""Transfers: one record for everything that moves between tiers during a step, and the transfers of a plan by tick.

===========  ======================  =====================================  ==========================================
moved        way                     ``issue``                              ``need_by``
===========  ======================  =====================================  ==========================================
parameters   home -> device          as planned: late, but in time          the first reader of this gather
activation   device -> host, nvme    after the op that computes it          compute waits here until it has left
activation   host, nvme -> device    as planned, in backward                the first reader in backward
activation   host -> host            the first reader in backward           the same: an integrated device reads it in place
gradient     device -> home          after the op that computes it          the end of backward
===========  ======================  =====================================  ==========================================

A movement of another kind is a new member of ``Moved``, not a new record.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from zinf_compile.ir.copies import NOT_DECODED, Decoded
from zinf_compile.ir.glossary import LiveRange, Tier


class Moved(StrEnum):
    """What a transfer moves."""

    PARAMETERS = "parameters"  # compute copies, or master copies where the graph reads those: a gather
    GRADIENT = "gradient"
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One movement between tiers. What stays where it is has one tier as source and as destination.

    Ticks are those of nodes: what happens at a tick happens before its node runs.
    """

    what: Moved
    name: str  # of a block ("layers.3"), a parameter or a value; several transfers may have the same
    parameters: tuple[str, ...]  # whose copies or gradient it moves; () for an activation
    source: Tier
    destination: Tier
    nbytes: int  # of full values, though each of several ranks moves a shard; of activations, in whole sectors
    issue: int  # tick at which it starts
    need_by: int  # tick at which compute waits for its end
    release: int  # tick at which its device bytes are free again
    launch: int | None = None  # of a gather: tick at which several ranks start to exchange shards; None: at need_by
    decoded: Decoded = NOT_DECODED  # of a gather: what it moves encoded, which takes other bytes on its way
    scratch_nbytes: int = (
        0  # of the arena behind them: this rank's shards, until all ranks' are gathered; or to decode in
    )
    offsets: tuple[int, ...] = ()  # absolute in the arena, one for each part; () where it takes no arena bytes
    # Of experts: tick of the value that says which have rows. Only these move, a ``share`` of the bytes as expected.
    ends: int | None = None
    share: float = 1.0

    @property
    def offset(self) -> int:
        """Return where its arena bytes begin; only of a transfer that has some."""
        return self.offsets[0]

    @property
    def launched_at(self) -> int:
        """Return the tick at which several ranks start to exchange shards."""
        return self.need_by if self.launch is None else self.launch

    @property
    def moved_nbytes(self) -> int:
        """Return the bytes that are expected to move: those of experts that have rows; of what is decoded, those at home."""
        asked = self.nbytes if self.ends is None else math.ceil(self.share * self.nbytes)
        return asked - self.decoded.saved_nbytes

    @property
    def arena_nbytes(self) -> int:
        """Return the arena bytes it takes; only of a transfer that has some."""
        return self.nbytes + self.scratch_nbytes

    @property
    def live(self) -> LiveRange:
        """Return the ticks in which its arena bytes are taken."""
        return LiveRange(start=self.issue, end=self.release)

    @property
    def made_at(self) -> int:
        """Return the tick of the node whose result leaves the device: that before its issue."""
        return self.issue - 1

    @property
    def stays(self) -> bool:
        """Return whether nothing moves: a gradient whose home is the device, an activation that is read in host memory."""
        return self.source is self.destination

    @property
    def is_offload(self) -> bool:
        """Return whether it takes an activation off the device."""
        return self.what is Moved.ACTIVATION and self.source is Tier.DEVICE

    @property
    def is_reload(self) -> bool:
        """Return whether it brings an activation back to the device, or lets it be read where it rests."""
        return self.what is Moved.ACTIVATION and self.source is not Tier.DEVICE

    @property
    def label(self) -> str:
        """Return its name in a timeline: that of its event, and of stalls that wait for it."""
        if self.what is Moved.PARAMETERS:
            return self.name
        if self.what is Moved.GRADIENT:
            return f"gradient {self.name}"
        return f"{self.name} {'back' if self.is_reload else 'out'}"


class Swap(NamedTuple):
    """The two transfers of an activation: it is offloaded in forward and reloaded in backward."""

    offload: Transfer
    reload: Transfer

    @property
    def value(self) -> str:
        """Return the name of the activation."""
        return self.offload.name

    @property
    def nbytes(self) -> int:
        """Return its bytes, in whole sectors."""
        return self.offload.nbytes

    @property
    def rests_on(self) -> Tier:
        """Return where it is in between: host or nvme."""
        return self.offload.destination


def pair_swaps(transfers: Iterable[Transfer]) -> tuple[Swap, ...]:
    """Return the offloads among some transfers, each with the reload of the same activation."""
    moved = [transfer for transfer in transfers if transfer.what is Moved.ACTIVATION]
    reloads = {transfer.name: transfer for transfer in moved if transfer.is_reload}
    return tuple(Swap(transfer, reloads[transfer.name]) for transfer in moved if transfer.is_offload)


def order_transfers(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Return transfers in the order in which they are issued. Equal ones stay in the order given.

    At one tick what leaves the device is issued first: gradients, then offloads, gathers, reloads.
    """
    return tuple(sorted(transfers, key=lambda transfer: (transfer.issue, _turn(transfer))))


def _turn(transfer: Transfer) -> int:
    if transfer.what is Moved.GRADIENT:
        return 0
    if transfer.what is Moved.PARAMETERS:
        return 2
    return 1 if transfer.is_offload else 3


class TransferIndex:
    """The transfers of a plan by the tick at which they are issued, and gathers by the parameters they move."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        issued: dict[int, list[Transfer]] = defaultdict(list)
        gathers: dict[str, list[Transfer]] = defaultdict(list)
        for transfer in transfers:
            issued[transfer.issue].append(transfer)
            if transfer.what is Moved.PARAMETERS:
                for name in transfer.parameters:
                    gathers[name].append(transfer)
        self.issued: Mapping[int, Sequence[Transfer]] = issued
        self._gathers: Mapping[str, Sequence[Transfer]] = gathers

    def issued_at(self, tick: int) -> Sequence[Transfer]:
        """Return what is issued at a tick, in this order."""
        return self.issued.get(tick, ())

    def gathers_of(self, parameter: str) -> Sequence[Transfer]:
        """Return the gathers of a parameter, by the ticks at which they are issued."""
        return self._gathers.get(parameter, ())

    def holding(self, parameter: str, tick: int) -> list[Transfer]:
        """Return the gathers that have a parameter on the device at a tick: waited for, and not yet released."""
        return [gather for gather in self.gathers_of(parameter) if gather.need_by <= tick < gather.release]

    @property
    def gathered(self) -> frozenset[str]:
        """Return the parameters that some gather moves."""
        return frozenset(self._gathers)
