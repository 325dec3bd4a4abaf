"""Adam and AdamW over a chunk in one pass over memory, bitwise equal to the user's optimizer.

The kernel (``native/fused_adamw.cpp``) replaces upcasting the gradient, the shadow's update, and rounding to the
compute copy. It is used for torch's own two classes on float32 master copies, with the options it supports. Before its
first use with some options it must give the bits of the plain optimizer on random numbers, or it is not used.
"""

import ctypes
import functools
import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from zinf_compile.ir.copies import Code
from zinf_compile.runtime.native.compiled import load_compiled
from zinf_compile.runtime.optim.shadow import is_scaled, shadow_step
from zinf_compile.runtime.storage.state_codes import c_maps

_NARROW = torch.bfloat16
# Sizes of the self-check: shorter than a vector, with every length of tail, and several blocks over two threads.
_CHECKED_SIZES = (1, 7, 16, 61, 1024, 4096 + 13)
_CHECKED_STEPS = 3
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_CODES = {Code.INT8: 1, Code.BFLOAT16: 2}  # ``Codes`` in the C++ source
_NO_DECAY, _ADD_TO_GRADIENT, _SHRINK_PARAMETER = range(3)

_lock = threading.Lock()
_checked: dict[tuple[object, ...], bool] = {}
_CORES_THAT_LAUNCH = 2
_NUMBERS = ("eps", "weight_decay", "momentum", "dampening")
_log = logging.getLogger(__name__)


