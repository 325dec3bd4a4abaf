"""``plan``: plan a model's training step on some hardware, without its weights, a store, or the hardware."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from zinf_compile.driver.offline import OfflinePlanner, Subject, describe
from zinf_compile.driver.offline_rounds import check_world, plan_in_rounds
from zinf_compile.driver.offline_stages import Share, make_mesh, plan_stages
from zinf_compile.driver.paper_catalog import PaperCatalog
from zinf_compile.driver.rounds import deal_parameters
from zinf_compile.driver.segmented import describe_missing_compiler
from zinf_compile.driver.this_machine import look_at_machine
from zinf_compile.driver.tile_search import check_tiles
from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.hardware.rates import assume_coded_states
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.config import OPTIONS, Config, make_config
from zinf_compile.ir.errors import ConfigError, UnsupportedError
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.glossary import Tier, format_bytes
from zinf_compile.ir.hardware import Hardware, TierSize
from zinf_compile.passes.analysis.parameters import analyze_parameter, find_linear_weights
from zinf_compile.passes.capture.offline.optimizer_state import StatesOfOptimizer
from zinf_compile.passes.capture.offline.shards import count_tokens
from zinf_compile.passes.capture.offline.trace import Inputs, RankInRounds
from zinf_compile.runtime.calibration.calibrate import with_coded_states, with_rows
from zinf_compile.runtime.calibration.machine import kernel_cache_nbytes
from zinf_compile.runtime.model.accessors import refuse_optimized
from zinf_compile.runtime.model.quantised import has_own_bytes
from zinf_compile.runtime.optim.block_wise import is_block_wise
from zinf_compile.runtime.optim.supported import check_supported
from zinf_compile.runtime.process.call_stack import with_room_for_calls

MakeOptimizer = Callable[[Iterable[Parameter]], Optimizer]

_BUDGETS = {Tier.DEVICE: "device_memory", Tier.HOST: "host_memory", Tier.NVME: "nvme_memory"}
# Options of ``optimize`` that do not affect a plan: the folder on this machine, and how the plan runs.
_NOT_PLANNED = frozenset({"nvme", "device", "remake_plan", "verify_store", "capture"})


@with_room_for_calls
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
    replicas: int = 1,
    tp: int = 1,
    pp: int = 1,
    accumulate: int | None = None,
    tp_plan: Mapping[str, str] | None = None,
    **options: object,
) -> PlanView:
    """Return the plan of one call of ``model`` on ``hardware``, with its backward and optimizer step.

    The model is captured with fake tensors: it may have any size and be on meta, and nothing of it is allocated, read
    or changed. Graphs are captured and planned as ``optimize`` would do it, which counts AdamW's state whatever the
    optimizer is.

    ``inputs`` is what the model is called with: a tensor, a tuple, or a dict of keyword arguments. Only shapes and
    dtypes of its tensors matter. ``hardware`` is a Hardware, the name of a preset such as "h200", or a file. By default
    it is this machine, with its free memory and with the free space of the disk of the folder ``nvme``, or of the
    current folder. Its rates are those that ``zinf doctor`` has stored; otherwise they are measured now, for some
    seconds.

    Options:
        device_memory, host_memory, nvme_memory: budgets in bytes or as "8GiB". By default what one device of the
            hardware has of each.
        optimizer: a class of torch.optim, or a function that takes parameters and returns an optimizer. The plan counts
            the state that it would keep.
        loss: a function of the model's output, planned as part of the forward. Without one, backward starts at the
            model's output.
        train: False to plan inference only, of the model in eval mode, without gradients.
        dynamic: True makes batch and sequence, the first two dimensions of the inputs, symbolic, so that the plan can
            answer for other sizes: ``plan.what_if(batch=8)``, ``plan.max_batch()``. Capture takes longer.
        world: number of ranks that train the model together, one per device, on as many nodes as needed. Inputs and
            budgets are those of one rank, which keeps its shard of parameters, gradients and optimizer state (ZeRO-3).
            ``optimize`` runs such plans on CPUs.
        replicas: number of groups of ``world / replicas`` ranks, as in a mesh of (replicate, shard). Each group keeps
            the whole model, in shards, and they add up their gradients.
        tp: number of tensor-parallel ranks, in one node, that divide the weights of each layer among them.
        pp: number of pipeline stages. The other ``world / (tp * pp)`` ranks are data-parallel: ``replicas`` of them divide
            parameters, gradients and optimizer state. ``plan.pipeline`` has the step of all stages; the plan is that of one
            micro-batch on the slowest stage.
        accumulate: micro-batches of a step, of all data-parallel ranks together; ``inputs`` are one of them. By default
            each such rank has one for every stage.
        tp_plan: which layers ``tp`` divides, and how: ``{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}``, and
            "vocabulary" for embeddings and heads. By default the model's own, as those of transformers have.
        schedule: "rounds" plans ranks of one node that have stages of the model, and compute them for the batches of all,
            as ``optimize(schedule="rounds")`` does. The plan is that of the rank that takes the longest, and
            ``plan.pipeline`` has the step of all.
        compute: as in ``optimize``: "inductor", the default, plans each block as one compiled op, "aten" op by op.
            Nothing is compiled: a block is assumed to take the traffic of its inputs and results, and the
            arithmetic of its matrix products.
        compute_dtype, state_dtype, exact_state, nvme_write_budget, reserve_memory, prefetch_memory, tile_memory, tiles,
            micro_batches, recompute, overlap_step, speculate, step_in_backward: as in ``optimize``.

    If the model is captured as several graphs, returns the plan of the graph whose backward computes the most
    gradients. The plan's notes say what the other graphs need.

    Raises ConfigError for arguments that cannot be used or contradict each other, UnsupportedError for a model that
    cannot be captured, and CapacityError, with the smallest budget that works, for one that does not fit.
    """
    if not isinstance(model, Module):
        raise ConfigError(f"plan takes a torch.nn.Module, not {type(model).__name__}")
    refuse_optimized(model)
    is_here = hardware is None
    kernel_cache = kernel_cache_nbytes() if is_here else 0  # of CPU kernels
    mesh = make_mesh(world, replicas, tp, pp, accumulate)
    num_ranks = mesh.num_ranks
    hardware = mesh.place_on(_find_hardware(hardware, nvme, options))
    config = _make_config(options, hardware)
    if config.schedule == "rounds":
        refused = {f"replicas={replicas}": replicas > 1, f"tp={tp}": tp > 1, f"pp={pp}": pp > 1}
        check_world(world, hardware, config, {**refused, "accumulate": accumulate is not None, "dynamic": dynamic})
    elif not mesh.is_of_data:
        _refuse_names(config, dynamic=dynamic)
    if tp > 1 and (coded := [name for name in ("state_dtype", "frozen_dtype") if getattr(config, name) is not None]):
        raise ConfigError(
            f"{coded[0]} encodes whole rows, and with tp={tp} a rank has parts of those, which optimize refuses; leave one "
            "of them out"
        )
    if config.state_dtype is not None:
        update = with_coded_states if is_here else assume_coded_states
        hardware = update(hardware, config.state_dtype)
    if config.frozen_dtype is not None and is_here:
        hardware = with_rows(hardware)
    called = replace(make_inputs(inputs), loss=loss)
    named = dict(model.named_parameters())
    check_tiles(config, named, 1 if config.schedule == "rounds" else num_ranks)
    config.check_exact(named)
    op_by_op = describe_missing_compiler() if is_here and config.compute == "inductor" else None
    subject = Subject(model=model, name=type(model).__name__, inputs=called, train=train, dynamic=dynamic)

    def plan_share(share: Share) -> PlanView:
        parameters = _parameter_facts(share.subject.model, config, optimizer if train else None)
        return OfflinePlanner(
            share.subject,
            PaperCatalog(config, parameters, num_ranks),
            hardware,
            num_ranks=num_ranks,
            num_replicas=replicas,
            num_tensor_ranks=tp,
            num_open=share.num_open,
            open_nbytes=share.open_nbytes,
            keeps_unread=pp == 1,
            kernel_cache_nbytes=kernel_cache,
            op_by_op=op_by_op,
        ).plan()

    def plan_rank(in_rounds: RankInRounds) -> PlanView:
        facts = _parameter_facts(model, config, optimizer if train else None)
        mine = tuple(fact for fact in facts if in_rounds.owners[fact.name] == in_rounds.rank)
        return OfflinePlanner(
            subject,
            PaperCatalog(config, mine, 1),
            hardware,
            num_ranks=1,
            num_replicas=1,
            kernel_cache_nbytes=kernel_cache,
            op_by_op=op_by_op,
            in_rounds=in_rounds,
        ).plan()

    if config.schedule == "rounds":
        deal = deal_parameters(named, world)
        return plan_in_rounds(model, deal, num_tokens=count_tokens(called), plan_rank=plan_rank)
    if mesh.is_of_data:
        return plan_share(Share(subject=subject, num_open=0, open_nbytes=0))
    return plan_stages(
        subject,
        mesh,
        tp_plan,
        hardware,
        zero_stage=config.stage,
        compute_dtype=config.compute_dtype,
        plan_share=plan_share,
    )


def _refuse_names(config: Config, *, dynamic: bool) -> None:
    """Raise ConfigError for options that name parameters of a whole model, or ask about other sizes."""
    refused = {
        "tiles": bool(config.tiles),
        "exact_state": bool(config.exact_state),
        "exact_frozen": bool(config.exact_frozen),
        "dynamic": dynamic,
    }
    if given := [name for name, is_given in refused.items() if is_given]:
        raise ConfigError(
            f"{given[0]} cannot be given with tp, pp or accumulate, which are planned for a part of the model and for given "
            "sizes; leave it out"
        )


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
    """Return this machine, with its memory divided between device and host as ``optimize`` divides it."""
    with torch.device("cpu"):  # regardless of the caller's default device
        found = look_at_machine(nvme)
    config = make_config({name: options.get(name) for name in ("device_memory", "host_memory")})
    sizes = {Tier.DEVICE: config.device_memory, Tier.HOST: config.host_memory}
    if any(Tier.NVME in route.name.split() for route in found.hardware.routes):
        sizes[Tier.NVME] = found.machine.free_disk_nbytes
    return replace(found.hardware, tiers=tuple(TierSize(tier=tier, nbytes=nbytes) for tier, nbytes in sizes.items()))


def make_inputs(inputs: object) -> Inputs:
    """Return how a model is called with a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(inputs, Tensor):
        return Inputs(args=(inputs,))
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        return Inputs(kwargs=dict(inputs))
    if isinstance(inputs, tuple | list):
        return Inputs(args=tuple(inputs))
    raise ConfigError(
        f"inputs is {describe(inputs)}; give what the model is called with: a tensor, a tuple of arguments, or a dict of "
        "keyword arguments"
    )


