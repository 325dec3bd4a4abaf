"""What ranks agree on before anything moves: the model, the options, the rates of the hardware, the facts of a graph.

Plans follow from these and from nothing else. So rank 0 makes a plan for all ranks, after they have compared hashes of what
it is made from.
"""

import itertools
import math
import os
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace

import torch
from torch import Tensor

from zinf_compile.hardware.observed import BusyTime, Observed, RouteBytes
from zinf_compile.ir.config import Config
from zinf_compile.ir.errors import RankError
from zinf_compile.ir.hardware import Hardware
from zinf_compile.runtime.device.device import Device
from zinf_compile.runtime.ranks.ranks import Collective, Ranks, describe_ranks, hash_of

_BUDGETS = ("device_memory", "host_memory", "nvme_memory", "prefetch_memory")
_OWN = (*_BUDGETS, "nvme", "device")  # options that may differ between ranks
_PROBE_NBYTES = 8 * 2**20  # of the full value whose shards are gathered, or added up, in a timed collective
_NUM_PROBES = 3
_MOST_CHARACTERS = 80  # of a value in an error
_SAME_BUILD = "every rank builds the same model with the same options and seed"
SAME_GRAPH = "every rank builds the same model with the same options, and calls it with the same shapes"


def check_alike(ranks: Ranks, what: str, mine: Mapping[str, object], *, remedy: str = _SAME_BUILD) -> None:
    """Raise RankError, on every rank, if ``mine`` is not the same everywhere; it names the first difference."""
    everywhere = ranks.exchange(what, dict(mine))
    first = everywhere[0]
    for name in dict.fromkeys(name for each in everywhere for name in each):
        others = [rank for rank, each in enumerate(everywhere) if each.get(name) != first.get(name)]
        if others:
            theirs = everywhere[others[0]]
            raise RankError(
                f"{what} differ: '{name}' is {_show(first, name)} on rank 0 and {_show(theirs, name)} on "
                f"{describe_ranks(others)}; {remedy}"
            )


def _show(values: Mapping[str, object], name: str) -> str:
    return str(values[name]) if name in values else "missing"


def check_record_alike(ranks: Ranks, what: str, mine: object) -> None:
    """Raise RankError, on every rank, if a record is not the same everywhere; it names the first field that differs.

    A record is a dataclass of numbers, text, enums, records and tuples of these. Hashes of its fields are compared. Only
    if some differ, parts of the first such field are, until the smallest part that differs is found.
    """
    if ranks.is_alone:
        return
    hashes: Sequence[Sequence[int]] = ranks.exchange_numbers(what, _hashes(mine))
    path = ""
    while (first := _first_difference(hashes)) is not None:
        name, mine = _parts_of(mine)[first]
        path += name
        kinds, hashes = zip(*ranks.exchange(f"parts of {what}", (type(mine).__name__, _hashes(mine))), strict=True)
        if len(set(kinds)) > 1 or _first_difference(hashes) is None:
            path = path.removeprefix(".")
            values = {path: _shorten(mine), f"the hash of {path}": hash_of(repr(mine).encode())}
            check_alike(ranks, what, values, remedy=SAME_GRAPH)


def _parts_of(value: object) -> list[tuple[str, object]]:
    """Return the parts of a record or tuple, with what a path to each of them continues with; none for anything else."""
    if isinstance(value, tuple):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if is_dataclass(value):
        return [(f".{field.name}", getattr(value, field.name)) for field in fields(value)]
    return []


def _hashes(value: object) -> list[int]:
    return [hash_of(repr(part).encode()) for _, part in _parts_of(value)]


def _first_difference(hashes: Sequence[Sequence[int]]) -> int | None:
    """Return the first position at which not all ranks have the same hash, of those that all have; None if there is none."""
    return next((index for index, each in enumerate(zip(*hashes, strict=False)) if len(set(each)) > 1), None)


def _shorten(value: object) -> str:
    text = repr(value)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{len(value)} items" if isinstance(value, tuple) else f"{text[:_MOST_CHARACTERS]}..."


def agree_on_config(ranks: Ranks, config: Config) -> Config:
    """Return the options with the smallest budgets of all ranks. RankError for other options that differ."""
    if ranks.is_alone:
        return config
    alike = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in _OWN}
    alike |= {
        "version of torch": torch.__version__,
        "whether there is an nvme folder": config.nvme is not None,
        "kind of device": torch.device(config.device).type,
    }
    check_alike(ranks, "options", alike)
    budgets = ranks.exchange("budgets", [getattr(config, name) for name in _BUDGETS])
    on_device, host, nvme, prefetch = (_least(given) for given in zip(*budgets, strict=True))
    assert on_device is not None
    assert host is not None
    return replace(config, device_memory=on_device, host_memory=host, nvme_memory=nvme, prefetch_memory=prefetch)


def _least(given: Sequence[int | None]) -> int | None:
    return min((each for each in given if each is not None), default=None)


