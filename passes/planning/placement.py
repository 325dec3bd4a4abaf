"""Where every copy of every parameter lives: device until its budget is used, then host, then nvme.

What costs most seconds of transfers per byte gets the fastest home first (``HomePrices``).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import NamedTuple

from zinf_compile.config import Config
from zinf_compile.errors import CapacityError
from zinf_compile.facts import ParameterFact, UseFact
from zinf_compile.passes.planning.prices import COMPUTE, MASTER, ROLES, USUAL_PRICES, HomePrices
from zinf_compile.plans import Placement
from zinf_compile.terms import Tier, format_bytes
from zinf_compile.world import shard_parameter

# A parameter this small costs a transfer more in latency than its bytes are worth: 64 KiB is under 0.1 ms of disk time.
RESIDENT_THRESHOLD = 64 * 2**10
# What moving a tensor through staging takes at the least: a few sectors for each of a few threads.
MIN_STAGING = 256 * 2**10
# Residents under the threshold may take at most this share of the device before any graph has been seen.
_SMALL_SHARE = 8
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
    """The homes of all parameters, in the order given, and what they add up to. Compared by identity."""

    placements: tuple[Placement, ...]
    device_nbytes: int
    file_nbytes: int


class _Copy(NamedTuple):
    """One copy of one parameter, by its place among all; with its bytes, and those it would take on the device."""

    slot: int
    nbytes: int
    device_nbytes: int


class Placer:
    """Places the same parameters again and again, with other budgets and prices.

    ``uses`` are those of a graph; before one is known, each compute copy counts as read in forward and in backward. Each of
    several ranks keeps its shard of everything, but all of a copy that is gathered where that is resident.
    """

    def __init__(
        self, parameters: Sequence[ParameterFact], uses: Sequence[UseFact] | None = None, *, num_ranks: int = 1
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
        self._nbytes = [slot_nbytes(shard_parameter(parameter, num_ranks)) for parameter in parameters]
        self._tile_nbytes = [[slot_nbytes(shard_parameter(tile, num_ranks)) for tile in tiles] for tiles in self._tiles]
        self._full_nbytes = [  # of the copy that is gathered
            slot_nbytes(parameter)[read] for parameter, read in zip(parameters, self._read, strict=True)
        ]
        everyone = range(len(parameters))
        self._small = [index for index in everyone if parameters[index].compute_nbytes <= RESIDENT_THRESHOLD]
        large = [index for index in everyone if parameters[index].compute_nbytes > RESIDENT_THRESHOLD]
        self._smallest_first = [
            *sorted(self._small, key=self._full_nbytes.__getitem__),
            *sorted(large, key=lambda index: -self._uses[index]),
        ]
        self._orders: dict[HomePrices, list[_Copy]] = {}
        self._made: dict[tuple[int, bytes], list[Placement]] = {}
        self._placed: dict[bytes, Placed] = {}  # by the home of every copy

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
        """Return the homes of all parameters, in the order given: for the same homes the same object.

        ``resident_nbytes`` is what the device has room for compute copies between uses; None before a graph has been
        seen, when only small parameters become resident. In ``spare_nbytes`` of the device rests what the host had no
        room for. Raises CapacityError when all tiers together cannot hold the rest.
        """
        device_left = config.device_memory // _SMALL_SHARE if resident_nbytes is None else resident_nbytes
        host_left = config.host_memory - config.staging_memory
        homes = bytearray([_NVME]) * (len(ROLES) * len(self._parameters))
        for index in self._small if resident_nbytes is None else self._smallest_first:
            if self._full_nbytes[index] <= device_left and self._may_reside(index, self._read[index], config):
                device_left -= self._full_nbytes[index]
                homes[len(ROLES) * index + self._read[index]] = _DEVICE
        # Small parameters keep all they have in memory: chunks of a few bytes are what a disk is worst at.
        for index in self._small:
            first, read = len(ROLES) * index, self._read[index]
            rest = sum(self._nbytes[index]) - self._nbytes[index][read]
            if homes[first + read] == _DEVICE and rest <= host_left:
                host_left -= rest
                homes[first : first + len(ROLES)] = bytes(
                    _DEVICE if role == read else _HOST for role in range(len(ROLES))
                )
        for copy in self._by_price(prices):
            if copy.nbytes <= host_left and homes[copy.slot] == _NVME:
                host_left -= copy.nbytes
                homes[copy.slot] = _HOST
        if spare_nbytes > 0:
            for copy in self._by_price(prices):
                is_free = homes[copy.slot] == _NVME and self._may_reside(*divmod(copy.slot, len(ROLES)), config)
                if copy.device_nbytes <= spare_nbytes and is_free:
                    spare_nbytes -= copy.device_nbytes
                    homes[copy.slot] = _DEVICE
        placed = self._placed_at(bytes(homes))
        _check_nvme(placed.placements, config, placed.file_nbytes)
        return placed

    def _may_reside(self, index: int, role: int, config: Config) -> bool:
        """Return whether a copy may live on the device. Where no CPU op reaches that, what people see lives elsewhere."""
        return not config.is_apart or (role == COMPUTE and self._read[index] == COMPUTE)

    def _placed_at(self, homes: bytes) -> Placed:
        if homes not in self._placed:
            placements = (
                self._placements(index, homes[len(ROLES) * index : len(ROLES) * (index + 1)])
                for index in range(len(self._parameters))
            )
            self._placed[homes] = count_placed(tuple(chain.from_iterable(placements)))
        return self._placed[homes]

    def _by_price(self, prices: HomePrices) -> list[_Copy]:
        """Return every copy that has bytes, dearest first."""
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
        # A compute copy that is the master copy too is updated like one.
        is_updated = role != COMPUTE or (parameter.trainable and not parameter.has_compute_copy)
        moved_by_step: float = getattr(prices, ROLES[MASTER if role == COMPUTE else role]) if is_updated else 0.0
        return prices.gather * gathers + moved_by_step

    def _placements(self, index: int, homes: bytes) -> list[Placement]:
        """Return the placement of a parameter, or of each of its tiles."""
        if (index, homes) not in self._made:
            read, tiers = self._read[index], [_TIERS[home] for home in homes]
            self._made[index, homes] = made = []
            for tile, shard in zip(self._tiles[index], self._tile_nbytes[index], strict=True):
                nbytes = list(shard)
                if homes[read] == _DEVICE:
                    nbytes[read] = slot_nbytes(tile)[read]
                made.append(make_placement(tile, tiers, nbytes))
        return self._made[index, homes]


def _group_tiles(parameters: Sequence[ParameterFact]) -> list[list[ParameterFact]]:
    """Return parameters each alone, and tiles with those of the same parameter, which stand side by side."""
    return [list(tiles) for _, tiles in groupby(parameters, key=lambda fact: fact.tile_of or fact.name)]


def _join_facts(tiles: Sequence[ParameterFact]) -> ParameterFact:
    """Return the fact of a parameter from those of its tiles."""
    if len(tiles) == 1:
        return tiles[0]
    return replace(
        tiles[0],
        num_elements=sum(tile.num_elements for tile in tiles),
        master_nbytes=sum(tile.master_nbytes for tile in tiles),
        compute_nbytes=sum(tile.compute_nbytes for tile in tiles),
        state_nbytes=sum(tile.state_nbytes for tile in tiles),
    )


def count_placed(placements: tuple[Placement, ...]) -> Placed:
    """Return homes with what they add up to."""
    on_device = sum(placement.nbytes_on(Tier.DEVICE) for placement in placements)
    return Placed(placements=placements, device_nbytes=on_device, file_nbytes=_file_nbytes(placements))


def slot_nbytes(parameter: ParameterFact) -> tuple[int, ...]:
    """Return the bytes of each copy, by role; a master copy that is the compute copy has none of its own."""
    master = parameter.master_nbytes if parameter.has_two_copies else 0
    return parameter.compute_nbytes, parameter.gradient_nbytes, master, parameter.optimizer_state_nbytes


def make_placement(parameter: ParameterFact, homes: Sequence[Tier], nbytes: Sequence[int]) -> Placement:
    compute_nbytes, gradient_nbytes, master_nbytes, state_nbytes = nbytes
    compute, gradient, master, optimizer_state = homes
    return Placement(
        parameter=parameter.name,
        compute=compute,
        master=master if master_nbytes else compute,
        gradient=gradient,
        optimizer_state=optimizer_state,
        compute_dtype=parameter.compute_dtype,
        compute_nbytes=compute_nbytes,
        master_nbytes=master_nbytes,
        gradient_nbytes=gradient_nbytes,
        gradient_dtype=parameter.gradient_dtype,
        optimizer_state_nbytes=state_nbytes,
        tile_of=parameter.tile_of,
    )


def place_thawed(
    parameter: ParameterFact,
    compute: Tier,
    others: Sequence[Placement],
    config: Config,
    *,
    master: Tier | None = None,
) -> Placement:
    """Return the homes of a parameter that was frozen and now needs a gradient, a master copy and optimizer state.

    Its compute copy stays, and the master copy if it has one. The rest goes where ``others`` leave room; CapacityError if
    nowhere.
    """
    placement = Placement(
        parameter=parameter.name,
        compute=compute,
        master=master or (Tier.NVME if parameter.has_compute_copy else compute),
        gradient=Tier.NVME,
        optimizer_state=Tier.NVME,
        compute_dtype=parameter.compute_dtype,
        compute_nbytes=parameter.compute_nbytes,
        master_nbytes=parameter.master_nbytes if parameter.has_two_copies else 0,
        gradient_nbytes=parameter.gradient_nbytes,
        gradient_dtype=parameter.gradient_dtype,
        optimizer_state_nbytes=parameter.optimizer_state_nbytes,
    )
    taken = sum(item.nbytes_on(Tier.HOST) for item in (*others, placement))
    host_left = config.host_memory - config.staging_memory - taken
    for role in ("gradient", "optimizer_state") if master else ("gradient", "master", "optimizer_state"):
        nbytes = getattr(placement, f"{role}_nbytes")
        if 0 < nbytes <= host_left:
            host_left -= nbytes
            placement = replace(placement, **{role: Tier.HOST})  # type: ignore[arg-type]  # a role is a Tier
    _check_nvme([*others, placement], config, _file_nbytes([*others, placement]))
    return placement


def place_narrowed(
    parameters: Sequence[ParameterFact], placements: Sequence[Placement], config: Config
) -> tuple[Placement, ...]:
    """Return the homes of all parameters, where the facts of some ask for a narrower compute copy than was placed.

    It takes the place of the one copy there was. That becomes the master copy, which stays on nvme, or else goes where
    there is room. CapacityError if nowhere.
    """
    placed: list[Placement] = []
    for parameter, old in zip(parameters, placements, strict=True):
        if parameter.compute_dtype == old.compute_dtype:
            placed.append(old)
            continue
        narrowed = replace(
            old,
            master=Tier.NVME if old.master_nbytes == 0 else old.master,
            compute_dtype=parameter.compute_dtype,
            compute_nbytes=parameter.compute_nbytes,
            master_nbytes=parameter.master_nbytes,
        )
        placed.append(narrowed)
    host_left = config.host_memory - config.staging_memory - sum(item.nbytes_on(Tier.HOST) for item in placed)
    for index, (old, new) in enumerate(zip(placements, placed, strict=True)):
        is_new = new is not old and old.master_nbytes == 0
        if is_new and old.compute is not Tier.NVME and new.master_nbytes <= host_left:
            host_left -= new.master_nbytes
            placed[index] = replace(new, master=Tier.HOST)
    _check_nvme(placed, config, _file_nbytes(placed))
    return tuple(placed)


def with_device_memory(config: Config, nbytes: int) -> Config:
    """Return a config to search for a device budget with: nvme takes whatever is left, however much."""
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
    largest = sorted(placements, key=lambda placement: -placement.nbytes_on(Tier.NVME))[:3]
    names = ", ".join(f"{item.parameter} {format_bytes(item.nbytes_on(Tier.NVME))}" for item in largest)
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
