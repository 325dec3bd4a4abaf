"""Where every copy of every parameter lives: device until its budget is used, then host, then nvme.

What moves most often per byte gets the fastest home first. Per byte and step a compute copy is read twice and written
once, a gradient written and read once, a master copy and optimizer state read and written once; the compute copies of
parameters that are used in several places come first of all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zinf_compile.config import Config
from zinf_compile.errors import CapacityError
from zinf_compile.facts import ParameterFact
from zinf_compile.passes.planning.arena import align
from zinf_compile.passes.planning.optimizer_step import plan_step
from zinf_compile.plans import Placement
from zinf_compile.terms import Tier, format_bytes

# A parameter this small costs a transfer more in latency than its bytes are worth: 64 KiB is under 0.1 ms of disk time.
RESIDENT_THRESHOLD = 64 * 2**10
# What moving a tensor through staging takes at the least: a few sectors for each of a few threads.
MIN_STAGING = 256 * 2**10
# Residents under the threshold may take at most this share of the device before any graph has been seen.
_SMALL_SHARE = 8


def plan_placement(
    parameters: Sequence[ParameterFact],
    config: Config,
    *,
    resident_nbytes: int | None = None,
    num_uses: Mapping[str, int] | None = None,
) -> tuple[Placement, ...]:
    """Return the homes of all parameters, in the order given.

    ``resident_nbytes`` is what the device has room for between uses; None before a graph has been seen, when only small
    parameters become resident. Raises CapacityError when host and nvme together cannot hold the rest.
    """
    device_left = config.device_memory // _SMALL_SHARE if resident_nbytes is None else resident_nbytes
    host_left = config.host_memory - config.staging_memory
    uses = num_uses or {}
    placements = {
        parameter.name: Placement(
            parameter=parameter.name,
            compute=Tier.NVME,
            master=Tier.NVME,
            gradient=Tier.NVME,
            optimizer_state=Tier.NVME,
            compute_dtype=parameter.compute_dtype,
            compute_nbytes=parameter.compute_nbytes,
            master_nbytes=parameter.master_nbytes if parameter.has_two_copies else 0,
            gradient_nbytes=parameter.gradient_nbytes,
            gradient_dtype=parameter.gradient_dtype,
            optimizer_state_nbytes=parameter.optimizer_state_nbytes,
        )
        for parameter in parameters
    }

    def settle(name: str, **homes: Tier) -> None:
        placement = replace(placements[name], **homes)  # type: ignore[arg-type]  # every field named here is a Tier
        if placement.master_nbytes == 0:
            placement = replace(placement, master=placement.compute)
        placements[name] = placement

    def by_use(parameter: ParameterFact) -> int:
        return -uses.get(parameter.name, 0)

    small = [parameter for parameter in parameters if parameter.compute_nbytes <= RESIDENT_THRESHOLD]
    large = [parameter for parameter in parameters if parameter.compute_nbytes > RESIDENT_THRESHOLD]
    for parameter in [*small, *(sorted(large, key=by_use) if resident_nbytes is not None else ())]:
        if parameter.compute_nbytes <= device_left:
            device_left -= parameter.compute_nbytes
            settle(parameter.name, compute=Tier.DEVICE)

    # Small parameters keep all they have in memory: chunks of a few bytes are what a disk is worst at.
    for parameter in small:
        placement = placements[parameter.name]
        rest = placement.gradient_nbytes + placement.master_nbytes + placement.optimizer_state_nbytes
        if placement.compute is Tier.DEVICE and rest <= host_left:
            host_left -= rest
            settle(parameter.name, master=Tier.HOST, gradient=Tier.HOST, optimizer_state=Tier.HOST)
    for role in ("compute", "gradient", "master", "optimizer_state"):
        for parameter in sorted(parameters, key=by_use):
            placement = placements[parameter.name]
            nbytes = getattr(placement, f"{role}_nbytes")
            if getattr(placement, role) is Tier.NVME and 0 < nbytes <= host_left:
                host_left -= nbytes
                settle(parameter.name, **{role: Tier.HOST})
    result = tuple(placements[parameter.name] for parameter in parameters)
    _check_nvme(result, config)
    return result


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
    _check_nvme([*others, placement], config)
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
            master=Tier.NVME,
            compute_dtype=parameter.compute_dtype,
            compute_nbytes=parameter.compute_nbytes,
            master_nbytes=parameter.master_nbytes,
        )
        placed.append(narrowed)
    host_left = config.host_memory - config.staging_memory - sum(item.nbytes_on(Tier.HOST) for item in placed)
    for index, (old, new) in enumerate(zip(placements, placed, strict=True)):
        if new is not old and old.compute is not Tier.NVME and new.master_nbytes <= host_left:
            host_left -= new.master_nbytes
            placed[index] = replace(new, master=Tier.HOST)
    _check_nvme(placed, config)
    return tuple(placed)


def check_budgets(parameters: Sequence[ParameterFact], placements: Sequence[Placement], config: Config) -> None:
    """Raise CapacityError if no graph of the model could ever run within the budgets, whatever its activations.

    The device must hold the small residents and the largest other parameter; staging must hold chunks of the step.
    """
    if _least_device_memory(placements) > config.device_memory:
        needed = _search_device_memory(parameters, config)
        streamed = [item for item in placements if item.compute is not Tier.DEVICE]
        largest = sorted(streamed, key=lambda item: -item.compute_nbytes)[:3]
        names = ", ".join(f"{item.parameter} {format_bytes(item.compute_nbytes)}" for item in largest)
        raise CapacityError(
            f"device_memory is {format_bytes(config.device_memory)}, and the largest parameter with its gradient needs "
            f"{format_bytes(needed)} before any activations; largest: {names}; raise device_memory to "
            f"{_size_option(needed)} and as much as the activations need"
        )
    plan_step(parameters, placements, staging_nbytes=config.staging_memory)
    if any(item.nbytes_on(Tier.NVME) for item in placements) and config.staging_memory < MIN_STAGING:
        raise CapacityError(
            f"host_memory is {format_bytes(config.host_memory)}, and moving parameters to nvme needs staging of "
            f"{format_bytes(MIN_STAGING)}; raise host_memory to {_size_option(2 * MIN_STAGING)}"
        )


def _least_device_memory(placements: Sequence[Placement]) -> int:
    """Return the bytes of what is resident, and of the largest other parameter with its gradient."""
    resident = sum(placement.nbytes_on(Tier.DEVICE) for placement in placements)
    streamed = [align(item.compute_nbytes) for item in placements if item.compute is not Tier.DEVICE]
    return resident + 2 * max(streamed, default=0)


def _search_device_memory(parameters: Sequence[ParameterFact], config: Config) -> int:
    """Return the smallest device budget that ``check_budgets`` lets pass; the larger it is, the more is resident."""
    needed = config.device_memory
    while True:
        least = _least_device_memory(plan_placement(parameters, with_device_memory(config, needed)))
        if least <= needed:
            return needed
        needed = least


def with_device_memory(config: Config, nbytes: int) -> Config:
    """Return a config to search for a device budget with: nvme takes whatever is left, however much."""
    return replace(config, device_memory=nbytes, nvme=config.nvme or ".", nvme_memory=None)


def _check_nvme(placements: Sequence[Placement], config: Config) -> None:
    on_nvme = sum(placement.nbytes_on(Tier.NVME) for placement in placements)
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
        f"give nvme='/path/on/a/local/disk', or raise host_memory to {_size_option(host_memory)}"
        if config.nvme is None
        else f"raise nvme_memory to {_size_option(on_nvme)}"
    )
    raise CapacityError(
        f"parameters, gradients and optimizer state that fit neither device ({format_bytes(config.device_memory)}) nor "
        f"host ({format_bytes(config.host_memory)}) need {format_bytes(on_nvme)} on nvme, and {limit}; "
        f"largest: {names}; {remedy}"
    )


def _size_option(nbytes: int) -> str:
    """Return a size rounded up to a whole MiB, as a user would write it."""
    return f"{-(-nbytes // 2**20)}MiB"
