"""Moving copies, gradients and optimizer state to the homes that a new plan gives them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

from zinf_compile.ir.copies import Role
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Placement
from zinf_compile.runtime.model.in_place import is_still_in
from zinf_compile.runtime.model.narrowing import narrow_parameter
from zinf_compile.runtime.params.coded_state import coded_home
from zinf_compile.runtime.params.home import HomeTensor
from zinf_compile.runtime.params.home_gradient import HomeGradient, settle_gradient
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.process.interrupts import check_interrupt, without_interrupts
from zinf_compile.runtime.process.ram import return_freed_memory
from zinf_compile.runtime.storage.slots import Slot, torch_dtype
from zinf_compile.runtime.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A slot that is to get another home."""

    slot: Slot
    tier: Tier
    num_ranks: int  # that are to have a part of it each; 1 where each has all of it
    run: Callable[[], None]

    @property
    def is_needed(self) -> bool:
        """Return whether the slot is not yet as it should be."""
        return self.slot.tier is not self.tier or self.slot.num_ranks != self.num_ranks

    @property
    def nbytes_in(self) -> int:
        """Return the bytes of memory that it takes, negative if it frees some.

        0 from one tier in memory to another, but for rows of int8, which are decoded on the device.
        """
        return self._nbytes_in_memory(self.tier) - self._nbytes_in_memory(self.slot.tier)

    def _nbytes_in_memory(self, tier: Tier) -> int:
        """Return the bytes of memory that the copy takes on a tier."""
        if tier is Tier.NVME:
            return 0
        code = None if tier is Tier.DEVICE else self.slot.row_code
        return self.slot.nbytes if code is None else code.nbytes(self.slot.tensor.numel())


@without_interrupts
def move_homes(store: Store, placements: Iterable[Placement]) -> None:
    """Move every slot of some parameters to the homes of a new plan. StoreError if bytes cannot be moved.

    A parameter whose compute copy is to have a narrower dtype gets one more slot. Memory stays within the budgets meanwhile:
    what comes into memory waits until there is room. The arena is dropped for it.
    """
    store.synchronize()
    if store.updates_ahead is not None:
        store.updates_ahead.drop_shadows()
    placements = tuple(_without_changed(store, placement) for placement in placements)
    moves: list[_Move] = []
    for placement in placements:
        record = store.records[placement.parameter]
        dtype = torch_dtype(placement.compute_dtype)
        if dtype != record.copies.compute.tensor.dtype:
            narrow_parameter(store, record, dtype)
        moves += (move for move in _moves_of(store, record, placement) if move.is_needed)
    if moves:
        store.arena.drop()
    shared = [move for move in moves if move.slot.num_ranks != move.num_ranks]  # in the same order on every rank
    local = [move for move in moves if move.slot.num_ranks == move.num_ranks]
    ordered = _within_budgets(store, local) if store.device.memory.unified else _within_tiers(store, local)
    for move in chain(shared, ordered):
        check_interrupt()  # what has moved is in its place, and calling this again moves the rest
        move.run()
    store.placements.update({placement.parameter: placement for placement in placements})
    with store.failing_on_error():
        store.tensor_io.wait_writes()
        if moves:
            store.give_back_free_extents()
    return_freed_memory()


def _without_changed(store: Store, placement: Placement) -> Placement:
    """Return a placement that puts nothing in place if its value, in memory, is no longer that of the weight file."""
    record = store.records[placement.parameter]
    copies, weights = record.copies, record.copies.weights
    is_to_return = placement.in_place_nbytes > 0 and copies.in_place is None
    if is_to_return and (weights is None or not is_still_in(weights, copies.master, store)):
        assert store.session is not None
        store.session.leave_weights(record)
        return placement.without_weights()
    return placement


def _moves_of(store: Store, record: StoredParameter, placement: Placement) -> Iterator[_Move]:
    copies, gradient, size = record.copies, record.gradient.slot, store.ranks.size
    of_compute = 1 if placement.is_whole(Role.COMPUTE) else size
    yield _Move(
        slot=copies.compute,
        tier=placement.compute,
        num_ranks=of_compute,
        run=partial(_move_copy, store, record, Role.COMPUTE, placement.compute, of_compute),
    )
    if copies.are_two:
        of_master = 1 if placement.is_whole(Role.MASTER) else size
        yield _Move(
            slot=copies.master,
            tier=placement.master,
            num_ranks=of_master,
            run=partial(_move_copy, store, record, Role.MASTER, placement.master, of_master),
        )
    if gradient is not None:
        settle_gradient(record)
        tier = placement.by_role[Role.GRADIENT][0].tier
        yield _Move(slot=gradient, tier=tier, num_ranks=size, run=partial(_move_gradient, store, record, tier))
    for key, slot in record.copies.updated_states.items():
        tier = placement.optimizer_state or slot.tier
        yield _Move(slot=slot, tier=tier, num_ranks=size, run=partial(_move_state, store, record, key, tier))


def _within_budgets(store: Store, moves: Iterable[_Move]) -> Iterator[_Move]:
    """Yield the moves in an order that stays within memory. Moves into memory go first if they fit, since they free disk."""
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
        room = budget - store.held.nbytes_on(Tier.DEVICE) - store.held.nbytes_on(Tier.HOST)
        fits = inwards and inwards[0].nbytes_in <= room
        yield inwards.popleft() if fits or not outwards else outwards.popleft()


