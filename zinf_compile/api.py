"""What users call: ``optimize`` a model, ask for its ``report``, ``close`` it."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._dynamo.external_utils import wrap_inline
from torch.nn import Module, Parameter

from zinf_compile.config import make_config
from zinf_compile.errors import ConfigError
from zinf_compile.recordings import Recording
from zinf_compile.reports import PhaseReport, Report, RouteReport, StallReport, StepReport, TierReport, sum_runs
from zinf_compile.runtime.accessors import Forward, install_accessors, move_buffers, refuse_optimized
from zinf_compile.runtime.device import free_device_memory
from zinf_compile.runtime.lending import Site, check_room, lend_values
from zinf_compile.runtime.recorder import Recorder
from zinf_compile.runtime.slots import owner_of, record_of
from zinf_compile.session import Session, check_devices, session_of_store
from zinf_compile.simulate import simulate
from zinf_compile.simulation.several_graphs import phases_of_step, share_updates
from zinf_compile.terms import Phase, Tier
from zinf_compile.weights.initialize import Init, choose_values, undo


def optimize(model: Module, *, init: Init = None, share: Module | None = None, **options: object) -> Module:
    """Let ``model`` train within memory budgets: its parameters, gradients and optimizer state move to their homes.

    Changes the model in place and returns it. The training loop stays as it is.

    A model built under ``torch.device("meta")`` has no values, and never needs the memory for all of them: ``init`` says
    where they come from, "reset" for its modules' own initialisation, or safetensors: a file, a folder with an index, or a
    list of files. Files are written over the values of a model that has some.

    ``share`` is a model that was optimized before: this one joins it, under the options of that one and within one set of
    budgets. Its names get its class in front, reports are about both, and closing one closes both.

    Options, all with defaults:
        device: what computes: "cpu", "cuda" or "cuda:1"; by default the GPU that the model is on, else the CPU. Inputs have
            to be there; parameters that people see, gradients and optimizer state are in host memory or on disk.
        device_memory, host_memory: budgets in bytes or as "8GiB"; by default they share the memory that is free.
        nvme: folder on a local disk for what fits neither; by default there is no nvme tier.
        nvme_memory: budget on that disk; by default what is free.
        compute_dtype: dtype of forward and backward, such as torch.bfloat16; the optimizer keeps updating the
            parameters in their own dtype. By default the parameters' own.
        compute: "inductor", the default, to compile what each block computes, once for all blocks that are alike, in the
            first call: that takes some seconds, and results are the same to rounding. Without a C++ compiler, or where that
            does not fit, graphs run op by op. "aten" to run them so always, with the bits of eager PyTorch.
        reserve_memory: share of device_memory to leave to Python and its compiled graphs; by default none, since they are
            not on the device. On a CPU, where all is one RAM, it keeps the whole process within the budgets.
        prefetch_memory: how far transfers run ahead of compute at most; by default the planner chooses.
        tile_memory: parameters larger than this are gathered by tiles, consecutive rows of them: unless it is resident, the
            whole one is never on the device, nor is its gradient. By default only where the model does not fit otherwise,
            in as few tiles as will do: they keep the result but not its last bits.
        tiles: the number of tiles of some parameters, by name; 1 for one that is always to be gathered whole. False to keep
            every bit: nothing is tiled, and no loss is fused with its layer, also where the model does not fit otherwise.
        recompute: True to recompute every block's activations in backward, False never to; by default as is fastest.
        overlap_step: False to let ``optimizer.step()`` return only when every update is home. By default updates run in the
            background, in the order in which the next forward gathers; whoever looks at a parameter waits for its own.
        step_in_backward: True to update a parameter as soon as its gradient is complete. The gradient never rests, and
            ``optimizer.step()`` only closes the step. What needs gradients, such as clipping by a norm, GradScaler and
            accumulation, is refused. The first step is an ordinary one, by which the optimizer becomes known.
        update_on: "device" to let a GPU update what is at home elsewhere, which goes there and comes back in chunks; "host"
            to let processors do it. By default the GPU, whose bits are those of PyTorch there; with compute="inductor" both,
            each as much as ends at the same time.
        remake_plan: False to keep plans as they were made before the first step. By default what the first steps measure
            replaces estimates, and a plan that is faster by that is adopted between steps, once for each captured graph.
        capture: False to run the model's own forward eagerly, gathering parameters as it goes.

    Raises ConfigError for options that cannot be used, UnsupportedError for a model this version cannot hold, and
    CapacityError, before anything has moved, for budgets in which no graph of the model could run. Activations are only
    known when the model is called: where they do not fit, its first call raises CapacityError.
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
    config = make_config(options, free_device_memory=free_device_memory) if shared is None else shared.config
    for name, parameter in parameters.items():
        if (record := record_of(parameter)) is not None:
            raise ConfigError(f"parameter '{name}' is already in the store of another model, as '{record.name}'")
    check_devices(parameters, config.device, may_be_meta=True)
    values = choose_values(model, init)
    on_meta = [parameter for parameter in parameters.values() if parameter.is_meta]
    session = Session(config, type(model).__name__) if shared is None else shared
    if shared is not None:
        parameters = session.prefixed(parameters, type(model).__name__)
    try:
        with torch.device("cpu"):  # whatever device the caller builds models on
            session.adopt(parameters, as_home=True, with_values=values is None)
            if values is not None:
                values.fill(session.store)
    except BaseException:
        if shared is None:
            session.store.close()
        if values is not None:
            undo(values, on_meta)
        raise
    forward = Forward(session.store.memory.torch_device if config.is_apart else None)
    session.forwards.append(forward)
    install_accessors(model, forward)
    if config.is_apart:
        move_buffers(model, session.store.memory.torch_device)
    if config.capture:
        call: Callable[..., Any] = model._call_impl
        if trace_rules.check(model.forward):  # torch.nn's own, Sequential say: Dynamo would pass over its frames
            call = wrap_inline(call)
        # Sizes in symbols round as compiled code does: attention, say, takes other kernels. Who wants bits has none.
        dynamic = None if config.compute == "inductor" else False
        model._compiled_call_impl = torch.compile(call, backend=session.compile, dynamic=dynamic)
    return model