def check_parameters(ranks: Ranks, parameters: Mapping[str, Tensor], *, with_values: bool) -> None:
    """Raise RankError if parameters, or their first values, differ between ranks."""
    if ranks.is_alone:
        return
    check_alike(
        ranks,
        "parameters",
        {
            name: f"{tuple(parameter.shape)} of {parameter.dtype}{'' if parameter.requires_grad else ', frozen'}"
            for name, parameter in parameters.items()
        },
    )
    if with_values:
        check_alike(ranks, "first values", {name: f"{_checksum(each):08x}" for name, each in parameters.items()})


def check_inputs(ranks: Ranks, graph: str, inputs: Sequence[object]) -> None:
    """Raise RankError, on every rank, unless the tensors given to a graph are the same on all ranks."""
    given = {f"input {number}": each for number, each in enumerate(inputs) if isinstance(each, Tensor)}
    check_alike(
        ranks,
        f"inputs of {graph}",
        {name: f"{tuple(each.shape)}, {_checksum(each):08x}" for name, each in given.items()},
        remedy="partition_activations=True is for tensor-parallel ranks with the same batch; give each of them the same, or "
        "leave it out",
    )


def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def agree_on_hardware(ranks: Ranks, mine: Hardware, device: Device) -> Hardware:
    """Return rates that all ranks plan with: the median of each route, and the links of devices, which are timed."""
    if ranks.is_alone:
        return mine
    link, between = _measure_links(ranks, device), _measure_replica_links(ranks, device)
    everywhere = ranks.exchange("rates of the hardware", (mine, os.uname().nodename, link, between))
    machines, nodes, links, links_between = zip(*everywhere, strict=True)
    first: Hardware = machines[0]
    routes = tuple(
        replace(
            route,
            bytes_per_second=statistics.median_low(
                {each.name: each for each in machine.routes}[route.name].bytes_per_second for machine in machines
            ),
        )
        for route in first.routes
    )
    each, in_group, between_groups = count_devices(nodes, ranks.size), min(links), min(links_between)
    # Of a node: what its devices get that use its links at the same time.
    of_node = [in_group * each] if ranks.size > 1 else []
    if ranks.num_replicas > 1:
        of_node.append(between_groups * min(ranks.size, each))
    agreed = replace(
        first,
        routes=routes,
        devices_per_node=each,
        device_link_bytes_per_second=in_group or between_groups,
        node_link_bytes_per_second=min(of_node),
        links_take_of_compute=1.0 if first.unified else 0.0,  # the CPU copies what it exchanges
    )
    return agreed.with_world(ranks.size, ranks.num_replicas)


def agree_on_observed(ranks: Ranks, mine: Observed) -> Observed:
    """Return what all ranks have measured of the same steps: the median of seconds, and what moved on any of them."""
    if ranks.is_alone:
        return mine
    everywhere = ranks.exchange("what the first steps took", mine)
    moved, busy = Counter[str](), Counter[tuple[str, ...]]()
    for each in everywhere:
        moved.update(dict(each.moved))
        busy.update(dict(each.busy))
    return Observed(
        num_steps=mine.num_steps,
        compute_seconds=statistics.median_low(each.compute_seconds for each in everywhere),
        step_seconds=statistics.median_low(each.step_seconds for each in everywhere),
        moved=tuple(RouteBytes(route, moved[route]) for route in sorted(moved)),
        busy=tuple(BusyTime(routes, busy[routes]) for routes in sorted(busy)),
    )


def count_devices(nodes: Sequence[str], num_ranks: int) -> int:
    """Return how many ranks share a node, for plans, which have as many on each and no replica spread unevenly.

    ``nodes`` are those of all ranks, in replicas of ``num_ranks``. Fewer than there are if machines are not like that.
    """
    each = math.gcd(*(len(list(run)) for _, run in itertools.groupby(nodes)))
    return math.gcd(each, num_ranks) if num_ranks % each and each % num_ranks else each


def _measure_links(ranks: Ranks, device: Device) -> float:
    """Return the bytes per second that a rank receives in an all-gather; 0 where each has all of everything."""
    if ranks.size == 1:
        return 0.0
    shard = torch.zeros(_PROBE_NBYTES // ranks.size, dtype=torch.uint8, device=device.torch_device)
    whole = device.allocate([shard.numel() * ranks.size], torch.uint8)
    seconds = _usual_seconds(ranks, device, lambda: ranks.all_gather("a timed all-gather", [shard], [whole]))
    return (whole.numel() - shard.numel()) / seconds


def _measure_replica_links(ranks: Ranks, device: Device) -> float:
    """Return the bytes per second that a rank sends in an all-reduce of a shard between replicas; 0 for one replica."""
    if ranks.num_replicas == 1:
        return 0.0
    shard = torch.zeros(_PROBE_NBYTES // ranks.size // torch.float32.itemsize, device=device.torch_device)
    seconds = _usual_seconds(ranks, device, lambda: ranks.sum_replicas("a timed all-reduce between replicas", shard))
    return 2 * shard.nbytes * (ranks.num_replicas - 1) / ranks.num_replicas / seconds


def _usual_seconds(ranks: Ranks, device: Device, start: Callable[[], Collective]) -> float:
    """Return the median seconds of a collective."""
    seconds = []
    for _ in range(_NUM_PROBES):
        began = time.perf_counter()
        ranks.wait(start())
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
