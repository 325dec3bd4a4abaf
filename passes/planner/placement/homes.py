"""Placement: the home of every copy of every parameter. The device is filled first, then the host, then nvme.

Copies that cost the most seconds of transfers per byte get the fastest homes (``HomePrices``).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import NamedTuple

from zinf_compile.ir.config import Config
from zinf_compile.ir.copies import LOW_HALVES, Copy, Role, chunk_multiple
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.facts import ParameterFact, UseFact
from zinf_compile.ir.glossary import Tier, format_bytes
from zinf_compile.ir.plan import Placement
from zinf_compile.ir.slices import Slice
from zinf_compile.passes.planner.cost.costs import RESIDENT_THRESHOLD
from zinf_compile.passes.planner.placement.prices import COMPUTE, MASTER, ROLES, STATE, USUAL_PRICES, HomePrices

# The least staging with which a tensor can be moved: a few sectors for each of a few threads.
MIN_STAGING = 256 * 2**10
# Before a graph is known, small residents take at most this fraction of the device: 1/8.
_SMALL_SHARE = 8
_LEAST_SPLIT = 16 * LOW_HALVES  # elements of a master copy that is split: of fewer, pages save little
# The staging with which master copies may be split: chunks are multiples of 30,720 elements then, up to 18 bytes each, and
# updates ahead of step() have eight of them in it.
_LEAST_SPLIT_STAGING = 8 * chunk_multiple([LOW_HALVES], [2, 4]) * 18
_TIERS = tuple(Tier)
_DEVICE, _HOST, _NVME = range(len(_TIERS))


def plan_placement(
    parameters: Sequence[ParameterFact],
    config: Config,
    *,
    resident_nbytes: int | None = None,
    spare_nbytes: int = 0,
    uses: Sequence[UseFact] | None = None,
    prices: HomePrices = USUAL_PRICES,
    num_ranks: int = 1,
) -> tuple[Placement, ...]:
    """Return the homes of all parameters, in the order given. See ``Placer.place``."""
    placer = Placer(parameters, uses, num_ranks=num_ranks)
    placed = placer.place(config, resident_nbytes=resident_nbytes, spare_nbytes=spare_nbytes, prices=prices)
    return placed.placements


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """The placements of all parameters, in the order given, and their total bytes. Compared by identity."""

    placements: tuple[Placement, ...]
    device_nbytes: int
    file_nbytes: int


class _Copy(NamedTuple):
    """One copy of one parameter, by its index among all copies, with its bytes at home and its bytes if resident."""

    slot: int
    nbytes: int
    device_nbytes: int


class Placer:
    """Places the same parameters for many budgets and prices. Results are cached.

    ``uses`` are those of a graph; before one is known, each compute copy counts as read in forward and in backward. Each of
    several ranks keeps its shard of everything, but a resident copy that the graph reads is whole on every rank.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterFact],
        uses: Sequence[UseFact] | None = None,
        *,
        num_ranks: int = 1,
        num_replicas: int = 1,
    ) -> None:
        self._tiles = _group_tiles(parameters)
        self._parameters = parameters = [_join_facts(tiles) for tiles in self._tiles]
        by_name: dict[str, list[UseFact]] = defaultdict(list)
        for use in uses or ():
            by_name[use.parameter].append(use)
        self._uses = [2.0 if uses is None else 0.0] * len(parameters)
        self._read = [COMPUTE] * len(parameters)  # the copy that is gathered
        for index, tiles in enumerate(self._tiles):
            found = [use for tile in tiles for use in by_name.get(tile.name, ())]
            if found:
                self._uses[index] = sum(len(use.ticks) for use in found) / len(tiles)
                if tiles[0].has_two_copies and found[-1].dtype != tiles[0].compute_dtype:
                    self._read[index] = MASTER
        self._num_ranks, self._num_replicas = num_ranks, num_replicas
        self._nbytes = [role_nbytes(parameter.among(num_ranks)) for parameter in parameters]
        self._full_nbytes = [  # of the copy that is gathered
            parameter.compute_nbytes if read == COMPUTE else parameter.nbytes_of(ROLES[read])
            for parameter, read in zip(parameters, self._read, strict=True)
        ]
        everyone = range(len(parameters))
        self._small = [index for index in everyone if parameters[index].compute_nbytes <= RESIDENT_THRESHOLD]
        large = [index for index in everyone if parameters[index].compute_nbytes > RESIDENT_THRESHOLD]
        self._smallest_first = [
            *sorted(self._small, key=self._full_nbytes.__getitem__),
            *sorted(large, key=lambda index: -self._uses[index]),
        ]
        self._orders: dict[HomePrices, list[_Copy]] = {}
        self._made: dict[tuple[int, bytes, bool], list[Placement]] = {}
        # By the home of every copy, and whether master copies may be split.
        self._placed: dict[tuple[bytes, bool], Placed] = {}

    @property
    def small_nbytes(self) -> int:
        """Return the bytes that all small parameters take where they are read."""
        return sum(self._full_nbytes[index] for index in self._small)

    def place(
        self,
        config: Config,
        *,
        resident_nbytes: int | None = None,
        spare_nbytes: int = 0,
        prices: HomePrices = USUAL_PRICES,
    ) -> Placed:
        """Return the homes of all parameters, in the order given. Equal homes are the same object.

        ``resident_nbytes`` is the room of the device for resident compute copies; None before a graph is known, when only
        small parameters become resident. Below stage 3 all compute copies are, whatever the room. ``spare_nbytes`` is room
        of the device for copies that the host cannot hold.
        Raises CapacityError when all tiers together cannot hold the rest.
        """
        device_left = config.device_memory // _SMALL_SHARE if resident_nbytes is None else resident_nbytes
        host_left = config.host_memory - config.staging_memory
        homes = bytearray([_NVME]) * (len(ROLES) * len(self._parameters))
        keeps_all = config.stage < 3
        for index in self._small if resident_nbytes is None and not keeps_all else self._smallest_first:
            fits = keeps_all or self._full_nbytes[index] <= device_left
            if fits and self._may_reside(index, self._read[index], config):
                device_left -= self._full_nbytes[index]
                homes[len(ROLES) * index + self._read[index]] = _DEVICE
        if not config.memory.unified:  # state that lives on the device is updated there, and crosses no link
            states = (copy for copy in self._by_price(prices) if copy.slot % len(ROLES) == STATE)
            spare_nbytes = self._fill_device(homes, spare_nbytes, states, config)
        # Small parameters keep all their copies in memory: disks are slowest with chunks of a few bytes.
        for index in self._small:
            first = len(ROLES) * index
            away = [role for role in range(len(ROLES)) if homes[first + role] != _DEVICE]
            rest = sum(self._nbytes[index][role] for role in away)
            if homes[first + self._read[index]] == _DEVICE and rest <= host_left:
                host_left -= rest
                for role in away:
                    homes[first + role] = _HOST
        for copy in self._by_price(prices):
            if copy.nbytes <= host_left and homes[copy.slot] == _NVME:
                host_left -= copy.nbytes
                homes[copy.slot] = _HOST
        self._fill_device(homes, spare_nbytes, self._by_price(prices), config)
        placed = self._placed_at(bytes(homes), config.staging_memory >= _LEAST_SPLIT_STAGING)
        _check_nvme(placed.placements, config, placed.file_nbytes)
        return placed

    def _fill_device(self, homes: bytearray, spare_nbytes: int, copies: Iterable[_Copy], config: Config) -> int:
        """Move copies from nvme to ``spare_nbytes`` of the device, as long as they fit; return the bytes left."""
        for copy in copies if spare_nbytes > 0 else ():
            is_free = homes[copy.slot] == _NVME and self._may_reside(*divmod(copy.slot, len(ROLES)), config)
            if copy.device_nbytes <= spare_nbytes and is_free:
                spare_nbytes -= copy.device_nbytes
                homes[copy.slot] = _DEVICE
        return spare_nbytes

    def _may_reside(self, index: int, role: int, config: Config) -> bool:
        """Return whether a copy may live on the device.

        What ranks read in tiles is not whole on each: a tile has rows of all of them, which are together only when gathered.
        With memory of its own a device holds compute copies, and optimizer state that is updated there. Master copies and
        gradients, which users see as tensors, stay in host memory or in the file.
        """
        if self._num_ranks > 1 and len(self._tiles[index]) > 1 and role == self._read[index]:
            return False
        if config.memory.unified or (role == COMPUTE and self._read[index] == COMPUTE):
            return True
        return role == STATE and config.update_on != "host"

    def _placed_at(self, homes: bytes, may_split: bool) -> Placed:
        if (homes, may_split) not in self._placed:
            placements = (
                self._placements(index, homes[len(ROLES) * index : len(ROLES) * (index + 1)], may_split)
                for index in range(len(self._parameters))
            )
            self._placed[homes, may_split] = count_placed(tuple(chain.from_iterable(placements)))
        return self._placed[homes, may_split]

    def _by_price(self, prices: HomePrices) -> list[_Copy]:
        """Return every copy that has bytes, the most expensive first."""
        if prices not in self._orders:
            copies = sorted(
                ((index, role) for role in range(len(ROLES)) for index in range(len(self._parameters))),
                key=lambda item: -self._price(prices, *item),
            )
            self._orders[prices] = [
                _Copy(
                    slot=len(ROLES) * index + role,
                    nbytes=self._nbytes[index][role],
                    device_nbytes=self._full_nbytes[index] if role == self._read[index] else self._nbytes[index][role],
                )
                for index, role in copies
                if self._nbytes[index][role] > 0
            ]
        return self._orders[prices]

    def _price(self, prices: HomePrices, index: int, role: int) -> float:
        parameter = self._parameters[index]
        gathers = self._uses[index] if role == self._read[index] else 0
        # A compute copy that is also the master copy is updated like a master copy.
        is_updated = role != COMPUTE or (parameter.trainable and not parameter.has_compute_copy)
        moved_by_step = prices.of_step(ROLES[MASTER if role == COMPUTE else role]) if is_updated else 0.0
        return prices.gather * gathers + moved_by_step

    def _placements(self, index: int, homes: bytes, may_split: bool) -> list[Placement]:
        """Return the placement of a parameter, or of each of its tiles."""
        if (index, homes, may_split) not in self._made:
            tiers = {role: _TIERS[home] for role, home in zip(ROLES, homes, strict=True)}
            read = ROLES[self._read[index]]
            is_alone = self._num_ranks * self._num_replicas == 1
            splits_master = may_split and is_alone and _may_split_master(self._parameters[index], tiers, read)
            made = (make_placement(tile, tiers, num_ranks=self._num_ranks, read=read) for tile in self._tiles[index])
            self._made[index, homes, may_split] = [replace(each, splits_master=splits_master) for each in made]
        return self._made[index, homes, may_split]