def _own_device(parameters: Mapping[str, Parameter]) -> str | None:
    """Return the GPU that a model is on already; None for any other place."""
    return next((str(parameter.device) for parameter in parameters.values() if parameter.is_cuda), None)


def report(model: Module) -> Report:
    """Return what was planned for ``model`` beside what was measured so far.

    Raises ConfigError for a model that neither ``optimize`` nor ``torch.compile(backend="zinf")`` has seen.
    """
    session = _session_of(model)
    store, meter = session.store, session.store.meter
    plans = tuple(program.plan for program in session.programs if program.plan is not None)
    measured = {
        Tier.DEVICE: max(store.ram.peak, store.nbytes_on(Tier.DEVICE)),
        Tier.HOST: store.host_peak_nbytes,
        Tier.NVME: max(store.layout.taken_nbytes, store.activations.peak_file_nbytes),
    }
    capacity = {
        Tier.DEVICE: session.config.device_memory,
        Tier.HOST: session.config.host_memory,
        Tier.NVME: session.config.nvme_memory,
    }
    phases, step = [], None
    step_plans = tuple(program.plan for program in session.step_programs if program.plan is not None)
    timelines = [simulate(plan) for plan in share_updates(step_plans)]
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
    return Report(
        model=session.model_name,
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
        phases=tuple(phases),
        step=step,
        moved=tuple(RouteReport(route=route, nbytes=nbytes) for route, nbytes in meter.moved),
        stalls=tuple(
            StallReport(transfer=stall.name, seconds=stall.seconds, count=stall.count) for stall in meter.stalls
        ),
        graph_breaks=tuple(session.graph_breaks),
        replanned=tuple(sentence for program in session.programs for sentence in program.replanned),
        num_eager_gathers=meter.num_eager_gathers,
    )


def _predicted_peak(session: Session, tier: Tier) -> int:
    """Return the most bytes of a tier that plans promised, or that updates which they do not know take on the device."""
    planned = session.promised.get(tier, session.store.nbytes_on(tier))
    if tier is not Tier.DEVICE or session.store.ram.least_promised == 0:
        return planned
    return max(planned, session.store.ram.least_promised + session.config.reserve_memory)


@contextmanager
def record(model: Module) -> Iterator[Recording]:
    """Record what a model does when, inside of the block: what it computes, waits for, moves and updates.

        with zinf_compile.record(model) as recording:
            model(**batch).backward()
            optimizer.step()
        recording.to_chrome_trace("trace.json")  # beside what was predicted

    Updates that go on in the background at its end are waited for. Raises ConfigError for a model that neither ``optimize``
    nor ``torch.compile(backend="zinf")`` has seen, and for one that is being recorded.
    """
    session = _session_of(model)
    meter = session.store.meter
    if meter.recorder is not None:
        raise ConfigError(
            f"{session.model_name} is being recorded already; end the block that does before the next begins"
        )
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
    """Give the parameters of an optimized model, or of a part of it, as full writable tensors in memory.

    Inside the block ``module.weight`` and ``module.parameters()`` are plain parameters; the model runs eagerly with them. At
    its end, and also when it raises, their values are written home and their gradients are added to the stored ones. An
    optimizer keeps the stored parameters, and cannot step inside.

    Raises ConfigError for a module without stored parameters, CapacityError where they do not fit in device_memory.
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
    # At every place in the model: a tied parameter is one tensor inside the block too.
    sites = [Site(part, name, record) for part, name, record in all_sites if record.name in records]
    check_room(session.store, list(records.values()), f"full_parameters({type(module).__name__})")
    with lend_values(sites):
        yield


def synchronize(model: Module) -> None:
    """Block until every update of the last ``optimizer.step()`` is home. Raises the StoreError of one that failed."""
    _session_of(model).store.synchronize()


def close(model: Module) -> None:
    """Give back the file, threads and buffers of a model. Its parameters can be read, and no longer trained."""
    _session_of(model).store.close()


def _session_of(model: Module) -> Session:
    for parameter in model.parameters():
        if (record := owner_of(parameter)) is not None:
            return session_of_store(record.store)
    raise ConfigError(
        f"{type(model).__name__} has no parameter in a store; call zinf_compile.optimize(model), or run a model compiled "
        "with torch.compile(model, backend='zinf') once"
    )
