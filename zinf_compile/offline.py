"""``plan``: what a model's training step would be on some hardware, without its weights, a store, or the hardware."""

import difflib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from zinf_compile.config import Config, make_config
from zinf_compile.errors import ConfigError, UnsupportedError
from zinf_compile.facts import ParameterFact, at_sizes
from zinf_compile.hardware import Hardware, TierSize
from zinf_compile.hardware_io import load_hardware
from zinf_compile.offline_tiles import OfflineTiles
from zinf_compile.passes.analysis.parameters import analyze_parameter
from zinf_compile.passes.offline.deep import trace_deep
from zinf_compile.passes.offline.optimizer_state import StateSizes
from zinf_compile.passes.offline.trace import Inputs, Trace, TracedGraph
from zinf_compile.passes.planning.planner import Request, check_fits, make_plan
from zinf_compile.passes.planning.policies import allowed_policies
from zinf_compile.plan_verify import verify_plan
from zinf_compile.plans import Placement, Plan
from zinf_compile.runtime.accessors import refuse_optimized
from zinf_compile.runtime.machine import kernel_cache_nbytes
from zinf_compile.runtime.shadow import check_supported
from zinf_compile.simulate import simulate
from zinf_compile.simulation.several_graphs import share_updates
from zinf_compile.terms import Tier, format_bytes
from zinf_compile.this_machine import look_at_machine
from zinf_compile.tile_search import check_tiles
from zinf_compile.tiles import join_placements

MakeOptimizer = Callable[[Iterable[Parameter]], Optimizer]

_BUDGETS = {Tier.DEVICE: "device_memory", Tier.HOST: "host_memory", Tier.NVME: "nvme_memory"}
# Options of ``optimize`` that say nothing about a plan: the folder on this machine, and how it runs.
_NOT_PLANNED = frozenset({"nvme", "compute", "remake_plan", "capture"})


def plan(
    model: Module,
    inputs: object,
    *,
    hardware: Hardware | str | Path | None = None,
    nvme: str | Path | None = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    loss: Callable[[Any], Tensor] | None = None,
    train: bool = True,
    dynamic: bool = False,
    world: int = 1,
    **options: object,
) -> Plan:
    """Return the plan of one call of ``model`` on ``hardware``, and of the backward and the optimizer step after it.

    Nothing of the model is allocated, read or written: it is captured with fake tensors, so it may be of any size, on
    meta, or have values, which are not looked at; it stays as it is. What is captured is what ``optimize`` would capture
    with ``compute="aten"``: ops one by one.

    ``inputs`` is what the model is called with: a tensor, a tuple, or a dict of keyword arguments; of its tensors only
    shapes and dtypes matter. ``hardware`` is a Hardware, the name of a preset such as "h200", or a file. Without it, this
    machine is planned for, with the disk of the folder ``nvme``, or of the current one: at the rates that ``zinf doctor``
    has kept, or that are measured now, for some seconds; with the memory and disk space that are free now.

    Options:
        device_memory, host_memory, nvme_memory: budgets in bytes or as "8GiB"; by default what one device of the hardware
            has of each.
        optimizer: a class of torch.optim, or a function that takes parameters and returns an optimizer: its state is
            counted as it would keep it.
        loss: a function of what the model returns, planned as part of the forward. Without one backward begins at what
            the model returns.
        train: False to plan a forward alone, of the model in eval mode, without gradients.
        dynamic: True to let batch and sequence, the first two dimensions of the inputs, be symbols, so that the plan can be
            asked about others: ``plan.what_if(batch=8)``, ``plan.max_batch()``. Capture takes longer.
        world: how many ranks train the model together, one on each device of as many nodes as they fill. Inputs and
            budgets are of one rank, which keeps its shard of parameters, gradients and optimizer state (ZeRO-3). Planning
            only: nothing runs on several ranks yet.
        compute_dtype, reserve_memory, prefetch_memory, tile_memory, tiles, recompute, overlap_step, step_in_backward: as in
            ``optimize``.

    A model that is captured as several graphs has the plan of the one whose backward gives the most gradients; the plan's
    notes say what the others need.

    Raises ConfigError for arguments that cannot be used or contradict each other, UnsupportedError for a model that
    cannot be captured, and CapacityError, with the smallest budget that works, for one that does not fit.
    """
    if not isinstance(model, Module):
        raise ConfigError(f"plan takes a torch.nn.Module, not {type(model).__name__}")
    refuse_optimized(model)
    kernel_cache = kernel_cache_nbytes() if hardware is None else 0  # of the CPU
    hardware = _find_hardware(hardware, nvme, options).with_world(world)
    config = _make_config(options, hardware)
    name = type(model).__name__
    called = replace(_make_inputs(inputs), loss=loss)
    policies = allowed_policies(config.recompute if train else False)
    parameters = _parameter_facts(model, config, optimizer if train else None)
    named = dict(model.named_parameters())
    check_tiles(config, named)
    tiles = OfflineTiles(
        config, {fact.name: fact for fact in parameters}, {name: each.shape for name, each in named.items()}
    )

    def request(
        graph: TracedGraph, placements: tuple[Placement, ...] | None, facts: Sequence[ParameterFact] = parameters
    ) -> Request:
        tiled = tiles.tiled_in(graph)
        return Request(
            name=graph.candidates[0].name,
            candidates=tuple(at_sizes(candidate) for candidate in graph.candidates),
            captured=graph.candidates,
            parameters=tiled.cut_facts(facts),
            config=config,
            hardware=hardware,
            num_ranks=world,
            placements=None if placements is None else tiled.cut_placements(join_placements(placements)),
            kernel_cache_nbytes=kernel_cache,
        )

    def look_at_short(graph: TracedGraph) -> None:
        wholes = tiles.tiled_in(graph)
        read = {wholes.whole_name(use.parameter) for use in graph.candidates[0].uses}
        facts = [fact for fact in parameters if fact.name in read]
        tiles.refuse_early(lambda: check_fits(request(graph, None, facts)))

    def attempt() -> Plan:
        trace = trace_deep(
            model,
            called,
            name=name,
            compute_dtype=config.compute_dtype,
            policies=policies,
            hardware=hardware,
            train=train,
            dynamic=dynamic,
            tile=tiles.apply,
            look_at_short=look_at_short,
        )
        _check_result(trace, name, train=train, has_loss=loss is not None)
        return _plan_all(replace(trace, notes=(*trace.notes, *tiles.notes)), request)

    with _collector_paused():
        return tiles.fit(attempt)