def _within_tiers(store: Store, moves: Iterable[_Move]) -> Iterator[_Move]:
    """Yield the moves in an order that stays within the budgets of device and host, each by itself."""
    config = store.config
    budgets = {
        Tier.DEVICE: config.device_memory - config.reserve_memory,
        Tier.HOST: config.host_memory - config.staging_memory - store.activations.host_nbytes,
    }

    def fits(move: _Move) -> bool:
        return move.tier is Tier.NVME or store.held.nbytes_on(move.tier) + move.slot.nbytes <= budgets[move.tier]

    waiting = list(moves)
    while waiting:
        first = next((index for index, move in enumerate(waiting) if fits(move)), 0)
        yield waiting.pop(first)


def _move_copy(store: Store, record: StoredParameter, role: Role, tier: Tier, num_ranks: int) -> None:
    slot = record.copies.compute if role is Role.COMPUTE else record.copies.master
    moved = _moved_slot(store, record, slot, tier, num_ranks)
    if moved is slot:
        return
    is_master = slot is record.copies.master
    record.copies.replace(slot, moved)
    if is_master:
        record.views.move(record.parameter, record.home)
    slot.give_back(store.layout)


def _move_gradient(store: Store, record: StoredParameter, tier: Tier) -> None:
    slot = record.gradient.slot
    assert slot is not None
    moved = _moved_slot(store, record, slot, tier, slot.num_ranks)
    if moved is slot:
        return
    grad = record.parameter.grad
    if grad is not None and slot.is_home_of(grad):
        record.parameter.grad = HomeGradient.show(moved, record)
    record.gradient.replace(moved)
    slot.give_back(store.layout)


def _move_state(store: Store, record: StoredParameter, key: str, tier: Tier) -> None:
    """Move state that a checkpoint brought before there was a plan, and show it where its optimizer keeps it."""
    slot = record.copies.states[key]
    owner = record.copies.states_owner() if record.copies.states_owner is not None else None
    if owner is None:  # its optimizer is gone
        return
    if (shown := coded_home(slot.shown)) is not None:
        shown.flush()
    moved = _moved_slot(store, record, slot, tier, slot.num_ranks)
    record.copies.put_state(key, moved)
    state = owner.state.get(record.parameter, {})
    if moved is not slot and slot.shown is not None and state.get(key) is slot.shown:
        state[key] = HomeTensor.show(moved, record)
    if moved is not slot:
        slot.give_back(store.layout)


def _moved_slot(store: Store, record: StoredParameter, slot: Slot, tier: Tier, num_ranks: int) -> Slot:
    """Return a slot on ``tier`` with the value: the same one where nothing has to move."""
    if slot.num_ranks != num_ranks:
        return _shared_slot(store, record, slot, tier, num_ranks)
    if slot.tier is tier:
        return slot
    if slot.row_code is not None:
        return _moved_rows(store, record, slot, tier)
    if store.device.memory.unified and slot.in_memory and tier is not Tier.NVME:
        # Both are RAM: only the accounting changes.
        store.held.count_home(slot.tier, -slot.nbytes)
        store.held.count_home(tier, slot.nbytes)
        slot.tier = tier
        return slot
    is_whole = slot.num_ranks == 1
    weights = record.copies.weights if slot is record.copies.master else None
    moved = store.new_slot(
        record.name,
        record.shape if slot.per_element else slot.tensor.shape,
        slot.dtype,
        tier,
        slot.key,
        is_whole=is_whole,
        code=slot.code,
        per_element=slot.per_element,
        weights=weights,
    )
    store.held.count_home(slot.tier, -slot.taken_nbytes)
    if moved.weights is not None:
        return moved  # which has the value already
    with store.failing_on_error():
        if slot.in_memory:
            store.tensor_io.write_value(moved, slot.tensor)
            store.tensor_io.wait_writes()
        elif moved.in_memory:
            store.tensor_io.read_value(slot, moved.tensor)
        else:
            for part, piece in store.tensor_io.read_pieces(slot):
                store.tensor_io.write_value(moved.part(part), piece)
            store.tensor_io.wait_writes()
    return moved


def _moved_rows(store: Store, record: StoredParameter, slot: Slot, tier: Tier) -> Slot:
    """Return a slot on ``tier`` with the value of a weight that is stored as rows of int8 outside of the device."""
    store.refresh_one(record)  # encodes what was written
    moved = store.new_slot(record.name, record.shape, slot.dtype, tier, slot.key, row_code=slot.row_code)
    store.held.count_home(slot.tier, -slot.taken_nbytes)
    with store.failing_on_error():
        for part, piece in store.tensor_io.read_pieces(slot):
            store.tensor_io.write_value(moved.part(part), piece)
        store.tensor_io.wait_writes()
    return moved


def _shared_slot(store: Store, record: StoredParameter, slot: Slot, tier: Tier, num_ranks: int) -> Slot:
    """Return a slot on ``tier`` that has all of a copy of which each rank has a shard, or a shard of all of it."""
    is_whole = num_ranks == 1
    value = store.full_value(record.shape, slot) if is_whole else slot.elements(record.shard)
    moved = store.new_slot(
        record.name, record.shape, slot.tensor.dtype, tier, slot.key, is_whole=is_whole, row_code=slot.row_code
    )
    store.held.count_home(slot.tier, -slot.taken_nbytes)
    with store.failing_on_error():
        store.tensor_io.write_value(moved, value.view(moved.tensor.shape))
        store.tensor_io.wait_writes()
    return moved
