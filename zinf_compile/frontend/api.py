"""What users call: ``optimize`` a model, ask for its ``report``, ``close`` it."""

import logging
import os
import statistics
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import trace_rules
from torch._dynamo.external_utils import wrap_inline
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter

from zinf_compile.driver.rounds import Rounds, check_rounds
from zinf_compile.driver.session import Session, check_devices, session_of_store
from zinf_compile.driver.tile_search import check_tiles
from zinf_compile.inspect.recordings import Recording
from zinf_compile.inspect.reports import (
    AheadReport,
    AllocatorReport,
    PhaseReport,
    ProcessReport,
    RankReport,
    Report,
    RouteReport,
    StallReport,
    StepReport,
    TierReport,
    sum_runs,
)
from zinf_compile.ir.config import Config, make_config
from zinf_compile.ir.errors import CapacityError, ConfigError, UnsupportedError
from zinf_compile.ir.glossary import Phase, Tier, format_bytes, printable
from zinf_compile.ir.hardware import route_name
from zinf_compile.passes.analysis.parameters import find_linear_weights
from zinf_compile.passes.planner.simulator.several_graphs import phases_of_step, share_updates
from zinf_compile.passes.planner.simulator.simulate import simulate
from zinf_compile.runtime.device.make_device import find_device
from zinf_compile.runtime.model.accessors import (
    Forward,
    install_accessors,
    move_buffers,
    refuse_optimized,
    with_own_code,
)
from zinf_compile.runtime.model.full_parameters import Site, check_room, hold_full_values
from zinf_compile.runtime.model.peft_layers import refuse_replacing_layers
from zinf_compile.runtime.model.quantised import check_in_place, describe_own, find_quantised
from zinf_compile.runtime.model.tensor_parallel import (
    check_distributed,
    check_meshes,
    find_data_ranks,
    find_distributed,
    may_capture,
    refuse_distributed,
    refuse_fully_sharded,
    with_locals,
)
from zinf_compile.runtime.observe.recorder import Recorder
from zinf_compile.runtime.optim.updates_ahead import UpdatesAhead
from zinf_compile.runtime.params.records import owner_of, record_of, replacement_of
from zinf_compile.runtime.params.remote import refuse_remote
from zinf_compile.runtime.ranks.agreement import agree_on_config, check_parameters
from zinf_compile.runtime.ranks.find_ranks import check_for_ranks, folder_of_rank, refuse_shared_devices
from zinf_compile.runtime.ranks.ranks import ALONE, Ranks
from zinf_compile.runtime.store.store import Store, store_of
from zinf_compile.weights.file_values import FileValues
from zinf_compile.weights.initialize import Init, Values, choose_values, undo