def _find_hardware(
    hardware: Hardware | str | Path | None, nvme: str | Path | None, options: Mapping[str, object]
) -> Hardware:
    if hardware is None:
        return _this_machine(Path() if nvme is None else Path(nvme), options)
    if nvme is not None:
        raise ConfigError(
            f"nvme={str(nvme)!r} is a folder of this machine, and hardware says to plan for another; leave out one of them"
        )
    return hardware if isinstance(hardware, Hardware) else load_hardware(hardware)


def _this_machine(nvme: Path, options: Mapping[str, object]) -> Hardware:
    """Return this machine, its memory divided between device and host as ``optimize`` does it."""
    with torch.device("cpu"):  # whatever device the caller builds models on
        found = look_at_machine(nvme)
    config = make_config({name: options.get(name) for name in ("device_memory", "host_memory")})
    sizes = {Tier.DEVICE: config.device_memory, Tier.HOST: config.host_memory}
    if any(Tier.NVME in route.name.split() for route in found.hardware.routes):
        sizes[Tier.NVME] = found.machine.free_disk_nbytes
    return replace(found.hardware, tiers=tuple(TierSize(tier=tier, nbytes=nbytes) for tier, nbytes in sizes.items()))


def _make_inputs(inputs: object) -> Inputs:
    if isinstance(inputs, Tensor):
        return Inputs(args=(inputs,))
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        return Inputs(kwargs=dict(inputs))
    if isinstance(inputs, tuple | list):
        return Inputs(args=tuple(inputs))
    raise ConfigError(
        f"inputs is {_describe(inputs)}; give what the model is called with: a tensor, a tuple of arguments, or a dict of "
        "keyword arguments"
    )


