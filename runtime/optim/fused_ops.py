"""torch's own fused updates, called directly: Adam, AdamW and SGD with ``fused=True``, on a device.

Their ``step()`` calls one op for all of its parameters. The shadow of an optimizer calls it for one chunk of one parameter,
and what Python does around it takes twenty times as long as the call. Where an optimizer is exactly torch's, the op is
called here, with the arguments that ``step()`` gives it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.runtime.device.device import Device
from zinf_compile.runtime.optim.fused_adamw import has_plain_options
from zinf_compile.runtime.optim.shadow import SCALER_ATTRIBUTES
from zinf_compile.runtime.optim.step_chunks import moved_to
from zinf_compile.runtime.optim.step_jobs import Job

_SOURCES = os.path.dirname(torch.optim.__file__)  # a path takes ten times as long
_ADAM_OPTIONS = ("amsgrad", "lr", "weight_decay", "eps", "maximize")
_SGD_OPTIONS = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOp:
    """The update of a job's chunks by one op each, which allocates nothing."""

    call: Callable[..., object]
    options: Mapping[str, Any]
    states: Sequence[Sequence[str]]  # those in each of the op's lists of states
    steps: Sequence[list[Tensor | None]]  # its list of step counts after the update, on the device; none of SGD
    is_zeroed: bool  # its states are undefined, and zero before the update

    def update(self, master: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> None:
        """Update a flat chunk in place. All tensors have one dtype; none requires a gradient."""
        if self.is_zeroed:
            for state in states.values():
                state.zero_()
        lists = [[states[name] for name in names] for names in self.states]
        self.call([master], [gradient], *lists, *self.steps, **self.options)


class FusedOps:
    """The ops of the jobs of one step: those of a group are mostly the same one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._found: dict[tuple[object, ...], FusedOp | None] = {}

    def find(self, job: Job) -> FusedOp | None:
        """Return the op that updates a job's chunks on the device as its optimizer's ``step()`` does.

        None where that does more.
        """
        slots, step = job.record.copies.states, job.scalars.get("step")
        if not job.scalars.keys() <= {"step"}:
            return None
        if step is not None and not (isinstance(step, Tensor) and step.dim() == 0 and step.device.type == "cpu"):
            return None
        dtypes = (job.record.copies.master.tensor.dtype, *((name, slot.dtype) for name, slot in slots.items()))
        # Groups are frozen, and the jobs keep them alive.
        key = (id(job.group), job.kept_states, dtypes, None if step is None else (step.dtype, step.item()))
        if key not in self._found:
            self._found[key] = self._make(job, step)
        return self._found[key]

    def _make(self, job: Job, step: Tensor | None) -> FusedOp | None:
        optimizer, group, slots = job.optimizer, job.group, job.record.copies.states
        is_plain = group.get("fused") and has_plain_options(optimizer, group, may_scale=True)
        if not (is_plain and _has_own_step(type(optimizer))):
            return None
        dtype = job.record.copies.master.tensor.dtype
        if not dtype.is_floating_point or any(slot.dtype != dtype for slot in slots.values()):
            return None
        is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        names = _names_of_adam(group) if is_adam else _names_of_sgd(group)
        is_first = not job.kept_states
        counts = is_adam and not is_first
        if (
            slots.keys() != {*names}
            or not (is_first or job.kept_states == slots.keys())
            or counts != (step is not None)
        ):
            return None
        if step is not None and step.dtype != torch.float32:
            return None
        with self._device.updating():
            scaled = {each: self._moved(getattr(optimizer, each, None)) for each in SCALER_ATTRIBUTES}
        if is_adam:
            return self._make_adam(group, names, step, scaled)
        return _make_sgd(group, names, scaled, is_first=is_first)

    def _moved(self, number: Tensor | None) -> Tensor | None:
        """Return a number of the host on the device: not a copy of the tensor, for which the host would wait."""
        return None if number is None else moved_to(self._device.torch_device, number)

    def _make_adam(
        self,
        group: Mapping[str, Any],
        names: Sequence[str],
        step: Tensor | None,
        scaled: Mapping[str, Tensor | None],
    ) -> FusedOp:
        count = torch.ones((), dtype=torch.float32, device="cpu") if step is None else step + 1
        beta1, beta2 = group["betas"]
        with self._device.updating():
            steps = [self._moved(count)]
        return FusedOp(
            call=torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_,
            options={**{name: group[name] for name in _ADAM_OPTIONS}, "beta1": beta1, "beta2": beta2, **scaled},
            states=(names[:1], names[1:2], names[2:]),
            steps=(steps,),
            is_zeroed=step is None,
        )


def _make_sgd(
    group: Mapping[str, Any], names: Sequence[str], scaled: Mapping[str, Tensor | None], *, is_first: bool
) -> FusedOp:
    options = {name: group[name] for name in _SGD_OPTIONS}
    return FusedOp(
        call=torch._fused_sgd_,
        options={**options, "is_first_step": is_first and bool(names), **scaled},
        states=(names,),
        steps=(),
        is_zeroed=False,
    )


def _names_of_adam(group: Mapping[str, Any]) -> Sequence[str]:
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]


def _names_of_sgd(group: Mapping[str, Any]) -> Sequence[str]:
    return ["momentum_buffer"] if group["momentum"] != 0 else []


def _has_own_step(cls: type[Optimizer]) -> bool:
    """Return whether the step of a class is torch's, and nobody's around it or in its place."""
    step: Any = cls.step
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or os.path.dirname(code.co_filename) != _SOURCES:
            return False
        step = getattr(step, "__wrapped__", None)
    return True