def optimize(
    model: Module,
    *,
    init: Init = None,
    share: Module | None = None,
    mesh: DeviceMesh | None = None,
    **options: object,
) -> Module:
    """Make ``model`` train within memory budgets, by offloading its parameters, gradients and optimizer state.

    Changes the model in place and returns it. The training loop does not change.

    A model built under ``torch.device("meta")`` has no values, and never needs memory for all of them at once: ``init``
    says where they come from. "reset" runs the initialisation of its modules. A safetensors file, a folder with an
    index, or a list of files is streamed in. For a model that already has values, the files overwrite them.

    Quantised parameters, of bitsandbytes or as tensor subclasses, are moved as they are: their codes, scales and statistics
    are stored like frozen parameters. What of them is small stays on the device and counts against its budget. On meta
    they can be filled from the files that bitsandbytes has saved, where they then stay.

    ``share`` is a model that was optimized before: both models use its options and budgets. Names of the new model's
    parameters are prefixed with its class. Reports cover both models, and closing one closes both.

    With an initialised process group of torch.distributed of more than one rank, all its ranks train the model together
    (ZeRO stage 3): each keeps its rows of every parameter, gradient and optimizer state. ``mesh`` is a DeviceMesh of other
    ranks. One of two dimensions, (replicate, shard), divides everything over the second and replicates it over the
    first, as FSDP2's HSDP. Registered parameters are then DTensors: create the optimizer after ``optimize``.

    Of parameters that are DTensors, as after ``parallelize_module``, each rank stores its local tensors. ``mesh`` is then
    the dimension along which these are the same. Such a model runs eagerly if its graph breaks.

    Options, all with defaults:
        device: where compute runs: "cpu", "cuda" or "cuda:1". By default the GPU that the model is on, else the CPU.
            Inputs must be on it. Registered parameters and gradients are in host memory or on disk, and so is optimizer
            state that does not fit on a GPU.
        device_memory, host_memory: budgets in bytes or as "8GiB". By default they share the free memory.
        nvme: folder on a local disk for what fits in neither budget. By default there is no nvme tier.
        nvme_memory: budget on that disk. By default its free space.
        nvme_write_budget: what training may write to that disk, such as "2TB/day". Plans that would write more, in a day
            of nothing but simulated steps, are not chosen. By default there is no limit.
        compute_dtype: dtype of forward and backward, such as torch.bfloat16. The optimizer updates parameters in their
            own dtype. By default the parameters' own.
        state_dtype: how the float32 state of optimizers that update element by element is stored: "int8" in blocks of 256
            elements with a scale each (the dynamic data type of arXiv 2110.02861), 1.07 bytes an element; or "bfloat16",
            rounded stochastically. Each chunk is decoded, updated by the optimizer in float32, and encoded again. State
            of parameters with less than 4096 elements stays exact. Each of several ranks encodes its rows. By default all
            is exact.
        exact_state: parameters whose state is exact beside ``state_dtype``: a name or a pattern such as "*embed*", or a list
            of these.
        frozen_dtype: "int8" stores frozen weights of ``nn.Linear`` as rows of int8 with a scale each, outliers in bfloat16
            (after LLM.int8(), arXiv 2208.07339), about 1.03 bytes an element. They are decoded where they arrive: by a
            kernel on a GPU. Weights with less than 4096 elements, and those that another module has too, stay exact. Each
            of several ranks encodes the rows that it has. By default all are exact.
        exact_frozen: parameters that are exact beside ``frozen_dtype``: a name or a pattern such as "*lm_head*", or a list
            of these.
        compute: "inductor", the default, compiles each block, and identical blocks only once. This takes some seconds
            in the first call, and results agree with eager PyTorch to rounding. Without a C++ compiler, or if it does
            not fit, graphs run op by op. "aten" always runs op by op, bitwise equal to eager PyTorch.
        reserve_memory: share of device_memory for Python and its captured graphs. "auto", the default, measures it on a
            CPU: the process then takes at most device_memory and host_memory more than before ``optimize``. It reserves
            nothing on a GPU, with capture=False, or if both budgets together are below 256 MiB. With 0, the budgets
            cover the model only.
        prefetch_memory: limit on the bytes of transfers ahead of compute. By default the planner chooses.
        tile_memory: parameters larger than this are gathered in tiles, which are consecutive rows; with several ranks,
            such rows of each. Unless they are resident, neither they nor their gradients are ever whole on the device.
            By default parameters are tiled only if the model does not fit otherwise, in as few tiles as possible.
            Results agree to rounding.
        tiles: number of tiles of some parameters, by name; 1 to always gather a parameter whole. False for bitwise
            results: nothing is tiled and no loss is fused with its layer, even if the model does not fit otherwise.
        micro_batches: each block, an entry of a ModuleList or Sequential, computes so many micro-batches one after
            another, and gathers its weights once for all. What is between its ops then exists for one of them at a time.
            By default as few as it takes to fit, mostly 1, which never cuts a batch. Results agree to rounding; random
            ops draw other numbers.
        recompute: True to recompute every block's activations in backward, False to recompute none. By default whatever
            is fastest.
        partition_activations: of a model that ``parallelize_module`` has divided: if activations leave the device that all
            tensor-parallel ranks have alike, each rank saves a part of them, and backward gathers the parts (ZeRO-R's Pa).
            By default these are what the model's all-reduces and all-gathers give, and what is computed from that alone.
            True counts on equal inputs, which the first call of each graph checks, and on equal parameters that are not
            distributed, which ``optimize`` checks: then inputs of blocks are among them. False divides none.
        overlap_step: False makes ``optimizer.step()`` return when all updates are finished. By default updates run in
            the background, in the order in which the next forward gathers, and reading a parameter waits for its
            update.
        speculate: False lets no update begin before ``optimizer.step()``. By default ("auto") updates of what is on nvme,
            or beside a GPU in host memory, begin in backward, as soon as a gradient is complete, where the planner finds
            the step shorter. They are written beside the old values, and the step takes them if nothing has changed by
            then: no gradient, no option of the optimizer. Otherwise they are made again; results are the same. True
            lets them begin wherever possible, and raises where there is no room for that, or the optimizer does not
            update element by element.
        step_in_backward: True updates a parameter as soon as its gradient is complete. The gradient is never stored,
            and ``optimizer.step()`` only ends the step. Anything that needs all gradients, such as clipping by norm,
            GradScaler and accumulation, is refused. The first step is an ordinary one, which shows what the optimizer
            is.
        update_on: for a GPU: "device" updates offloaded parameters on the GPU, in chunks that are copied to it and
            back. "host" updates them on the CPU. By default the GPU, bitwise like PyTorch there. With
            compute="inductor" both, split so that they finish together.
        gather_by_expert: True gathers of fused expert weights only the experts that tokens are routed to, as soon as that
            is known, wherever a graph reads no others; False gathers them whole, ahead of compute. By default whichever
            makes the simulated step shorter. Results are the same.
        remake_plan: False keeps the plans made before the first step. By default measured times replace estimates, and
            a plan that is faster by the measured times is adopted between steps, once per captured graph.
        verify_store: True keeps a checksum of everything written to nvme and checks everything read from it. A
            StoreError names the bytes that a disk changed or lost. Takes about 0.2 s of one core per GB moved, and
            needs the package xxhash.
        capture: False runs the model's own forward eagerly, gathering parameters when they are used.
        stage: of ZeRO. 3, the default, divides parameters, gradients and optimizer state among ranks. 2 keeps the copies
            that compute reads whole on the device of every rank. 1 also keeps gradients there, and reduces them once per
            step.
        schedule: "rounds" deals the stages of the model out to the ranks of one machine, in turn: each rank stores,
            computes and updates its own, for the batches of all ranks. So a weight goes to one device only, once per pass.
            Registered parameters of other ranks are then ``RemoteParameter`` on meta. By default ZeRO's ``stage``.
        reduce: on several ranks, "ordered", the default, adds gradients in the order of ranks: the same bits every time,
            and those of one process that accumulates the ranks' batches. "fast" leaves the order to torch.distributed.
        gradient_divide_factor: what the sum of gradients over ranks is divided by. By default the number of ranks.

    Raises ConfigError for invalid options, UnsupportedError for a model that this version cannot handle, and
    CapacityError, before anything has moved, for budgets in which no graph of the model could run. Activations are
    known only when the model is called: if they do not fit, its first call raises CapacityError.
    """
    if not isinstance(model, Module):
        raise ConfigError(f"optimize takes a torch.nn.Module, not {type(model).__name__}")
    refuse_optimized(model)
    if share is not None and (options or init is not None):
        given = ", ".join([*options, *(["init"] if init is not None else [])])
        raise ConfigError(f"a model that shares the budgets of another has its options; leave out share, or {given}")
    shared = None if share is None else _session_of(share)
    parameters = dict(model.named_parameters())
    if options.get("device") is None and (found := _own_device(parameters)) is not None:
        options["device"] = found
    if distributed := find_distributed(parameters):
        refuse_fully_sharded(model)
    ranks = find_data_ranks(mesh, distributed) if shared is None else shared.store.ranks
    if shared is None:
        options["nvme"] = folder_of_rank(options.get("nvme"), ranks)
        with ranks.alike_beside("reading options"):
            config = make_config(options, find_device=find_device)
        config = agree_on_config(ranks, config)
        for each in ranks.beside:
            config = agree_on_config(each, config)
            if config.partition_activations:
                plain = {name: one for name, one in parameters.items() if name not in distributed and not one.is_meta}
                check_parameters(each, plain, with_values=True)
        if not ranks.is_alone and config.schedule is None:
            config = check_for_ranks(config, parameters)
    else:
        if shared.rounds is not None:
            raise UnsupportedError(
                "a model with schedule='rounds' cannot share its budgets with another one in this version; optimize the "
                "second one by itself, with budgets of its own"
            )
        check_meshes(ranks.mesh, distributed)
        config = shared.config
    rounds: Rounds | None = None
    if config.schedule == "rounds":
        check_rounds(config, ranks, has_init=init is not None, is_distributed=bool(distributed))
        check_parameters(ranks, parameters, with_values=True)
        check_tiles(config, parameters, 1)
        config.check_exact(parameters)
        rounds = Rounds(model, parameters, ranks, config.gradient_divide_factor)
        parameters, ranks, config = rounds.mine, ALONE, rounds.options_of_rank(config)
    check_distributed(distributed, config, has_init=init is not None)
    refuse_replacing_layers(model, capture=config.capture)
    if distributed:  # their gradients are DTensors, which do not count what is written to them
        config = replace(config, speculate=False)
    eagerly = config.capture and not may_capture(ranks, distributed)
    if eagerly:
        config = replace(config, capture=False)
    for name, parameter in parameters.items():
        if (record := record_of(parameter)) is not None:
            raise ConfigError(f"parameter '{name}' is already in the store of another model, as '{record.name}'")
    check_devices(parameters, config.device, may_be_meta=True)
    parameters = with_locals(parameters, distributed)
    may_store = _can_store_components(config, ranks)
    on_meta = [parameter for parameter in parameters.values() if parameter.is_meta]
    values: Values | None = None
    session: Session | None = None
    replaced: list[tuple[Module, str, Parameter]] = []
    try:
        with (ranks if rounds is None else rounds.ranks).alike_beside("placing parameters"):
            values = choose_values(model, init)
            if isinstance(values, FileValues) and values.quantised:
                _check_may_store(values.quantised[0].parameter, may_store=may_store)
                with torch.device("cpu"):  # regardless of the caller's default device
                    values.show_quantised()
            quantised = find_quantised(model, may_store=may_store, but=distributed)
            if quantised.parameters:
                if rounds is not None:
                    raise UnsupportedError(
                        "schedule='rounds' does not go with quantised weights in this version; leave it out, which shards "
                        "what is trained (ZeRO stage 3)"
                    )
                _check_quantised(quantised.parameters, share)
                parameters = {
                    name: parameter
                    for whole, own in parameters.items()
                    for name, parameter in quantised.components.get(whole, {whole: own}).items()
                }
                config = replace(config, reserve_memory=config.reserve_memory + quantised.kept_nbytes)
                if config.reserve_memory >= config.device_memory:
                    raise CapacityError(
                        f"{quantised.describe()}, and device_memory is {format_bytes(config.device_memory)}; raise it to "
                        f"{-(-config.reserve_memory // 2**20)}MiB plus activation memory"
                    )
            if isinstance(values, FileValues):
                values.take_components(quantised.components)
            session = Session(config, type(model).__name__, ranks, rounds) if shared is None else shared
            if shared is not None:
                parameters = session.prefixed(parameters, type(model).__name__)
            if not ranks.is_alone:
                refuse_shared_devices(ranks, session.store.device)
            with torch.device("cpu"):  # regardless of the caller's default device
                weights = values.serve(session.store) if isinstance(values, FileValues) else {}
                linear = find_linear_weights(model) if config.frozen_dtype is not None else frozenset()
                session.adopt(parameters, as_home=True, with_values=values is None, weights=weights, linear=linear)
                replaced = _register_replacements(model) if rounds is None else rounds.take_place()
                if values is not None:
                    with session.progress("writing the first values of", parameters.values()):
                        values.fill(session.store)
    except BaseException:
        if session is not None and shared is None:
            session.close()
        for module, name, parameter in replaced:
            module._parameters[name] = parameter
        if values is not None:
            undo(values, on_meta)
        raise
    if quantised.parameters:
        session.catalog.notes.append(quantised.describe())
    if eagerly:
        session.fallbacks.append(
            f"{type(model).__name__} runs eagerly, gathering as it goes: {len(distributed)} of its parameters, such as "
            f"'{next(iter(distributed))}', are DTensors, and the model whose budgets it shares has none over these ranks; "
            "optimize this model first, and let the other share its budgets"
        )
        _log.warning("%s", printable(session.fallbacks[-1]))
    forward = Forward(session.store.memory.torch_device)
    if isinstance(values, FileValues) and values.quantised:
        forward.check = partial(check_in_place, session.store)
    if rounds is not None:
        rounds.seat(session.store)
    session.forwards.append(forward)
    install_accessors(model, forward)
    if not config.memory.unified:
        move_buffers(model, session.store.memory.torch_device)
    if config.capture:
        forward.to_capture = type(model).__name__
        call: Callable[..., Any] = model._call_impl
        if trace_rules.check(model.forward):  # code of torch.nn, such as Sequential's: Dynamo skips its frames
            call = with_own_code(wrap_inline(call))
        # Symbolic sizes change rounding, since attention, for one, uses other kernels. "aten" has to be bitwise exact.
        dynamic = None if config.compute == "inductor" and rounds is None else False
        model._compiled_call_impl = torch.compile(call, backend=_held_weakly(session), dynamic=dynamic)
        if any(base.__name__ == "LightningModule" for base in type(model).__mro__):
            _log.warning(
                "%s is a LightningModule, whose training_step Lightning calls, and not the module itself, so nothing of it "
                "is captured or planned; optimize the network that training_step calls",
                printable(type(model).__name__),
            )
    model.__dict__[_SESSION] = session  # the only way to the session of a model without parameters
    return model