class _Update(ctypes.Structure):
    """Mirrors ``Update`` in the C++ source."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (*("master", "low_halves", "mean", "square", "max_square", "gradient", "compute"),)
        ),
        ("pages", ctypes.c_void_p * len(_MOMENTS)),
        *((name, ctypes.c_void_p) for name in ("maps", "vector_root", "set_local_threads")),
        *((name, ctypes.c_int64) for name in ("num_elements", "first")),
        *(
            (name, ctypes.c_float)
            for name in (
                *("decay", "mean_weight", "beta2", "square_weight"),
                *("root_correction", "eps", "negative_step_size"),
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("decay_mode", "gradient_is_bfloat16", "maximize", "as_fused", "num_threads"),
                *("codes", "is_zeroed"),
            )
        ),
        ("seeds", ctypes.c_uint32 * len(_MOMENTS)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The compiled update. It releases the GIL, and allocates nothing per element."""

    run: Any  # the C function
    root_functions: tuple[int | None, int | None]  # addresses of the MKL functions that torch's op-by-op kernels call

    def takes(self, scalars: Mapping[str, Any], moments: Mapping[str, torch.dtype]) -> bool:
        """Return whether the kernel can go on from a state: float32 moments, and a step count as torch keeps it."""
        others = {key for key in scalars if key != "step"}
        if "step" in scalars and not (isinstance(scalars["step"], Tensor) and scalars["step"].dim() == 0):
            return False
        is_complete = moments.keys() in ({"exp_avg", "exp_avg_sq"}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
        return not others and is_complete and all(dtype == torch.float32 for dtype in moments.values())

    def update(
        self,
        group: Mapping[str, Any],
        state: Mapping[str, Any],
        master: Tensor,
        gradient: Tensor,
        compute: Tensor | None,
        *,
        num_threads: int = 1,
    ) -> dict[str, Any]:
        """Update ``master`` and the moments in place, write ``compute`` if there is one; return the new state.

        All tensors are flat, contiguous and of one length. Of a split master copy, ``master`` is its pages, uint8.
        ``state`` holds memory for the moments; without ``step`` in it this is the first update, and they are zeroed.
        """
        new_state = dict(state)
        if "step" not in state:
            moments = {key: value.zero_() for key, value in state.items()}
            dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            new_state = {"step": torch.zeros((), dtype=torch.float32 if group["fused"] else dtype), **moments}
        new_state["step"] += 1
        update = _scalars(group, new_state["step"].item())
        update.mean, update.square = new_state["exp_avg"].data_ptr(), new_state["exp_avg_sq"].data_ptr()
        update.max_square = new_state["max_exp_avg_sq"].data_ptr() if group["amsgrad"] else None
        self._run(update, master, gradient, compute, num_threads)
        return new_state

    def update_coded(
        self,
        group: Mapping[str, Any],
        step: float | None,
        pages: Mapping[str, Tensor],
        code: Code,
        master: Tensor,
        gradient: Tensor,
        compute: Tensor | None,
        *,
        first: int,
        seeds: Mapping[str, int],
        num_threads: int = 1,
    ) -> None:
        """Do the same with moments in uint8 ``pages`` of codes, in one pass: they are decoded, updated and encoded.

        ``step`` is the count of updates before. At the first one it is None, and moments are zero whatever pages hold.
        ``first`` is the number of the first element in its parameter, and ``seeds`` are those of each moment, for which see
        ``state_codes.encode``.
        """
        update = _scalars(group, 1 if step is None else step + 1)
        update.codes, update.is_zeroed, update.first = _CODES[code], step is None, first
        update.maps = ctypes.cast(c_maps(), ctypes.c_void_p) if code is Code.INT8 else None
        for index, name in enumerate(_MOMENTS[: 3 if group["amsgrad"] else 2]):
            update.pages[index], update.seeds[index] = pages[name].data_ptr(), seeds[name]
        self._run(update, master, gradient, compute, num_threads)

    def _run(
        self, update: "_Update", master: Tensor, gradient: Tensor, compute: Tensor | None, num_threads: int
    ) -> None:
        update.num_elements = gradient.numel()
        update.num_threads = num_threads
        if not update.as_fused:
            update.vector_root, update.set_local_threads = self.root_functions
        if master.dtype == torch.uint8:
            update.low_halves = master.data_ptr()
        else:
            update.master = master.data_ptr()
        update.gradient = gradient.data_ptr()
        update.compute = None if compute is None else compute.data_ptr()
        update.gradient_is_bfloat16 = gradient.dtype == _NARROW
        self.run(ctypes.byref(update))
        increment_version(master if compute is None else compute)  # so that autograd notices if a forward has saved it


def find_kernel(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    *,
    master_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    compute_dtype: torch.dtype | None,
) -> Kernel | None:
    """Return the kernel that updates as ``optimizer`` does with the options of ``group``; None where there is none.

    ``compute_dtype`` is None where there is no compute copy. The first call compiles; the first call with some options
    compares the kernel with the plain optimizer.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or not has_plain_options(optimizer, group):
        return None
    if master_dtype != torch.float32 or gradient_dtype not in (torch.float32, _NARROW):
        return None
    if compute_dtype not in (None, _NARROW):
        return None
    library = load_compiled("fused_adamw.cpp")
    if library is None:
        return None
    run = library.zinf_update_adam
    run.restype, run.argtypes = None, (ctypes.POINTER(_Update),)
    kernel = Kernel(run=run, root_functions=_find_root_functions())
    key = (
        *(bool(group[option]) for option in ("fused", "amsgrad", "maximize", "weight_decay", "decoupled_weight_decay")),
        *(isinstance(group["lr"], Tensor), 1 - group["betas"][0] < 0.5, gradient_dtype, compute_dtype),
    )
    if key not in _checked:
        # Not under the lock: the check may wait for a compilation on another thread, which may need the kernel as well.
        is_plain = _is_bitwise_plain(kernel, optimizer, group, gradient_dtype, compute_dtype)
        with _lock:
            is_first = key not in _checked
            _checked.setdefault(key, is_plain)
        if is_first and not is_plain:
            _log.warning("the compiled AdamW does not round as torch does here, and torch's is used: %s", key)
    return kernel if _checked[key] else None


@functools.cache
def _find_root_functions() -> tuple[int | None, int | None]:
    """Return the addresses of MKL's square root and of its thread setting, as torch has them; none where it has no MKL."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))  # loaded already
    try:
        functions = (library.vmsSqrt, library.MKL_Set_Num_Threads_Local)
    except AttributeError:
        return None, None
    root, set_local_threads = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    return root, set_local_threads


def update_threads(*, unified: bool) -> int:
    """Return with how many threads updates run on the host: beside a GPU, two cores are left to those that launch work."""
    num_threads = torch.get_num_threads()
    return num_threads if unified else max(1, num_threads - _CORES_THAT_LAUNCH)


def has_plain_options(optimizer: Optimizer, group: Mapping[str, Any], *, may_scale: bool = False) -> bool:
    """Return whether one of torch's fused optimizers updates by numbers known to the host, which nothing else changes.

    ``may_scale``: or by those, and what a GradScaler lets it divide gradients by.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return False
    if group.get("capturable") or group["differentiable"]:
        return False
    if not may_scale and is_scaled(optimizer):
        return False
    lr = group["lr"]
    if isinstance(lr, Tensor):
        is_plain = lr.numel() == 1 and lr.device.type == "cpu" and not lr.requires_grad and not group["foreach"]
    else:
        is_plain = isinstance(lr, int | float)
    numbers = (*group.get("betas", ()), *(group[name] for name in _NUMBERS if name in group))
    return is_plain and all(isinstance(number, int | float) for number in numbers)


def _scalars(group: Mapping[str, Any], step: float) -> _Update:
    """Return an update's numbers, by the expressions of ``torch.optim.adam``: a tensor lr rounds as it does there."""
    beta1, beta2 = group["betas"]
    is_fused = bool(group["fused"])
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.item() if is_fused else lr.squeeze()
    correction = 1 - beta2**step
    update = _Update(
        mean_weight=1 - beta1,
        beta2=beta2,
        square_weight=1 - beta2,
        root_correction=math.sqrt(correction) if is_fused else correction**0.5,
        eps=group["eps"],
        negative_step_size=float(-(lr / (1 - beta1**step))),
        maximize=bool(group["maximize"]),
        as_fused=is_fused,
    )
    if group["weight_decay"] == 0:
        update.decay_mode = _NO_DECAY
    elif group["decoupled_weight_decay"]:
        update.decay_mode, update.decay = _SHRINK_PARAMETER, float(1 - lr * group["weight_decay"])
    else:
        update.decay_mode, update.decay = _ADD_TO_GRADIENT, group["weight_decay"]
    return update


def _is_bitwise_plain(
    kernel: Kernel,
    optimizer: Optimizer,
    group: Mapping[str, Any],
    gradient_dtype: torch.dtype,
    compute_dtype: torch.dtype | None,
) -> bool:
    """Return whether the kernel and the plain optimizer give the same bits for some steps over random numbers."""
    generator = torch.Generator().manual_seed(0)
    for size in _CHECKED_SIZES:
        plain = torch.randn(size, generator=generator)
        master, compute = plain.clone(), None if compute_dtype is None else torch.empty(size, dtype=compute_dtype)
        plain_state: dict[str, Any] = {}
        keys = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        state: dict[str, Any] = {key: torch.empty(size) for key in keys}
        for _ in range(_CHECKED_STEPS):
            scale = 10 ** (4 * torch.rand(size, generator=generator) - 4)
            gradient = (torch.randn(size, generator=generator) * scale).to(gradient_dtype)
            plain_state = shadow_step(optimizer, group, plain.detach(), gradient.to(plain.dtype), plain_state)
            state = kernel.update(group, state, master, gradient, compute, num_threads=2)
            if state.keys() != plain_state.keys() or not torch.equal(master, plain):
                return False
            if not all(torch.equal(state[key], plain_state[key]) for key in state):
                return False
            if compute is not None and not torch.equal(compute, plain.to(compute.dtype)):
                return False
    return True