def _may_split_master(parameter: ParameterFact, homes: Mapping[Role, Tier], read: Role) -> bool:
    """Return whether updates may write of a master copy only what its compute copy lacks.

    On a CPU, of a float32 one on nvme that no graph reads, with a bfloat16 compute copy, and large enough to be worth it.
    """
    return (
        parameter.unified
        and parameter.trainable
        and not parameter.narrowed
        and (parameter.master.dtype, parameter.compute_dtype) == ("float32", "bfloat16")
        and homes[Role.MASTER] is Tier.NVME
        and read is Role.COMPUTE
        and parameter.num_elements >= _LEAST_SPLIT
    )


def _group_tiles(parameters: Sequence[ParameterFact]) -> list[list[ParameterFact]]:
    """Return each parameter by itself, and the tiles of one parameter, which are neighbours, together."""
    return [list(tiles) for _, tiles in groupby(parameters, key=lambda fact: fact.tile_of or fact.name)]


def _join_facts(tiles: Sequence[ParameterFact]) -> ParameterFact:
    """Return the fact of a parameter from those of its tiles."""
    if len(tiles) == 1:
        return tiles[0]
    return replace(tiles[0], name=tiles[0].slice.parameter, slice=tiles[0].slice.whole)


def count_placed(placements: tuple[Placement, ...]) -> Placed:
    """Return placements with their total bytes."""
    on_device = sum(placement.nbytes_on(Tier.DEVICE) for placement in placements)
    return Placed(placements=placements, device_nbytes=on_device, file_nbytes=_file_nbytes(placements))


