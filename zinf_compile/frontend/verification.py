"""``verify``: trains copies of a model within budgets and in memory, and says whether they are alike."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from zinf_compile.frontend.api import close, optimize, report
from zinf_compile.frontend.offline import MakeOptimizer, make_inputs
from zinf_compile.inspect.reports import ProcessReport, TierReport
from zinf_compile.ir.errors import CapacityError, ConfigError
from zinf_compile.ir.glossary import dtype_name, format_bytes, printable
from zinf_compile.passes.capture.offline.trace import Inputs
from zinf_compile.runtime.model.accessors import refuse_optimized
from zinf_compile.runtime.storage.slots import torch_dtype

_SEED = 0
# Sums that are taken in another order are about as far from the exact ones; what is wrong is thousands of times further.
_MOST_TIMES_AS_FAR = 10
# On a CPU the device tier is measured by the memory of the process, in which Python keeps its objects too.
_NOISE = 2**20
_NAMED = 3  # of the tensors that differ
_REFUSED = {
    "init": "it is for models without values, and plain PyTorch needs them in memory",
    "share": "a model is verified by itself",
    "mesh": "one process is compared with one",
    "step_in_backward": "gradients, which are compared, are never stored then",
    "state_dtype": "it rounds optimizer state, so results are not those of plain PyTorch",
    "frozen_dtype": "it rounds frozen weights, so results are not those of plain PyTorch",
}


class InComputeDtype(Module):
    """The plain counterpart of ``compute_dtype``: full-precision parameters, cast for every forward."""

    def __init__(self, model: Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype, self.config = model, dtype, getattr(model, "config", None)

    def forward(self, *inputs: object, **options: object) -> object:
        parameters = {name: parameter.to(self.dtype) for name, parameter in self.model.named_parameters()}
        return functional_call(self.model, parameters, inputs, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The gradient that is the furthest from exact, compared with that of plain PyTorch.

    Distances are norms of what is wrong with it over its norm. Exact is what plain PyTorch computes in float64.
    """

    parameter: str
    distance: float
    plain_distance: float  # or the rounding of one operation, if that is more

    @property
    def times_as_far(self) -> float:
        """Return the distance over that of plain PyTorch."""
        return self.distance / self.plain_distance


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What ``verify`` returns; ``print(verdict)`` shows it."""

    model: str
    num_steps: int
    num_compared: int  # tensors that were compared bit by bit
    differing: tuple[str, ...]  # those that differ, such as "loss of step 2" or "gradient of head.weight"
    rounding: Rounding | None  # of the model as it was asked for; None if that is op by op, or not judged
    tiers: tuple[TierReport, ...]  # of the model as it was asked for
    process: ProcessReport | None  # None where budgets are for the model alone
    notes: tuple[str, ...] = ()  # what was not compared, and why

    @property
    def is_right(self) -> bool:
        """Return whether something was compared, and all of it is bitwise equal, or equal to rounding."""
        is_near = self.rounding is None or self.rounding.times_as_far <= _MOST_TIMES_AS_FAR
        return (self.num_compared > 0 or self.rounding is not None) and not self.differing and is_near

    @property
    def is_within_budgets(self) -> bool:
        """Return whether no tier took a MiB more than the plan promised, nor the process more than its budgets."""
        is_beyond = self.process is not None and self.process.measured_peak > self.process.budget
        return not is_beyond and not any(map(_is_exceeded, self.tiers))

    def __str__(self) -> str:
        lines = [f"{printable(self.model)}: {self.num_steps} steps, compared with plain PyTorch in memory"]
        if self.num_compared:
            lines.append(f"bits      {self._tell_bits()}")
        if self.rounding is not None:
            lines.append(f"rounding  {self._tell_rounding(self.rounding)}")
        for tier in self.tiers:
            peaks = f"{format_bytes(tier.measured_peak)} of {format_bytes(tier.predicted_peak)} promised"
            lines.append(f"memory    {tier.tier}: {peaks}{', exceeded' if _is_exceeded(tier) else ''}")
        if self.process is not None:
            lines.append(f"memory    {self.process}")
        lines += [f"note      {note}" for note in self.notes]
        return "\n".join([*lines, f"verdict: {self._tell_verdict()}"])

    def _tell_bits(self) -> str:
        if not self.differing:
            return f"all {self.num_compared} losses, gradients, parameters, buffers and optimizer states are equal, op by op"
        named = ", ".join(map(printable, self.differing[:_NAMED])) + (", ..." if len(self.differing) > _NAMED else "")
        return f"{len(self.differing)} of {self.num_compared} tensors differ, op by op: {named}"

    def _tell_rounding(self, rounding: Rounding) -> str:
        return (
            f"gradients are at most {rounding.times_as_far:.1f} times as far from exact ones "
            f"({printable(rounding.parameter)}: {rounding.distance:.1e}, plain PyTorch {rounding.plain_distance:.1e})"
        )

    def _tell_verdict(self) -> str:
        if not self.is_right:
            return "WRONG" if self.differing or self.rounding is not None else "nothing could be compared"
        return "right, and within its budgets" if self.is_within_budgets else "right, but beyond what was promised"


def _is_exceeded(tier: TierReport) -> bool:
    return tier.measured_peak > tier.predicted_peak + _NOISE


class _Trace(NamedTuple):
    """What training a copy has led to. ``draws`` is whether a forward draws random numbers."""

    compared: dict[str, Tensor]  # losses, parameters, buffers and states after the last step
    gradients: dict[str, Tensor]  # of the first step
    draws: bool


class _Trained(NamedTuple):
    """What training an optimized copy has led to, and its memory."""

    trace: _Trace
    tiers: tuple[TierReport, ...]
    process: ProcessReport | None


def verify(
    model: Module,
    inputs: object,
    *,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    loss: Callable[[Any], Tensor] | None = None,
    steps: int = 3,
    **options: object,
) -> Verdict:
    """Train copies of ``model`` within budgets and in memory, and return whether they are alike.

    ``model`` has values and stays as it is. Memory must hold a few copies of it with their gradients and optimizer state:
    for a larger model, verify one with fewer layers. ``inputs`` is what it is called with in each step: a tensor, a tuple,
    or a dict of keyword arguments. ``options`` are those of ``optimize``; plain PyTorch trains where ``model`` is, so
    a ``device`` has to be that one.

    First it is trained as ``optimize`` would train it, for the peaks of memory. Then with ``compute="aten"`` and
    without tiles: losses, first gradients, and parameters, buffers and optimizer states at the end must have the bits of
    plain PyTorch. If it was not asked for op by op, its first gradients are also compared with those of plain PyTorch in
    float64: they may be ten times as far from these as plain PyTorch's own.

    Options:
        optimizer: a class of torch.optim, or a function that takes parameters and returns an optimizer.
        loss: a function of the model's output that returns a tensor of one element. By default the output itself, its
            ``loss``, or its first item.
        steps: number of steps.

    Raises ConfigError for arguments that cannot be used, and what ``optimize`` and the model raise.
    """
    if not isinstance(model, Module):
        raise ConfigError(f"verify takes a torch.nn.Module, not {type(model).__name__}")
    refuse_optimized(model)
    if steps < 1:
        raise ConfigError(f"steps is {steps}; at least one is needed")
    for name, reason in _REFUSED.items():
        if options.get(name) is not None:
            raise ConfigError(f"{name} cannot be verified: {reason}; leave it out")
    if on_meta := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ConfigError(
            f"the model is on the meta device ('{on_meta[0]}' and {len(on_meta) - 1} more), and plain PyTorch needs values; "
            "build it in memory, with fewer layers if it is too large"
        )
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ConfigError(
            f"{_REFUSED['mesh']}, and this is one of {torch.distributed.get_world_size()}; run it without ranks"
        )
    training = _Training(model, make_inputs(inputs), optimizer, loss or _loss_of, steps)
    with _own_random_numbers():
        return _verify(training, options)


def _verify(training: "_Training", options: Mapping[str, object]) -> Verdict:
    notes = []
    asked = training.within_budgets(options)
    # Tiles and micro-batches add up in another order, and compiled blocks too.
    op_by_op = {**options, "compute": "aten", "tiles": False, "tile_memory": None, "micro_batches": None}
    is_captured = options.get("capture") is not False  # otherwise nothing is compiled or tiled
    exactly: _Trained | None = asked
    is_exact = options.get("compute") == "aten" and options.get("tiles") is False
    if is_captured and not (is_exact and options.get("micro_batches") in (None, 1)):
        try:
            exactly = training.within_budgets(op_by_op)
        except CapacityError as error:
            exactly = None
            notes.append(f"bits were not compared, since op by op and without tiles it does not fit: {error}")
    named = options.get("compute_dtype")  # one that cannot be is refused by now
    dtype = None if named is None else torch_dtype(dtype_name(named))
    plain = training.in_memory(dtype)
    rounding = None
    if asked is not exactly:
        if plain.draws:
            notes.append(
                "rounding was not compared: the model draws random numbers, which compiled blocks draw otherwise"
            )
        else:
            rounding = _find_rounding(training, asked.trace.gradients, plain.gradients, dtype, notes)
    mine = {} if exactly is None else exactly.trace.compared | _named_gradients(exactly.trace.gradients)
    theirs = plain.compared | _named_gradients(plain.gradients)
    names = list(theirs | mine) if mine else []
    return Verdict(
        model=type(training.model).__name__,
        num_steps=training.num_steps,
        num_compared=len(names),
        differing=tuple(name for name in names if not _has_same_bits(mine.get(name), theirs.get(name))),
        rounding=rounding,
        tiers=asked.tiers,
        process=asked.process,
        notes=tuple(notes),
    )


def _find_rounding(
    training: "_Training",
    gradients: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    notes: list[str],
) -> Rounding | None:
    """Return the gradient that is the furthest from exact; None, with a note, if that cannot be computed."""
    try:
        exact = training.exact_gradients()
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        notes.append(f"rounding was not compared: in float64, to compare with, the model fails: {reason}")
        return None
    found = []
    for name, value in exact.items():
        norm = value.norm().item()
        if norm:
            one_operation = torch.finfo(dtype or plain[name].dtype).eps
            near = max((plain[name].double() - value).norm().item() / norm, one_operation)
            far = (gradients[name].double() - value).norm().item() / norm if name in gradients else math.inf
            distance = math.inf if math.isnan(far) else far
            found.append(Rounding(parameter=name, distance=distance, plain_distance=near))
    if not found:
        notes.append("rounding was not compared: no gradient is other than zero")
    return max(found, key=lambda each: each.times_as_far, default=None)


class _Training:
    """How each copy of the model is trained."""

    def __init__(
        self,
        model: Module,
        inputs: Inputs,
        make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
        loss_of: Callable[[Any], Tensor],
        num_steps: int,
    ) -> None:
        self.model, self.num_steps = model, num_steps
        self._inputs, self._make_optimizer, self._loss_of = inputs, make_optimizer, loss_of

    def within_budgets(self, options: Mapping[str, object]) -> _Trained:
        """Train a copy that is optimized with these options."""
        given: dict[str, Any] = {name: each for name, each in options.items() if each is not None}
        trained = optimize(copy.deepcopy(self.model), **given)
        try:
            optimizer, losses, draws = self._train(trained, trained)
            found = report(trained)  # before memory is taken for what is compared
            # Without a reserve budgets are for the model, not for the process.
            process = None if found.process is None or not found.process.reserved else found.process
            trace = self._trace(trained, trained, optimizer, losses, draws)
            return _Trained(trace, found.tiers, process)
        finally:
            close(trained)

    def in_memory(self, dtype: torch.dtype | None) -> _Trace:
        """Train a copy in memory, by plain PyTorch that computes in ``dtype``."""
        trained = copy.deepcopy(self.model)
        forward = trained if dtype is None else InComputeDtype(trained, dtype)
        return self._trace(trained, forward, *self._train(trained, forward))

    def exact_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the first step in float64."""
        model = copy.deepcopy(self.model).double()
        args, kwargs = pytree.tree_map_only(
            Tensor,
            lambda value: value.double() if value.is_floating_point() else value,
            (self._inputs.args, self._inputs.kwargs),
        )
        self._backward(model, replace(self._inputs, args=args, kwargs=kwargs))
        return _gradients_of(model)

    def _train(self, model: Module, forward: Module) -> tuple[Optimizer, list[Tensor], bool]:
        torch.manual_seed(_SEED)
        optimizer = self._make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        losses = []
        before = _random_states()
        for _ in range(self.num_steps):
            optimizer.zero_grad()
            losses.append(self._backward(forward, self._inputs))
            optimizer.step()
        return optimizer, losses, not all(map(torch.equal, _random_states(), before))

    def _trace(self, model: Module, forward: Module, optimizer: Optimizer, losses: list[Tensor], draws: bool) -> _Trace:
        compared = {f"loss of step {step}": loss for step, loss in enumerate(losses, start=1)}
        for name, value in model.state_dict().items():
            if isinstance(value, Tensor):
                compared[name] = value.detach().cpu().clone()
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    compared[f"{key} of {name}"] = value.detach().cpu().clone()
        optimizer.zero_grad()
        model.load_state_dict(self.model.state_dict())
        torch.manual_seed(_SEED)
        self._backward(forward, self._inputs)
        return _Trace(compared=compared, gradients=_gradients_of(model), draws=draws)

    def _backward(self, forward: Module, inputs: Inputs) -> Tensor:
        """Compute the gradients of one call; return the loss."""
        loss = self._loss_of(forward(*inputs.args, **inputs.kwargs))
        loss.backward()
        return loss.detach().cpu().clone()


def _gradients_of(model: Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.detach().cpu().to(parameter.dtype, copy=True)  # with a compute_dtype it is in that
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _named_gradients(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"gradient of {name}": value for name, value in gradients.items()}


def _loss_of(output: Any) -> Tensor:
    found = output
    if not isinstance(output, Tensor):
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if found is None and isinstance(output, tuple | list) and output:
            found = output[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ConfigError(
            f"the model returns {type(output).__name__}, in which there is no loss of one element; give loss=, a function "
            "of what it returns"
        )
    return found


def _has_same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:  # only one of the two has it
        return False
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other)))


def _random_states() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Leave the generators of torch as they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices):
        yield
