"""Kernels of ``cuda/state_codes.cu``, which decode and encode optimizer state on a GPU, compiled by CuPy at first use."""

import functools
import importlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zinf_compile.ir.copies import Code

SOURCE = Path(__file__).parents[2] / "cuda" / "state_codes.cu"
OPTIONS = ("-std=c++17",)
KERNELS = ("zinf_decode_int8", "zinf_encode_int8", "zinf_decode_bfloat16", "zinf_encode_bfloat16")
_THREADS = 256  # of a block
_BLOCKS_PER_PROCESSOR = 8
_log = logging.getLogger(__name__)


class StateKernels:
    """The compiled kernels of one device. They run on torch's current stream, and nothing waits for them."""

    def __init__(self, cupy: Any, device: torch.device) -> None:
        """Compile them with CuPy, which keeps them on disk between runs."""
        self._cupy, self._device = cupy, device
        module = cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS, backend="nvrtc")
        with cupy.cuda.Device(device.index):
            module.compile()
            self._functions = {name: module.get_function(name) for name in KERNELS}
        self._most = _BLOCKS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count

    def decode(self, code: Code, pages: Tensor, values: Tensor, maps: Tensor | None) -> None:
        """Enqueue what ``state_codes.decode`` does. ``maps``, for int8: the values of codes, float32 [2, 256]."""
        more = () if maps is None else (maps.data_ptr(),)
        self._launch(f"zinf_decode_{code}", code, pages, values, values.numel(), *more)

    def encode(
        self,
        code: Code,
        values: Tensor,
        pages: Tensor,
        codes: Tensor | None,
        *,
        first: int,
        seed: int,
        drawn_from: Tensor | None,
    ) -> None:
        """Enqueue what ``state_codes.encode`` does. ``codes``, for int8: by upper bits of a float32, uint8 [2, 2**18]."""
        import numpy

        if codes is not None:
            self._launch(f"zinf_encode_{code}", code, values, pages, values.numel(), codes.data_ptr())
            return
        others = 0 if drawn_from is None else drawn_from.data_ptr()
        self._launch(f"zinf_encode_{code}", code, values, pages, values.numel(), first, numpy.uint32(seed), others)

    def _launch(self, name: str, code: Code, source: Tensor, target: Tensor, num_elements: int, *more: Any) -> None:
        """Enqueue a kernel; its arguments are 64 bits each but for numbers of numpy, which are as they are."""
        import numpy

        cupy, num_blocks = self._cupy, min(-(-num_elements // code.page_elements), self._most)
        given = (source.data_ptr(), target.data_ptr(), num_elements, *more)
        arguments = tuple(numpy.int64(each) if isinstance(each, int) else each for each in given)
        with cupy.cuda.Device(self._device.index):
            stream = cupy.cuda.Stream.from_external(_Stream(torch.cuda.current_stream(self._device).cuda_stream))
            self._functions[name]((max(1, num_blocks),), (_THREADS,), arguments, stream=stream)


class _Stream:
    """A stream of torch's, by the protocol with which CuPy takes streams; torch's own class has it in later versions."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@functools.cache
def load_state_kernels(device: torch.device) -> StateKernels | None:
    """Return the kernels of a device; None where it has none, or where CuPy is missing or cannot compile them.

    The log says once why torch takes their place.
    """
    if device.type != "cuda":
        return None
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        _tell(
            f"CuPy cannot be imported ({error}); torch here is built for CUDA {torch.version.cuda}: "
            "pip install 'zinf_compile[cuda]', which is for CUDA 13"
        )
        return None
    try:
        return StateKernels(cupy, device)
    except (
        cupy.cuda.compiler.CompileException,
        ImportError,
        OSError,
        RuntimeError,
    ) as error:  # of NVRTC and the driver
        _tell(f"CuPy cannot compile {SOURCE.name}: {error}")
        return None


@functools.cache
def _tell(why: str) -> None:
    _log.warning("optimizer state is encoded on the GPU by torch, which takes longer than our kernels: %s", why)