def role_nbytes(parameter: ParameterFact) -> tuple[int, ...]:
    """Return the bytes of each role; a master copy that is the compute copy has none of its own."""
    return tuple(parameter.nbytes_of(role) for role in ROLES)


def make_placement(
    parameter: ParameterFact, homes: Mapping[Role, Tier], *, num_ranks: int = 1, read: Role = Role.COMPUTE
) -> Placement:
    """Return the placement of a parameter with its copies in ``homes``, of one rank.

    Each rank keeps its shard of every copy, but all of the copy that is ``read``, if that is resident.
    """
    shard = parameter.slice.among(num_ranks)

    def slice_of(role: Role) -> Slice:
        return parameter.slice if role is read and homes[role] is Tier.DEVICE else shard

    forms = [(Role.COMPUTE, parameter.compute)]
    if parameter.has_two_copies:
        forms.append((Role.MASTER, parameter.master))
    if parameter.gradient is not None:
        forms.append((Role.GRADIENT, parameter.gradient))
    copies = [
        Copy(
            role=role,
            encoding=encoding,
            slice=slice_of(role),
            tier=homes[role],
            in_weights=role is not Role.GRADIENT and parameter.is_in_weights(encoding),
        )
        for role, encoding in forms
    ]
    return Placement(
        parameter=parameter.name,
        copies=(*copies, *_state_copies(parameter, homes[Role.STATE], num_ranks)),
        in_place=parameter.integrated and num_ranks == 1 and parameter.compute.rows is None,
    )