def _make_config(options: Mapping[str, object], hardware: Hardware) -> Config:
    """Return the config of ``options`` with the hardware's own sizes for budgets that are not stated.

    Raises ConfigError for options that contradict the hardware or each other, with both numbers.
    """
    known = {field.name for field in fields(Config)} - _NOT_PLANNED
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown option {name!r} of plan; {hint}")
    sizes = {tier.tier: tier.nbytes for tier in hardware.tiers}
    budgets = {name: sizes[tier] for tier, name in _BUDGETS.items() if tier in sizes}
    given = {name: option for name, option in options.items() if option is not None}
    config = make_config({"device_memory": 0, "host_memory": 0, **budgets, **given})
    stated = {tier: getattr(config, name) for tier, name in _BUDGETS.items() if name in given}
    if Tier.DEVICE not in sizes and Tier.DEVICE not in stated:
        raise ConfigError(f"{hardware.name} does not say how much memory a device has; give device_memory")
    for tier, nbytes in stated.items():
        if hardware.tiers and nbytes > sizes.get(tier, 0):
            has = f"has {format_bytes(sizes[tier])}" if tier in sizes else f"has no {tier} tier"
            raise ConfigError(
                f"{_BUDGETS[tier]} is {format_bytes(nbytes)}, and one device of {hardware.name} {has}; lower "
                f"{_BUDGETS[tier]}, or name other hardware"
            )
    for name in ("reserve_memory", "prefetch_memory"):
        nbytes = getattr(config, name) or 0
        if nbytes >= max(1, config.device_memory):
            raise ConfigError(
                f"{name} is {format_bytes(nbytes)}, and device_memory, which it is a share of, is "
                f"{format_bytes(config.device_memory)}; lower {name}"
            )
    has_nvme = config.nvme_memory is not None and config.nvme_memory > 0
    return replace(config, nvme=f"the disk of {hardware.name}" if has_nvme else None)


def _parameter_facts(model: Module, config: Config, make_optimizer: MakeOptimizer | None) -> tuple[ParameterFact, ...]:
    sizes = StateSizes(make_optimizer, check=check_supported) if make_optimizer is not None else None
    return tuple(
        analyze_parameter(
            name,
            parameter,
            compute_dtype=config.compute_dtype,
            state_nbytes=sizes.nbytes(parameter) if sizes is not None and parameter.requires_grad else 0,
            is_apart=config.is_apart,
        )
        for name, parameter in model.named_parameters()
    )


def _check_result(trace: Trace, name: str, *, train: bool, has_loss: bool) -> None:
    """Raise unless there is something to plan."""
    if trace.stopped_by is not None:
        if train and not any(graph.candidates[0].gradients for graph in trace.graphs):
            raise UnsupportedError(
                f"{name} cannot be planned: before any parameter is read that is trained, its shapes or branches depend on "
                f"values, which planning does not have ({trace.stopped_by}); make them depend on shapes alone"
            )
        return
    if has_loss and not (isinstance(trace.result, Tensor) and trace.result.numel() == 1):
        raise ConfigError(f"loss returned {_describe(trace.result)}; it has to return a tensor of one element")
    leaves = [leaf for leaf in pytree.tree_leaves(trace.result) if isinstance(leaf, Tensor)]
    if train and not any(leaf.requires_grad for leaf in leaves):
        raise UnsupportedError(
            f"{name} returns {_describe(trace.result)}, of which nothing depends on a parameter that requires grad, so "
            "there is no training step to plan; say train=False to plan its forward"
        )


def _describe(result: object) -> str:
    if isinstance(result, Tensor):
        return f"a tensor {str(result.dtype).removeprefix('torch.')}{list(result.shape)}"
    return f"{'an' if type(result).__name__[0] in 'aeiouAEIOU' else 'a'} {type(result).__name__}"


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's collector from looking through millions of facts again and again, of which none is in a cycle.

    That is a third of the time that planning a deep model takes. Captures leave cycles, tens of MB each: who makes several
    collects in between.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan_all(trace: Trace, request: Callable[[TracedGraph, tuple[Placement, ...] | None], Request]) -> Plan:
    """Return the plan of the main graph, with notes about the others, which keep the homes that it chooses."""
    main = max(trace.graphs, key=lambda graph: (len(graph.candidates[0].gradients), len(graph.candidates[0].uses)))

    def plan_one(graph: TracedGraph, placements: tuple[Placement, ...] | None) -> Plan:
        made = make_plan(request(graph, placements))
        verify_plan(made)
        return made

    first = plan_one(main, None)
    notes = [*trace.notes]
    if main.ended_by is not None:
        notes.append(f"{first.name} ends early, at {main.ended_by}.")
    others = [graph for graph in trace.graphs if graph is not main]
    plans = [first, *(plan_one(graph, first.placements) for graph in others)]
    for graph, plan in zip(others, share_updates(plans)[1:], strict=True):
        ended = f"; it ends at {graph.ended_by}" if graph.ended_by is not None else ""
        notes.append(
            f"{plan.name} is planned by itself: {plan.tier(Tier.DEVICE).predicted_peak:,} bytes on device, "
            f"{simulate(plan).step_seconds:.3g} s{ended}."
        )
    if trace.stopped_by is not None:
        notes.append(f"What follows could not be planned, since it depends on values: {trace.stopped_by}.")
    return replace(first, notes=(*first.notes, *notes))