def _make_config(options: Mapping[str, object], hardware: Hardware) -> Config:
    """Return the config of ``options``, with the sizes of the hardware as budgets that are not given.

    Raises ConfigError for options that contradict the hardware or each other, with both numbers.
    """
    known = OPTIONS - _NOT_PLANNED
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown option {name!r} of plan; {hint}")
    sizes = {tier.tier: tier.nbytes for tier in hardware.tiers}
    budgets = {name: sizes[tier] for tier, name in _BUDGETS.items() if tier in sizes}
    given = {name: option for name, option in options.items() if option is not None}
    config = make_config({"device_memory": 0, "host_memory": 0, **budgets, **given}, memory=hardware.memory)
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


def _check_plannable(optimizer: Optimizer) -> None:
    """Raise UnsupportedError for an optimizer whose state is not found by a step on a small parameter."""
    check_supported(optimizer)
    if is_block_wise(optimizer):
        raise UnsupportedError(
            f"plan(optimizer=...) does not count the codes in which torchao's {type(optimizer).__name__} keeps its state, "
            "since that of small parameters is exact; plan with torch.optim.AdamW and state_dtype='int8', whose state takes "
            "about as many bytes as that of AdamW8bit"
        )


def _parameter_facts(model: Module, config: Config, make_optimizer: MakeOptimizer | None) -> tuple[ParameterFact, ...]:
    linear = find_linear_weights(model) if config.frozen_dtype is not None else frozenset()
    states = StatesOfOptimizer(make_optimizer, check=_check_plannable) if make_optimizer is not None else None
    return tuple(
        analyze_parameter(
            name,
            parameter,
            compute_dtype=config.compute_dtype,
            states=states.of(parameter) if states is not None and parameter.requires_grad else (),
            state_code=config.state_code_of(name),
            is_encoded=parameter in linear and not has_own_bytes(parameter) and config.encodes_frozen(name),
            memory=config.memory,
        )
        for name, parameter in model.named_parameters()
    )