def _state_copies(parameter: ParameterFact, tier: Tier, num_ranks: int) -> Iterator[Copy]:
    shard = parameter.slice.among(num_ranks)
    for state in parameter.states if parameter.trainable else ():
        yield Copy(role=Role.STATE, encoding=state.encoding, slice=shard, tier=tier, state=state)


def place_states(
    parameters: Sequence[ParameterFact], placements: Sequence[Placement], config: Config, *, num_ranks: int = 1
) -> tuple[Placement, ...]:
    """Return the homes of all parameters with the optimizer state of their facts, in the place of what was assumed.

    It is where other state was, or else with the master copy. If host memory has no room for all of it, the largest goes to
    nvme, and then other copies; CapacityError if that has none either. What cannot be cut stays in host memory if staging
    could not hold all that an update of the parameter moves at once.
    """

    def is_allowed(item: Placement) -> bool:
        staged = item.nbytes_on(Tier.NVME) + (0 if config.unified else item.nbytes_on(Tier.DEVICE))
        return config.nvme is not None and not (item.has_whole_state and staged > config.staging_memory)

    placed: list[Placement] = []
    for parameter, old in zip(parameters, placements, strict=True):
        tier = old.optimizer_state or old.master
        if tier is Tier.DEVICE and parameter.optimizer_state_nbytes > old.optimizer_state_nbytes:
            tier = Tier.HOST  # the device was planned to be full
        others = (copy for copy in old.copies if copy.role is not Role.STATE)
        new = replace(old, copies=(*others, *_state_copies(parameter, tier, num_ranks)))
        placed.append(new if tier is not Tier.NVME or is_allowed(new) else new.moved({Role.STATE: Tier.HOST}))
    host_left = config.host_memory - config.staging_memory - sum(item.nbytes_on(Tier.HOST) for item in placed)
    for role in (Role.STATE, Role.GRADIENT, Role.MASTER, Role.COMPUTE):
        for index in sorted(range(len(placed)), key=lambda index: -placed[index].nbytes_of(role)):
            if host_left >= 0:
                break
            moved = placed[index].moved({role: Tier.NVME})
            if placed[index].home_of(role) is Tier.HOST and is_allowed(moved):
                host_left += placed[index].nbytes_of(role)
                placed[index] = moved
    _check_nvme(placed, config, _file_nbytes(placed))
    if host_left < 0:
        raise CapacityError(
            f"host_memory is {format_bytes(config.host_memory)}, and optimizer state that stays there needs "
            f"{format_bytes(-host_left)} more: it belongs to whole matrices, whose updates staging cannot hold, or there is "
            f"no nvme folder; raise host_memory to {size_option(config.host_memory - 2 * host_left)}"
        )
    return tuple(placed)


