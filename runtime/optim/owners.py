"""Updates of whole tensors on several ranks: each parameter has an owner, which updates all of it.

Homes stay divided by rows. In a round, the rows of some parameters go to their owners, which update them side by side::

    rank 0    rows of A and B          all of A, updated          rows of A and B
    rank 1    rows of A and B    ->    all of B, updated    ->    rows of A and B

So memory and disk of a rank hold its share of everything, and while a round lasts about one whole tensor more. Owners are
in the shard group: replicas do the same beside each other. Entries of the state that do not have the shape of the
parameter, such as step counts and sums of rows, are kept by every rank.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zinf_compile.ir.copies import COMPUTE, GRADIENT, MASTER, CopyKey, state_key
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.optim.bookkeeping import Ledger
from zinf_compile.runtime.optim.shadow import StateTensor, copy_scalars
from zinf_compile.runtime.optim.step_chunks import Chunk, Operands, update_slice
from zinf_compile.runtime.optim.step_jobs import Job, state_slot
from zinf_compile.runtime.ranks.agreement import check_alike
from zinf_compile.runtime.ranks.ranks import Collective, Ranks
from zinf_compile.runtime.store.store import Store


class Load(NamedTuple):
    """What an update takes."""

    whole_nbytes: int  # of memory, on the owner
    staged_nbytes: int  # of staging, on the rank with the most rows


class Owned(NamedTuple):
    """A load, by its number, and the rank of the shard group that gets it."""

    number: int
    owner: int


def deal_out(loads: Sequence[Load], num_ranks: int, room: int) -> list[list[Owned]]:
    """Return rounds, in each of which no rank owns more bytes than the largest load has, and all fit ``room`` of staging.

    Large loads come first, and each goes to the rank that has the least. Every rank gets the same result.
    """
    rounds: list[list[Owned]] = []
    most = max((load.whole_nbytes for load in loads), default=0)
    totals = [0] * num_ranks
    left = sorted(range(len(loads)), key=lambda number: -loads[number].whole_nbytes)
    while left:
        staged = 0
        owned, mine, later = [0] * num_ranks, list[Owned](), list[int]()
        for number in left:
            load = loads[number]
            owner = min(range(num_ranks), key=lambda rank: (owned[rank], totals[rank], rank))
            if mine and (owned[owner] + load.whole_nbytes > most or staged + load.staged_nbytes > room):
                later.append(number)
                continue
            mine.append(Owned(number, owner))
            staged += load.staged_nbytes
            owned[owner] += load.whole_nbytes
            totals[owner] += load.whole_nbytes
        rounds.append(mine)
        left = later
    return rounds


def check_updates_alike(store: Store, jobs: Sequence[Job]) -> None:
    """Raise RankError, on every rank, unless all are about to update the same parameters in the same way."""
    mine = {job.record.name: _describe(job, store.ranks) for job in jobs}
    check_alike(store.ranks, "updates of whole tensors", mine | {"staging": f"{store.staging.capacity} bytes"})


def _describe(job: Job, ranks: Ranks) -> str:
    copies = ", ".join(f"{key.label} {slot.tensor.dtype}" for key, slot in job.home_slots.items())
    kept = f", kept {', '.join(sorted(job.kept_states))}" if job.kept_states else ""
    return f"{tuple(job.record.shape)} with a gradient of {job.grad.dtype}, {copies}{kept}, {load_of(job, ranks)}"


def load_of(job: Job, ranks: Ranks) -> Load:
    """Return what an update takes."""
    most_rows = Slice.of_whole(job.record.name, job.record.shape).among(ranks.size).num_elements
    return Load(whole_nbytes=job.whole_nbytes, staged_nbytes=job.lease_nbytes(most_rows))


class OwnedUpdate:
    """The update of one parameter by its owner, from the rows of all ranks to the rows of all ranks."""

    def __init__(self, store: Store, chunk: Chunk, owner: int) -> None:
        """``chunk`` has this rank's rows, which have been read."""
        record = chunk.job.record
        self.chunk, self.owner = chunk, owner
        self._store, self._ranks = store, store.ranks
        self._whole = Slice.of_whole(record.name, record.shape)
        shares = self._whole.among(self._ranks.size)
        self._counts = [shares.of_rank(rank).num_elements for rank in range(self._ranks.size)]
        self._rows: dict[CopyKey, Tensor] = {  # of this rank
            MASTER: chunk.tensor(MASTER, record.copies.master),
            GRADIENT: chunk.gradient(),
            **{state_key(name): chunk.tensor(state_key(name), slot) for name, slot in record.copies.states.items()},
        }
        self._wholes: dict[CopyKey, Tensor] = {}  # on the owner, during the round
        self._new_states: list[str] = []  # which have come with this update, and are not in the chunk

    @property
    def is_mine(self) -> bool:
        """Return whether this rank is the owner."""
        return self._ranks.rank == self.owner

    def gather(self) -> list[Collective]:
        """Start sending rows to the owner."""
        job = self.chunk.job
        if self.is_mine:
            size = torch.Size([self._whole.num_elements])
            self._wholes = {key: self._store.memory.new_value(size, rows.dtype) for key, rows in self._rows.items()}
        read = [key for key in self._rows if job.reads(key)]
        self._count(read)
        what = f"the rows of {job.record.name} for its owner"
        return [
            self._ranks.send_to_owner(what, self._rows[key], self._counts, self.owner, self._wholes.get(key))
            for key in read
        ]

    def _count(self, moved: Sequence[CopyKey]) -> None:
        itemsizes = (self._rows[key].dtype.itemsize for key in moved)
        self._store.meter.add_collective("owners", self._whole.num_elements * sum(itemsizes))

    def run(self) -> dict[str, Any]:
        """Update all of the parameter; return its new state, with a StateTensor in the place of each divided tensor."""
        job = self.chunk.job
        operands = Operands(
            slice=self._whole.flat,
            master=self._wholes[MASTER],
            gradient=self._wholes[GRADIENT],
            states={name: self._wholes[state_key(name)] for name in job.record.copies.states},
            compute=None,
        )
        with self._store.meter.updating(job.record.name):
            new_state = update_slice(job, operands, shape=job.record.shape)
        scalars = copy_scalars(new_state, job.record.shape)
        state: dict[str, Any] = {}
        for name, value in new_state.items():
            if name in scalars:
                state[name] = scalars[name]
                continue
            state[name] = StateTensor(key=name, dtype=value.dtype)
            if name not in operands.states:
                self._wholes[state_key(name)] = value.detach().contiguous().view(-1)
        self._store.held.sample()
        return state

    def scatter(self, state: dict[str, Any]) -> list[Collective]:
        """Start sending the updated rows to their ranks, given what ``run`` returned on the owner."""
        job, slots = self.chunk.job, self.chunk.job.record.copies.states
        names = [name for name, value in state.items() if isinstance(value, StateTensor)]
        for name in names:
            if name not in slots:
                state_slot(job.record, job.real_optimizer, name, state[name].dtype, job.record.shape)
                self._rows[state_key(name)] = torch.empty(self.chunk.slice.num_elements, dtype=state[name].dtype)
                self._new_states.append(name)
        sent = [MASTER, *([GRADIENT] if job.changes_gradient else []), *map(state_key, names)]
        self._count(sent)
        what = f"the updated rows of {job.record.name}"
        return [
            self._ranks.send_from_owner(what, self._wholes.get(key), self._counts, self.owner, self._rows[key])
            for key in sent
        ]

    def finish(self) -> None:
        """Cast the rows of the compute copy, and forget the whole tensors."""
        record = self.chunk.job.record
        self._wholes.clear()
        if record.copies.are_two:
            self.chunk.tensor(COMPUTE, record.copies.compute).copy_(self._rows[MASTER])

    def write_new_states(self) -> None:
        """Start writing the rows of new states home, through staging: not while chunks hold all of it."""
        for name in self._new_states:
            slot = self.chunk.job.record.copies.states[name]
            self._store.tensor_io.write_value(slot, self._rows[state_key(name)].view(slot.tensor.shape))


def update_round(ranks: Ranks, updates: Sequence[OwnedUpdate]) -> list[dict[str, Any]]:
    """Run the updates of a round, with every rank; return their new states. Until all are made, nothing has changed.

    An error on one rank is an error on all of them.
    """
    for collective in [each for update in updates for each in update.gather()]:
        ranks.wait(collective)
    what = "an update of whole tensors by their owners"
    made = ranks.share_alike(what, lambda: [update.run() for update in updates if update.is_mine])
    of_owner = [iter(made[ranks.replica * ranks.size + owner]) for owner in range(ranks.size)]
    states = [next(of_owner[update.owner]) for update in updates]
    for update in updates:
        update.chunk.job.is_begun = True
        update.chunk.job.record.update.tear()
    for collective in [each for update, state in zip(updates, states, strict=True) for each in update.scatter(state)]:
        ranks.wait(collective)
    for update in updates:
        update.finish()
    return states


def share_ledger(ranks: Ranks, ledger: Ledger) -> None:
    """Record what the updates of all ranks wrote. UnsupportedError, on every rank, if they did not write the same."""
    for noted in ranks.share_alike("what updates of whole tensors wrote", lambda: dict(ledger.noted)):
        for group, books in noted.items():
            ledger.note(group, books)