def _register_replacements(model: Module) -> list[tuple[Module, str, Parameter]]:
    """Register the DTensors of several ranks in the place of the parameters they replace; return where those were."""
    replaced = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (replacement := replacement_of(parameter)) is not None:
                replaced.append((module, name, parameter))
                module._parameters[name] = replacement
    return replaced


_log = logging.getLogger(__name__)
_SESSION = "_zinf_session"  # the attribute of an optimized model that holds its session


def _held_weakly(session: Session) -> Callable[..., Any]:
    """Return the Dynamo backend of a session. Dynamo keeps backends forever, so this one holds the session weakly."""
    of_session = weakref.ref(session)

    def compile(graph_module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        session = of_session()
        assert session is not None, "a model that is called has its session"
        return session.compile(graph_module, inputs)

    return compile


def _own_device(parameters: Mapping[str, Parameter]) -> str | None:
    """Return the GPU that the parameters are on; None if they are not on a GPU."""
    return next((str(parameter.device) for parameter in parameters.values() if parameter.is_cuda), None)


def _can_store_components(config: Config, ranks: Ranks) -> bool:
    """Return whether tensors of quantised parameters may be stored. Their library computes with what it has on a GPU.

    A write through such a tensor is not observed, so that ``verify_store`` would take it for damage.
    """
    return config.memory.unified and ranks.is_alone and not config.verify_store


def _check_may_store(parameter: Parameter, *, may_store: bool) -> None:
    """Raise UnsupportedError where what a checkpoint has of a quantised parameter would have to be in memory."""
    if not may_store:
        raise UnsupportedError(
            f"init serves quantised parameters ({type(parameter).__name__}) from files on a CPU, in one process and without "
            "verify_store; elsewhere they stay whole on the device, so load the model with its values, and leave init out"
        )


def _check_quantised(quantised: Mapping[str, Parameter], share: Module | None) -> None:
    """Raise UnsupportedError if a model with quantised parameters is to share budgets."""
    if share is not None:
        raise UnsupportedError(
            f"{describe_own(quantised, list(quantised))}, for which there is no room in the budgets of another; optimize "
            "this model first, and let the other share it"
        )


def report(model: Module, *, all_ranks: bool = False) -> Report:
    """Return what was planned for ``model`` next to what was measured so far.

    On several ranks these are the numbers of the rank that asks. It may be the only one that does, so nothing is
    exchanged, and nobody waits. With ``all_ranks`` every rank has to call this, at the same point of its loop. ``ranks``
    of the result then has peaks, disk reads, and seconds of a step and of waiting of each, and the slowest rank is named.
    It is the one that waits least: seconds of a step are about the same on all ranks, since all wait for the slowest. A
    rank that does something else meanwhile is named in a RankError on all of them.

    Raises ConfigError for a model that neither ``optimize`` nor ``torch.compile(backend="zinf")`` has seen.
    """
    session = _session_of(model)
    store, meter = session.store, session.store.meter
    plans = tuple(program.planned for program in session.programs if program.planned is not None)
    measured = {
        Tier.DEVICE: max(store.ram.peak, store.held.nbytes_on(Tier.DEVICE)),
        Tier.HOST: store.held.host_peak_nbytes,
        Tier.NVME: max(store.layout.taken_nbytes, store.activations.peak_file_nbytes),
    }
    capacity = {
        Tier.DEVICE: session.config.device_memory,
        Tier.HOST: session.config.host_memory,
        Tier.NVME: session.config.nvme_memory,
    }
    phases, step = [], None
    step_plans = tuple(program.planned for program in session.step_programs if program.planned is not None)
    timelines = [simulate(plan) for plan in share_updates([each.plan for each in step_plans])]
    predicted = phases_of_step(timelines)
    if timelines and meter.step_seconds:
        step = StepReport(
            predicted_seconds=sum(predicted.values()),
            measured_seconds=statistics.median(meter.step_seconds),
            count=len(meter.step_seconds),
        )
    for phase, seconds in predicted.items():
        num_graphs = sum(phase in dict(timeline.phase_seconds) for timeline in timelines)
        runs = sum_runs(meter.phase_seconds(phase), 1 if phase is Phase.STEP else num_graphs)
        if runs:
            phases.append(
                PhaseReport(
                    phase=phase,
                    predicted_seconds=seconds,
                    measured_seconds=statistics.median(runs),
                    count=len(runs),
                )
            )
    in_place = [slot for record in store.records.values() if (slot := record.copies.in_place) is not None]
    ranks = store.ranks
    mine = [] if ranks.is_alone else [_rank_of(store, measured)]
    return Report(
        model=session.model_name,
        ranks=tuple(ranks.exchange("report(model, all_ranks=True)", mine[0]) if mine and all_ranks else mine),
        num_ranks=ranks.mesh_size,
        in_place_nbytes=sum(slot.nbytes for slot in in_place),
        weight_files=tuple(sorted({slot.weights.file.path for slot in in_place if slot.weights is not None})),
        plans=plans,
        step_plans=step_plans,
        tiers=tuple(
            TierReport(
                tier=tier,
                capacity=capacity[tier],
                predicted_peak=_predicted_peak(session, tier),
                measured_peak=measured[tier],
            )
            for tier in Tier
        ),
        process=_process_of(session),
        allocator=_allocator_of(store),
        ahead=_ahead_of(store),
        phases=tuple(phases),
        step=step,
        moved=tuple(RouteReport(route=route, nbytes=nbytes) for route, nbytes in meter.moved),
        stalls=tuple(
            StallReport(transfer=stall.name, seconds=stall.seconds, count=stall.count) for stall in meter.stalls
        ),
        graph_breaks=tuple(session.graph_breaks),
        replanned=tuple(sentence for program in session.programs for sentence in program.replanned),
        num_eager_gathers=meter.num_eager_gathers,
        fallbacks=(
            *session.fallbacks,
            *(sentence for program in session.programs for sentence in program.fallbacks),
        ),
    )


def _ahead_of(store: Store) -> AheadReport | None:
    updates = store.updates_ahead
    if not isinstance(updates, UpdatesAhead) or not updates.is_planned:
        return None
    counts = updates.counts
    return AheadReport(
        num_taken=counts.num_taken, num_late=counts.num_late, dropped=tuple(counts.dropped.most_common())
    )


def _rank_of(store: Store, peaks: Mapping[Tier, int]) -> RankReport:
    """Return what this rank tells the others of itself."""
    meter = store.meter
    reads = {route_name(Tier.NVME, tier) for tier in (Tier.DEVICE, Tier.HOST)}
    arrived = sum(nbytes for route, nbytes in meter.arrived if route in reads)
    busy = sum(seconds for routes, seconds in meter.busy if not reads.isdisjoint(routes))
    return RankReport(
        rank=store.ranks.mesh_rank,
        node=os.uname().nodename,
        peaks=tuple(peaks.items()),
        nbytes_read=sum(nbytes for route, nbytes in meter.moved if route in reads),
        read_bytes_per_second=arrived / busy if arrived and busy else None,
        step_seconds=statistics.median(meter.step_seconds) if meter.step_seconds else None,
        waited_seconds=statistics.median(meter.step_waits) if meter.step_waits else None,
        waited_seconds_in_all=meter.waited_seconds(),
    )


def _process_of(session: Session) -> ProcessReport | None:
    peak = session.store.held.process_peak
    if peak is None:
        return None
    config = session.config
    return ProcessReport(
        budget=config.device_memory + config.host_memory, reserved=config.reserve_memory, measured_peak=peak
    )


def _allocator_of(store: Store) -> AllocatorReport | None:
    peak = store.ram.reserved_peak
    return AllocatorReport(limit=store.ram.reserved_limit, measured_peak=peak) if peak else None


def _predicted_peak(session: Session, tier: Tier) -> int:
    """Return the largest planned peak of a tier; on the device also counting updates that no plan includes."""
    planned = session.catalog.promised.get(tier, session.store.held.nbytes_on(tier))
    if tier is not Tier.DEVICE or session.store.ram.least_promised == 0:
        return planned
    return max(planned, session.store.ram.least_promised + session.config.reserve_memory)


@contextmanager
def record(model: Module) -> Iterator[Recording]:
    """Record what a model computes, waits for, moves and updates inside the block, with times.

        with zinf_compile.record(model) as recording:
            model(**batch).backward()
            optimizer.step()
        recording.to_chrome_trace("trace.json")  # next to the prediction

    The end of the block waits for updates in the background. Raises ConfigError for a model that neither ``optimize``
    nor ``torch.compile(backend="zinf")`` has seen, and for one that is already being recorded.
    """
    session = _session_of(model)
    meter = session.store.meter
    if meter.recorder is not None:
        raise ConfigError(f"{session.model_name} is being recorded already; leave that `with record(...)` block first")
    recording = Recording(model=session.model_name)
    meter.recorder = recorder = Recorder()
    try:
        yield recording
        session.store.synchronize()
    finally:
        meter.settle()
        meter.recorder = None
        recording.events, recording.stalls = recorder.take()
        recording.plans = tuple(program.plan for program in session.step_programs if program.plan is not None)


@contextmanager
def full_parameters(module: Module) -> Iterator[None]:
    """Summon the full parameters of an optimized model, or of a part of it, as writable tensors in memory.

    Inside the block ``module.weight`` and ``module.parameters()`` are plain parameters; the model runs eagerly with
    them. When the block ends, or raises, their values are written home and their gradients are added to the stored
    ones. An optimizer keeps the stored parameters, so it cannot step inside the block.

    Raises ConfigError for a module without stored parameters, CapacityError if they do not fit in device_memory.
    """
    session = _session_of(module)
    if not session.forwards:
        raise ConfigError(
            "full_parameters takes a model, or a part of one, that zinf_compile.optimize(model) has returned"
        )
    parts = set(module.modules())
    all_sites = [site for forward in session.forwards for site in forward.sites]
    records = {
        record.name: record
        for part, name, record in all_sites
        if part in parts and part._parameters.get(name) is record.parameter
    }
    # All places in the model, not only in this module, so that a tied parameter is one tensor inside the block too.
    sites = [Site(part, name, record) for part, name, record in all_sites if record.name in records]
    refuse_distributed(records.values(), f"full_parameters({type(module).__name__})")
    if session.rounds is not None:
        refuse_remote(session.rounds.remote.values(), f"full_parameters({type(module).__name__})")
    check_room(session.store, list(records.values()), f"full_parameters({type(module).__name__})")
    with hold_full_values(sites):
        yield


def synchronize(model: Module) -> None:
    """Block until every update of the last ``optimizer.step()`` is stored. Raises StoreError if an update failed."""
    _session_of(model).store.synchronize()


def close(model: Module) -> None:
    """Release the file, threads and buffers of a model. Its parameters can still be read, but not trained."""
    _session_of(model).close()


def _session_of(model: Module) -> Session:
    if isinstance(session := model.__dict__.get(_SESSION), Session):
        return session
    for parameter in model.parameters():
        if (record := owner_of(parameter)) is not None:
            return session_of_store(store_of(record))
    raise ConfigError(
        f"{type(model).__name__} has no parameter in a store; call zinf_compile.optimize(model), or run a model compiled "
        "with torch.compile(model, backend='zinf') once"
    )