def place_unfrozen(
    parameter: ParameterFact,
    compute: Tier,
    others: Sequence[Placement],
    config: Config,
    *,
    master: Tier | None = None,
    num_ranks: int = 1,
) -> Placement:
    """Return the homes of a parameter that was frozen and now needs a gradient, a master copy and optimizer state.

    Its compute copy stays, and its master copy if it has one. The rest goes where ``others`` leave room; CapacityError if
    there is none.
    """
    homes = dict.fromkeys(Role, Tier.NVME) | {Role.COMPUTE: compute, Role.MASTER: master or Tier.NVME}
    placement = make_placement(parameter, homes, num_ranks=num_ranks)
    taken = sum(item.nbytes_on(Tier.HOST) for item in (*others, placement))
    host_left = config.host_memory - config.staging_memory - taken
    for role in (Role.GRADIENT, Role.STATE) if master else (Role.GRADIENT, Role.MASTER, Role.STATE):
        if 0 < placement.nbytes_of(role) <= host_left:
            host_left -= placement.nbytes_of(role)
            placement = placement.moved({role: Tier.HOST})
    _check_nvme([*others, placement], config, _file_nbytes([*others, placement]))
    return placement


def place_narrowed(
    parameters: Sequence[ParameterFact], placements: Sequence[Placement], config: Config, *, num_ranks: int = 1
) -> tuple[Placement, ...]:
    """Return the homes of all parameters, where the facts of some have a narrower compute copy than was placed.

    The new compute copy takes the home of the only copy so far. That becomes the master copy, which stays on nvme if it was
    there, or else goes where there is room. CapacityError if there is none.
    """
    placed: list[Placement] = []
    for parameter, old in zip(parameters, placements, strict=True):
        if parameter.compute_dtype == old.compute_dtype:
            placed.append(old)
            continue
        homes = {role: old.home_of(role) or Tier.NVME for role in Role}
        placed.append(make_placement(parameter, homes, num_ranks=num_ranks))
    host_left = config.host_memory - config.staging_memory - sum(item.nbytes_on(Tier.HOST) for item in placed)
    for index, (old, new) in enumerate(zip(placements, placed, strict=True)):
        is_new = new is not old and Role.MASTER not in old.by_role
        if is_new and old.compute is not Tier.NVME and new.master_nbytes <= host_left:
            host_left -= new.master_nbytes
            placed[index] = new.moved({Role.MASTER: Tier.HOST})
    _check_nvme(placed, config, _file_nbytes(placed))
    return tuple(placed)


def check_file(placements: Sequence[Placement], config: Config) -> None:
    """Raise CapacityError if the store's file cannot hold what these placements put into it."""
    _check_nvme(placements, config, _file_nbytes(placements))


def with_device_memory(config: Config, nbytes: int) -> Config:
    """Return a config for the search for a device budget: with this one, and with nvme of any size."""
    return replace(config, device_memory=nbytes, nvme=config.nvme or ".", nvme_memory=None)


def _file_nbytes(placements: Sequence[Placement]) -> int:
    return sum(placement.file_nbytes for placement in placements)


def _check_nvme(placements: Sequence[Placement], config: Config, on_nvme: int) -> None:
    if on_nvme == 0 or (config.nvme is not None and (config.nvme_memory is None or on_nvme <= config.nvme_memory)):
        return
    in_host = sum(placement.nbytes_on(Tier.HOST) for placement in placements)
    # Staging takes half of the host budget up to its own limit.
    needed = in_host + on_nvme
    host_memory = needed + replace(config, host_memory=2 * needed).staging_memory
    on_disk = (placement for placement in placements if placement.file_nbytes)
    largest = sorted(on_disk, key=lambda placement: -placement.file_nbytes)[:3]
    names = ", ".join(f"{item.parameter} {format_bytes(item.file_nbytes)}" for item in largest)
    limit = (
        "there is no nvme folder" if config.nvme is None else f"nvme_memory is {format_bytes(config.nvme_memory or 0)}"
    )
    remedy = (
        f"give nvme='/path/on/a/local/disk', or raise host_memory to {size_option(host_memory)}"
        if config.nvme is None
        else f"raise nvme_memory to {size_option(on_nvme)}"
    )
    raise CapacityError(
        f"parameters, gradients and optimizer state that fit neither device ({format_bytes(config.device_memory)}) nor "
        f"host ({format_bytes(config.host_memory)}) need {format_bytes(on_nvme)} on nvme, and {limit}; "
        f"largest: {names}; {remedy}"
    )


def size_option(nbytes: int) -> str:
    """Return a size rounded up to a whole MiB, as a user would write it."""
    return f"{-(-nbytes // 2**20)}MiB"
