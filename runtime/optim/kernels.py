"""Kernels over flat chunks: AdamW, packing a gradient, block-wise int8. On CUDA from ``cuda/*.cu``, on a CPU by torch.

The torch code for the CPU is the reference of the kernels: equal up to rounding, where one of them fuses a
multiplication and an addition. The runtime does not call these kernels yet.
"""

import functools
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zinf_compile.ir.errors import UnsupportedError

QUANTIZED_BLOCK = 2048  # values that share a scale
KERNELS: Mapping[str, tuple[str, ...]] = {  # by source
    "fused_adamw.cu": ("zinf_fused_adamw",),
    "pack_gradient.cu": ("zinf_pack_gradient",),
    "quantize.cu": ("zinf_quantize", "zinf_dequantize"),
}
SOURCES = Path(__file__).parents[2] / "cuda"
OPTIONS = ("-std=c++17", f"-I{SOURCES}")
_THREADS = 256  # of a block
_BLOCKS_PER_PROCESSOR = 8
_LARGEST_CODE = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWScalars:
    """The scalars of an AdamW update; ``step`` counts from 1."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int

    def as_floats(self) -> tuple[float, ...]:
        """Return the fields of ``Update`` in the CUDA source, computed in float64."""
        beta1, beta2 = self.betas
        return (
            1 - self.lr * self.weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**self.step),
            self.eps,
            -self.lr / (1 - beta1**self.step),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGradient:
    """A gradient in bfloat16, the sum of its squares in float64, and 1 if some element is not finite, else 0 (int32)."""

    values: Tensor
    square_sum: Tensor
    is_not_finite: Tensor


def fused_adamw(
    master: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    compute: Tensor,
    factors: Tensor,
    scalars: AdamWScalars,
) -> None:
    """Update a chunk in place by one step of AdamW, and write its compute copy.

    All are flat, contiguous and of one length: ``master`` and the two moments float32, ``gradient`` and ``compute``
    bfloat16. The gradient is multiplied by both of ``factors`` (float32 [2]: clipping's, and 1 / the loss scale), which
    are read on the device, so that the host does not wait for them. ValueError for other shapes, dtypes or devices.
    """
    _check({"master": master, "mean": mean, "square": square}, torch.float32, like=master)
    _check({"gradient": gradient, "compute": compute}, torch.bfloat16, like=master)
    _check({"factors": factors}, torch.float32, like=master, num_elements=2)
    floats = scalars.as_floats()
    if master.is_cuda:
        tensors = (master, mean, square, gradient, compute, factors)
        _launch("fused_adamw.cu", "zinf_fused_adamw", tensors, floats)
        return
    shrink, mean_weight, beta2, square_weight, root_correction, eps, negative_step_size = floats
    widened = gradient.float() * (factors[0] * factors[1])
    mean.add_(widened - mean, alpha=mean_weight)
    square.mul_(beta2).addcmul_(widened, widened, value=square_weight)
    master.mul_(shrink).addcdiv_(mean, square.sqrt().div_(root_correction).add_(eps), value=negative_step_size)
    compute.copy_(master)


def pack_gradient(gradient: Tensor) -> PackedGradient:
    """Return a flat, contiguous float32 gradient in bfloat16, with the sum of its squares and whether it is finite.

    ValueError for another shape or dtype.
    """
    _check({"gradient": gradient}, torch.float32, like=gradient)
    if not gradient.is_cuda:
        square_sum = gradient.double().square().sum()
        is_not_finite = (~square_sum.isfinite()).to(torch.int32)
        return PackedGradient(values=gradient.bfloat16(), square_sum=square_sum, is_not_finite=is_not_finite)
    values = torch.empty_like(gradient, dtype=torch.bfloat16)
    partials = torch.zeros(_num_blocks(gradient.numel(), gradient.device), dtype=torch.float64, device=gradient.device)
    is_not_finite = torch.zeros((), dtype=torch.int32, device=gradient.device)
    tensors = (gradient, values, partials, is_not_finite)
    _launch("pack_gradient.cu", "zinf_pack_gradient", tensors)
    return PackedGradient(values=values, square_sum=partials.sum(), is_not_finite=is_not_finite)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes of flat, contiguous float32 values, and the float32 scale of each block of ``QUANTIZED_BLOCK``.

    ``dequantize`` is off by half a scale at most, which is 1/254 of the largest magnitude in the block. A block with a
    value that is not finite is dequantized to NaN. ValueError for another shape or dtype.
    """
    _check({"values": values}, torch.float32, like=values)
    num_blocks = -(-values.numel() // QUANTIZED_BLOCK)
    if values.is_cuda:
        codes = torch.empty_like(values, dtype=torch.int8)
        scales = torch.empty(num_blocks, dtype=torch.float32, device=values.device)
        _launch("quantize.cu", "zinf_quantize", (values, codes, scales))
        return codes, scales
    padding = num_blocks * QUANTIZED_BLOCK - values.numel()
    blocks = torch.nn.functional.pad(values, (0, padding)).view(num_blocks, QUANTIZED_BLOCK)
    largest = blocks.abs().amax(1)
    scales = torch.where(largest.isfinite(), largest / _LARGEST_CODE, math.nan)
    steps = torch.where(scales > 0, scales, math.inf).unsqueeze(1)
    codes = (blocks / steps).nan_to_num_(0).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
    return codes.flatten()[: values.numel()].to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values of what ``quantize`` returned. ValueError for other shapes, dtypes or devices."""
    _check({"codes": codes}, torch.int8, like=codes)
    _check({"scales": scales}, torch.float32, like=codes, num_elements=-(-codes.numel() // QUANTIZED_BLOCK))
    if codes.is_cuda:
        values = torch.empty_like(codes, dtype=torch.float32)
        _launch("quantize.cu", "zinf_dequantize", (codes, scales, values))
        return values
    return codes.float() * scales.repeat_interleave(QUANTIZED_BLOCK)[: codes.numel()]


def _check(tensors: Mapping[str, Tensor], dtype: torch.dtype, *, like: Tensor, num_elements: int | None = None) -> None:
    """Raise ValueError unless tensors are flat, of a dtype, where ``like`` is, and as long or of so many elements."""
    expected = like.numel() if num_elements is None else num_elements
    for name, tensor in tensors.items():
        found = (tensor.dim(), tensor.numel(), tensor.dtype, tensor.device)
        if found != (1, expected, dtype, like.device) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is a tensor {tensor.dtype} {list(tensor.shape)} on {tensor.device}; it has to be {dtype} "
                f"[{expected}] on {like.device}, and contiguous"
            )
        if tensor.is_cuda and tensor.data_ptr() % 16:
            raise ValueError(
                f"{name} begins at a multiple of {tensor.data_ptr() & -tensor.data_ptr()} bytes; kernels read 16 at once, "
                "and it has to begin at a multiple of them"
            )


def _num_blocks(num_elements: int, device: torch.device) -> int:
    """Return how many blocks of threads a kernel runs with: no more than there is work for, or than fit the device."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(-(-num_elements // (4 * _THREADS)), _BLOCKS_PER_PROCESSOR * processors))


def _launch(source: str, name: str, tensors: tuple[Tensor, ...], floats: tuple[float, ...] = ()) -> None:
    """Enqueue a kernel on torch's current stream: tensors, the number of elements of the first, and float32 scalars."""
    import numpy

    device, num_elements = tensors[0].device, tensors[0].numel()
    cupy = _load_cupy()
    pointers = (tensor.data_ptr() for tensor in tensors)
    arguments = (*pointers, numpy.int64(num_elements), *map(numpy.float32, floats))
    with cupy.cuda.Device(device.index):
        function = _compile(source, device.index).get_function(name)
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream)
        function((_num_blocks(num_elements, device),), (_THREADS,), arguments, stream=stream)


@functools.cache
def _compile(source: str, device: int) -> Any:
    """Return the kernels of a source, compiled by NVRTC for a device; CuPy keeps them on disk between runs."""
    return _load_cupy().RawModule(code=(SOURCES / source).read_text(), options=OPTIONS, backend="nvrtc")


def _load_cupy() -> Any:
    """Return CuPy. UnsupportedError, with what to install, without it."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise UnsupportedError(
            f"kernels on CUDA are compiled by CuPy, which cannot be imported ({error}); torch here is built for CUDA "
            f"{torch.version.cuda}: pip install 'zinf_compile[cuda]', which is for CUDA 13"
        ) from error
