"""Moving: copies, gradients and optimizer state go to the homes that a new plan gives them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from zinf_compile.plans import Placement
from zinf_compile.runtime.home import HomeTensor
from zinf_compile.runtime.home_gradient import HomeGradient, settle_gradient
from zinf_compile.runtime.narrowing import narrow_parameter
from zinf_compile.runtime.ram import return_freed_memory
from zinf_compile.runtime.slots import Slot, StoredParameter, torch_dtype
from zinf_compile.runtime.store import Store
from zinf_compile.terms import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A slot that is to get another home."""

    slot: Slot
    tier: Tier
    run: Callable[[], None]

    @property
    def nbytes_in(self) -> int:
        """Return the bytes of memory that it takes; negative, that it gives back; 0 from one tier in memory to another."""
        is_in_memory = self.slot.tier is not Tier.NVME
        if is_in_memory == (self.tier is not Tier.NVME):
            return 0
        return -self.slot.nbytes if is_in_memory else self.slot.nbytes


def move_homes(store: Store, placements: Iterable[Placement]) -> None:
    """Move every slot of some parameters to the homes of a new plan. StoreError if bytes cannot be moved.

    A parameter whose compute copy is to have a narrower dtype gets one more slot. Memory stays within the budgets meanwhile:
    what comes into memory waits until there is room. The arena is dropped for it.
    """
    store.synchronize()
    placements = tuple(placements)
    moves: list[_Move] = []
    for placement in placements:
        record = store.records[placement.parameter]
        dtype = torch_dtype(placement.compute_dtype)
        if dtype != record.compute.tensor.dtype:
            narrow_parameter(record, dtype)
        moves += (move for move in _moves_of(record, placement) if move.slot.tier is not move.tier)
    if moves:
        store.arena.drop()
    ordered = _within_budgets(store, moves) if store.device is None else _within_tiers(store, moves)
    for move in ordered:
        move.run()
    store.placements.update({placement.parameter: placement for placement in placements})
    with store.failing_on_error():
        store.transfers.wait_writes()
        if moves:
            store.give_back_free_extents()
    return_freed_memory()


def _moves_of(record: StoredParameter, placement: Placement) -> Iterator[_Move]:
    yield _Move(slot=record.compute, tier=placement.compute, run=partial(_move, record, "compute", placement.compute))
    if record.has_compute_copy:
        yield _Move(slot=record.master, tier=placement.master, run=partial(_move, record, "master", placement.master))
    if record.gradient is not None:
        settle_gradient(record)
        yield _Move(
            slot=record.gradient, tier=placement.gradient, run=partial(_move, record, "gradient", placement.gradient)
        )
    for key, slot in record.states.items():
        tier = placement.optimizer_state
        yield _Move(slot=slot, tier=tier, run=partial(_move_state, record, key, tier))


def _within_budgets(store: Store, moves: Iterable[_Move]) -> Iterator[_Move]:
    """Yield the moves in an order in which memory holds them. What comes in goes first where it fits: that frees disk."""
    config = store.config
    outwards: deque[_Move] = deque()
    inwards: deque[_Move] = deque()
    for move in moves:
        if move.nbytes_in == 0:  # on a CPU both tiers are RAM: only the accounting changes
            yield move
        else:
            (inwards if move.nbytes_in > 0 else outwards).append(move)
    budget = config.device_memory - config.reserve_memory + config.host_memory - config.staging_memory
    budget -= store.activations.host_nbytes
    while inwards or outwards:
        room = budget - store.nbytes_on(Tier.DEVICE) - store.nbytes_on(Tier.HOST)
        fits = inwards and inwards[0].nbytes_in <= room
        yield inwards.popleft() if fits or not outwards else outwards.popleft()


def _within_tiers(store: Store, moves: Iterable[_Move]) -> Iterator[_Move]:
    """Yield the moves in an order in which device and host hold them, each by itself."""
    config = store.config
    budgets = {
        Tier.DEVICE: config.device_memory - config.reserve_memory,
        Tier.HOST: config.host_memory - config.staging_memory - store.activations.host_nbytes,
    }

    def fits(move: _Move) -> bool:
        return move.tier is Tier.NVME or store.nbytes_on(move.tier) + move.slot.nbytes <= budgets[move.tier]

    waiting = list(moves)
    while waiting:
        first = next((index for index, move in enumerate(waiting) if fits(move)), 0)
        yield waiting.pop(first)


def _move(record: StoredParameter, role: str, tier: Tier) -> None:
    slot: Slot = getattr(record, role)
    moved = _moved_slot(record.store, slot, tier)
    if moved is slot:
        return
    grad = record.parameter.grad
    if role == "gradient" and grad is not None and slot.is_home_of(grad):
        record.parameter.grad = HomeGradient.show(moved, record)
    if slot is record.master:
        record.master = moved
        with torch._C.DisableTorchFunctionSubclass():
            record.parameter.data = moved.tensor
    setattr(record, role, moved)
    slot.give_back(record.store.layout)


def _move_state(record: StoredParameter, key: str, tier: Tier) -> None:
    """Move state that a checkpoint brought before there was a plan, and show it where its optimizer keeps it."""
    slot = record.states[key]
    owner = record.states_owner() if record.states_owner is not None else None
    if owner is None:  # nobody steps with it any more
        return
    moved = record.states[key] = _moved_slot(record.store, slot, tier)
    state = owner.state.get(record.parameter, {})
    if moved is not slot and slot.shown is not None and state.get(key) is slot.shown:
        state[key] = HomeTensor.show(moved, record)
    if moved is not slot:
        slot.give_back(record.store.layout)


def _moved_slot(store: Store, slot: Slot, tier: Tier) -> Slot:
    """Return a slot on ``tier`` with the value: the same one where nothing has to move."""
    if slot.tier is tier:
        return slot
    if store.device is None and slot.in_memory and tier is not Tier.NVME:
        # All is RAM: nothing moves but the accounting.
        store.count_home(slot.tier, -slot.nbytes)
        store.count_home(tier, slot.nbytes)
        slot.tier = tier
        return slot
    moved = store.new_slot(slot.name, slot.tensor.shape, slot.tensor.dtype, tier)
    store.count_home(slot.tier, -slot.nbytes)
    with store.failing_on_error():
        if slot.in_memory:
            store.transfers.write_value(moved, slot.tensor)
            store.transfers.wait_writes()
        elif moved.in_memory:
            store.transfers.read_value(slot, moved.tensor)
        else:
            start = 0
            for piece in store.transfers.read_pieces(slot):
                store.transfers.write_value(moved, piece, first=start)
                start += piece.numel()
            store.transfers.wait_writes()
    return moved
