"""What-if: planning again under changes, for the largest batch that fits, or for the smallest device memory that works."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from zinf_compile.hardware.rates import RATE_NAMES, with_rates
from zinf_compile.ir.config import Config, parse_size
from zinf_compile.ir.errors import CapacityError, ConfigError, UnsupportedError
from zinf_compile.ir.facts import GraphFacts, at_sizes, join_sizes
from zinf_compile.ir.glossary import Tier
from zinf_compile.passes.planner.memory.arena import ARENA_ALIGN
from zinf_compile.passes.planner.search.planner import (
    NEGLIGIBLE_STALLS,
    Request,
    does_fit,
    lay_groundworks,
    make_plan,
    minimum_device_memory,
)
from zinf_compile.passes.planner.simulator.simulate import simulate
from zinf_compile.passes.planner.simulator.summary import count_disk_stalls

_MOST = 2**31  # largest size of a dimension that is tried
_BUDGETS = ("device_memory", "host_memory", "nvme_memory", "prefetch_memory", "reserve_memory")
_SWITCHES = ("overlap_step", "step_in_backward", "speculate")
_BATCH, _SEQUENCE = "batch", "sequence"
_FINE = 16  # a number of tokens is found to within this part of it


def change_request(request: Request, changes: Mapping[str, object]) -> Request:
    """Return a request for other sizes, budgets, options or rates, in which parameters find new homes.

    ConfigError for a name that is none of these, with the nearest.
    """
    symbols = [symbol.name for symbol in request.candidates[0].symbols]
    known = (*symbols, *_BUDGETS, *_SWITCHES, *RATE_NAMES)
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(dict.fromkeys(known))}"
            raise ConfigError(f"what_if does not know {name!r}; {hint}")
    sizes: dict[str, Any] = {name: changes[name] for name in symbols if name in changes}
    options = {name: changes[name] for name in (*_BUDGETS, *_SWITCHES) if name in changes}
    rates: dict[str, Any] = {name: value for name, value in changes.items() if name not in {*sizes, *options}}
    changed = replace(
        _with_sizes(request, sizes) if sizes else request,
        config=_with_options(request.config, options),
        hardware=with_rates(request.hardware, **rates),
        placements=None,
    )
    if changed.config.nvme is not None and request.config.nvme is None:
        _check_nvme_routes(changed)
    return changed


def tokens_to_hide_disk(request: Request) -> int | None:
    """Return the fewest tokens per step with which compute hardly waits for the disk, to within a sixteenth.

    None if there is no such batch that fits. UnsupportedError where the batch of a capture is fixed.
    """
    _check_batch(request)
    low, high = 0, 1
    while not _hides_disk(request, high):
        low, high = high, 2 * high
        if high > _MOST or not does_fit(_with_sizes(request, {_BATCH: high})):
            high = largest_batch(request)
            if high <= low or not _hides_disk(request, high):
                return None
            break
    while high - low > max(1, high // _FINE):
        middle = (low + high) // 2
        low, high = (low, middle) if _hides_disk(request, middle) else (middle, high)
    return high * next((symbol.value for symbol in request.candidates[0].symbols if symbol.name == _SEQUENCE), 1)


def _hides_disk(request: Request, batch: int) -> bool:
    """Return whether compute hardly waits for the disk; of a batch that does not fit, False."""
    try:
        timeline = simulate(make_plan(_with_sizes(request, {_BATCH: batch})))
    except CapacityError:
        return False
    return count_disk_stalls(timeline) <= NEGLIGIBLE_STALLS * timeline.step_seconds


def largest_batch(request: Request) -> int:
    """Return the largest batch that fits, 0 if none does; UnsupportedError where the batch of a capture is fixed."""
    _check_batch(request)
    return largest_that_fits(lambda batch: does_fit(_with_sizes(request, {_BATCH: batch})))


def _check_batch(request: Request) -> None:
    names = [symbol.name for symbol in request.candidates[0].symbols]
    if _BATCH not in names:
        others = f"; what may change in it is {', '.join(names)}" if names else ""
        raise UnsupportedError(
            f"{request.name} was captured for one batch only: the first dimension of its inputs is a fixed number, or not "
            f"the same for all{others}; plan it for other inputs"
        )


def smallest_device_memory(request: Request) -> int:
    """Return the smallest device budget, in whole pages, with which planning succeeds."""
    request = replace(request, placements=None)
    groundworks = lay_groundworks(request)

    def fits(pages: int) -> bool:
        config = replace(request.config, device_memory=pages * ARENA_ALIGN)
        return does_fit(replace(request, config=config), groundworks)

    low, high = 0, -(-minimum_device_memory(request) // ARENA_ALIGN)
    if not fits(high):  # the device is not what is too small
        make_plan(replace(request, config=replace(request.config, device_memory=high * ARENA_ALIGN)))
    step = 1
    while high > step and fits(high - step):
        high, step = high - step, 2 * step
    low = max(0, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * ARENA_ALIGN


def largest_that_fits(fits: Callable[[int], bool], *, start: int = 1) -> int:
    """Return the largest whole number for which ``fits`` is true, up to 2^31; 0 if it is for none."""
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
        if low >= _MOST:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def describe_largest(request: Request, sizes: Mapping[str, int]) -> str:
    """Return, for inputs that do not fit, the largest size of each grown dimension that would fit.

    The plan must remain valid for what its one candidate is valid for; other dimensions are those of the inputs.
    """
    (planned,), (captured,) = request.candidates, request.captured
    sentences = []
    for symbol in planned.symbols:
        if sizes[symbol.name] <= symbol.value:
            continue

        def fits(size: int, name: str = symbol.name) -> bool:
            graph = join_sizes(planned, at_sizes(captured, {**sizes, name: size}))
            return does_fit(replace(request, candidates=(graph,)))

        others = ", ".join(f"{name}={size}" for name, size in sizes.items() if name != symbol.name)
        largest = largest_that_fits(fits)
        found = f"is {largest}" if largest else "is none"
        sentences.append(f"the largest {symbol.name} that fits{f' with {others}' if others else ''} {found}")
    return "; ".join(sentences)


def _with_sizes(request: Request, sizes: Mapping[str, int]) -> Request:
    """Return a request for other sizes; sizes that are not named stay those of the plan."""

    def resized(captured: GraphFacts[Any], planned: GraphFacts) -> GraphFacts:
        return at_sizes(captured, {**{symbol.name: symbol.value for symbol in planned.symbols}, **sizes})

    pairs = zip(request.captured, request.candidates, strict=True)
    return replace(request, candidates=tuple(resized(*pair) for pair in pairs), placements=None)


def _with_options(config: Config, options: Mapping[str, object]) -> Config:
    changes: dict[str, Any] = {}
    for name, given in options.items():
        if name in _BUDGETS:
            changes[name] = parse_size(given, option=name)  # type: ignore[arg-type]  # it checks the type itself
        elif isinstance(given, bool):
            changes[name] = given
        else:
            raise ConfigError(f"{name}={given!r} is neither True nor False")
    if changes.get("nvme_memory") and config.nvme is None:
        changes["nvme"] = "."  # any folder: planning only needs to know that there is one
    return replace(config, **changes)


def _check_nvme_routes(request: Request) -> None:
    if not any(Tier.NVME in route.name.split() for route in request.hardware.routes):
        raise ConfigError(
            f"nvme_memory cannot be given: {request.hardware.name} has no nvme, and nobody knows how fast it would be; "
            "plan for hardware that has one"
        )
